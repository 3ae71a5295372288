"""The figures of a suite: one row per contender, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rich.box import SIMPLE
from rich.table import Table

from mlakit.bench.measure import Spread

SCHEMA = 1
OURS = "mlakit"


@dataclass(frozen=True)
class Row:
    """One contender on one workload.

    us       microseconds of a call
    bytes    that the call must move at least: each input read once, each result written once
    ratio    mlakit's time over this contender's, round by round; None for mlakit itself
    limit    what `ratio` shall not exceed; only for the fastest of the contenders it is said of
    """

    workload: str
    op: str
    contender: str
    rounds: int
    us: Spread
    flops: int
    bytes: int
    ratio: Spread | None
    limit: float | None

    @property
    def gflops(self) -> float:
        return self.flops / self.us.p50 / 1e3

    @property
    def gbytes_per_s(self) -> float:
        return self.bytes / self.us.p50 / 1e3


@dataclass(frozen=True)
class LeftOut:
    """A contender that was not timed on a workload, and why."""

    workload: str
    contender: str
    reason: str


@dataclass(frozen=True)
class Report:
    suite: str
    command: str
    environment: dict[str, object]
    rows: Sequence[Row]
    left_out: Sequence[LeftOut]

    def as_json(self) -> dict[str, object]:
        """Plain values; the keys of `rows` are the fields of `Row`, flat, and its rates."""
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "command": self.command,
            "environment": self.environment,
            "rows": [_flat(row) for row in self.rows],
            "left_out": [asdict(each) for each in self.left_out],
        }


def _flat(row: Row) -> dict[str, object]:
    ratio = row.ratio
    return {
        "workload": row.workload,
        "op": row.op,
        "contender": row.contender,
        "rounds": row.rounds,
        "p20_us": row.us.p20,
        "p50_us": row.us.p50,
        "p80_us": row.us.p80,
        "flops": row.flops,
        "bytes": row.bytes,
        "gflops": row.gflops,
        "gbytes_per_s": row.gbytes_per_s,
        "ratio_p20": None if ratio is None else ratio.p20,
        "ratio_p50": None if ratio is None else ratio.p50,
        "ratio_p80": None if ratio is None else ratio.p80,
        "limit": row.limit,
    }


def table(rows: Iterable[Row], unit: str = "ms") -> Table:
    """Times in `unit`, ms or us; a ratio below 1 says that mlakit is the faster one."""
    divisor = {"ms": 1e3, "us": 1.0}[unit]
    shown = Table(
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        caption=f"{unit}: median and the range of the middle three fifths of the rounds; "
        f"ratio: {OURS} / contender in the same round",
        caption_justify="left",
    )
    shown.add_column("workload", no_wrap=True)
    shown.add_column("contender", no_wrap=True)
    for heading in (
        unit,
        "from",
        "to",
        "GFLOP/s",
        "GB/s",
        "rounds",
        "ratio",
        "from",
        "to",
        "limit",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        if previous and row.workload != previous:
            shown.add_section()
        name = "" if row.workload == previous else row.workload
        times = (_digits(us / divisor) for us in (row.us.p50, row.us.p20, row.us.p80))
        ratio = row.ratio
        ratios = (
            ("", "", "")
            if ratio is None
            else tuple(map(_digits, (ratio.p50, ratio.p20, ratio.p80)))
        )
        facts = (_digits(row.gflops), _digits(row.gbytes_per_s), str(row.rounds))
        shown.add_row(name, row.contender, *times, *facts, *ratios, _verdict(row))
        previous = row.workload
    return shown


def _verdict(row: Row) -> str:
    if row.limit is None or row.ratio is None:
        return ""
    return f"{'≤' if row.ratio.p50 <= row.limit else 'over'} {row.limit}"


def _digits(value: float) -> str:
    """Three significant digits, never in exponents."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
