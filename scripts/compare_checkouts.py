"""Compares the times of ops in several checkouts of mlakit, interleaved on one GPU.

    git worktree add /tmp/before HEAD~1
    python scripts/compare_checkouts.py before=/tmp/before after=. --decode 128q1s4k,128 4q1s32k,128
    python scripts/compare_checkouts.py before=/tmp/before after=. --prefill 2q8ks8k,128 \\
        --sparse 128q1s32k,128 1q4ks32k,128,bf16 --indexer 64q1s8k,64

A workload is a shape of `mlakit bench --shape`, the number of heads, and optionally in any order:

    decode   the cache format, `e4m3` for FP8 queries, `page1` for a page size of 1
    prefill  `full`: without the causal mask; prompts have no context, so q_len is kv_len
    sparse   the cache format, `page1` for a page size of 1, `top512` for lists of 512 rows
    indexer  none; the heads are index heads

Environment variables of a checkout's process may follow it: `NAME=FOLDER,VARIABLE=VALUE`. Each
checkout runs in its own process and finds its own modules, wherever its version of mlakit has them.
The process compares every result with the oracle before it times one call between two events, with
a cold L2 and a plan made before. The table shows the median in microseconds and the speedup over
the first checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

# the suites of `mlakit bench`, by the option that names their workloads
SUITES = {
    "decode": "decode",
    "prefill": "prefill",
    "sparse": "sparse_decode",
    "indexer": "indexer",
}
FOLDERS = ("mlakit.tools.bench", "mlakit.bench")  # of the suites, the newest first
CALLS = 3  # per measurement; the first one warms the caches and does not count
READY = "ready"
CONSOLE = Console()


@dataclass(frozen=True)
class Request:
    """A workload as it is given: the option and its text."""

    op: str  # one of SUITES
    text: str

    def __str__(self) -> str:
        return f"{self.op} {self.text}"

    @classmethod
    def parse(cls, text: str) -> Request:
        """Return the request that `str` of it gives."""
        return cls(*text.split(" ", 1))


@dataclass(frozen=True)
class Checkout:
    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, text: str, requests: Sequence[Request]) -> Checkout:
        """Start the process of NAME=FOLDER or NAME=FOLDER,VARIABLE=VALUE,…"""
        name, _, rest = text.partition("=")
        folder, *settings = rest.split(",")
        if not (Path(folder) / "mlakit").is_dir():
            sys.exit(f"{text!r} must be NAME=FOLDER with a checkout of mlakit in the folder")
        own = dict(setting.split("=", 1) for setting in settings)
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *map(str, requests)],
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

    def measure(self, number: int) -> list[float]:
        """Return the microseconds of the calls that count, of a request by its number."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return [float(us) for us in self.answer().split()[1:]]


def serve(requests: Sequence[Request]) -> None:
    """Time the request whose number is read from stdin, until EOF, in a checkout's own process."""
    timer = _bench("gpu_timers").ColdGpu()
    calls = [_call(request) for request in requests]
    for call in calls:
        for _ in range(timer.warm_ups):
            timer(call)
    print(READY, flush=True)  # noqa: T201  # the parent process reads it
    for line in sys.stdin:
        times = [timer(calls[int(line)]) * 1e6 for _ in range(CALLS)]
        print(*times, flush=True)  # noqa: T201


def _bench(module: str) -> ModuleType:
    """Import a module of this checkout's benchmarks."""
    for folder in FOLDERS:
        try:
            found = find_spec(folder)
        except ModuleNotFoundError:  # its parent is not there
            continue
        if found is not None:
            return import_module(f"{folder}.{module}")
    sys.exit(f"the checkout has no {' and no '.join(FOLDERS)}")


def _call(request: Request) -> Callable[[], object]:
    """Return the call of a request, whose result is compared with the oracle."""
    import torch

    shape, heads, *rest = request.text.split(",")
    given: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for each in rest:
        if each == "e4m3":
            changes["dtype"] = torch.float8_e4m3fn
        elif each == "full":
            given["causal"] = False
        elif each.startswith("page"):
            given["page_size"] = int(each.removeprefix("page"))
        elif each.startswith("top"):
            given["topk"] = int(each.removeprefix("top"))
        else:
            given["format"] = each
    shaped = _bench("shapes").Shape(shape, heads=int(heads), **given)
    workload = _bench(SUITES[request.op]).of_shape(shaped)[0]
    case = replace(workload, **changes).build_case()
    case.check()
    return case.call  # type: ignore[no-any-return]


def compare(checkouts: Sequence[Checkout], requests: Sequence[Request], rounds: int) -> Table:
    table = Table("workload")
    for checkout in checkouts:
        table.add_column(f"{checkout.name}, us", justify="right")
    for number, request in enumerate(requests):
        times: dict[str, list[float]] = {checkout.name: [] for checkout in checkouts}
        for i in track(range(rounds), description=str(request), console=CONSOLE, transient=True):
            # the order alternates between rounds
            for checkout in checkouts[:: 1 if i % 2 else -1]:
                times[checkout.name] += checkout.measure(number)
        medians = [median(each) for each in times.values()]
        cells = (f"{each:.1f} ({medians[0] / each:.3f}x)" for each in medians)
        table.add_row(str(request), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", metavar="NAME=FOLDER")
    for op in SUITES:
        parser.add_argument(f"--{op}", nargs="+", default=[], metavar="SHAPE,HEADS")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve", nargs="+", default=[], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve([Request.parse(each) for each in asked.serve])
        return
    if not asked.checkouts:
        parser.error("name at least one checkout")
    requests = [Request(op, text) for op in SUITES for text in getattr(asked, op)]
    if not requests:
        parser.error(f"name at least one workload: {', '.join(f'--{op}' for op in SUITES)}")
    checkouts = [Checkout.start(text, requests) for text in asked.checkouts]
    try:
        for checkout in checkouts:
            checkout.answer()  # READY
        CONSOLE.print(compare(checkouts, requests, asked.rounds))
    finally:
        for checkout in checkouts:
            checkout.process.kill()


if __name__ == "__main__":
    main()
