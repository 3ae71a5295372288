"""The timing protocol: contenders take turns in one process, each round in a random order.

A machine drifts (clocks, neighbours, memory), so two contenders are compared within a round, where
both met the same machine: a ratio is the median over rounds of the quotients, with its own spread.

A timer says how long one call takes: `WallClock` here, those of a GPU in `gpu_timers`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeAlias

import torch

Call: TypeAlias = Callable[[], object]

LEAST_ROUNDS = 3
MOST_ROUNDS = 50


@dataclass(frozen=True)
class Spread:
    """The middle of a sample, and the range that holds the middle three fifths of it."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        """Quantiles of a sample that is not empty, interpolated."""
        points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        return cls(*torch.quantile(torch.tensor(sample, dtype=torch.float64), points).tolist())


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """ours / theirs, round by round."""
    return Spread.of([own / other for own, other in zip(ours, theirs, strict=True)])


class Timer(Protocol):
    """Says how many seconds a call takes."""

    @property
    def warm_ups(self) -> int:
        """Calls before the first that counts."""

    @property
    def calls(self) -> int:
        """How often a turn makes the call."""

    def prepared(self, call: Call) -> Call:
        """What is to be timed in the place of `call`. Raises RuntimeError if it cannot be."""

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


def take_turns(
    contenders: Mapping[str, Call],
    *,
    budget_s: float,
    seed: int = 0,
    timer: Timer | None = None,
    after_round: Callable[[int, int], None] = lambda done, rounds: None,
    out_of_memory: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every contender in every round, in the order of the rounds.

    Each is called to warm up, and the last of these calls tells how many rounds fit into
    `budget_s`.

    out_of_memory  is told, by name, what a contender said that ran out of it: this one has no more
                   turns, and no seconds. None: the error is raised.
    """
    timer = timer or WallClock()
    present = dict(contenders)

    def time(name: str, calls: int = 1) -> list[float]:
        """The seconds of so many calls; none where memory did not suffice."""
        try:
            return [timer(present[name]) for _ in range(calls)]
        except torch.OutOfMemoryError as error:
            if out_of_memory is None:
                raise
            del present[name]
            out_of_memory[name] = first_line(error)
            return []

    last_s = [sum(time(name, timer.warm_ups)[-1:]) for name in contenders]
    rounds = rounds_within(budget_s, sum(last_s) * timer.calls)
    order, seconds = random.Random(seed), {name: list[float]() for name in contenders}
    for done in range(1, rounds + 1):
        for name in order.sample(list(present), len(present)):
            seconds[name] += time(name)
        after_round(done, rounds)
    return {name: seconds[name] for name in present}


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def rounds_within(budget_s: float, round_s: float) -> int:
    """Rounds of `round_s` seconds within the budget, but neither too few nor needlessly many."""
    return min(max(LEAST_ROUNDS, int(budget_s / max(round_s, 1e-9))), MOST_ROUNDS)
