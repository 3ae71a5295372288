"""Compares the decode times of several checkouts of mlakit, interleaved on one GPU.

    git worktree add /tmp/before HEAD~1
    python scripts/compare_checkouts.py before=/tmp/before after=. --decode 128q1s4k,128 4q1s32k,128

A decode is a shape of `mlakit bench --shape`, the number of heads, and optionally in any order: the
cache format, `e4m3` for FP8 queries, `page1` for a page size of 1. Environment variables of a
checkout's process may follow it: `NAME=FOLDER,VARIABLE=VALUE`. Each checkout runs in its own
process, which compares every result with the oracle before it times one call between two events,
with a cold L2 and a plan made before. The table shows the median in microseconds and the speedup
over the first checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

CALLS = 3  # per measurement; the first one warms the caches and does not count
READY = "ready"
CONSOLE = Console()


@dataclass(frozen=True)
class Checkout:
    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, text: str, decodes: Sequence[str]) -> Checkout:
        """`text` is NAME=FOLDER or NAME=FOLDER,VARIABLE=VALUE,…"""
        name, _, rest = text.partition("=")
        folder, *settings = rest.split(",")
        if not (Path(folder) / "mlakit").is_dir():
            sys.exit(f"{text!r} must be NAME=FOLDER with a checkout of mlakit in the folder")
        own = dict(setting.split("=", 1) for setting in settings)
        command = [sys.executable, __file__, "--serve", "--decode", *decodes]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(Path(folder).resolve()), **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return cls(name, process)

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            sys.exit(f"{self.name} ended early; its output is above")
        return line

    def measure(self, decode: int) -> list[float]:
        """Microseconds of the calls that count."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{decode}\n")
        self.process.stdin.flush()
        return [float(us) for us in self.answer().split()[1:]]


def serve(decodes: Sequence[str]) -> None:
    """In a checkout's own process: time the decode whose index is read from stdin, until EOF."""
    from mlakit.bench.gpu_timers import ColdGpu

    timer = ColdGpu()
    calls = [_call(decode) for decode in decodes]
    for call in calls:
        for _ in range(timer.warm_ups):
            timer(call)
    print(READY, flush=True)  # noqa: T201  # the parent process reads it
    for line in sys.stdin:
        times = [timer(calls[int(line)]) * 1e6 for _ in range(CALLS)]
        print(*times, flush=True)  # noqa: T201


def _call(decode: str) -> Callable[[], object]:
    """The call of a decode, compared with the oracle."""
    import torch

    from mlakit.bench.decode import Decode
    from mlakit.bench.shapes import Batch

    shape, heads, *rest = decode.split(",")
    given: dict[str, Any] = {}
    for each in rest:
        if each == "e4m3":
            given["dtype"] = torch.float8_e4m3fn
        elif each.startswith("page"):
            given["page_size"] = int(each.removeprefix("page"))
        else:
            given["format"] = each
    workload: Any = Decode(Batch.parse(shape), int(heads), **given)
    if not hasattr(workload, "build_case"):  # a checkout from before these names
        case = workload.contest()
        case.gate()
        return case.ours  # type: ignore[no-any-return]
    case = workload.build_case()
    case.check()
    return case.call  # type: ignore[no-any-return]


def compare(checkouts: Sequence[Checkout], decodes: Sequence[str], rounds: int) -> Table:
    table = Table("decode")
    for checkout in checkouts:
        table.add_column(f"{checkout.name}, us", justify="right")
    for number, decode in enumerate(decodes):
        times: dict[str, list[float]] = {checkout.name: [] for checkout in checkouts}
        for i in track(range(rounds), description=decode, console=CONSOLE, transient=True):
            # the order alternates between rounds
            for checkout in checkouts[:: 1 if i % 2 else -1]:
                times[checkout.name] += checkout.measure(number)
        medians = [median(each) for each in times.values()]
        table.add_row(decode, *(f"{each:.1f} ({medians[0] / each:.3f}x)" for each in medians))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--decode", nargs="+", required=True, metavar="SHAPE,HEADS")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.decode)
        return
    if not asked.checkouts:
        parser.error("name at least one checkout")
    checkouts = [Checkout.start(text, asked.decode) for text in asked.checkouts]
    try:
        for checkout in checkouts:
            checkout.answer()  # READY
        CONSOLE.print(compare(checkouts, asked.decode, asked.rounds))
    finally:
        for checkout in checkouts:
            checkout.process.kill()


if __name__ == "__main__":
    main()
