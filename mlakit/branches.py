"""The composed steps: what a serving layer does between its projections.

`prefill_branch` expands latents and attends in the expanded form, `decode_branch` absorbs the
up-projection into the query and attends to the cache itself, `mla_step` sends each request of a
mixed batch to the one that suits it. All of them append the step's new tokens to the cache first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, PageTable, gather_rows, select_requests
from mlakit.checks import Dims, values_visible
from mlakit.masks import CAUSAL, NULL, Mask
from mlakit.ops import merge_states, mla_decode, mla_prefill, norm_rope_quant_append, sparse_mla
from mlakit.plan import ContextPlan, DecodePlan, EvenSplit, plan_context
from mlakit.weights import UpProjection

DECODE_UP_TO = 8  # new tokens of a request that still take the decode branch in `mla_step`


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """What one layer brings to a step, its projections to and from the hidden size aside."""

    up: UpProjection
    gamma: Tensor  # [D_C] weight of the latent's RMSNorm
    freqs: Tensor  # [positions, D_R] cos0, sin0, cos1, sin1, …
    softmax_scale: float
    epsilon: float = 1e-6
    rope: str = "interleaved"


@dataclass(frozen=True, eq=False)
class CachedBatch:
    """The requests of a step, and where their tokens are cached."""

    cache: PagedLatentCache
    page_table: PageTable
    kv_lens: Tensor  # [batch] int32 tokens cached before this step
    q_starts: Tensor  # [batch + 1] int32
    layer: int = 0

    @property
    def kv_lens_after(self) -> Tensor:
        return self.kv_lens + self.q_starts.diff()


def prefill_branch(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    mask: Mask = CAUSAL,
    plan: ContextPlan | None = None,
    max_context_rows: int | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Append the new tokens, expand the keys they see, attend.

    q                [tokens, heads, D_N + D_R]; its rope columns are rotated in place
    kv               [tokens, D_C + D_R] raw latents
    plan             `plan_context` of the step, to share among layers; required on a GPU, where
                     making one here would wait for the lengths
    max_context_rows cached keys expanded at a time; partial results are merged. A window or chunk
                     mask needs no more than its own keys and takes them in one piece

    Returns out [tokens, heads, D_V].
    """
    dims = Dims("prefill_branch")
    g = weights.up.geometry
    dims.bind("heads", g.num_heads, "the geometry's num_heads")
    dims.bind("D_N + D_R", g.qk_head_dim, "the geometry's qk_head_dim")
    dims.match("q", q, "tokens", "heads", "D_N + D_R")
    plan = _context_plan(dims, batch, plan, max_context_rows)
    _append(q[..., g.qk_nope_head_dim :], q[..., g.qk_nope_head_dim :], kv, weights, batch, backend)
    return _attend_expanded(q, weights, batch, plan, mask, out, backend)


