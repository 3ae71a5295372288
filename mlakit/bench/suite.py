"""Running a suite: every workload passes its gate, then its contenders are timed, then a table."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from mlakit.bench import environment
from mlakit.bench.measure import ColdGpu, Spread, Timer, WallClock, paired_ratio, take_turns
from mlakit.bench.report import OURS, LeftOut, Report, Row, table

BUDGET_S = 10.0  # for the rounds of one workload; a slow one gets its least rounds
QUICK_BUDGET_S = 0.02
HOPELESS = 10.0  # times as slow as the fastest baseline on a small problem
WIDE = 130  # columns for the table where the output is no terminal


@dataclass(frozen=True)
class Baseline:
    """What others do instead. A workload's limit is set by the fastest of those with `is_limit`."""

    name: str
    call: Callable[[], object]
    is_limit: bool = True


@dataclass(frozen=True)
class Contest:
    """A workload made concrete; `gate` raises AssertionError unless `ours` computes the truth."""

    ours: Callable[[], object]
    baselines: Sequence[Baseline]
    gate: Callable[[], None]


class Workload(ABC):
    """One problem, described in plain values."""

    op: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def flops(self) -> int:
        """Of the products over the keys that are seen."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Each input read once, each result written once."""

    @property
    @abstractmethod
    def limit(self) -> float | None:
        """What mlakit's time over the fastest baseline's shall not exceed."""

    @property
    @abstractmethod
    def small(self) -> Workload:
        """The same kind of problem, done in milliseconds."""

    @abstractmethod
    def contest(self) -> Contest:
        """Its inputs, drawn from a fixed seed, and what is to be called."""


def run(
    suite: str,
    workloads: Sequence[Workload],
    *,
    command: str,
    quick: bool = False,
    threads: int | None = None,
    on_gpu: bool = False,
) -> Report | None:
    """Measure every workload and print the table; None, after saying so, where a result is wrong.

    quick    small problems and few rounds: shows that the suite runs, measures nothing
    threads  of torch, for all contenders; None leaves torch's own choice
    on_gpu   time the GPU's work with a cold L2 (`ColdGpu`) instead of the host's clock
    """
    timer = ColdGpu() if on_gpu else WallClock()
    console = Console(width=None if Console().is_terminal else WIDE)
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    with _torch_threads(threads), _no_warnings(), _progress_bars() as progress:
        facts = environment.describe()
        console.print(environment.summary(facts), highlight=False)
        for workload in dict.fromkeys(each.small for each in workloads) if quick else workloads:
            contest = workload.contest()
            try:
                contest.gate()
            except AssertionError as wrong:
                console.print(f"[red]{workload.name} is wrong:[/red] {escape(str(wrong))}")
                return None
            reasons = {} if on_gpu else _hopeless(workload.small)
            left_out += [LeftOut(workload.name, *each) for each in reasons.items()]
            rows += _measured(
                workload,
                contest.ours,
                [each for each in contest.baselines if each.name not in reasons],
                budget_s=QUICK_BUDGET_S if quick else BUDGET_S,
                limit=None if quick else workload.limit,
                timer=timer,
                progress=progress,
            )
    console.print(table(rows, unit="us" if on_gpu else "ms"))
    for each in left_out:
        console.print(f"{each.workload}: {each.contender} not timed, {each.reason}")
    return Report(suite, command, facts, rows, left_out)


def _hopeless(small: Workload) -> dict[str, str]:
    """By name, why a baseline that sets no limit is not worth timing: one may take minutes here."""
    baselines = small.contest().baselines
    if all(each.is_limit for each in baselines):
        return {}
    turns = take_turns({each.name: each.call for each in baselines}, budget_s=0.0)
    best = {name: min(seconds) for name, seconds in turns.items()}
    fastest = min(best, key=best.__getitem__)
    slowness = {name: seconds / best[fastest] for name, seconds in best.items()}
    return {
        each.name: f"{slowness[each.name]:.0f} times as slow as {fastest} on {small.name}"
        for each in baselines
        if not each.is_limit and slowness[each.name] > HOPELESS
    }


def _measured(
    workload: Workload,
    ours: Callable[[], object],
    baselines: Sequence[Baseline],
    *,
    budget_s: float,
    limit: float | None,
    timer: Timer,
    progress: Progress,
) -> Iterator[Row]:
    """A row for mlakit, then one for each baseline."""
    task = progress.add_task(workload.name, total=None)

    def advance(done: int, rounds: int) -> None:
        progress.update(task, completed=done, total=rounds)

    calls = {OURS: ours, **{each.name: each.call for each in baselines}}
    seconds = take_turns(calls, budget_s=budget_s, timer=timer, after_round=advance)
    times = {name: Spread.of([1e6 * each for each in sample]) for name, sample in seconds.items()}
    bounding = [each.name for each in baselines if each.is_limit]
    fastest = min(bounding, key=lambda name: times[name].p50, default=None)
    for name, us in times.items():
        yield Row(
            workload=workload.name,
            op=workload.op,
            contender=name,
            rounds=len(seconds[name]),
            us=us,
            flops=workload.flops,
            bytes=workload.bytes,
            ratio=None if name == OURS else paired_ratio(seconds[OURS], seconds[name]),
            limit=limit if name == fastest else None,
        )


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """torch tells at length of each kind of product it is slow at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _progress_bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
