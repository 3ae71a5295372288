"""The figures of a suite: one row per contender, as JSON and CSV. Runs and prints nothing."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from mlakit.bench.ceilings import Ceilings
from mlakit.bench.measure import Spread

SCHEMA = 2
OURS = "mlakit"
READING, COPYING, NOTHING = "reading its bytes", "copying its bytes", "empty kernel"
YARDSTICKS = (READING, COPYING, NOTHING)  # they compute nothing of the workload
WALL = "wall"  # the mode of a suite without a GPU


@dataclass(frozen=True)
class Row:
    """One contender on one workload.

    us        microseconds of a call
    bytes     that the call must move at least: each input read once, each result written once
    ratio     mlakit's time over this contender's, round by round; None for mlakit itself
    limit     what `ratio` shall not exceed; only for the contender it is said of
    met       is the limit kept? None without one
    roofline  the least time by the measured ceilings over the time taken; None without ceilings
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
    met: bool | None = None
    roofline: float | None = None

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
    """mode  how times were taken: wall, or of a GPU cold, b2b, graph, host."""

    suite: str
    command: str
    environment: dict[str, object]
    rows: Sequence[Row]
    left_out: Sequence[LeftOut]
    mode: str = WALL
    ceilings: Ceilings | None = None

    def as_json(self) -> dict[str, object]:
        """Plain values; the keys of `rows` are the fields of `Row`, flat, and its rates."""
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "command": self.command,
            "mode": self.mode,
            "environment": self.environment,
            "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "rows": [flat(row) for row in self.rows],
            "left_out": [asdict(each) for each in self.left_out],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Report:
        """What `as_json` made, of this schema or the one before. Raises ValueError otherwise."""
        if not isinstance(stored, Mapping) or "rows" not in stored:
            raise ValueError("is no report of mlakit bench")
        if stored.get("schema") not in (1, SCHEMA):
            raise ValueError(
                f"has schema {stored.get('schema')}, this version reads 1 and {SCHEMA}"
            )
        ceilings = stored.get("ceilings")
        return cls(
            suite=stored["suite"],
            command=stored["command"],
            environment=dict(stored["environment"]),
            rows=[_row(each) for each in stored["rows"]],
            left_out=[LeftOut(**each) for each in stored["left_out"]],
            mode=stored.get("mode", WALL if stored["suite"] == "cpu" else "cold"),
            ceilings=None if ceilings is None else Ceilings(**ceilings),
        )


def flat(row: Row) -> dict[str, object]:
    return {
        "workload": row.workload,
        "op": row.op,
        "contender": row.contender,
        "rounds": row.rounds,
        **_quantiles(row.us, "p20_us", "p50_us", "p80_us"),
        "flops": row.flops,
        "bytes": row.bytes,
        "gflops": row.gflops,
        "gbytes_per_s": row.gbytes_per_s,
        "roofline": row.roofline,
        **_quantiles(row.ratio, "ratio_p20", "ratio_p50", "ratio_p80"),
        "limit": row.limit,
        "met": row.met,
    }


def _quantiles(spread: Spread | None, *names: str) -> dict[str, float | None]:
    values = (None,) * 3 if spread is None else (spread.p20, spread.p50, spread.p80)
    return dict(zip(names, values, strict=True))


def _row(stored: Mapping[str, Any]) -> Row:
    ratio = [stored[f"ratio_{p}"] for p in ("p20", "p50", "p80")]
    limit, met = stored["limit"], stored.get("met")
    if met is None and limit is not None and ratio[1] is not None:
        met = ratio[1] <= limit  # the first schema left it to the reader
    return Row(
        workload=stored["workload"],
        op=stored["op"],
        contender=stored["contender"],
        rounds=stored["rounds"],
        us=Spread(*(stored[f"{p}_us"] for p in ("p20", "p50", "p80"))),
        flops=stored["flops"],
        bytes=stored["bytes"],
        ratio=None if None in ratio else Spread(*ratio),
        limit=limit,
        met=met,
        roofline=stored.get("roofline"),
    )


def as_csv(reports: Iterable[Report]) -> str:
    """A line per row, under the keys of the JSON, with suite and mode first."""
    lines = [
        {"suite": report.suite, "mode": report.mode, **flat(row)}
        for report in reports
        for row in report.rows
    ]
    text = StringIO()
    if lines:
        writer = csv.DictWriter(text, lines[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return text.getvalue()
