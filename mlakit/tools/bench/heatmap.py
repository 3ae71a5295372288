"""Heat maps of a grid, lengths down: of decodes one per number of heads, with batches across; of
prefills one per mask, with heads across.

A cell is mlakit's speedup over the fastest peer; without a peer, the share of the roofline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table

from mlakit.tools.bench.report import MLAKIT, Row
from mlakit.tools.bench.tables import times_of

POINT = re.compile(r"^grid-.*-b(?P<batch>\d+)-h(?P<heads>\d+)-(?P<length>\d+)$")
PROMPTS = re.compile(r"^prefill-grid-.*-b\d+-h(?P<heads>\d+)-(?P<length>\d+)-(?P<mask>\w+)$")
FULL_SHADE = 0.4  # a time difference of this share of the peer's time has the full colour
EVEN = 0.03  # a smaller one counts as equally fast


@dataclass(frozen=True)
class HeatMap:
    """One map of a grid.

    label       what its points have in common: `16 heads`, `causal`
    axis        of its columns: `b` batches, `h` heads
    cells       by (length, column)
    is_speedup  else a share of the roofline
    """

    label: str
    axis: str
    cells: dict[tuple[int, int], float]
    is_speedup: bool

    @property
    def lengths(self) -> list[int]:
        return sorted({length for length, _ in self.cells})

    @property
    def columns(self) -> list[int]:
        return sorted({column for _, column in self.cells})

    @property
    def title(self) -> str:
        what = f"{MLAKIT}'s speedup over the fastest peer"
        return f"{self.label}: {what if self.is_speedup else 'share of the roofline'}"

    def text(self, length: int, column: int) -> str:
        value = self.cells.get((length, column))
        if value is None:
            return ""
        return times_of(value) if self.is_speedup else f"{100 * value:.0f} %"

    def goodness(self, length: int, column: int) -> float:
        """From −1, slow, to 1, fast; 0 for equally fast and for points that were not measured."""
        value = self.cells.get((length, column))
        if value is None:
            return 0.0
        # a speedup by the share of the peer's time that it saves
        goodness = (1 - 1 / value) / FULL_SHADE if self.is_speedup else 2 * value - 1
        return max(-1.0, min(1.0, goodness))


def heat_maps(rows: Iterable[Row]) -> list[HeatMap]:
    """The maps of a grid's rows; empty for other rows."""
    speedups: dict[_Point, float] = {}
    shares: dict[_Point, float] = {}
    for row in rows:
        point = _point(row.workload)
        if point is None:
            continue
        if row.speedup is not None:
            speedups[point] = min(row.speedup.p50, speedups.get(point, row.speedup.p50))
        elif row.roofline is not None:
            shares[point] = row.roofline
    values = speedups or shares
    maps: dict[tuple[int, str, str], dict[tuple[int, int], float]] = {}
    for point in sorted(values):
        cells = maps.setdefault((point.order, point.label, point.axis), {})
        cells[point.length, point.column] = values[point]
    return [HeatMap(label, axis, cells, bool(speedups)) for (_, label, axis), cells in maps.items()]


class _Point(NamedTuple):
    """Where a workload is in the maps; `order` sorts them."""

    order: int
    label: str
    axis: str
    length: int
    column: int


def _point(workload: str) -> _Point | None:
    """None for a workload that is in no grid."""
    if found := POINT.match(workload):
        heads = int(found["heads"])
        return _Point(heads, f"{heads} heads", "b", int(found["length"]), int(found["batch"]))
    if found := PROMPTS.match(workload):
        return _Point(0, found["mask"], "h", int(found["length"]), int(found["heads"]))
    return None


def heat_table(heat: HeatMap) -> Group:
    """The map under its title, which may be wider."""
    shown = Table(box=SIMPLE)
    shown.add_column("s_k", justify="right")
    for column in heat.columns:
        shown.add_column(f"{heat.axis} {column}", justify="right")
    for length in heat.lengths:
        cells = (
            _coloured(heat.text(length, column), heat.goodness(length, column))
            for column in heat.columns
        )
        shown.add_row(f"{length >> 10}k" if length >= 1024 else str(length), *cells)
    return Group(heat.title, shown)


def _coloured(text: str, goodness: float) -> str:
    if abs(goodness) <= EVEN / FULL_SHADE:
        return text
    return f"[{'green' if goodness > 0 else 'red'}]{text}[/]"
