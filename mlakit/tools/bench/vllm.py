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

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PagedLatentCache
from mlakit.formats import Format, row_codec
from mlakit.integrations import steps
from mlakit.integrations.vllm import calls
from mlakit.ops import indexer_logits, physical_rows
from mlakit.tools.bench import correctness, decode, gpu, indexer, prefill, sparse_decode
from mlakit.tools.bench.pool import ROW, SCALE, filled_index_keys, filled_pages, page_counts
from mlakit.tools.bench.problems import DensePrefill
from mlakit.tools.bench.shapes import Batch, Shape, even_lengths, with_topk
from mlakit.tools.bench.sparse import random_tokens, sampled_queries
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.testing import assert_same_bits, shuffled_pages

D_C, D_R = ROW.kv_lora_rank, ROW.qk_rope_head_dim
D_N, D_V = prefill.D_N, prefill.D_V
PAGE_SIZE = 64
MAX_CHECKED = 64  # rows of a cache update, queries of a selection


def query_parts(generator: torch.Generator, tokens: int, heads: int) -> tuple[Tensor, Tensor]:
    """(latent, rope) as vLLM's layer makes them of a projected query."""
    latent = gpu.normal(generator, tokens, heads, D_C)
    return latent, gpu.normal(generator, tokens, heads, D_N + D_R)[..., D_N:]


@dataclass(frozen=True)
class Decode(decode.Decode):
    """`forward_mqa` of MLAKIT."""

    only_grid_peers = True

    @property
    def name(self) -> str:
        return f"vllm-{super().name}"

    def build_case(self) -> BenchmarkCase:
        generator = gpu.generator()
        cache, table = self._pages(generator)
        q = query_parts(generator, self.batch.tokens, self.heads)
        whole = torch.cat(q, dim=-1)
        kv_lens, starts = gpu.int32(self.batch.kv_lens), gpu.int32(self.batch.starts)
        batch = calls.decode_batch(table, kv_lens, starts, max(self.batch.q_lens))
        pools, kv_cache = steps.Pools(ROW), cache.payload[0]

        def call() -> tuple[Tensor, Tensor]:
            return steps.decode(q, pools.of(kv_cache, None), batch, SCALE)

        def samples() -> Iterator[correctness.Sample]:
            return self._samples(whole, cache, table)

        return BenchmarkCase(
            call,
            [gpu.read_baseline(self.bytes)],
            check=lambda: correctness.assert_correct(("out", "lse"), call(), samples()),
            problem=self._problem(whole, cache, table, kv_lens),
            peer_error=lambda output: correctness.peer_error(output, samples()),
        )


@dataclass(frozen=True)
class Sparse(sparse_decode.Sparse):
    """`forward_mqa` of MLAKIT_SPARSE."""

    only_grid_peers = True

    @property
    def name(self) -> str:
        return f"vllm-{super().name}"

    def build_case(self) -> BenchmarkCase:
        generator, lens = gpu.generator(), self.batch.kv_lens
        cache, table = filled_pages(lens, self.page_size, self.format, generator)
        lists = zip(self.batch.q_lens, lens, strict=True)
        tokens = torch.cat([random_tokens(*each, self.topk, generator) for each in lists]).int()
        starts = gpu.int32(self.batch.starts)
        rows = physical_rows(tokens, table, self.page_size, starts)
        q = query_parts(generator, self.batch.tokens, self.heads)
        whole = torch.cat(q, dim=-1)
        pools, kv_cache = steps.Pools(ROW), cache.payload[0]

        def call() -> tuple[Tensor, Tensor]:
            return calls.sparse(q, pools.of(kv_cache, None), tokens, table, starts, SCALE)

        def samples() -> Iterator[correctness.Sample]:
            return sampled_queries(whole, cache, rows)

        return BenchmarkCase(
            call,
            self.hardware_baselines,
            check=lambda: correctness.assert_correct(("out", "lse"), call(), samples()),
            problem=self.problem(whole, cache, rows),
            peer_error=lambda output: correctness.peer_error(output, samples()),
        )


