"""The suite `prefill-grid`: prefill over a grid of lengths and heads, as heat maps.

Grid    s {512, 2k, 8k, 32k, 64k} x h {8, 16, 64, 128}, causal and full; max(1, 16k / s) prompts
Target  0.97x of the fastest peer: mlakit takes at most 3 % more time
"""

from __future__ import annotations

from dataclasses import dataclass

from mlakit.tools.bench.prefill import Prefill
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import Workload

LENGTHS = (512, 2 << 10, 8 << 10, 32 << 10, 64 << 10)
HEADS = (8, 16, 64, 128)
TOKENS = 16 << 10  # of all prompts of a point, unless one prompt is longer


@dataclass(frozen=True)
class GridPoint(Prefill):
    """One prefill of the grid, timed briefly and against the fast peers only."""

    min_speedup: float | None = 0.97

    target_baseline = None
    budget_s = 1.0
    only_grid_peers = True

    @property
    def name(self) -> str:
        return f"prefill-grid-bf16-{self.label}"


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    raise ValueError("suite prefill-grid does not take --shape; suite prefill does")


WORKLOADS: tuple[Workload, ...] = tuple(
    GridPoint(Batch.of(max(1, TOKENS // length), length, length), heads, causal)
    for heads in HEADS
    for length in LENGTHS
    for causal in (True, False)
)
