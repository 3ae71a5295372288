"""Reads which names and signatures that the plugins need a release of an engine has.

    pip download --no-deps vllm==0.33.0
    python scripts/check_seams.py vllm-0.33.0-*.whl sglang-0.5.23-*.whl

A wheel is read and not installed. `--json FILE` writes what each release lacks, and keeps what the
file says of other releases. The exit status is 1 if a release in the range that a plugin serves
lacks anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mlakit.integrations.releases import Releases
from mlakit.integrations.seams import Source, missing, version_of
from mlakit.integrations.sglang.seams import RELEASES as SGLANG
from mlakit.integrations.vllm.seams import RELEASES as VLLM

ENGINES = {each.distribution: each for each in (VLLM, SGLANG)}


def read(wheel: Path) -> tuple[Releases, str, list[str]]:
    """Return the engine of a wheel, its release, and what it lacks."""
    name, version, *_ = wheel.name.split("-")
    releases = ENGINES[name]
    return releases, version, missing(releases.seams, Source.of_wheel(wheel), version_of(version))


def is_served(releases: Releases, version: str) -> bool:
    ends = version_of(releases.first), version_of(releases.last)
    return ends[0] <= version_of(version) <= ends[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    found: dict[str, dict[str, list[str]]] = {}
    if given.json is not None and given.json.exists():
        found = json.loads(given.json.read_text(encoding="utf-8"))
    table = Table("engine", "release", "names", "lacks")
    is_broken = False
    for wheel in given.wheels:
        releases, version, lacks = read(wheel)
        found.setdefault(releases.engine, {})[version] = lacks
        needed = sum(each.is_in(version_of(version)) for each in releases.seams.values())
        table.add_row(releases.engine, version, str(needed), ", ".join(lacks) or "nothing")
        is_broken |= bool(lacks) and is_served(releases, version)
    Console().print(table)
    if given.json is not None:
        ordered = {
            engine: dict(sorted(own.items(), key=lambda each: version_of(each[0])))
            for engine, own in sorted(found.items())
        }
        given.json.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    sys.exit(is_broken)


if __name__ == "__main__":
    main()
