"""Running a suite: every workload passes its gate, then its contenders are timed, then a table."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from rich.markup import escape

from mlakit.bench import environment, gpu_timers
from mlakit.bench.ceilings import Ceilings
from mlakit.bench.measure import (
    Call,
    Spread,
    Timer,
    WallClock,
    first_line,
    paired_ratio,
    take_turns,
)
from mlakit.bench.problems import Problem
from mlakit.bench.progress import SuiteProgress, suite_progress
from mlakit.bench.report import OURS, WALL, YARDSTICKS, LeftOut, Report, Row
from mlakit.bench.tables import left_out_lines, table
from mlakit.columns import wide_console

BUDGET_S = 10.0  # for the rounds of one workload; a slow one gets its least rounds
QUICK_BUDGET_S = 0.02
HOPELESS = 10.0  # times as slow as the fastest baseline on a small problem
REPLAY = f"{OURS}, graph replay"
# what imports, compilers and kernels of others raise
PEER_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    ImportError,
    OSError,
)


@dataclass(frozen=True)
class Baseline:
    """What others do instead. A workload's limit is set by the fastest of those with `is_limit`."""

    name: str
    call: Callable[[], object]
    is_limit: bool = True


# of the libraries named, or of all: their calls, and (name, reason) of those that have none
PeersOf: TypeAlias = Callable[
    [Problem, tuple[str, ...] | None], tuple[list[Baseline], list[tuple[str, str]]]
]


@dataclass(frozen=True)
class Contest:
    """A workload made concrete; `gate` raises AssertionError unless `ours` computes the truth.

    problem     the same for other libraries; None where they have nothing like it
    peers       others that are timed only if they can take it and are right, like those libraries
    peer_fault  what is wrong with a result of theirs, None if nothing is
    """

    ours: Callable[[], object]
    baselines: Sequence[Baseline]
    gate: Callable[[], None]
    problem: Problem | None = None
    peers: Sequence[Baseline] = ()
    peer_fault: Callable[[object], str | None] = lambda output: None


class Workload(ABC):
    """One problem, described in plain values.

    rival       the contender `limit` is said of; None: the fastest baseline
    read_share  of the measured read bandwidth, which keeps the limit too
    products    "bf16" or "fp8", traffic "read" or "copy": which ceilings are its own
    budget_s    for its rounds
    only_peers  the libraries that are worth their time; None: all
    """

    op: ClassVar[str]
    rival: ClassVar[str | None] = None
    products: ClassVar[str] = "bf16"
    traffic: ClassVar[str] = "read"
    budget_s: ClassVar[float] = BUDGET_S
    only_peers: ClassVar[tuple[str, ...] | None] = None

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
        """What mlakit's time over the rival's, or the fastest baseline's, shall not exceed."""

    @property
    def read_share(self) -> float | None:
        return None

    @property
    @abstractmethod
    def small(self) -> Workload:
        """The same kind of problem, done in milliseconds."""

    @abstractmethod
    def contest(self) -> Contest:
        """Its inputs, drawn from a fixed seed, and what is to be called."""


@dataclass(frozen=True)
class Method:
    """How workloads are measured; the arguments of `run` of these names."""

    mode: str
    timer: Timer
    quick: bool
    peers_of: PeersOf | None
    ceilings: Ceilings | None

    @property
    def judges(self) -> bool:
        """Do its times say something of limits and ceilings?"""
        return not self.quick and self.mode != gpu_timers.HOST


class WrongResult(Exception):
    """A workload's gate is red."""


def run(
    suite: str,
    workloads: Sequence[Workload],
    *,
    command: str,
    quick: bool = False,
    threads: int | None = None,
    mode: str = WALL,
    peers_of: PeersOf | None = None,
    peer_builds: Mapping[str, str] | None = None,
    ceilings: Ceilings | None = None,
) -> Report | None:
    """Measure every workload and print the table; None, after saying so, where a result is wrong.

    quick        small problems and few rounds: shows that the suite runs, measures nothing
    threads      of torch, for all contenders; None leaves torch's own choice
    mode         how time is taken: `WALL`, or on a GPU one of `gpu_timers.MODES` or its `HOST`
    peers_of     gives other libraries' calls for a problem; None leaves them out
    peer_builds  by name, which build of a library this is; for the report
    ceilings     of this GPU, for the share of the roofline
    """
    timer = WallClock() if mode == WALL else gpu_timers.timer_for(mode)
    method = Method(mode, timer, quick, peers_of, ceilings)
    console = wide_console()
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    if quick:
        workloads = list(dict.fromkeys(each.small for each in workloads))
    with _torch_threads(threads), _no_warnings():
        facts = environment.describe()
        if peer_builds:
            facts["peers"] = [f"{name}: {build}" for name, build in peer_builds.items()]
        with suite_progress(suite, len(workloads)) as progress:
            console.print(environment.summary(facts), highlight=False)
            for workload in workloads:
                try:
                    measured, reasons = _entries(workload, method, progress)
                except WrongResult as wrong:
                    console.print(f"[red]{workload.name} is wrong:[/red] {escape(str(wrong))}")
                    return None
                rows += measured
                left_out += [LeftOut(workload.name, *each) for each in reasons.items()]
                progress.finish_workload()
    console.print(table(rows, "ms" if mode == WALL else "us", console.width))
    for line in left_out_lines(left_out):
        console.print(escape(line))
    return Report(suite, command, facts, rows, left_out, mode, ceilings)


