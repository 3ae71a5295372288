"""The suite `sparse-step`: a layer's whole step of DeepSeek-V3.2, `sparse_step`, and its stages.

Step    absorb the up-projection, append latents and index keys, score the index keys, select 2048
        rows per query, attend to them, project up; 128 heads, 656-byte FP8 rows, 64 index heads
Stages  each one alone, with a cold L2 of its own. Top-k is the time of `indexer_select` minus that
        of `indexer_logits`. The speedup column is a stage's share of the step: 0.30x is 30 %
Bytes   index keys, selected rows, weights, q and out once; of a stage: its own inputs and results
Check   some queries: their appended rows, logits, selection and output against the oracles
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import request_slots
from mlakit.formats import Format, row_codec
from mlakit.ops import indexer_logits, indexer_select, physical_rows, sparse_mla
from mlakit.ops.indexer_select import MAX_SCORE_BYTES
from mlakit.steps import CachedBatch, IndexInputs, LayerWeights, sparse_step
from mlakit.steps.batch import append_tokens
from mlakit.steps.decode import absorb
from mlakit.steps.sparse import append_index_keys
from mlakit.tools.bench import branch_oracle, gpu
from mlakit.tools.bench.branch import D_C, D_N, D_V, layer_weights
from mlakit.tools.bench.indexer import KEY_BYTES, scored_queries
from mlakit.tools.bench.indexer import MODEL as INDEX_MODEL
from mlakit.tools.bench.indexer import TOPK as INDEX_TOPK
from mlakit.tools.bench.indexer import WIDTH as INDEX_WIDTH
from mlakit.tools.bench.pool import ROW, SharedPool, StepPool, clear_new_rows, page_counts
from mlakit.tools.bench.report import MLAKIT, SELECT, STAGES
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Work, Workload
from mlakit.tools.testing import assert_same_bits

INDEX_HEADS = INDEX_MODEL.index_n_heads
SEPARATE_STAGES = ("absorb", "append", "logits", "top-k", "attend", "up-project")


@dataclass(frozen=True)
class SparseStep(Workload):
    """One layer's step over a batch of requests.

    pool  shared with other workloads; None: its own
    """

    batch: Batch
    heads: int = 128
    topk: int = INDEX_TOPK
    format: Format = "fp8_block128"
    page_size: int = 64
    pool: StepPool | None = field(default=None, compare=False)

    op = "sparse_step"
    budget_s = 3.0

    @property
    def name(self) -> str:
        page = f"-page{self.page_size}" if self.page_size != 64 else ""
        return f"sparse-step-{self.format}-{self.batch.label(self.heads)}-top{self.topk}{page}"

    @property
    def flops(self) -> int:
        return sum(self.work_of(stage).flops for stage in SEPARATE_STAGES)

    @property
    def bytes(self) -> int:
        tokens, heads = self.batch.tokens, self.heads
        per_token = 2 * (heads * (D_N + ROW.qk_rope_head_dim + D_V) + ROW.width + INDEX_WIDTH)
        index = INDEX_HEADS * (INDEX_WIDTH + 4)
        weights = 2 * heads * D_C * (D_N + D_V)
        return self._key_bytes + self._selected_bytes + weights + tokens * (per_token + index)

    @property
    def small(self) -> Workload:
        small = self.batch.small
        return replace(self, batch=small, heads=min(self.heads, 4), topk=64, pool=None)

    @property
    def _key_bytes(self) -> int:
        return sum(self.batch.kv_lens) * KEY_BYTES

    @property
    def _selected_bytes(self) -> int:
        return self.batch.tokens * self.topk * row_codec(self.format, ROW).bytes_per_token

    @property
    def _pairs(self) -> int:
        return sum(a * b for a, b in zip(self.batch.q_lens, self.batch.kv_lens, strict=True))

    def work_of(self, implementation: str) -> Work:
        tokens, heads = self.batch.tokens, self.heads
        latent, absorbed = 2 * tokens * heads * D_C, 2 * tokens * heads * ROW.width
        scores = 4 * tokens * max(self.batch.kv_lens)
        queries = tokens * INDEX_HEADS * (INDEX_WIDTH + 4)
        match implementation:
            case "absorb":
                moved = 2 * heads * D_N * (D_C + tokens) + latent
                return Work(2 * tokens * heads * D_N * D_C, moved)
            case "append":
                rotated = 2 * 2 * heads * ROW.qk_rope_head_dim
                stored = row_codec(self.format, ROW).bytes_per_token + KEY_BYTES
                raw = 2 * (ROW.width + INDEX_WIDTH)
                return Work(0, tokens * (rotated + stored + raw))
            case "logits":
                flops = 2 * self._pairs * INDEX_HEADS * INDEX_WIDTH
                return Work(flops, self._key_bytes + queries + scores, "fp8")
            case "top-k":
                return Work(0, scores + 4 * tokens * self.topk)
            case implementation if implementation == SELECT:
                logits, topk = self.work_of("logits"), self.work_of("top-k")
                return Work(logits.flops, logits.bytes + topk.bytes, "fp8")
            case "attend":
                flops = 2 * tokens * heads * self.topk * (ROW.width + ROW.v_width)
                moved = self._selected_bytes + 4 * tokens * self.topk + absorbed + latent
                return Work(flops, moved)
            case "up-project":
                moved = 2 * heads * D_V * (D_C + tokens) + latent
                return Work(2 * tokens * heads * D_V * D_C, moved)
        return super().work_of(implementation)

    def with_derived(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        """Top-k is what `indexer_select` takes beyond `indexer_logits`; stages in their order."""
        found = dict(seconds)
        if SELECT in found and "logits" in found:
            both = zip(found.pop(SELECT), found["logits"], strict=True)
            found["top-k"] = [max(select - logits, 1e-9) for select, logits in both]
        stages = {name: found.pop(name) for name in STAGES if name in found}
        return {MLAKIT: found.pop(MLAKIT), **stages, **found}

    def build_case(self) -> BenchmarkCase:
        generator = gpu.generator()
        weights = layer_weights(generator, self.heads, max(self.batch.kv_lens))
        q, kv, batch, index = self._inputs(generator)
        columns = max(self.batch.kv_lens)

        def call() -> Tensor:
            return sparse_step(q, kv, weights, batch, index, self.topk, max_kv_len=columns)

        return BenchmarkCase(
            call,
            [
                Baseline(name, stage, sets_target=False)
                for name, stage in self._stages(q, kv, weights, batch, index)
            ]
            + [gpu.read_baseline(self.bytes)],
            check=lambda: self._check(q, kv, weights, batch, index),
        )

    def _inputs(
        self, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, CachedBatch, IndexInputs]:
        """(q, kv, batch, index)."""
        counts = page_counts(self.batch.kv_lens, self.page_size)
        own = SharedPool(sum(counts), self.page_size, self.format)
        pool = StepPool(own) if self.pool is None else self.pool
        cache, page_table = pool.latents.pages(self.batch.kv_lens, generator)
        keys = pool.index_keys(INDEX_WIDTH)
        kv_lens, starts = gpu.int32(self.batch.kv_lens), gpu.int32(self.batch.starts)
        tokens = self.batch.tokens
        width = D_N + ROW.qk_rope_head_dim
        e4m3 = torch.float8_e4m3fn
        index = IndexInputs(
            gpu.normal(generator, tokens, INDEX_HEADS, INDEX_WIDTH, dtype=e4m3),
            gpu.normal(generator, tokens, INDEX_WIDTH),
            gpu.normal(generator, tokens, INDEX_HEADS, dtype=torch.float32),
            keys,
        )
        return (
            gpu.normal(generator, tokens, self.heads, width),
            gpu.normal(generator, tokens, ROW.width),
            CachedBatch(cache, page_table, kv_lens, starts),
            index,
        )

    def _stages(
        self,
        q: Tensor,
        kv: Tensor,
        weights: LayerWeights,
        batch: CachedBatch,
        index: IndexInputs,
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """Each stage of the step on inputs of its own, with what it is called."""
        scored = (index.q, index.weights, index.cache, batch.page_table, batch.kv_lens)
        starts, columns = batch.q_starts, max(self.batch.kv_lens)
        absorbed, q_rope, rotated = absorb(q, weights, "auto")

        def append() -> None:
            append_tokens(q_rope, kv, weights, batch, q_rope_out=rotated, backend="auto")
            append_index_keys(index, weights, batch, backend="auto")

        def select() -> Tensor:
            return indexer_select(*scored, self.topk, q_starts=starts, max_kv_len=columns)

        append()
        rows = select()
        scale = weights.softmax_scale

        def attend() -> Tensor:
            return sparse_mla(absorbed, batch.cache, rows, softmax_scale=scale)[0]

        attended = attend()
        out = attended.new_empty(*attended.shape[:2], D_V)
        yield "absorb", lambda: absorb(q, weights, "auto")
        yield "append", append
        if 4 * self.batch.tokens * columns <= MAX_SCORE_BYTES:  # else `indexer_select` has blocks
            yield "logits", lambda: indexer_logits(*scored, q_starts=starts, max_kv_len=columns)
        yield SELECT, select
        yield "attend", attend
        yield "up-project", lambda: weights.up.w_uv.apply(attended, out=out)

    def _check(
        self,
        q: Tensor,
        kv: Tensor,
        weights: LayerWeights,
        batch: CachedBatch,
        index: IndexInputs,
    ) -> None:
        columns = max(self.batch.kv_lens)
        assert isinstance(batch.page_table, Tensor)
        table = batch.page_table
        clear_new_rows(batch, len(q), batch.cache, index.cache)
        rows = gpu.int32([[-1] * self.topk] * len(q))
        out = sparse_step(q, kv, weights, batch, index, self.topk, max_kv_len=columns, rows=rows)
        scored = (index.q, index.weights, index.cache, table)
        scores = indexer_logits(*scored, batch.kv_lens, q_starts=batch.q_starts, max_kv_len=columns)
        for each in scored_queries(self.batch, *scored):
            own, request, seen = slice(each.token, each.token + 1), each.request, len(each.keys)
            each.assert_correct(scores)
            chosen = reference.indexer_topk(scores[own], self.topk)
            want = physical_rows(
                chosen.to(table.device), table[request : request + 1], self.page_size
            )
            assert_same_bits(f"rows of {each.label}", rows[own], want)
            slots = request_slots(table, self.page_size, request, seen - 1, seen)
            position = (q[each.token], seen - 1)
            latents, keys = batch.cache.layer(0), index.cache.layer(0)
            appended = branch_oracle.Query(*position, latents.read(slots, torch.float64), seen - 1)
            branch_oracle.assert_row_appended(appended, kv[each.token], weights, latents.codec)
            stored = keys.codec.decode(
                *keys.codec.encode(index.keys[own], power_of_two=index.power_of_two_scales)
            )
            assert_same_bits(f"index key of {each.label}", keys.read(slots), stored)
            selected = latents.read(want[want >= 0].long(), torch.float64)
            attended = branch_oracle.Query(*position, selected, seen - 1)
            branch_oracle.assert_output_correct(out, each.token, attended, weights, is_decode=True)


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("sparse-step", "heads", "format", "topk", "page_size")
    return (SparseStep(shape.batch, **given),)  # type: ignore[arg-type]  # checked by their options


BATCHES = (1, 8, 64, 128)
CONTEXTS = (8 << 10, 32 << 10, 128 << 10)
_POOL = StepPool(SharedPool(max(BATCHES) * max(CONTEXTS) // 64, 64, "fp8_block128"))
WORKLOADS: tuple[Workload, ...] = tuple(
    SparseStep(Batch.of(count, 1, context), pool=_POOL) for context in CONTEXTS for count in BATCHES
)
