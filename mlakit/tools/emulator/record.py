"""The record of emulated configurations, docs/data/emulated.json, which `make emulate-all` writes.

A record says which configurations ran with which seeds, what was wrong, and the kernels' sources,
by the hash that proofs of GPUs have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlakit.dispatch.proofs import hash_of_sources
from mlakit.tools.emulator.harness import Outcome


@dataclass(frozen=True)
class Record:
    """Runs of configurations, each with all seeds."""

    date: str
    triton: str
    sources: str  # a hash of the kernels' sources
    seeds: tuple[int, ...]
    configurations: tuple[str, ...]
    faults: tuple[str, ...]  # of runs that did not pass


def record_of(outcomes: Sequence[Outcome], sources: str) -> Record:
    """Return the record of runs; `sources` is the hash from before the first of them."""
    return Record(
        date=date.today().isoformat(),
        triton=version("triton"),
        sources=sources,
        seeds=tuple(dict.fromkeys(each.seed for each in outcomes)),
        configurations=tuple(dict.fromkeys(each.configuration for each in outcomes)),
        faults=tuple(str(each) for each in outcomes if not each.passed),
    )


def write(record: Record, path: Path) -> None:
    """Write a record in place of an older one."""
    path.write_text(json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n", "utf-8")


def read(path: Path) -> Record:
    """Read a record."""
    fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
    for name in ("seeds", "configurations", "faults"):
        fields[name] = tuple(fields[name])
    return Record(**fields)


def changed_since(record: Record, configurations: Sequence[str]) -> str:
    """Say what is newer than a record: the kernels, or some of the configurations."""
    new = [name for name in configurations if name not in record.configurations]
    changed = ["the kernels' sources"] if record.sources != hash_of_sources() else []
    changed += [f"{len(new)} configurations, such as {new[0]}"] if new else []
    said = f"Emulated: {len(record.configurations)} configurations with {len(record.seeds)} seeds"
    if not changed:
        return f"{said} on {record.date}, and nothing changed since"
    return f"{said} on {record.date}; changed since: {' and '.join(changed)}"
