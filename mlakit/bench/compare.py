"""What moved between two runs: times, and ratios to others, which drift less than times do.

A figure is said to have moved where its medians are further apart than either run's own spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from mlakit.bench.measure import Spread
from mlakit.bench.report import OURS, Report, Row
from mlakit.bench.tables import digits
from mlakit.columns import Column, fitting_table


@dataclass(frozen=True)
class Change:
    """One figure of one workload, before and now: a time in us, or a ratio to a contender."""

    suite: str
    workload: str
    figure: str
    before: Spread
    now: Spread

    @property
    def factor(self) -> float:
        return self.now.p50 / self.before.p50

    @property
    def has_moved(self) -> bool:
        spread = max(each.p80 - each.p20 for each in (self.before, self.now))
        return abs(self.now.p50 - self.before.p50) > spread

    @property
    def verdict(self) -> str:
        """Less is better: figures are mlakit's times, and its times over others'."""
        if not self.has_moved:
            return "within the spread"
        return f"{'better' if self.factor < 1 else 'worse'} by {abs(self.factor - 1):.1%}"


@dataclass(frozen=True)
class Comparison:
    """only_before, only_now  workloads that one of the runs does not have."""

    changes: Sequence[Change]
    only_before: Sequence[str]
    only_now: Sequence[str]

    @property
    def summary(self) -> str:
        moved = [each for each in self.changes if each.has_moved]
        better = sum(each.factor < 1 for each in moved)
        lines = [
            f"{len(self.changes)} figures: {better} better, {len(moved) - better} worse, "
            f"{len(self.changes) - len(moved)} within the spread"
        ]
        for label, names in (("before", self.only_before), ("now", self.only_now)):
            if names:
                lines.append(f"only {label}: {', '.join(names)}")
        return "\n".join(lines)


def compare(before: Iterable[Report], now: Iterable[Report]) -> Comparison:
    """Rows are matched by suite, mode, workload and contender."""
    old, new = _by_key(before), _by_key(now)
    changes = []
    for key in (key for key in new if key in old):
        suite, _, workload, contender = key
        pairs = {contender: (old[key].us, new[key].us)} if contender == OURS else {}
        before_ratio, now_ratio = old[key].ratio, new[key].ratio
        if before_ratio is not None and now_ratio is not None:
            pairs[f"ratio to {contender}"] = (before_ratio, now_ratio)
        changes += [
            Change(suite, workload, f"{figure}, us" if figure == OURS else figure, *pair)
            for figure, pair in pairs.items()
        ]
    return Comparison(changes, _missing(old, new), _missing(new, old))


def _by_key(reports: Iterable[Report]) -> dict[tuple[str, str, str, str], Row]:
    return {
        (report.suite, report.mode, row.workload, row.contender): row
        for report in reports
        for row in report.rows
    }


def _missing(
    here: Iterable[tuple[str, str, str, str]], there: Iterable[tuple[str, str, str, str]]
) -> list[str]:
    known = {key[:3] for key in there}
    return list(dict.fromkeys(key[2] for key in here if key[:3] not in known))


def comparison_table(comparison: Comparison, width: int) -> RenderableType:
    columns = (
        Column("workload", is_number=False),
        Column("figure", is_number=False),
        *(Column(heading) for heading in ("before", "now")),
        Column("factor", rank=1),
        Column("verdict", is_number=False),
    )
    caption = "moved: the medians are further apart than the middle three fifths of either run"
    rows = (
        (
            each.workload,
            each.figure,
            digits(each.before.p50),
            digits(each.now.p50),
            f"{each.factor:.3f}",
            _coloured(each),
        )
        for each in comparison.changes
    )
    return fitting_table(columns, rows, width, caption=caption)


def _coloured(change: Change) -> Text:
    if not change.has_moved:
        return Text(change.verdict)
    return Text(change.verdict, style="green" if change.factor < 1 else "red")
