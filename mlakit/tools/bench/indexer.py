"""The suite `indexer`: indexer logits over 132-byte keys, their top-k, and both, on a GPU.

Widths  64 index heads of 128 columns, as in DeepSeek-V3.2; e4m3 queries and keys
Logits  bytes: the keys once, q, weights and the logits; FLOPs: 2 · queries · keys · heads · 128
Keys    paged; DeepGEMM reads gathered keys for more than 4 new tokens per request, as in vLLM
Top-k   bytes: the logits once and the selection; against torch.topk on the same logits
Select  both ops as one, for a prompt; against DeepGEMM's logits and torch.topk on all of them
Check   some queries against the oracle; for top-k also the selected logits of every row
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PagedLatentCache, request_slots
from mlakit.model.geometry import MLAGeometry
from mlakit.model.masks import CAUSAL
from mlakit.ops import indexer_logits, indexer_select, indexer_topk
from mlakit.tools.bench import correctness, gpu
from mlakit.tools.bench.peers import deep_gemm
from mlakit.tools.bench.peers.peer import Unavailable, Unsupported
from mlakit.tools.bench.pool import filled_index_keys, page_counts
from mlakit.tools.bench.problems import IndexLogits
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.testing import assert_same_bits, shuffled_pages
from mlakit.tools.workloads.case import assert_logits_match
from mlakit.tools.workloads.fp8_scores import fp8_logits, uses_fp8_logits

MODEL = MLAGeometry.preset("deepseek-v3.2")
WIDTH, TOPK = MODEL.index_head_dim, MODEL.index_topk
KEY_BYTES = WIDTH + 4
PAGE_SIZE = 64
MAX_CHECKED = 3  # queries per request, rows of a selection


@dataclass(frozen=True)
class Logits(Workload):
    """Logits of every cached token for the newest tokens of each request.

    min_speedup  target for DeepGEMM's time / mlakit's time; None: no target
    """

    batch: Batch
    heads: int = MODEL.index_n_heads
    min_speedup: float | None = None

    op = "indexer_logits"
    target_baseline = "deep_gemm"
    products = "fp8"

    @property
    def name(self) -> str:
        return f"indexer-logits-{self.batch.label(self.heads)}"

    @property
    def flops(self) -> int:
        return 2 * self._pairs * self.heads * WIDTH

    @property
    def bytes(self) -> int:
        per_query = self.heads * (WIDTH + 4) + 4 * max(self.batch.kv_lens)
        return sum(self.batch.kv_lens) * KEY_BYTES + self.batch.tokens * per_query

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, min_speedup=None)

    @property
    def _pairs(self) -> int:
        return sum(a * b for a, b in zip(self.batch.q_lens, self.batch.kv_lens, strict=True))

    def build_case(self) -> BenchmarkCase:
        inputs = IndexerInputs.of(self.batch, self.heads)

        def check() -> None:
            logits = inputs.logits()
            for each in inputs.queries():
                each.assert_correct(logits)

        baselines = [gpu.read_baseline(self.bytes)]
        if len(self.batch.groups) == 1 and self.batch.q_lens[0] == 1:
            by_torch = _torch_scores(inputs.q, inputs.weights, inputs.cache, inputs.page_table)
            baselines.append(Baseline("torch bf16", by_torch, sets_target=False))
        return BenchmarkCase(
            inputs.logits,
            baselines,
            check,
            problem=inputs.problem(),
            peer_error=lambda output: _peer_error(output, inputs.queries()),
        )


@dataclass(frozen=True, eq=False)
class IndexerInputs:
    """Queries of a batch, and its paged index keys."""

    batch: Batch
    q: Tensor
    weights: Tensor
    pages: Tensor  # the cache, as peers take it
    cache: PagedLatentCache
    page_table: Tensor
    kv_lens: Tensor
    starts: Tensor

    @classmethod
    def of(cls, batch: Batch, heads: int) -> IndexerInputs:
        generator = gpu.generator()
        counts = page_counts(batch.kv_lens, PAGE_SIZE)
        pages, cache = filled_index_keys(sum(counts), PAGE_SIZE, WIDTH, generator)
        page_table = shuffled_pages(batch.size, counts, sum(counts), generator)
        q = gpu.normal(generator, batch.tokens, heads, WIDTH, dtype=torch.float8_e4m3fn)
        weights = gpu.normal(generator, batch.tokens, heads, dtype=torch.float32)
        kv_lens, starts = gpu.int32(batch.kv_lens), gpu.int32(batch.starts)
        return cls(batch, q, weights, pages, cache, page_table, kv_lens, starts)

    @property
    def columns(self) -> int:
        return max(self.batch.kv_lens)

    @property
    def scored(self) -> tuple[Tensor, Tensor, PagedLatentCache, Tensor, Tensor]:
        """The first arguments of `indexer_logits` and of `indexer_select`."""
        return self.q, self.weights, self.cache, self.page_table, self.kv_lens

    def logits(self) -> Tensor:
        return indexer_logits(*self.scored, q_starts=self.starts, max_kv_len=self.columns)

    def queries(self) -> Iterator[ScoredQuery]:
        return scored_queries(self.batch, self.q, self.weights, self.cache, self.page_table)

    def problem(self) -> IndexLogits | None:
        """For peers: every request has the same number of queries."""
        if not self.batch.is_even:
            return None
        return IndexLogits(
            q=self.q.unflatten(0, (self.batch.size, -1)),
            weights=self.weights,
            pages=self.pages,
            # some peers read table entries past a request's last page
            page_table=self.page_table.clamp(max=len(self.pages) - 1),
            kv_lens=self.kv_lens,
            max_kv_len=self.columns,
        )


@dataclass(frozen=True, eq=False)
class ScoredQuery:
    """A query with its visible keys, and what the oracle says about its logits."""

    token: int
    request: int
    q: Tensor  # [heads, WIDTH]
    weights: Tensor  # [heads]
    keys: Tensor  # [visible, WIDTH] float64
    key_scales: Tensor | None  # [visible], given if the kernel multiplies e4m3 by e4m3

    @property
    def label(self) -> str:
        return f"query {self.token}"

    def logits(self, dtype: torch.dtype) -> Tensor:
        """[1, visible] by the oracle."""
        return reference.indexer_logits(
            self.q[None], self.weights[None], [self.keys], [1], dtype=dtype
        ).cpu()

    def assert_correct(self, logits: Tensor) -> None:
        """Assert that its logits match the oracle, and are −inf past its visible keys."""
        own, seen = logits[self.token], len(self.keys)
        longest = self.keys.norm(dim=-1).amax()
        terms = (self.weights.double().abs() * self.q.double().norm(dim=-1)).sum() * longest
        exact, naive = self.logits(torch.float64), self.logits(torch.float32)
        if self.key_scales is not None:
            own_query = self.q[None], self.weights[None]
            naive = fp8_logits(*own_query, self.keys, self.key_scales).cpu()
        assert_logits_match(f"logits of {self.label}", own[None, :seen], exact, naive, terms.cpu())
        if not bool((own[seen:] == -torch.inf).all()):
            raise AssertionError(f"logits of {self.label}: a key that is not visible has a logit")


def scored_queries(
    batch: Batch, q: Tensor, weights: Tensor, cache: PagedLatentCache, page_table: Tensor
) -> Iterator[ScoredQuery]:
    """Some queries of a batch, each with the keys that it sees."""
    layer = cache.layer(0)
    is_fp8 = uses_fp8_logits(q, layer, page_table, CAUSAL, "auto")
    assert layer.scales is not None
    for request in batch.checked_requests:
        slots = request_slots(page_table, layer.page_size, request, 0, batch.kv_lens[request])
        keys = layer.read(slots, torch.float64)
        scales = layer.scales[slots // layer.page_size, slots % layer.page_size, 0].double()
        for place in correctness.evenly_spaced(batch.q_lens[request], MAX_CHECKED):
            token = batch.starts[request] + place
            seen = len(keys) - batch.q_lens[request] + place + 1
            own = (q[token], weights[token], keys[:seen])
            yield ScoredQuery(token, request, *own, scales[:seen] if is_fp8 else None)


def _peer_error(output: object, queries: Iterator[ScoredQuery]) -> str | None:
    """What is wrong with a peer's logits of visible keys: it may leave the others unwritten."""
    if not isinstance(output, Tensor) or output.ndim != 2:
        return correctness.peer_error(output, ())
    for each in queries:
        exact = each.logits(torch.float64).to(output.device)
        own = slice(each.token, each.token + 1)
        sample = correctness.Sample(each.label, own, [exact], [exact])
        if error := correctness.peer_error(output[:, : len(each.keys)], [sample]):
            return error
    return None