def decode_branch(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    rows: Tensor | None = None,
    topk_lens: Tensor | None = None,
    mask: Mask = CAUSAL,
    plan: DecodePlan | EvenSplit | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Append the new tokens, absorb the up-projection, attend to the cache, project up.

    q     [tokens, heads, D_N + D_R], not modified
    kv    [tokens, D_C + D_R] raw latents
    rows  [tokens, topk] physical rows: attend to these only (`sparse_mla`), `mask` aside

    Returns out [tokens, heads, D_V].
    """
    dims = Dims("decode_branch")
    g = weights.up.geometry
    dims.bind("heads", g.num_heads, "the geometry's num_heads")
    dims.bind("D_N + D_R", g.qk_head_dim, "the geometry's qk_head_dim")
    dims.match("q", q, "tokens", "heads", "D_N + D_R")
    q_nope, q_rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)
    absorbed = q.new_empty(*q.shape[:2], g.row.width)
    _append(q_rope, absorbed[..., g.kv_lora_rank :], kv, weights, batch, backend)
    weights.up.absorb.apply(q_nope, out=absorbed[..., : g.kv_lora_rank], backend=backend)
    if rows is None:
        latent, _ = mla_decode(
            absorbed,
            batch.cache,
            batch.page_table,
            batch.kv_lens_after,
            q_starts=batch.q_starts,
            layer=batch.layer,
            softmax_scale=weights.softmax_scale,
            mask=mask,
            plan=plan,
            backend=backend,
        )
    else:
        latent, _, _ = sparse_mla(
            absorbed,
            batch.cache,
            rows,
            topk_lens=topk_lens,
            layer=batch.layer,
            softmax_scale=weights.softmax_scale,
            backend=backend,
        )
    out = q.new_empty(*q.shape[:2], g.v_head_dim) if out is None else out
    return weights.up.values.apply(latent, out=out, backend=backend)


def mla_step(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    q_lens: Sequence[int] | None = None,
    decode_up_to: int = DECODE_UP_TO,
    max_context_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """One causal step over a mixed batch: short requests decode, long ones prefill.

    A request with up to `decode_up_to` new tokens takes the decode branch whatever else is in the
    batch. q and kv as in `prefill_branch`; `q_lens` are the new tokens of each request on the host,
    required on a GPU. Returns out [tokens, heads, D_V].
    """
    dims = Dims("mla_step")
    if q_lens is None:
        dims.require(values_visible(batch.q_starts), "q_lens", "be given on a GPU", None)
        q_lens = batch.q_starts.diff().tolist()
    short = [b for b, n in enumerate(q_lens) if 0 < n <= decode_up_to]
    long = [b for b, n in enumerate(q_lens) if n > decode_up_to]
    out = q.new_empty(*q.shape[:2], weights.up.geometry.v_head_dim)
    if short:
        tokens, part = _subset(batch, short, q_lens)
        out[tokens] = decode_branch(q[tokens], kv[tokens], weights, part, backend=backend)
    if long:
        tokens, part = _subset(batch, long, q_lens)
        out[tokens] = prefill_branch(
            q[tokens], kv[tokens], weights, part, max_context_rows=max_context_rows, backend=backend
        )
    return out


def _subset(
    batch: CachedBatch, requests: Sequence[int], q_lens: Sequence[int]
) -> tuple[Tensor, CachedBatch]:
    """(token indices, batch) of some requests."""
    device = batch.q_starts.device
    starts = [0]
    for length in q_lens:
        starts.append(starts[-1] + length)
    tokens = torch.cat([torch.arange(starts[b], starts[b + 1], device=device) for b in requests])
    chosen = torch.tensor(requests, device=device)
    own = [0]
    for b in requests:
        own.append(own[-1] + q_lens[b])
    return tokens, CachedBatch(
        batch.cache,
        select_requests(batch.page_table, requests),
        batch.kv_lens[chosen],
        torch.tensor(own, dtype=batch.q_starts.dtype, device=device),
        batch.layer,
    )


def _append(
    q_rope: Tensor,
    q_rope_out: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    backend: str,
) -> None:
    norm_rope_quant_append(
        q_rope,
        kv,
        weights.freqs,
        weights.gamma,
        batch.cache,
        batch.page_table,
        batch.kv_lens,
        batch.q_starts,
        epsilon=weights.epsilon,
        layer=batch.layer,
        rope=weights.rope,
        q_rope_out=q_rope_out,
        backend=backend,
    )


def _context_plan(
    dims: Dims, batch: CachedBatch, plan: ContextPlan | None, max_rows: int | None
) -> ContextPlan:
    """The caller's plan, checked where that is free; or one made from lengths in host memory."""
    if not (values_visible(batch.kv_lens) and values_visible(batch.q_starts)):
        dims.require(plan is not None, "plan", "be given on a GPU", None)
    if plan is not None and batch.kv_lens.device.type != "cpu":
        return plan
    kv_lens, q_lens = tuple(batch.kv_lens.tolist()), tuple(batch.q_starts.diff().tolist())
    if plan is None:
        return plan_context(kv_lens, q_lens, max_rows=max_rows)
    dims.require(
        (plan.kv_lens, plan.q_lens) == (kv_lens, q_lens),
        "plan",
        f"be made for cached lengths {kv_lens} and new ones {q_lens}",
        (plan.kv_lens, plan.q_lens),
    )
    return plan


def _attend_expanded(
    q: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    plan: ContextPlan,
    mask: Mask,
    out: Tensor | None,
    backend: str,
) -> Tensor:
    """Attention of rotated q over keys expanded from the cache, chunk by chunk, then merged."""
    before = plan.kv_lens
    after = [low + new for low, new in zip(before, plan.q_lens, strict=True)]
    if mask not in (CAUSAL, NULL):
        first = [
            mask.interval(low, high)[0] if high > low else high
            for low, high in zip(before, after, strict=True)
        ]
        return _attend_rows(q, weights, batch, first, after, mask, out, backend)[0]
    # the new tokens see each other through the mask, and all of the context
    out, lse = _attend_rows(q, weights, batch, before, after, mask, out, backend)
    for chunk in plan.chunks:
        lows, highs = zip(*chunk, strict=True)
        part_out, part_lse = _attend_rows(q, weights, batch, lows, highs, NULL, None, backend)
        merge_states([out, part_out], [lse, part_lse], out=out, lse=lse, backend=backend)
    return out


def _attend_rows(
    q: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    first: Sequence[int],
    last: Sequence[int],
    mask: Mask,
    out: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the cached tokens [first, last) of every request, its queries the newest."""
    layer = batch.cache.layer(batch.layer)
    rows, kv_starts = gather_rows(layer, batch.page_table, first, last, q.dtype)
    row = layer.codec.row
    latent, k_rope = rows.split([row.kv_lora_rank, row.qk_rope_head_dim], dim=-1)
    k_nope, v = weights.up.expand(latent, backend=backend)
    return mla_prefill(
        q,
        k_nope,
        k_rope,
        v,
        batch.q_starts,
        kv_starts,
        softmax_scale=weights.softmax_scale,
        mask=mask,
        out=out,
        backend=backend,
    )
