"""`mlakit bench cpu --busy N`: the CPU path on an idle machine and next to N busy processes.

Step      `mla_step` with the sizes of `mlakit demo`: a layer's step without its projections
Decode    `mla_decode` over 4 x 4096 cached tokens
Prefill   `mla_prefill` of 1024 tokens
Rounds    each round measures once next to the busy processes and once while they are stopped, in
          random order. A measurement repeats the call for half a second and takes the mean.
Target    0.33x of the quiet run: at most 3 times its time

A busy process runs an endless loop. It may use the same CPUs as the call: with `taskset -c 0,1` one
busy process competes for two CPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter, sleep

from rich.console import Console

from mlakit.tools.bench import cpu, gpu, steps, suite
from mlakit.tools.bench.measure import Call
from mlakit.tools.bench.report import MLAKIT, Report
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload

MIN_SPEEDUP = 1 / 3  # quiet time / busy time
MEASURED_S = 0.5
SETTLE_S = 0.05  # after processes are stopped or resumed
QUIET = "quiet"
# ends when the process that started it is gone
BUSY_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


class BusyProcesses:
    """Processes that use all available CPU time unless they are stopped."""

    def __init__(self, count: int) -> None:
        self._processes = [
            subprocess.Popen([sys.executable, "-S", "-c", BUSY_LOOP]) for _ in range(count)
        ]
        self.stop()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def stop(self) -> None:
        """Suspend them: they use no CPU time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)
        sleep(SETTLE_S)


@contextmanager
def busy_processes(count: int) -> Iterator[BusyProcesses]:
    processes = BusyProcesses(count)
    try:
        yield processes
    finally:
        processes.end()


@dataclass(frozen=True)
class Step(steps.Step):
    """A layer's step on the CPU."""

    def build_case(self) -> BenchmarkCase:
        with gpu.on(gpu.CPU):
            return super().build_case()


@dataclass(frozen=True)
class Quiet:
    """A call that is measured while the busy processes are stopped."""

    call: Call

    def __call__(self) -> object:
        return self.call()


@dataclass(frozen=True)
class Beside(Workload):
    """A workload next to busy processes; the baseline is the same call without them."""

    workload: Workload

    target_baseline = QUIET
    max_rounds = 8
    min_speedup = MIN_SPEEDUP

    @property
    def op(self) -> str:  # type: ignore[override]
        return self.workload.op

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def flops(self) -> int:
        return self.workload.flops

    @property
    def bytes(self) -> int:
        return self.workload.bytes

    @property
    def small(self) -> Workload:
        return replace(self, workload=self.workload.small)

    def build_case(self) -> BenchmarkCase:
        case = self.workload.build_case()
        return BenchmarkCase(case.call, [Baseline(QUIET, Quiet(case.call))], case.check)


@dataclass(frozen=True)
class BusyTimer:
    """The mean seconds of a call that is repeated for `measured_s`, next to the processes."""

    processes: BusyProcesses
    measured_s: float = MEASURED_S

    warm_ups = 1
    calls = 1

    def prepared(self, call: Call) -> Call:
        return call

    def __call__(self, call: Call) -> float:
        if isinstance(call, Quiet):
            return self._mean_s(call)
        self.processes.resume()
        try:
            return self._mean_s(call)
        finally:
            self.processes.stop()

    def _mean_s(self, call: Call) -> float:
        done, start = 0, perf_counter()
        while True:
            call()
            done += 1
            if (elapsed := perf_counter() - start) >= self.measured_s:
                return elapsed / done


def run(
    workloads: Sequence[Workload],
    count: int,
    *,
    command: str,
    quick: bool = False,
    threads: int | None = None,
) -> Report | None:
    """Measure and print the table; None, after an error message, on a wrong result."""
    with busy_processes(count) as processes:
        report = suite.run(
            "cpu",
            [Beside(each) for each in workloads],
            command=command,
            quick=quick,
            threads=threads,
            timer=BusyTimer(processes, 0.0 if quick else MEASURED_S),
        )
    if report is not None:
        plural = "es" if count > 1 else ""
        Console().print(
            f"{MLAKIT}: next to {count} busy process{plural}; "
            f"{QUIET}: mlakit while they are stopped",
            highlight=False,
        )
    return report


WORKLOADS: tuple[Workload, ...] = (
    Step(Batch.of(2, 1, 301), format="fp8_block128"),
    Step(Batch.of(1, 100, 300), format="fp8_block128"),
    cpu.Decode(Batch.of(4, 1, 4096), 16),
    cpu.Decode(Batch.of(4, 1, 4096), 16, "fp8_block128"),
    cpu.Prefill(Batch.of(1, 1024, 1024), 16),
)
