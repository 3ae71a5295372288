"""Brings what follows from docs/data up to date, after new measurements:

mlakit/tools/planner/h200.json   the kernel times that `mlakit plan-cluster` interpolates
docs/scaling.md            its tables, by the commands above them
docs/img/plots/            the chart of the page

    python scripts/docs/scaling_page.py
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.planner.kernel_times import FILE, SOURCES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "scaling.md"
# a command in a block of its own, and what it prints in the block after it
SHOWN = re.compile(r"```sh\n(mlakit [^\n]*)\n```\n\n```text\n(.*?)```", flags=re.DOTALL)
PLOT = re.compile(r"^(mlakit (?:[^\n]|\\\n)*--plot (\S+\.svg))$", flags=re.MULTILINE)
COLUMNS = 100


def measured(folder: Path) -> dict[str, Any]:
    """The figures of docs/data that h200.json has."""
    found: dict[str, Any] = {}
    for name, wanted in SOURCES.items():
        report = json.loads((folder / name).read_text(encoding="utf-8"))
        found[name] = {
            "commit": report["environment"]["commit"],
            "ceilings": {key: round(value, 1) for key, value in report["ceilings"].items()},
            "us": {
                f"{row['workload']} {row['implementation']}": round(row["p50_us"], 2)
                for row in report["rows"]
                if row["implementation"] in wanted
            },
        }
    return found


def run(command: str) -> str:
    """What a command of mlakit prints on stdout and stderr."""
    return CliRunner(env={"COLUMNS": str(COLUMNS)}).invoke(cli.app, shlex.split(command)[1:]).output


def printed(command: str) -> str:
    """The same for a page: long serve lines are continued."""
    lines = [_continued(line.rstrip()) for line in run(command).splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def _continued(line: str) -> str:
    if not line.startswith("vllm serve"):
        return line
    options = re.sub(r" (?=--)", "\n", line).splitlines()
    rows = [options[0]]
    for each in options[1:]:
        if len(rows[-1]) + len(each) > COLUMNS - 3:
            rows.append("   ")
        rows[-1] += f" {each}"
    return " \\\n".join(rows)


def filled(text: str) -> str:
    """A page with the output of its commands."""
    return SHOWN.sub(
        lambda match: f"```sh\n{match[1]}\n```\n\n```text\n{printed(match[1])}```", text
    )


def plots(text: str) -> dict[str, str]:
    """The commands of a page that write a chart, by its file."""
    return {match[2]: match[1].replace("\\\n", "") for match in PLOT.finditer(text)}


def main() -> None:
    FILE.write_text(json.dumps(measured(ROOT / "docs" / "data"), indent=1) + "\n", "utf-8")
    text = filled(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, "utf-8")
    for file, command in plots(text).items():
        run(command.replace(file, str(ROOT / file)))


if __name__ == "__main__":
    main()
