"""`mlakit bench cpu --busy N`: the CPU path on an idle machine and next to N busy processes.

Step      `decode_branch` and `prefill_branch` with the sizes of `mlakit demo`: a layer's step
          without its projections
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
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter, sleep

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, request_slots
from mlakit.formats import Format, row_codec
from mlakit.model.rope import rope_table
from mlakit.reference.steps import StepQuery
from mlakit.steps import CachedBatch, LayerWeights, decode_branch, prefill_branch
from mlakit.steps.weights import UpProjection
from mlakit.tools.bench import cpu, environment
from mlakit.tools.bench.measure import Call, Spread, paired_speedup
from mlakit.tools.bench.progress import suite_progress
from mlakit.tools.bench.report import MLAKIT, Report, Row
from mlakit.tools.bench.step_checks import assert_output_correct
from mlakit.tools.bench.suite import (
    BenchmarkCase,
    Workload,
    chosen,
    print_wrong_result,
    torch_threads,
)
from mlakit.tools.bench.tables import table
from mlakit.tools.columns import wide_console
from mlakit.tools.testing import shuffled_pages

MIN_SPEEDUP = 1 / 3  # quiet time / busy time
ROUNDS = 8
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
D_C, D_N, D_V = cpu.MODEL.kv_lora_rank, cpu.D_N, cpu.D_V


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
class Step(Workload):
    """One layer's step: `batch` requests with `new` tokens each after `cached` tokens."""

    branch: str  # "decode" or "prefill"
    batch: int
    new: int
    cached: int
    heads: int = cpu.MODEL.num_heads
    format: Format = "fp8_block128"
    page_size: int = 64

    op = "step"

    @property
    def name(self) -> str:
        lengths = f"b{self.batch}-h{self.heads}-{self.new}-on-{self.cached}"
        return f"step-{self.branch}-{self.format}-{lengths}"

    @property
    def flops(self) -> int:
        keys = self.cached + self.new
        seen = self.new * keys - self.new * (self.new - 1) // 2
        if self.branch == "decode":
            each = self.new * D_C * (D_N + D_V) + seen * (cpu.ROW.width + D_C)
        else:
            each = keys * D_C * (D_N + D_V) + seen * (D_N + cpu.D_R + D_V)
        return 2 * self.batch * self.heads * each

    @property
    def bytes(self) -> int:
        tokens = self.batch * self.new
        rows = self.batch * (self.cached + self.new)
        per_token = self.heads * (D_N + cpu.D_R + D_V) + cpu.ROW.width
        weights = self.heads * (D_N + D_V) * D_C
        stored = rows * row_codec(self.format, cpu.ROW).bytes_per_token
        return stored + 2 * (weights + tokens * per_token)

    @property
    def min_speedup(self) -> float | None:
        return MIN_SPEEDUP

    @property
    def small(self) -> Step:
        return replace(self, heads=2, new=min(self.new, 20), cached=min(self.cached, 30))

    def build_case(self) -> BenchmarkCase:
        generator = torch.Generator().manual_seed(cpu.SEED)
        total = self.cached + self.new
        pages = -(-total // self.page_size)
        page_table = shuffled_pages(self.batch, pages, self.batch * pages, generator)
        cache = PagedLatentCache.allocate(
            cpu.ROW, self.format, num_pages=self.batch * pages, page_size=self.page_size
        )
        layer = cache.layer(0)
        for request in range(self.batch):
            slots = request_slots(page_table, self.page_size, request, 0, self.cached)
            layer.write(slots, torch.randn(self.cached, cpu.ROW.width, generator=generator))
        starts = torch.arange(0, self.batch * self.new + 1, self.new, dtype=torch.int32)
        kv_lens = torch.full((self.batch,), total, dtype=torch.int32)
        batch = CachedBatch(cache, page_table, kv_lens, starts)
        weights = self._weights(generator, total)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        q = normal(self.batch * self.new, self.heads, D_N + cpu.D_R)
        kv = normal(self.batch * self.new, cpu.ROW.width)

        def call() -> Tensor:
            if self.branch == "decode":
                return decode_branch(q, kv, weights, batch)
            return prefill_branch(q.clone(), kv, weights, batch)  # the branch rotates q in place

        def check() -> None:
            out = call()
            for request in range(self.batch):
                token = (request + 1) * self.new - 1
                slots = request_slots(page_table, self.page_size, request, 0, total)
                rows = layer.read(slots, torch.float64)
                query = StepQuery(q[token], kv[token], total - 1, rows, self.cached)
                is_decode = self.branch == "decode"
                assert_output_correct(out, token, query, weights, is_decode=is_decode)

        return BenchmarkCase(call, [], check)

    def _weights(self, generator: torch.Generator, positions: int) -> LayerWeights:
        matrix = torch.randn(self.heads * (D_N + D_V), D_C, generator=generator) / D_C**0.5
        geometry = replace(cpu.MODEL, num_heads=self.heads)
        return LayerWeights(
            up=UpProjection.from_checkpoint(matrix.to(torch.bfloat16), geometry),
            gamma=torch.randn(D_C, generator=generator).to(torch.bfloat16),
            freqs=rope_table(cpu.MODEL, positions),
            softmax_scale=cpu.SCALE,
        )


def seconds_of(call: Call, measured_s: float) -> float:
    """Mean seconds of a call that is repeated for `measured_s`."""
    calls, start = 0, perf_counter()
    while True:
        call()
        calls += 1
        if (elapsed := perf_counter() - start) >= measured_s:
            return elapsed / calls


def run(
    workloads: Sequence[Workload],
    count: int,
    *,
    command: str,
    quick: bool = False,
    threads: int | None = None,
) -> Report | None:
    """Measure and print the table; None, after an error message, on a wrong result."""
    console = wide_console()
    workloads = chosen(workloads, quick=quick)
    rounds, measured_s = (2, 0.0) if quick else (ROUNDS, MEASURED_S)
    rows: list[Row] = []
    with torch_threads(threads):
        facts = environment.describe()
        console.print(environment.summary(facts), highlight=False)
        with busy_processes(count) as processes, suite_progress("cpu", len(workloads)) as progress:
            for workload in workloads:
                case = workload.build_case()
                try:
                    case.check()
                except AssertionError as wrong:
                    print_wrong_result(console, workload, wrong)
                    return None
                progress.begin_workload(workload.name)
                seconds = _time_interleaved(
                    case.call, processes, rounds, measured_s, progress.finish_round
                )
                rows += _rows(workload, seconds, min_speedup=None if quick else MIN_SPEEDUP)
                progress.finish_workload()
    console.print(table(rows, "ms", console.width))
    plural = "es" if count > 1 else ""
    console.print(
        f"{MLAKIT}: next to {count} busy process{plural}; {QUIET}: mlakit while they are stopped",
        highlight=False,
    )
    return Report("cpu", command, facts, rows, [])


def _time_interleaved(
    call: Call,
    processes: BusyProcesses,
    rounds: int,
    measured_s: float,
    after_round: Callable[[int, int], None],
) -> dict[str, list[float]]:
    """Seconds of a call next to the busy processes and without them, round by round."""
    order = random.Random(0)
    seconds: dict[str, list[float]] = {MLAKIT: [], QUIET: []}
    call()  # to warm up
    for done in range(1, rounds + 1):
        for name in order.sample([MLAKIT, QUIET], 2):
            if name == MLAKIT:
                processes.resume()
            seconds[name].append(seconds_of(call, measured_s))
            if name == MLAKIT:
                processes.stop()
        after_round(done, rounds)
    return seconds


def _rows(
    workload: Workload, seconds: Mapping[str, Sequence[float]], min_speedup: float | None
) -> Iterator[Row]:
    """Next to the busy processes, then without them."""
    speedup = paired_speedup(seconds[MLAKIT], seconds[QUIET])
    for name, sample in seconds.items():
        is_baseline = name == QUIET
        target = min_speedup if is_baseline else None
        yield Row(
            workload=workload.name,
            op=workload.op,
            implementation=name,
            rounds=len(sample),
            us=Spread.of([1e6 * each for each in sample]),
            flops=workload.flops,
            bytes=workload.bytes,
            speedup=speedup if is_baseline else None,
            min_speedup=target,
            met=None if target is None else speedup.p50 >= target,
        )


WORKLOADS: tuple[Workload, ...] = (
    Step("decode", batch=2, new=1, cached=300),
    Step("prefill", batch=1, new=100, cached=200),
    cpu.Decode("bf16", "bf16"),
    cpu.Decode("bf16", "fp8_block128"),
    cpu.Prefill("bf16", 1, 1024),
)
