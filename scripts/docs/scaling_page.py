"""Brings what follows from docs/data up to date, after new measurements:

mlakit/tools/planner/h200.json   the kernel times that `mlakit plan` interpolates
docs/scaling.md                  what its commands print

    python scripts/docs/scaling_page.py
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.planner.times import FILE

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "data"
PAGE = ROOT / "docs" / "scaling.md"
# a command in a block of its own, and what it prints in the block after it
SHOWN = re.compile(r"```sh\n(mlakit [^\n]*)\n```\n\n```text\n(.*?)```", flags=re.DOTALL)
COLUMNS = 100
NAME = re.compile(r"(?P<kind>[a-z0-9_-]+?)-b(?P<b>\d+)-h(?P<h>\d+)-(?P<n>\d+)(-top2048)?")

Row = tuple[str, int, int, int, float]


def rows(file: str, implementation: str = "mlakit") -> list[Row]:
    """(kind, requests, heads, tokens, us) of the workloads with one query per request."""
    found = []
    for row in json.loads((DATA / file).read_text(encoding="utf-8"))["rows"]:
        match = NAME.fullmatch(row["workload"])
        if match and row["implementation"] == implementation:
            sizes = (int(match[each]) for each in "bhn")
            found.append((match["kind"], *sizes, row["p50_us"]))
    return found


def lines(points: Iterable[tuple[int, int, float]]) -> dict[str, list[tuple[int, float]]]:
    """(key, x, us) as lines by key; the median of those with the same key and x."""
    grouped: dict[int, dict[int, list[float]]] = {}
    for key, x, us in points:
        grouped.setdefault(key, {}).setdefault(x, []).append(us)
    return {
        str(key): sorted((x, round(median(us), 2)) for x, us in line.items())
        for key, line in sorted(grouped.items())
    }


def measured() -> dict[str, Any]:
    """The figures of docs/data that h200.json has."""
    decode, step = rows("h200-decode.json"), "h200-sparse-step.json"
    bf16 = {(b, h, n): us for kind, b, h, n, us in decode if kind == "decode-bf16"}
    factors: dict[str, dict[int, list[float]]] = {}
    for kind, b, h, n, us in decode:
        if kind != "decode-bf16":
            by_heads = factors.setdefault(kind.removeprefix("decode-"), {})
            by_heads.setdefault(h, []).append(us / bf16[b, h, n])
    attend = {(h, b): us for _, b, h, _, us in rows(step, "attend")}
    attend |= {(h, b): us for _, b, h, _, us in rows("h200-sparse-decode.json") if h < 128}
    sparse = lines((h, b, us) for (h, b), us in attend.items())
    return {
        # rows of the grid with as many tokens differ by up to 20 %
        "dense": lines((h, b * n, us) for _, b, h, n, us in rows("h200-grid.json")),
        "factors": {
            name: sorted((h, round(median(found), 4)) for h, found in by_heads.items())
            for name, by_heads in factors.items()
        },
        "logits": lines((n, b, us) for _, b, _, n, us in rows(step, "logits")),
        "topk": lines((n, b, us) for _, b, _, n, us in rows(step, "top-k")),
        # with 32 and 64 heads there is one point each: 16 and 128 heads have several
        "attend": {heads: points for heads, points in sparse.items() if len(points) > 1},
    }


def printed(command: str) -> str:
    """Return what a command of mlakit prints on stdout and stderr."""
    runner = CliRunner(env={"COLUMNS": str(COLUMNS)})
    output = runner.invoke(cli.app, shlex.split(command)[1:]).output
    return "\n".join(line.rstrip() for line in output.splitlines()).strip("\n") + "\n"


def main() -> None:
    kinds = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in measured().items())
    FILE.write_text("{\n" + ",\n".join(kinds) + "\n}\n", "utf-8")
    text = PAGE.read_text(encoding="utf-8")
    filled = SHOWN.sub(
        lambda found: f"```sh\n{found[1]}\n```\n\n```text\n{printed(found[1])}```", text
    )
    PAGE.write_text(filled, "utf-8")


if __name__ == "__main__":
    main()