def _entries(
    workload: Workload, method: Method, progress: SuiteProgress
) -> tuple[list[Row], dict[str, str]]:
    """The rows of a workload; and by contender, why others have none.

    Raises WrongResult before anything is timed if mlakit's result is wrong.
    """
    try:
        contest = workload.contest()
        contest.gate()
    except torch.OutOfMemoryError as error:
        return [], {OURS: first_line(error)}
    except AssertionError as wrong:
        raise WrongResult(str(wrong)) from wrong
    contenders, reasons = _contenders(workload, contest, method)
    if OURS in reasons:
        return [], reasons
    progress.begin_workload(workload.name)
    seconds = take_turns(
        {each.name: each.call for each in contenders},
        budget_s=QUICK_BUDGET_S if method.quick else workload.budget_s,
        timer=method.timer,
        after_round=progress.finish_round,
        out_of_memory=reasons,
    )
    if OURS in reasons:  # nothing to compare the others with
        return [], reasons
    timed = [each for each in contenders if each.name not in reasons]
    return list(_rows(workload, timed, seconds, method)), reasons


def _contenders(
    workload: Workload, contest: Contest, method: Method
) -> tuple[list[Baseline], dict[str, str]]:
    """mlakit and those it is compared with, ready to be timed; and why others are not."""
    peers, reasons = _peers(contest, method.peers_of, workload.only_peers)
    ours = Baseline(OURS, contest.ours, is_limit=False)
    found = [ours, *contest.baselines, *peers]
    if method.mode == WALL:
        reasons |= _hopeless(workload.small)
    elif method.mode == gpu_timers.HOST:
        calling = [each for each in contest.baselines if each.name not in YARDSTICKS]
        found = [ours, *_replayed(contest.ours, reasons), *calling, *peers, _empty_kernel()]
    ready = []
    for each in found:
        if each.name in reasons:
            continue
        try:
            ready.append(Baseline(each.name, method.timer.prepared(each.call), each.is_limit))
        except RuntimeError as error:
            reasons[each.name] = f"cannot be captured: {first_line(error)}"
    return ready, reasons


def _peers(
    contest: Contest, peers_of: PeersOf | None, only: tuple[str, ...] | None
) -> tuple[list[Baseline], dict[str, str]]:
    """Other libraries whose results are right; and why the others are not there."""
    present: list[Baseline] = []
    absent: list[tuple[str, str]] = []
    if peers_of is not None and contest.problem is not None:
        present, absent = peers_of(contest.problem, only)
    reasons, right = dict(absent), []
    for peer in (*contest.peers, *present):
        try:
            fault = contest.peer_fault(peer.call())
        except PEER_ERRORS as error:
            fault = f"failed: {first_line(error)}"
        if fault is None:
            right.append(peer)
        else:
            reasons[peer.name] = fault
    return right, reasons


def _replayed(ours: Call, reasons: dict[str, str]) -> list[Baseline]:
    try:
        return [Baseline(REPLAY, gpu_timers.captured(ours), is_limit=False)]
    except RuntimeError as error:
        reasons[REPLAY] = f"cannot be captured: {first_line(error)}"
        return []


def _empty_kernel() -> Baseline:
    from mlakit.bench.gpu import launching_nothing  # which knows `Baseline` from here

    return launching_nothing()


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


def _rows(
    workload: Workload,
    contenders: Sequence[Baseline],
    seconds: Mapping[str, Sequence[float]],
    method: Method,
) -> Iterator[Row]:
    """A row for mlakit, then one for each of the others."""
    times = {name: Spread.of([1e6 * each for each in sample]) for name, sample in seconds.items()}
    judged = _judged(workload, contenders, times)
    limit, ceilings = (workload.limit, method.ceilings) if method.judges else (None, None)
    least_us = 0.0
    if ceilings is not None:
        kind = {"products": workload.products, "traffic": workload.traffic}
        least_us = ceilings.least_us(workload.flops, workload.bytes, **kind)
    for name, us in times.items():
        ratio = None if name == OURS else paired_ratio(seconds[OURS], seconds[name])
        own_limit = limit if name == judged else None
        met = None
        if own_limit is not None and ratio is not None:
            met = ratio.p50 <= own_limit or _reads_enough(workload, times[OURS], ceilings)
        yield Row(
            workload=workload.name,
            op=workload.op,
            contender=name,
            rounds=len(seconds[name]),
            us=us,
            flops=workload.flops,
            bytes=workload.bytes,
            ratio=ratio,
            limit=own_limit,
            met=met,
            roofline=least_us / us.p50 if ceilings is not None else None,
        )


def _judged(
    workload: Workload, contenders: Sequence[Baseline], times: dict[str, Spread]
) -> str | None:
    """The contender the limit is said of; None where it is not there."""
    if workload.rival is not None:
        return workload.rival
    bounding = [each.name for each in contenders if each.is_limit]
    return min(bounding, key=lambda name: times[name].p50, default=None)


def _reads_enough(workload: Workload, ours_us: Spread, ceilings: Ceilings | None) -> bool:
    if workload.read_share is None or ceilings is None:
        return False
    return workload.bytes / ours_us.p50 / 1e3 >= workload.read_share * ceilings.read_gb_s


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
