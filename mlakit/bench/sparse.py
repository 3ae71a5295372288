"""What the suites `sparse-decode` and `sparse-prefill` share.

Rows    `topk` of each query's own request, uniform, distinct, not sorted
FLOPs   2 · queries · heads · topk · (576 + 512)
Gate    some queries, all their heads, against the float64 oracle
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mlakit import reference
from mlakit.bench import gate, gpu
from mlakit.bench.pool import ROW, SCALE
from mlakit.bench.problems import SparseDecode, SparsePrefill
from mlakit.bench.shapes import Batch, Shape, with_topk
from mlakit.bench.suite import Baseline, Contest, Workload
from mlakit.cache import PagedLatentCache
from mlakit.formats import Format
from mlakit.ops import sparse_mla

MOST_JUDGED = 6  # queries


@dataclass(frozen=True)
class SparseWorkload(Workload):
    """The newest tokens of a batch of requests, each over `topk` rows of its request.

    ratio  of mlakit's time to FlashMLA's that is to be reached; None: none is set
    """

    batch: Batch
    heads: int
    topk: int = 2048
    format: Format = "bf16"
    ratio: float | None = None

    op = "sparse_mla"
    rival = "flash_mla"
    suite: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.suite}-{self.format}-{self.batch.label(self.heads)}-top{self.topk}"

    @property
    def flops(self) -> int:
        return 2 * self.batch.tokens * self.heads * self.topk * (ROW.width + ROW.v_width)

    @property
    def query_bytes(self) -> int:
        """Of a query, of its result and of its list."""
        return 4 * self.topk + 2 * self.heads * (ROW.width + ROW.v_width)

    @property
    def limit(self) -> float | None:
        return self.ratio

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, topk=min(self.topk, 128), ratio=None)

    @property
    def yardsticks(self) -> Sequence[Baseline]:
        return ()

    @abstractmethod
    def listed(self, generator: torch.Generator) -> tuple[PagedLatentCache, Tensor]:
        """(a cache, int32 [tokens, topk] of its rows)."""

    @abstractmethod
    def problem(
        self, q: Tensor, cache: PagedLatentCache, rows: Tensor
    ) -> SparseDecode | SparsePrefill | None:
        """For peers."""

    def contest(self) -> Contest:
        generator = gpu.generator()
        cache, rows = self.listed(generator)
        q = gpu.normal(generator, self.batch.tokens, self.heads, ROW.width)

        def ours() -> tuple[Tensor, Tensor, Tensor]:
            return sparse_mla(q, cache, rows, softmax_scale=SCALE)

        def samples() -> Iterator[gate.Sample]:
            return sampled_queries(q, cache, rows)

        return Contest(
            ours,
            self.yardsticks,
            gate=lambda: gate.hold(("out", "lse"), ours()[:2], samples()),
            problem=self.problem(q, cache, rows),
            peer_fault=lambda output: gate.fault(output, samples()),
        )


def sampled_queries(q: Tensor, cache: PagedLatentCache, rows: Tensor) -> Iterator[gate.Sample]:
    """What the oracle gives for some queries, each over its own list."""
    layer = cache.layer(0)
    for token in gate.spread_out(len(q), MOST_JUDGED):
        own = slice(token, token + 1)
        listed = layer.read(rows[token].long(), torch.float64)
        place = torch.arange(len(listed), device=rows.device)[None]
        exact, naive = (
            reference.sparse_mla(
                q[own], listed, place, softmax_scale=SCALE, v_width=ROW.v_width, dtype=dtype
            )
            for dtype in (torch.float64, torch.float32)
        )
        yield gate.Sample(f"query {token}", own, exact[:2], naive[:2])


def sparse_of_shape(kind: type[SparseWorkload], shape: Shape, *options: str) -> SparseWorkload:
    """The workload of `shape`, which may have these options beside heads, format and topk."""
    given = shape.accept(kind.suite, "heads", "format", "topk", *options)
    topk = with_topk(kind.suite, shape.batch, given.pop("topk", None))
    return kind(shape.batch, **{"heads": 128, **given}, topk=topk)  # type: ignore[arg-type]  # checked by their options
