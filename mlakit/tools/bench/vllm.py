"""The suite `vllm`: the calls of the vLLM plugin's layers, with tensors as vLLM has them, on a GPU.

Calls    what its classes compute in `forward_mqa` (decode, sparse), `run_prefill_new_tokens`,
         `do_kv_cache_update` and the indexer's step; vLLM is not needed
Queries  in two parts: the product with W_UK, and a view of the rotated columns
Sparse   token positions, turned into cache rows in the call; FlashMLA gets rows
Prefill  keys concatenated, values a view of the projection's result; FA3 gets the same
Plan     made by the first layer of a step, before the clock starts, for peers too
Peers    the fast ones, on the same cache; queries are concatenated for them before the clock starts
Check    as in the suites of these ops, against the float64 oracle; stored rows bit by bit
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PagedLatentCache
from mlakit.formats import Format, row_codec
from mlakit.integrations import steps
from mlakit.integrations.vllm import calls
from mlakit.tools.bench import correctness, decode, gpu, indexer, prefill, sparse_decode
from mlakit.tools.bench.pool import ROW, SCALE
from mlakit.tools.bench.prefill import Tensors
from mlakit.tools.bench.problems import DensePrefill
from mlakit.tools.bench.shapes import Batch, Shape, even_lengths, with_topk
from mlakit.tools.bench.sparse import Lists
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.testing import assert_same_bits

D_C, D_R = ROW.kv_lora_rank, ROW.qk_rope_head_dim
D_N, D_V = prefill.D_N, prefill.D_V
PAGE_SIZE = 64
MAX_CHECKED = 64  # rows of a cache update, queries of a selection

Pair: TypeAlias = Callable[[], tuple[Tensor, Tensor]]


def query_parts(q: Tensor) -> tuple[Tensor, Tensor]:
    """(latent, rope) as vLLM's layer makes them: the rope columns are a view of a wider tensor."""
    wide = q.new_zeros(*q.shape[:-1], D_N + D_R)
    wide[..., D_N:] = q[..., D_C:]
    return q[..., :D_C].contiguous(), wide[..., D_N:]


@dataclass(frozen=True)
class Decode(decode.Decode):
    """`forward_mqa` of MLAKIT."""

    only_grid_peers = True

    @property
    def name(self) -> str:
        return f"vllm-{super().name}"

    def operation(
        self, q: Tensor, cache: PagedLatentCache, page_table: Tensor, kv_lens: Tensor
    ) -> tuple[Pair, list[Baseline]]:
        starts, parts = gpu.int32(self.batch.starts), query_parts(q)
        batch = calls.decode_batch(
            page_table, kv_lens, starts, max(self.batch.q_lens), sum(self.batch.q_lens)
        )
        pools, kv_cache = steps.Pools(ROW), cache.payload[0]
        return lambda: steps.decode(parts, pools.of(kv_cache, None), batch, SCALE), [
            gpu.read_baseline(self.bytes)
        ]


@dataclass(frozen=True)
class Sparse(sparse_decode.Sparse):
    """`forward_mqa` of MLAKIT_SPARSE."""

    only_grid_peers = True

    @property
    def name(self) -> str:
        return f"vllm-{super().name}"

    def operation(self, q: Tensor, lists: Lists) -> Pair:
        cache, tokens, table = lists.cache, lists.tokens, lists.page_table
        assert tokens is not None
        assert table is not None
        starts, parts = gpu.int32(self.batch.starts), query_parts(q)
        pools, kv_cache = steps.Pools(ROW), cache.payload[0]
        return lambda: calls.sparse(parts, pools.of(kv_cache, None), tokens, table, starts, SCALE)


@dataclass(frozen=True)
class Prefill(prefill.Prefill):
    """`run_prefill_new_tokens` of the prefill backend MLAKIT."""

    only_grid_peers = True

    @property
    def name(self) -> str:
        return f"vllm-{super().name}"

    def tensors(self) -> Tensors:
        """Values are a view of the result of kv_b_proj."""
        q, k_nope, k_rope, v = super().tensors()
        projected = torch.cat([k_nope, v], dim=-1)
        return q, projected[..., :D_N], k_rope, projected[..., D_N:]

    def operation(self, tensors: Tensors, problem: DensePrefill) -> tuple[Pair, list[Baseline]]:
        q, k, v, starts = problem.q, problem.k, problem.v, problem.starts
        out = torch.empty(v.shape, dtype=q.dtype, device=q.device)

        def call() -> tuple[Tensor, Tensor]:
            _, lse = calls.prefill(q, k, v, starts, starts, D_N, SCALE, is_causal=True, out=out)
            return out, lse.T

        return call, []


