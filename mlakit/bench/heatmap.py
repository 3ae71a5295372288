"""Heat maps of a decode grid: one per number of heads, lengths down and batches across.

A cell is mlakit's speedup over the fastest peer; without a peer, the share of the roofline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table

from mlakit.bench.report import MLAKIT, Row
from mlakit.bench.tables import times_of

POINT = re.compile(r"^grid-.*-b(?P<batch>\d+)-h(?P<heads>\d+)-(?P<length>\d+)$")
FULL_SHADE = 0.4  # a time difference of this share of the peer's time has the full colour
EVEN = 0.03  # a smaller one counts as equally fast


@dataclass(frozen=True)
class HeatMap:
    """One number of heads. `cells` by (length, batch)."""

    heads: int
    cells: dict[tuple[int, int], float]
    is_speedup: bool  # else a share of the roofline

    @property
    def lengths(self) -> list[int]:
        return sorted({length for length, _ in self.cells})

    @property
    def batches(self) -> list[int]:
        return sorted({batch for _, batch in self.cells})

    @property
    def title(self) -> str:
        what = f"{MLAKIT}'s speedup over the fastest peer"
        return f"{self.heads} heads: {what if self.is_speedup else 'share of the roofline'}"

    def text(self, length: int, batch: int) -> str:
        value = self.cells.get((length, batch))
        if value is None:
            return ""
        return times_of(value) if self.is_speedup else f"{100 * value:.0f} %"

    def goodness(self, length: int, batch: int) -> float:
        """From −1, slow, to 1, fast; 0 for equally fast and for points that were not measured."""
        value = self.cells.get((length, batch))
        if value is None:
            return 0.0
        # a speedup by the share of the peer's time that it saves
        goodness = (1 - 1 / value) / FULL_SHADE if self.is_speedup else 2 * value - 1
        return max(-1.0, min(1.0, goodness))


def heat_maps(rows: Iterable[Row]) -> list[HeatMap]:
    """The maps of a grid's rows; empty for other rows."""
    speedups: dict[tuple[int, int, int], float] = {}
    shares: dict[tuple[int, int, int], float] = {}
    for row in rows:
        found = POINT.match(row.workload)
        if found is None:
            continue
        point = (int(found["heads"]), int(found["length"]), int(found["batch"]))
        if row.speedup is not None:
            speedups[point] = min(row.speedup.p50, speedups.get(point, row.speedup.p50))
        elif row.roofline is not None:
            shares[point] = row.roofline
    values = speedups or shares
    return [
        HeatMap(
            heads,
            {point[1:]: values[point] for point in values if point[0] == heads},
            bool(speedups),
        )
        for heads in sorted({point[0] for point in values})
    ]


def heat_table(heat: HeatMap) -> Group:
    """The map under its title, which may be wider."""
    shown = Table(box=SIMPLE)
    shown.add_column("s_k", justify="right")
    for batch in heat.batches:
        shown.add_column(f"b {batch}", justify="right")
    for length in heat.lengths:
        cells = (
            _coloured(heat.text(length, batch), heat.goodness(length, batch))
            for batch in heat.batches
        )
        shown.add_row(f"{length >> 10}k" if length >= 1024 else str(length), *cells)
    return Group(heat.title, shown)


def _coloured(text: str, goodness: float) -> str:
    if abs(goodness) <= EVEN / FULL_SHADE:
        return text
    return f"[{'green' if goodness > 0 else 'red'}]{text}[/]"