def _torch_scores(
    q: Tensor, weights: Tensor, cache: PagedLatentCache, page_table: Tensor
) -> Callable[[], Tensor]:
    """The same logits by torch; keys are gathered and converted before the clock starts."""
    slots = page_table.long()[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=gpu.DEVICE)
    keys = cache.layer(0).read(slots.flatten(1)).to(torch.bfloat16)
    wide = q.to(torch.bfloat16)

    def scores() -> Tensor:
        dots = torch.bmm(wide, keys.mT).relu()
        return torch.bmm(weights[:, None].to(torch.bfloat16), dots)

    return scores


@dataclass(frozen=True)
class TopK(Workload):
    """The top `k` of every row of logits."""

    rows: int
    columns: int
    k: int = TOPK

    op = "indexer_topk"

    @property
    def name(self) -> str:
        return f"indexer-topk-{self.rows}x{self.columns}-k{self.k}"

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        return 4 * self.rows * (self.columns + self.k)

    @property
    def min_speedup(self) -> float | None:
        return 1.0

    @property
    def small(self) -> Workload:
        return replace(self, rows=min(self.rows, 3), columns=512, k=64)

    def build_case(self) -> BenchmarkCase:
        logits = gpu.normal(gpu.generator(), self.rows, self.columns, dtype=torch.float32)

        def call() -> Tensor:
            return indexer_topk(logits, self.k)

        def check() -> None:
            selected = call()
            for row in correctness.evenly_spaced(self.rows, MAX_CHECKED):
                expected = reference.indexer_topk(logits[row : row + 1], self.k)[0]
                assert_same_bits(f"columns of row {row}", selected[row], expected)
            scores = logits.gather(1, selected.long())
            in_order = scores.sort(dim=-1, descending=True).values
            assert_same_bits("scores selected", in_order, torch.topk(logits, self.k).values)

        by_torch = [
            Baseline("torch.topk", lambda: torch.topk(logits, self.k)),
            Baseline("torch.topk, unsorted", lambda: torch.topk(logits, self.k, sorted=False)),
        ]
        return BenchmarkCase(call, [*by_torch, gpu.read_baseline(self.bytes)], check)


