"""What changed between two runs: times, and speedups over baselines, which drift less than times.

A figure counts as changed if its medians differ by more than the spread of either run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from mlakit.tools.bench.measure import Spread
from mlakit.tools.bench.report import MLAKIT, Report, Row
from mlakit.tools.bench.tables import digits
from mlakit.tools.columns import Column, fitting_table

HEADINGS = ("workload", "figure", "before", "now", "now / before", "change")


@dataclass(frozen=True)
class Change:
    """One figure of one workload in both runs: mlakit's time in us, or its speedup."""

    suite: str
    workload: str
    figure: str
    before: Spread
    now: Spread
    is_time: bool  # less is better; of a speedup more is better

    @property
    def factor(self) -> float:
        return self.now.p50 / self.before.p50

    @property
    def has_moved(self) -> bool:
        spread = max(each.p80 - each.p20 for each in (self.before, self.now))
        return abs(self.now.p50 - self.before.p50) > spread

    @property
    def is_better(self) -> bool:
        return (self.factor < 1) == self.is_time

    @property
    def text(self) -> str:
        if not self.has_moved:
            return "within the spread"
        return f"{'better' if self.is_better else 'worse'} by {abs(self.factor - 1):.1%}"

    @property
    def figures(self) -> list[str]:
        """The cells under `HEADINGS`, without `text`."""
        medians = [digits(each.p50) for each in (self.before, self.now)]
        return [self.workload, self.figure, *medians, f"{self.factor:.3f}"]


@dataclass(frozen=True)
class Comparison:
    """only_before, only_now  workloads of one of the runs only."""

    changes: Sequence[Change]
    only_before: Sequence[str]
    only_now: Sequence[str]

    @property
    def summary(self) -> str:
        moved = [each for each in self.changes if each.has_moved]
        better = sum(each.is_better for each in moved)
        lines = [
            f"{len(self.changes)} figures: {better} better, {len(moved) - better} worse, "
            f"{len(self.changes) - len(moved)} within the spread"
        ]
        for label, names in (("before", self.only_before), ("now", self.only_now)):
            if names:
                lines.append(f"only {label}: {', '.join(names)}")
        return "\n".join(lines)


def compare(before: Iterable[Report], now: Iterable[Report]) -> Comparison:
    """Rows are matched by suite, mode, workload and implementation."""
    old, new = _by_key(before), _by_key(now)
    changes = []
    for key in (key for key in new if key in old):
        suite, _, workload, name = key
        if name == MLAKIT:
            times = old[key].us, new[key].us
            changes.append(Change(suite, workload, f"{MLAKIT}, us", *times, is_time=True))
        earlier, later = old[key].speedup, new[key].speedup
        if earlier is not None and later is not None:
            figure = f"speedup over {name}"
            changes.append(Change(suite, workload, figure, earlier, later, is_time=False))
    return Comparison(changes, _missing(old, new), _missing(new, old))


def _by_key(reports: Iterable[Report]) -> dict[tuple[str, str, str, str], Row]:
    return {
        (report.suite, report.mode, row.workload, row.implementation): row
        for report in reports
        for row in report.rows
    }


def _missing(
    here: Iterable[tuple[str, str, str, str]], there: Iterable[tuple[str, str, str, str]]
) -> list[str]:
    known = {key[:3] for key in there}
    return list(dict.fromkeys(key[2] for key in here if key[:3] not in known))


def comparison_table(comparison: Comparison, width: int) -> RenderableType:
    columns = [Column(each, is_number=each in HEADINGS[2:5]) for each in HEADINGS]
    columns[4] = Column(HEADINGS[4], rank=1)
    caption = "changed: the medians differ by more than the 20th to 80th percentile of either run"
    rows: list[list[str | Text]] = [[*each.figures, _coloured(each)] for each in comparison.changes]
    return fitting_table(columns, rows, width, caption=caption)


def _coloured(change: Change) -> Text:
    if not change.has_moved:
        return Text(change.text)
    return Text(change.text, style="green" if change.is_better else "red")