@dataclass(frozen=True)
class Prefill(prefill.Prefill):
    """`run_prefill_new_tokens` of the prefill backend MLAKIT."""

    only_grid_peers = True

    @property
    def name(self) -> str:
        return f"vllm-{super().name}"

    def build_case(self) -> BenchmarkCase:
        generator, tokens = gpu.generator(), self.batch.tokens
        q = gpu.normal(generator, tokens, self.heads, D_N + D_R)
        kv = gpu.normal(generator, tokens, self.heads, D_N + D_V)  # of kv_b_proj
        k_rope = gpu.normal(generator, tokens, 1, D_R)
        k = torch.cat([kv[..., :D_N], k_rope.expand(-1, self.heads, -1)], dim=-1)
        v = kv[..., D_N:]
        out = torch.empty(tokens, self.heads, D_V, dtype=q.dtype, device=q.device)
        starts = gpu.int32(self.batch.starts)

        def call() -> tuple[Tensor, Tensor]:
            return calls.prefill(q, k, v, starts, starts, D_N, SCALE, is_causal=True, out=out)

        def check() -> None:
            result, lse = call()
            correctness.assert_correct(("out", "lse"), (result, lse.T), samples())

        def samples() -> Iterator[correctness.Sample]:
            return self._samples(q, kv[..., :D_N], k_rope[:, 0], v)

        return BenchmarkCase(
            call,
            [],
            check,
            problem=DensePrefill(q, k, v, starts, max(self.batch.kv_lens), SCALE, causal=True),
            peer_error=lambda output: correctness.peer_error(output, samples()),
        )


@dataclass(frozen=True)
class Select(Workload):
    """The indexer's step: scores of all keys, and the positions of the best of every query."""

    batch: Batch
    heads: int = indexer.MODEL.index_n_heads
    topk: int = indexer.TOPK

    op = "indexer_topk"
    products = "fp8"

    @property
    def name(self) -> str:
        return f"vllm-select-{self.batch.label(self.heads)}-top{self.topk}"

    @property
    def flops(self) -> int:
        return indexer.Logits(self.batch, self.heads).flops

    @property
    def bytes(self) -> int:
        per_query = self.heads * (indexer.WIDTH + 4) + 4 * self.topk
        return sum(self.batch.kv_lens) * indexer.KEY_BYTES + self.batch.tokens * per_query

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, topk=min(self.topk, 64))

    def build_case(self) -> BenchmarkCase:
        generator, batch = gpu.generator(), self.batch
        counts = page_counts(batch.kv_lens, PAGE_SIZE)
        _, keys = filled_index_keys(sum(counts), PAGE_SIZE, indexer.WIDTH, generator)
        table = shuffled_pages(batch.size, counts, sum(counts), generator)
        q = gpu.normal(generator, batch.tokens, self.heads, indexer.WIDTH)
        q = q.to(torch.float8_e4m3fn)
        weights = gpu.normal(generator, batch.tokens, self.heads, dtype=torch.float32)
        kv_lens, columns = gpu.int32(batch.kv_lens), max(batch.kv_lens)
        starts = None if max(batch.q_lens) == 1 else gpu.int32(batch.starts)
        buffer = torch.empty(batch.tokens, self.topk, dtype=torch.int32, device=gpu.DEVICE)

        def call() -> Tensor:
            calls.select_tokens(q, weights, keys, table, kv_lens, starts, columns, buffer)
            return buffer

        def check() -> None:
            selected = call()
            logits = indexer_logits(
                q, weights, keys, table, kv_lens, q_starts=starts, max_kv_len=columns
            )
            for each in indexer.scored_queries(batch, q, weights, keys, table):
                each.assert_correct(logits)
            for token in correctness.evenly_spaced(batch.tokens, MAX_CHECKED):
                best = reference.indexer_topk(logits[token : token + 1], self.topk)[0]
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
        Select(batch, topk=topk),
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