@dataclass(frozen=True)
class Select(Workload):
    """The cache rows of the top `k` keys of every token of a prompt."""

    batch: Batch
    heads: int = MODEL.index_n_heads
    k: int = TOPK
    min_speedup: float | None = None

    op = "indexer_select"
    target_baseline = "deep_gemm, torch.topk"
    products = "fp8"
    max_rounds = 12

    @property
    def name(self) -> str:
        return f"indexer-select-{self.batch.label(self.heads)}-k{self.k}"

    @property
    def flops(self) -> int:
        return Logits(self.batch, self.heads).flops

    @property
    def bytes(self) -> int:
        per_query = self.heads * (WIDTH + 4) + 4 * self.k
        return sum(self.batch.kv_lens) * KEY_BYTES + self.batch.tokens * per_query

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, k=16, min_speedup=None)

    def build_case(self) -> BenchmarkCase:
        inputs = IndexerInputs.of(self.batch, self.heads)

        def call() -> Tensor:
            return indexer_select(
                *inputs.scored, self.k, q_starts=inputs.starts, max_kv_len=inputs.columns
            )

        def check() -> None:
            rows, logits = call(), inputs.logits()
            for each in inputs.queries():
                each.assert_correct(logits)
                columns = reference.indexer_topk(logits[each.token : each.token + 1], self.k)[0]
                expected = physical_rows(inputs.page_table[each.request], columns.long())
                assert_same_bits(f"rows of {each.label}", rows[each.token], expected.int())

        by_torch = Baseline(
            "logits, torch.topk", lambda: torch.topk(inputs.logits(), self.k), sets_target=False
        )
        problem = inputs.problem()
        return BenchmarkCase(
            call,
            [by_torch, gpu.read_baseline(self.bytes)],
            check,
            peers=[] if problem is None else deep_gemm_select(problem, self.k),
            peer_error=lambda output: _selection_error(output, inputs.queries(), self.k),
        )


