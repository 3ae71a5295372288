"""The stages of a step, each as one call on inputs of its own: the suites of steps time them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.layer import MLAAttention
from mlakit.layer.linear import Activations
from mlakit.model.masks import CAUSAL
from mlakit.ops import indexer_logits, indexer_select, mla_decode, mla_prefill, sparse_mla
from mlakit.ops.indexer_select import MAX_SCORE_BYTES
from mlakit.plan import DecodePlanTensors, plan_context
from mlakit.steps import CachedBatch, IndexInputs, LayerWeights
from mlakit.steps.batch import append_tokens
from mlakit.steps.context import KeyRange, pick_part_sizes
from mlakit.steps.decode import absorb
from mlakit.steps.prefill import key_ranges
from mlakit.steps.sparse import append_index_keys
from mlakit.tools.bench import gpu
from mlakit.tools.bench.measure import Call
from mlakit.tools.bench.pool import ROW
from mlakit.tools.bench.report import SELECT
from mlakit.tools.bench.shapes import Batch

GEMMS, ATTENTION = "GEMMs alone", "attention alone"


def absorbed_stages(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    index: IndexInputs | None = None,
    topk: int = 0,
    max_kv_len: int = 0,
    plan: DecodePlanTensors | None = None,
) -> tuple[dict[str, Call], Tensor]:
    """The stages of `decode_branch`, or of `sparse_step` with an index, and the step's result."""
    where, starts = (batch.page_table, batch.kv_lens), batch.q_starts
    scale = weights.softmax_scale
    absorbed, q_rope, rotated = absorb(q, weights, "auto")

    def append_latents() -> None:
        append_tokens(q_rope, kv, weights, batch, q_rope_out=rotated, backend="auto")

    calls: dict[str, Call] = {"absorb": lambda: absorb(q, weights, "auto")}
    if index is None:
        calls["append"] = append_latents
        append_latents()

        def attend() -> Tensor:
            return mla_decode(
                absorbed, batch.cache, *where, q_starts=starts, softmax_scale=scale, plan=plan
            )[0]
    else:
        given, inputs = index, (index.q, index.weights, index.cache, *where)

        def append() -> None:
            append_latents()
            append_index_keys(given, weights, batch, backend="auto")

        def select() -> Tensor:
            return indexer_select(*inputs, topk, q_starts=starts, max_kv_len=max_kv_len)

        append()
        rows = select()
        calls |= {"append": append, SELECT: select}
        if 4 * len(q) * max_kv_len <= MAX_SCORE_BYTES:  # else `indexer_select` has blocks
            calls["logits"] = lambda: indexer_logits(
                *inputs, q_starts=starts, max_kv_len=max_kv_len
            )

        def attend() -> Tensor:
            return sparse_mla(absorbed, batch.cache, rows, softmax_scale=scale)[0]

    attended = attend()
    out = attended.new_empty(*attended.shape[:2], weights.up.geometry.v_head_dim)
    weights.up.w_uv.apply(attended, out=out)
    calls |= {"attend": attend, "up-project": lambda: weights.up.w_uv.apply(attended, out=out)}
    return calls, out


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """A layer and the tensors of a step."""

    layer: MLAAttention
    x: Tensor
    batch: CachedBatch
    positions: Tensor
    index_cache: PagedLatentCache | None
    plan: DecodePlanTensors | None
    max_kv_len: int

    def run(self, rows: Tensor | None = None) -> Tensor:
        result: Tensor = self.layer(
            self.x,
            self.batch,
            plan=self.plan,
            index_cache=self.index_cache,
            rows=rows,
            positions=self.positions,
            max_kv_len=self.max_kv_len,
        )
        return result


def layer_stages(inputs: LayerInputs) -> dict[str, Call]:
    """The stages of a whole layer."""
    layer, x = inputs.layer, inputs.x
    weights = layer.weights(x.device)

    def project() -> tuple[Activations, Activations, Tensor, Tensor]:
        states = Activations(x)
        residual = Activations(layer.q_a_layernorm(layer.q_a_proj(states)))
        q = layer.q_b_proj(residual).unflatten(-1, (layer.config.geometry.num_heads, -1))
        return states, residual, q, layer.kv_a_proj_with_mqa(states)

    states, residual, q, kv = project()
    calls: dict[str, Call] = {"projections": project}
    indexer, keys = layer.indexer, inputs.index_cache
    if indexer is None or keys is None:
        own, out = absorbed_stages(q, kv, weights, inputs.batch, plan=inputs.plan)
    else:
        calls["indexer"] = lambda: indexer(states, residual, inputs.positions, keys)
        own, out = absorbed_stages(
            q,
            kv,
            weights,
            inputs.batch,
            index=indexer(states, residual, inputs.positions, keys),
            topk=indexer.topk,
            max_kv_len=inputs.max_kv_len,
        )
        own.pop("logits", None)
    return calls | own | {"output": lambda: layer.o_proj(out.flatten(1))}


def decode_kernels(stages: dict[str, Call]) -> dict[str, Call]:
    """Absorb and up-projection; attention with its merge."""

    def multiply() -> None:
        stages["absorb"]()
        stages["up-project"]()

    return {GEMMS: multiply, ATTENTION: stages["attend"]}


def prefill_kernels(batch: Batch, weights: LayerWeights) -> dict[str, Call]:
    """Up-projections and attentions of all parts, on random K and V of one part."""
    g, generator = weights.up.geometry, gpu.generator()
    columns = (g.qk_nope_head_dim, g.v_head_dim)
    plan = plan_context(batch.kv_lens, batch.q_lens)
    sizes = pick_part_sizes(g, tokens=batch.tokens, itemsize=torch.bfloat16.itemsize, head_group=1)
    ranges = key_ranges(plan, CAUSAL, sizes.max_rows)
    parts = [part for keys in ranges for part in sizes.parts(keys)]
    most = max(keys.num_rows for keys in ranges)
    rows = gpu.normal(generator, most, ROW.width)
    latent, k_rope = rows.split([g.kv_lora_rank, g.qk_rope_head_dim], dim=-1)
    size = max(part.keys.num_rows * part.num_heads for part in parts) * sizes.columns_per_head
    buffer = gpu.normal(generator, size)
    q = gpu.normal(generator, batch.tokens, g.num_heads, g.qk_head_dim)
    out = q.new_empty(batch.tokens, g.num_heads, g.v_head_dim)
    q_starts = gpu.int32(batch.starts)
    kv_starts = {keys: gpu.int32(_starts(keys)) for keys in ranges}

    def expand() -> None:
        for part in parts:
            weights.up.expand(latent[: part.keys.num_rows], heads=part.heads, buffer=buffer)

    def attend() -> None:
        for part in parts:
            rows = part.keys.num_rows
            shape = (rows, part.num_heads, sum(columns))
            k_nope, v = buffer[: rows * shape[1] * shape[2]].view(shape).split(columns, dim=-1)
            mla_prefill(
                q[:, part.heads],
                k_nope,
                k_rope[:rows],
                v,
                q_starts,
                kv_starts[part.keys],
                softmax_scale=weights.softmax_scale,
                mask=part.keys.mask,
                out=out[:, part.heads],
            )

    return {GEMMS: expand, ATTENTION: attend}


def _starts(keys: KeyRange) -> list[int]:
    lengths = (last - first for first, last in zip(keys.first, keys.last, strict=True))
    return [0, *accumulate(lengths)]
