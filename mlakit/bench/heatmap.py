"""A grid of decodes as maps: for every number of heads, lengths down and batches across.

A cell is mlakit's time over the fastest peer's; where no peer was there, the share of the roofline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table

from mlakit.bench.report import OURS, Row

POINT = re.compile(r"^grid-.*-b(?P<batch>\d+)-h(?P<heads>\d+)-(?P<length>\d+)$")
EVEN = 0.03  # a ratio so close to 1 is neither faster nor slower


@dataclass(frozen=True)
class HeatMap:
    """One number of heads. `cells` by (length, batch)."""

    heads: int
    cells: dict[tuple[int, int], float]
    is_ratio: bool  # else a share of the roofline

    @property
    def lengths(self) -> list[int]:
        return sorted({length for length, _ in self.cells})

    @property
    def batches(self) -> list[int]:
        return sorted({batch for _, batch in self.cells})

    @property
    def title(self) -> str:
        what = f"{OURS} / fastest peer" if self.is_ratio else "share of the roofline"
        return f"{self.heads} heads: {what}"

    def text(self, length: int, batch: int) -> str:
        value = self.cells.get((length, batch))
        if value is None:
            return ""
        return f"{value:.2f}" if self.is_ratio else f"{100 * value:.0f} %"

    def goodness(self, length: int, batch: int) -> float:
        """From −1, bad, to 1, good; 0 for even and for what was not measured."""
        value = self.cells.get((length, batch))
        if value is None:
            return 0.0
        return max(-1.0, min(1.0, (1 - value) / 0.4 if self.is_ratio else 2 * value - 1))


def heat_maps(rows: Iterable[Row]) -> list[HeatMap]:
    """Of the rows of a grid; none of other rows."""
    ratios: dict[tuple[int, int, int], float] = {}
    shares: dict[tuple[int, int, int], float] = {}
    for row in rows:
        found = POINT.match(row.workload)
        if found is None:
            continue
        point = (int(found["heads"]), int(found["length"]), int(found["batch"]))
        if row.ratio is not None:
            ratios[point] = max(row.ratio.p50, ratios.get(point, 0.0))
        elif row.roofline is not None:
            shares[point] = row.roofline
    values = ratios or shares
    return [
        HeatMap(
            heads, {point[1:]: values[point] for point in values if point[0] == heads}, bool(ratios)
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
    if abs(goodness) <= EVEN / 0.4:
        return text
    return f"[{'green' if goodness > 0 else 'red'}]{text}[/]"