def physical_rows(pages: Tensor, columns: Tensor) -> Tensor:
    """The cache rows of a request's tokens; −1 stays."""
    rows = pages[columns.clamp(min=0) // PAGE_SIZE] * PAGE_SIZE + columns % PAGE_SIZE
    return torch.where(columns < 0, -1, rows)


def deep_gemm_select(problem: IndexLogits, k: int) -> list[Baseline]:
    """DeepGEMM's logits, −inf where a key is not visible, and torch.topk; none if unavailable."""
    try:
        logits = deep_gemm.prepare(problem, clean=True)
    except (Unavailable, Unsupported):
        return []
    return [Baseline(Select.target_baseline, lambda: torch.topk(logits(), k).indices)]


def _selection_error(output: object, queries: Iterator[ScoredQuery], k: int) -> str | None:
    """What is wrong with a peer's columns: the exact logits that they have are compared."""
    if not isinstance(output, Tensor) or output.ndim != 2:
        return correctness.peer_error(output, ())
    for each in queries:
        exact = each.logits(torch.float64)[0]
        count = min(k, len(exact))
        own = output[each.token, :count].cpu().long()
        if len(own.unique()) < count or not bool(((own >= 0) & (own < len(exact))).all()):
            return f"selects a column of {each.label} twice, or one that it does not see"
        found, best = exact[own].sort(descending=True).values, exact.topk(count).values
        sample = correctness.Sample(each.label, slice(0, 1), [best[None]], [best[None]])
        if error := correctness.peer_error(found[None], [sample]):
            return error
    return None


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    """Both ops of an indexer's step over the batch."""
    given = shape.accept("indexer", "heads", "topk")
    batch = shape.batch
    columns = max(batch.kv_lens)
    logits = Logits(batch, int(given.get("heads", MODEL.index_n_heads)))
    return logits, TopK(batch.tokens, columns, min(int(given.get("topk", TOPK)), columns))


WORKLOADS: tuple[Workload, ...] = (
    Logits(Batch.of(64, 1, 8192), min_speedup=1.053),
    Logits(Batch.of(128, 2, 32768), min_speedup=1.042),
    Logits(Batch.of(1, 1, 131072), min_speedup=1.111),
    Logits(Batch.of(1, 2048, 32768), min_speedup=1.124),
    Logits(Batch.of(1, 8192, 32768), min_speedup=1.136),
    Select(Batch.of(1, 32768, 32768), min_speedup=1.5),
    *(TopK(rows, columns) for rows in (1, 128, 4096) for columns in (4096, 16384, 65536, 131072)),
    TopK(64, 8192),
)
