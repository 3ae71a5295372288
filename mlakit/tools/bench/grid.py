"""The suite `grid`: bf16 decode over a grid of lengths, batches and heads, as heat maps.

Grid    s_k {1k, 4k, 16k, 64k, 128k} x b {1, 4, 16, 64, 256} x h {8, 16, 32, 64, 128}, without the
        points whose cache exceeds 20 GB
Pool    one for all points, filled once; each point uses random pages of it
Target  0.97x of the fastest peer: mlakit is at most 3 % slower
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlakit.formats import row_codec
from mlakit.tools.bench.decode import Decode
from mlakit.tools.bench.pool import ROW, SharedPool, page_counts
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import BenchmarkCase, Workload

LENGTHS = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 128 << 10)
BATCHES = (1, 4, 16, 64, 256)
HEADS = (8, 16, 32, 64, 128)
MAX_BYTES = 20e9
PAGE_SIZE = 64


@dataclass(frozen=True)
class GridPoint(Decode):
    """One decode of the grid, timed briefly and against the fast peers only."""

    min_speedup: float | None = 0.971

    target_baseline = None
    budget_s = 0.3
    only_grid_peers = True

    @property
    def name(self) -> str:
        return f"grid-{self.format}-{self.batch.label(self.heads)}"

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, pool=None)

    def build_case(self) -> BenchmarkCase:
        return replace(super().build_case(), baselines=[])


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    raise ValueError("suite grid does not take --shape")


def _grid() -> tuple[Workload, ...]:
    row_bytes = row_codec("bf16", ROW).bytes_per_token
    sizes = [(b, s) for s in LENGTHS for b in BATCHES if b * s * row_bytes <= MAX_BYTES]
    pool = SharedPool(max(sum(page_counts([s] * b, PAGE_SIZE)) for b, s in sizes), PAGE_SIZE)
    return tuple(
        GridPoint(Batch.of(b, 1, s), heads, pool=pool) for heads in HEADS for b, s in sizes
    )


WORKLOADS: tuple[Workload, ...] = _grid()
