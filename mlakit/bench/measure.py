"""The timing protocol: contenders take turns in one process, each round in a random order.

A machine drifts (clocks, neighbours, memory), so two contenders are compared within a round, where
both met the same machine: a ratio is the median over rounds of the quotients, with its own spread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

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


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    *,
    budget_s: float,
    seed: int = 0,
    clock: Callable[[], float] = perf_counter,
    after_round: Callable[[int, int], None] = lambda done, rounds: None,
) -> dict[str, list[float]]:
    """Seconds of every contender in every round, in the order of the rounds.

    Each is called once to warm up, which tells how many rounds fit into `budget_s`.
    """
    rounds = rounds_within(budget_s, sum(_seconds(call, clock) for call in contenders.values()))
    order, seconds = random.Random(seed), {name: list[float]() for name in contenders}
    for done in range(1, rounds + 1):
        for name in order.sample(list(contenders), len(contenders)):
            seconds[name].append(_seconds(contenders[name], clock))
        after_round(done, rounds)
    return seconds


def rounds_within(budget_s: float, round_s: float) -> int:
    """Rounds of `round_s` seconds within the budget, but neither too few nor needlessly many."""
    return min(max(LEAST_ROUNDS, int(budget_s / max(round_s, 1e-9))), MOST_ROUNDS)


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start
