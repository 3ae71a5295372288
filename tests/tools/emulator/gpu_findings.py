"""What the GPU tests of the emulator found, in .gpu-record/emulator.json; prints it as tables.

    python -m tests.tools.emulator.gpu_findings

A line of a table has the name of a test's case; a later run with the same Triton replaces it.
"""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.paths import ROOT

FILE = ROOT / ".gpu-record" / "emulator.json"


def add(table: str, name: str, **values: Any) -> None:
    """Put a line into a table of the file, which tests of several processes write."""
    import triton

    FILE.parent.mkdir(exist_ok=True)
    line = {"triton": triton.__version__, "gpu": torch.cuda.get_device_name(), **values}
    with FILE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        found.setdefault(table, {})[f"{name}, Triton {line['triton']}"] = line
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def tables(file: Path) -> str:
    """Return the tables of a file in Markdown."""
    text = []
    for title, lines in json.loads(file.read_text(encoding="utf-8")).items():
        columns = list(dict.fromkeys(column for line in lines.values() for column in line))
        rows = [["case", *columns], ["---"] * (len(columns) + 1)]
        rows += [
            [name, *(_cell(line.get(column, "")) for column in columns)]
            for name, line in lines.items()
        ]
        text += [title, "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(text)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(_cell, value)) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.stdout.write(tables(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE))
