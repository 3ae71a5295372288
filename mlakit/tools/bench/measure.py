"""The timing protocol: implementations run interleaved in one process, in random order each round.

Clocks, neighbours and memory drift, so two implementations are compared within a round, where both
see the same machine: a speedup is the median of the per-round quotients, with its own spread.

A timer measures the time of one call: `WallClock` here, the GPU timers in `gpu_timers`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeAlias

import torch

Call: TypeAlias = Callable[[], object]

MIN_ROUNDS = 3
MAX_ROUNDS = 50


@dataclass(frozen=True)
class Spread:
    """The median of a sample, with its 20th and 80th percentiles."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        """Interpolated quantiles of a nonempty sample."""
        points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        return cls(*torch.quantile(torch.tensor(sample, dtype=torch.float64), points).tolist())


def paired_speedup(own: Sequence[float], baseline: Sequence[float]) -> Spread:
    """baseline time / own time, round by round: above 1 the baseline is slower."""
    return Spread.of([theirs / ours for ours, theirs in zip(own, baseline, strict=True)])


class Timer(Protocol):
    """Measures the seconds of a call."""

    @property
    def warm_ups(self) -> int:
        """Calls before the first one that counts."""

    @property
    def calls(self) -> int:
        """Calls per measurement."""

    def prepared(self, call: Call) -> Call:
        """The callable to time instead of `call`. Raises RuntimeError if there is none."""

    def __call__(self, call: Call) -> float: ...


class WallClock:
    """Seconds of a call on the host's clock."""

    warm_ups = 1
    calls = 1

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock

    def prepared(self, call: Call) -> Call:
        return call

    def __call__(self, call: Call) -> float:
        start = self.clock()
        call()
        return self.clock() - start


def time_interleaved(
    implementations: Mapping[str, Call],
    *,
    budget_s: float,
    max_rounds: int = MAX_ROUNDS,
    seed: int = 0,
    timer: Timer | None = None,
    after_round: Callable[[int, int], None] = lambda done, rounds: None,
    out_of_memory: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every implementation in every round, in the order of the rounds.

    Each implementation first runs its warm-up calls, for `budget_s` at most but two or more; the
    last of them determines how many rounds fit into `budget_s`, at most `max_rounds`.

    out_of_memory  receives, by name, the message of an implementation that ran out of memory; that
                   implementation is dropped. None: the error is raised.
    """
    timer = timer or WallClock()
    present = dict(implementations)

    def time(name: str, calls: int = 1) -> list[float]:
        """The seconds of up to `calls` calls; empty if memory ran out."""
        seconds: list[float] = []
        try:
            while len(seconds) < calls and (len(seconds) < 2 or sum(seconds) < budget_s):
                seconds.append(timer(present[name]))
            return seconds
        except torch.OutOfMemoryError as error:
            if out_of_memory is None:
                raise
            del present[name]
            out_of_memory[name] = first_line(error)
            return []

    last_s = [sum(time(name, timer.warm_ups)[-1:]) for name in implementations]
    rounds = min(rounds_within(budget_s, sum(last_s) * timer.calls), max_rounds)
    order, taken = random.Random(seed), {name: list[float]() for name in implementations}
    for done in range(1, rounds + 1):
        for name in order.sample(list(present), len(present)):
            taken[name] += time(name)
        after_round(done, rounds)
    return {name: taken[name] for name in present}


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def rounds_within(budget_s: float, round_s: float) -> int:
    """Rounds of `round_s` seconds that fit into the budget, from MIN_ROUNDS to MAX_ROUNDS."""
    return min(max(MIN_ROUNDS, int(budget_s / max(round_s, 1e-9))), MAX_ROUNDS)
