"""The figures of a suite: one row per workload and implementation, as JSON and CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from mlakit.tools.bench.ceilings import Ceilings
from mlakit.tools.bench.json_fields import field, objects, record
from mlakit.tools.bench.measure import Spread

SCHEMA = 3
MLAKIT = "mlakit"
READ_SAME_BYTES, COPY_SAME_BYTES = "read same bytes", "copy same bytes"
EMPTY_KERNEL = "empty kernel"
# they compute nothing of the workload
HARDWARE_BASELINES = (READ_SAME_BYTES, COPY_SAME_BYTES, EMPTY_KERNEL)
# parts of a whole step, timed alone; prompts too long for all their logits are not timed apart
SELECT = "logits and top-k"
STAGES = (
    "projections",
    "absorb",
    "append",
    "indexer",
    "logits",
    "top-k",
    SELECT,
    "attend",
    "up-project",
    "output",
)
WALL = "wall"  # the mode of a suite without a GPU
QUANTILES = ("p20", "p50", "p80")


@dataclass(frozen=True)
class Row:
    """One implementation on one workload.

    us           microseconds of a call
    bytes        the least traffic of the call: each input read once, each result written once
    speedup      this implementation's time / mlakit's time, round by round; None for mlakit itself
    min_speedup  the target for `speedup`; only on the row of the baseline the target refers to
    met          whether the target is met; None without one
    roofline     the time at the measured ceilings / the time of the call; None without ceilings
    """

    workload: str
    op: str
    implementation: str
    rounds: int
    us: Spread
    flops: int
    bytes: int
    speedup: Spread | None
    min_speedup: float | None
    met: bool | None = None
    roofline: float | None = None

    @property
    def gflops(self) -> float:
        return self.flops / self.us.p50 / 1e3

    @property
    def gbytes_per_s(self) -> float:
        return self.bytes / self.us.p50 / 1e3


INTERRUPTED = "the run was interrupted"


@dataclass(frozen=True)
class LeftOut:
    """An implementation that was not timed on a workload, and why."""

    workload: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of an implementation: its weights, its cache, and the most that a step adds."""

    weights: int
    cache: int
    step: int

    @property
    def peak(self) -> int:
        return self.weights + self.cache + self.step


@dataclass(frozen=True)
class Memory:
    """The memory of one implementation on one workload."""

    workload: str
    implementation: str
    use: MemoryUse


@dataclass(frozen=True)
class Report:
    """mode  how times were taken: wall, or on a GPU cold, b2b, graph, host."""

    suite: str
    command: str
    environment: dict[str, object]
    rows: Sequence[Row]
    left_out: Sequence[LeftOut]
    mode: str = WALL
    ceilings: Ceilings | None = None
    memory: Sequence[Memory] = ()

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C or SIGTERM ended the run before its last workload."""
        return any(each.reason == INTERRUPTED for each in self.left_out)

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
            "memory": [
                {"workload": each.workload, "implementation": each.implementation}
                | asdict(each.use)
                for each in self.memory
            ],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Report:
        """Reads what `as_json` wrote. Raises ValueError."""
        if not isinstance(stored, Mapping) or "rows" not in stored:
            raise ValueError("is no report of mlakit bench")
        if stored.get("schema") != SCHEMA:
            raise ValueError(f"has schema {stored.get('schema')}, this version reads {SCHEMA}")
        ceilings = field(stored, "ceilings", "dict | None")
        return cls(
            suite=field(stored, "suite", "name"),
            command=field(stored, "command", "str"),
            environment=field(stored, "environment", "dict"),
            rows=[_row(*each) for each in objects(stored, "rows")],
            left_out=[record(LeftOut, *each) for each in objects(stored, "left_out")],
            mode=field(stored, "mode", "name"),
            ceilings=ceilings and record(Ceilings, ceilings, "ceilings"),
            memory=tuple(
                record(Memory, *each, use=record(MemoryUse, *each))
                for each in objects(stored, "memory")
            ),
        )


def flat(row: Row) -> dict[str, object]:
    return {
        "workload": row.workload,
        "op": row.op,
        "implementation": row.implementation,
        "rounds": row.rounds,
        **_quantiles(row.us, "{}_us"),
        "flops": row.flops,
        "bytes": row.bytes,
        "gflops": row.gflops,
        "gbytes_per_s": row.gbytes_per_s,
        "roofline": row.roofline,
        **_quantiles(row.speedup, "speedup_{}"),
        "min_speedup": row.min_speedup,
        "met": row.met,
    }


def _quantiles(spread: Spread | None, name: str) -> dict[str, float | None]:
    return {name.format(each): getattr(spread, each, None) for each in QUANTILES}


def _row(stored: object, path: str) -> Row:
    us = [field(stored, f"{each}_us", "float", path) for each in QUANTILES]
    speedup = [field(stored, f"speedup_{each}", "float | None", path) for each in QUANTILES]
    return record(
        Row,
        stored,
        path,
        us=Spread(*us),
        speedup=None if None in speedup else Spread(*speedup),
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
