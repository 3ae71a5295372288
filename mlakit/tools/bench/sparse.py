"""What the suites `sparse-decode` and `sparse-prefill` share.

Rows    `topk` rows of the query's own request: uniform, distinct, unsorted
FLOPs   2 · queries · heads · topk · (576 + 512)
Peers   FlashMLA supports 64 and 128 heads: fewer are padded with zeros before the clock starts, as
        its user has to keep q padded
Check   some queries, all heads, against the float64 oracle
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PagedLatentCache
from mlakit.formats import Format
from mlakit.model.geometry import RowShape
from mlakit.ops import sparse_mla
from mlakit.tools.bench import correctness, gpu
from mlakit.tools.bench.pool import ROW, SCALE
from mlakit.tools.bench.problems import SparseDecode, SparsePrefill
from mlakit.tools.bench.shapes import Batch, Shape, with_topk
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.workloads.fp16_rows import block_scales, rounded_rows, rounds_rows

MAX_CHECKED = 6  # queries
NUMBERS_AT_ONCE = 1 << 26


class Lists(NamedTuple):
    """What queries attend to: int32 [tokens, topk] rows of a cache; -1 marks an unused slot."""

    cache: PagedLatentCache
    rows: Tensor
    tokens: Tensor | None = None  # the same by position in the request
    page_table: Tensor | None = None
    extra: tuple[PagedLatentCache, Tensor] | None = None  # a second cache, and rows of it


@dataclass(frozen=True)
class SparseWorkload(Workload):
    """The newest tokens of a batch of requests, each over `topk` rows of its request.

    min_speedup  target for FlashMLA's time / mlakit's time; None: no target
    """

    batch: Batch
    heads: int
    topk: int = 2048
    format: Format = "bf16"
    min_speedup: float | None = None

    op = "sparse_mla"
    target_baseline = "flash_mla"
    suite: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.suite}-{self.format}-{self.batch.label(self.heads)}-top{self.topk}"

    @property
    def row(self) -> RowShape:
        return ROW

    @property
    def attended(self) -> int:
        """Rows that a query attends to."""
        return self.topk

    @property
    def flops(self) -> int:
        columns = self.row.width + self.row.v_width
        return 2 * self.batch.tokens * self.heads * self.attended * columns

    @property
    def query_bytes(self) -> int:
        """Bytes of a query, its result and its indices."""
        return 4 * self.attended + 2 * self.heads * (self.row.width + self.row.v_width)

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, topk=min(self.topk, 128), min_speedup=None)

    @property
    def hardware_baselines(self) -> Sequence[Baseline]:
        return ()

    @abstractmethod
    def lists(self, generator: torch.Generator) -> Lists:
        """A cache, and what each query attends to."""

    @abstractmethod
    def problem(
        self, q: Tensor, cache: PagedLatentCache, rows: Tensor
    ) -> SparseDecode | SparsePrefill | None:
        """The problem for peers; None if they do not support the format."""

    def operation(self, q: Tensor, lists: Lists) -> Callable[[], tuple[Tensor, ...]]:
        """The call of mlakit."""
        return lambda: sparse_mla(
            q, lists.cache, lists.rows, softmax_scale=SCALE, extra=lists.extra
        )

    def build_case(self) -> BenchmarkCase:
        generator = gpu.generator()
        lists = self.lists(generator)
        q = gpu.normal(generator, self.batch.tokens, self.heads, self.row.width)

        call = self.operation(q, lists)

        def samples() -> Iterator[correctness.Sample]:
            return sampled_queries(q, lists.cache, lists.rows, lists.extra)

        return BenchmarkCase(
            call,
            self.hardware_baselines,
            check=lambda: correctness.assert_correct(("out", "lse"), call()[:2], samples()),
            problem=self.problem(q, lists.cache, lists.rows),
            peer_error=lambda output: correctness.peer_error(output, samples()),
        )


def random_tokens(queries: int, kv_len: int, topk: int, generator: torch.Generator) -> Tensor:
    """int64 [queries, topk]: distinct tokens below `kv_len`, uniform, unsorted, per query."""
    step = max(NUMBERS_AT_ONCE // kv_len, 1)
    indices = []
    for first in range(0, queries, step):
        size = (min(step, queries - first), kv_len)
        keys = torch.rand(size, generator=generator, device=gpu.DEVICE)
        indices.append(keys.topk(topk, dim=-1).indices)
    return torch.cat(indices)


def sampled_queries(
    q: Tensor,
    cache: PagedLatentCache,
    rows: Tensor,
    extra: tuple[PagedLatentCache, Tensor] | None = None,
) -> Iterator[correctness.Sample]:
    """The oracle's results for some queries, each over its own rows.

    The naive run has rows that are rounded as the kernel's are, where the kernel rounds them.
    """
    layer = cache.layer(0)
    is_rounded = rounds_rows(q.device, "auto", format=cache.format, heads=q.shape[1])
    for token in correctness.evenly_spaced(len(q), MAX_CHECKED):
        own, slots = slice(token, token + 1), rows[token].long()
        listed = naive_listed = layer.read(slots, torch.float64)
        if is_rounded:
            payload = layer.payload[slots // layer.page_size, slots % layer.page_size]
            naive_listed = rounded_rows(listed, block_scales(payload.view(torch.uint8)))
        if extra is not None:
            others = extra[0].layer(0).read(extra[1][token].long(), torch.float64)
            listed, naive_listed = (torch.cat([each, others]) for each in (listed, naive_listed))
        place = torch.arange(len(listed), device=rows.device)[None]
        exact, naive = (
            reference.sparse_mla(
                q[own], keys, place, softmax_scale=SCALE, v_width=cache.row.v_width, dtype=dtype
            )
            for keys, dtype in ((listed, torch.float64), (naive_listed, torch.float32))
        )
        yield correctness.Sample(f"query {token}", own, exact[:2], naive[:2])


def sparse_of_shape(kind: type[SparseWorkload], shape: Shape, *options: str) -> SparseWorkload:
    """The workload of `shape`; the suite takes heads, format, topk and `options`."""
    given = shape.accept(kind.suite, "heads", "format", "topk", *options)
    topk = with_topk(kind.suite, shape.batch, given.pop("topk", None))
    return kind(shape.batch, **{"heads": 128, **given}, topk=topk)  # type: ignore[arg-type]  # checked by their options