@dataclass(frozen=True)
class Select(indexer.Select):
    """The indexer's step: scores of all keys, and the positions of the best of every query."""

    op = "indexer_topk"

    @property
    def name(self) -> str:
        return f"vllm-select-{self.batch.label(self.heads)}-top{self.k}"

    def build_case(self) -> BenchmarkCase:
        inputs = indexer.IndexerInputs.of(self.batch, self.heads)
        tokens = self.batch.tokens
        starts = None if max(self.batch.q_lens) == 1 else inputs.starts
        buffer = torch.empty(tokens, self.k, dtype=torch.int32, device=gpu.DEVICE)

        def call() -> Tensor:
            calls.select_tokens(*inputs.scored, starts, inputs.columns, buffer)
            return buffer

        def check() -> None:
            selected, logits = call(), inputs.logits()
            for each in inputs.queries():
                each.assert_correct(logits)
            for token in correctness.evenly_spaced(tokens, MAX_CHECKED):
                best = reference.indexer_topk(logits[token : token + 1], self.k)[0]
                assert_same_bits(f"positions of query {token}", selected[token], best)

        return BenchmarkCase(call, [gpu.read_baseline(self.bytes)], check)


@dataclass(frozen=True)
class Update(Workload):
    """`do_kv_cache_update`: the normed latents and rotated keys of new tokens, to their slots."""

    tokens: int
    format: Format = "bf16"

    op = "append_rows"
    traffic = "copy"

    @property
    def name(self) -> str:
        return f"vllm-update-{self.format}-{self.tokens}"

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        return self.tokens * (2 * ROW.width + row_codec(self.format, ROW).bytes_per_token + 8)

    @property
    def small(self) -> Workload:
        return replace(self, tokens=min(self.tokens, 3))

    def build_case(self) -> BenchmarkCase:
        generator, tokens = gpu.generator(), self.tokens
        cache = PagedLatentCache.allocate(
            ROW, self.format, num_pages=tokens, page_size=PAGE_SIZE, device=gpu.DEVICE
        )
        slots = torch.randperm(tokens * PAGE_SIZE, generator=generator, device=gpu.DEVICE)[:tokens]
        kv_c = gpu.normal(generator, tokens, D_C)
        k_pe = gpu.normal(generator, tokens, 1, D_N + D_R)[..., D_N:]  # a view
        pools, kv_cache = steps.Pools(ROW), cache.payload[0]

        def call() -> None:
            calls.update_cache(kv_c, k_pe, pools.of(kv_cache, None), slots)

        rows = cache.payload[0].flatten(0, 1)

        def check() -> None:
            rows.view(torch.uint8).zero_()
            call()
            checked = correctness.evenly_spaced(tokens, MAX_CHECKED)
            given = torch.cat([kv_c, k_pe[:, 0]], dim=-1)[checked].float()
            wanted, _ = cache.codec.encode(given)
            assert_same_bits("rows", rows[slots[checked]].view(wanted.dtype), wanted)

        baselines = [gpu.copy_baseline(self.bytes)]
        if self.format == "bf16":

            def by_torch() -> None:
                rows[slots] = torch.cat([kv_c, k_pe[:, 0]], dim=-1)

            baselines.append(Baseline("torch", by_torch))
        return BenchmarkCase(call, baselines, check)


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    """All calls of a batch's step; prefill if its requests have no cached tokens."""
    given = shape.accept("vllm", "heads", "topk")
    batch, heads = shape.batch, int(given.get("heads", 128))
    if batch.q_lens == batch.kv_lens:
        return Prefill(even_lengths("vllm", batch), heads), Update(batch.tokens)
    topk = with_topk("vllm", batch, given.get("topk"))
    return (
        Decode(batch, heads),
        Sparse(batch, heads, topk),
        Select(batch, k=topk),
        Update(batch.tokens),
    )


WORKLOADS: tuple[Workload, ...] = (
    Decode(Batch.of(128, 1, 4096), 16),
    Decode(Batch.of(64, 1, 8192), 128),
    Decode(Batch.of(64, 2, 8192), 128),
    Decode(Batch.of(128, 1, 4096), 16, "fp8_block128"),
    Sparse(Batch.of(64, 1, 16384), 128),
    Sparse(Batch.of(64, 1, 16384), 16),
    Prefill(Batch.of(1, 4096, 4096), 128),
    Prefill(Batch.of(4, 2048, 2048), 16),
    Select(Batch.of(64, 1, 16384)),
    Select(Batch.of(1, 2048, 16384)),
    Update(128),
    Update(128, "fp8_block128"),
    Update(4096, "fp8_block128"),
)
