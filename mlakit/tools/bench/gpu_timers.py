"""Timers for the GPU: cold L2, back to back, CUDA graph; and the host time of a call.

GPU times exclude the host: the GPU sleeps until everything is launched, so the time between two
events is GPU work only.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from mlakit.tools.bench.measure import Call, Timer

CYCLES_PER_S = 2e9  # an upper bound: at a lower clock the sleep is longer
SLEEP_S = 1e-3  # enough for the host to launch about ten kernels
MAX_SLEEP_S = 20e-3
MODES = ("cold", "b2b", "graph")
HOST = "host"


def timer_for(mode: str) -> Timer:
    """`mode` is one of `MODES`, or `HOST`."""
    kinds: dict[str, Callable[[], Timer]] = {
        "cold": ColdGpu,
        "b2b": BackToBack,
        "graph": ColdGraph,
        HOST: HostTime,
    }
    return kinds[mode]()


def captured(call: Call) -> Call:
    """The replay of a CUDA graph of `call`. Raises RuntimeError if it cannot be captured."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):  # compiles, plans and allocates before the capture
        for _ in range(3):
            call()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class ColdGpu:
    """One call after a flush of L2.

    The flush reads more memory than L2 holds. It only reads, so no dirty lines are written back
    during the call.
    """

    warm_ups = 10
    calls = 1
    FLUSHED_BYTES = 256 << 20

    def __init__(self) -> None:
        self.evicting = torch.ones(self.FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")
        self.sum = torch.zeros((), dtype=torch.int64, device="cuda")

    def prepared(self, call: Call) -> Call:
        return call

    def __call__(self, call: Call) -> float:
        seconds, host_s = self._once(call, SLEEP_S)
        if host_s > SLEEP_S:  # the GPU waited for the host, as in a step with many kernels
            seconds, _ = self._once(call, min(2 * host_s, MAX_SLEEP_S))
        return seconds

    def _once(self, call: Call, sleep_s: float) -> tuple[float, float]:
        """(seconds on the GPU, seconds the host took to launch)."""
        torch.sum(self.evicting, dim=0, dtype=torch.int64, out=self.sum)
        return _between_events(call, 1, sleep_s)


class ColdGraph(ColdGpu):
    """A CUDA graph replay of the call, with a cold L2."""

    def prepared(self, call: Call) -> Call:
        return captured(call)


class BackToBack:
    """Many calls in a row: L2 holds the data of the previous call."""

    warm_ups = 2
    calls = 20

    def prepared(self, call: Call) -> Call:
        return call

    def __call__(self, call: Call) -> float:
        seconds, host_s = _between_events(call, self.calls, self.calls * SLEEP_S / 10)
        if host_s > self.calls * SLEEP_S / 10:
            seconds, _ = _between_events(call, self.calls, min(2 * host_s, 5 * MAX_SLEEP_S))
        return seconds / self.calls


class HostTime:
    """Host time of an asynchronous call.

    The first calls run before the clock starts: the other implementations have evicted their code
    and data from the CPU caches.
    """

    warm_ups = 2
    COUNTED, BEFORE = 20, 3
    calls = COUNTED + BEFORE

    def prepared(self, call: Call) -> Call:
        return call

    def __call__(self, call: Call) -> float:
        torch.cuda.synchronize()
        for _ in range(self.BEFORE):
            call()
        start = perf_counter()
        for _ in range(self.COUNTED):
            call()
        seconds = perf_counter() - start
        torch.cuda.synchronize()
        return seconds / self.COUNTED


def _between_events(call: Call, calls: int, sleep_s: float) -> tuple[float, float]:
    """(seconds on the GPU, seconds the host took to launch) of `calls` calls together."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(sleep_s * CYCLES_PER_S))
    begun = perf_counter()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    host_s = perf_counter() - begun
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3, host_s
