"""Runs a suite: checks each workload, times its implementations, prints the table."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from rich.markup import escape

from mlakit.tools.bench import environment, gpu_timers
from mlakit.tools.bench.ceilings import Ceilings
from mlakit.tools.bench.measure import (
    MAX_ROUNDS,
    Call,
    Spread,
    Timer,
    WallClock,
    first_line,
    paired_speedup,
    time_interleaved,
)
from mlakit.tools.bench.problems import Problem
from mlakit.tools.bench.progress import SuiteProgress, suite_progress
from mlakit.tools.bench.report import (
    HARDWARE_BASELINES,
    INTERRUPTED,
    MLAKIT,
    WALL,
    LeftOut,
    Memory,
    MemoryUse,
    Report,
    Row,
)
from mlakit.tools.bench.tables import left_out_lines, memory_lines, table
from mlakit.tools.columns import wide_console

BUDGET_S = 10.0  # for the rounds of one workload; a slow one gets MIN_ROUNDS
QUICK_BUDGET_S = 0.02
TOO_SLOW = 10.0  # times the fastest baseline's time on a small problem
REPLAY = f"{MLAKIT}, graph replay"
# what imports, compilers and kernels of other libraries raise
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
    """An alternative to mlakit.

    sets_target  the fastest baseline with this flag is the one `min_speedup` refers to
    """

    name: str
    call: Call
    sets_target: bool = True


# (problem, only those with `in_grid`?) -> calls of other libraries, and (name, reason) of the rest
PeersOf: TypeAlias = Callable[[Problem, bool], tuple[list[Baseline], list[tuple[str, str]]]]


@dataclass(frozen=True)
class BenchmarkCase:
    """A workload with its tensors.

    call        the call of mlakit
    check       raises AssertionError unless `call` matches the oracle
    problem     the same problem for other libraries; None if they have no such function
    peers       baselines that are timed only if they support the problem and pass `peer_error`
    peer_error  what is wrong with a peer's result; None if it is right
    memory      of implementations, by name; there after `check`
    """

    call: Call
    baselines: Sequence[Baseline]
    check: Callable[[], None]
    problem: Problem | None = None
    peers: Sequence[Baseline] = ()
    peer_error: Callable[[object], str | None] = lambda output: None
    memory: Mapping[str, MemoryUse] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """What an implementation computes.

    flops     of the matrix products over the visible keys
    bytes     each input read once, each result written once
    products  "bf16" or "fp8": the compute ceiling of its roofline
    """

    flops: int
    bytes: int
    products: str = "bf16"


class Workload(ABC):
    """One problem, described in plain values.

    target_baseline  the implementation `min_speedup` refers to; None: the fastest baseline
    products         "bf16" or "fp8": the compute ceiling of its roofline
    traffic          "read" or "copy": the bandwidth ceiling of its roofline
    budget_s         seconds for its rounds
    max_rounds       bounds the rounds of a suite with many short calls
    only_grid_peers  time only the peers with `in_grid`
    """

    op: ClassVar[str]
    target_baseline: ClassVar[str | None] = None
    products: ClassVar[str] = "bf16"
    traffic: ClassVar[str] = "read"
    budget_s: ClassVar[float] = BUDGET_S
    max_rounds: ClassVar[int] = MAX_ROUNDS
    only_grid_peers: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def flops(self) -> int:
        """FLOPs of the matrix products over the visible keys."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Each input read once, each result written once."""

    @property
    def min_speedup(self) -> float | None:
        """The target: time of `target_baseline` / time of mlakit is at least this."""
        return None

    @property
    def min_read_share(self) -> float | None:
        """A share of the measured read bandwidth that meets the target as well."""
        return None

    def work_of(self, implementation: str) -> Work:
        """The work of an implementation; that of a stage is a part of the workload's."""
        return Work(self.flops, self.bytes, self.products)

    def with_derived(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        """`seconds` by implementation, with times that are computed from others."""
        return seconds

    @property
    @abstractmethod
    def small(self) -> Workload:
        """The same kind of problem, small enough to run in milliseconds."""

    @abstractmethod
    def build_case(self) -> BenchmarkCase:
        """Its inputs, from a fixed seed, and the calls to time."""


@dataclass(frozen=True)
class Method:
    """How workloads are measured; the arguments of `run` with these names."""

    mode: str
    timer: Timer
    quick: bool
    peers_of: PeersOf | None
    ceilings: Ceilings | None

    @property
    def has_targets(self) -> bool:
        """Whether its times can be compared with targets and ceilings."""
        return not self.quick and self.mode != gpu_timers.HOST


class WrongResult(Exception):
    """mlakit's result does not match the oracle."""


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
    timer: Timer | None = None,
) -> Report | None:
    """Measure every workload and print the table; None, after an error message, on a wrong result.

    Ctrl-C ends the run early: the report has the workloads that are done.

    quick        small problems and few rounds: shows that the suite runs, measures nothing
    threads      torch's threads, for all implementations; None keeps torch's own choice
    mode         how time is taken: `WALL`, or on a GPU one of `gpu_timers.MODES` or its `HOST`
    peers_of     gives other libraries' calls for a problem; None leaves them out
    peer_builds  the build of each library, by name; for the report
    ceilings     the ceilings of this GPU, for the share of the roofline
    timer        None: that of the mode
    """
    timer = timer or (WallClock() if mode == WALL else gpu_timers.timer_for(mode))
    method = Method(mode, timer, quick, peers_of, ceilings)
    console = wide_console()
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    memory: list[Memory] = []
    with _torch_threads(threads), _no_warnings():
        facts = environment.describe()
        if peer_builds:
            facts["peers"] = [f"{name}: {build}" for name, build in peer_builds.items()]
        if quick:
            workloads = list(dict.fromkeys(each.small for each in workloads))
        with suite_progress(suite, len(workloads)) as progress:
            console.print(environment.summary(facts), highlight=False)
            for number, workload in enumerate(workloads):
                try:
                    measured, reasons, used = _measure(workload, method, progress)
                except WrongResult as wrong:
                    console.print(f"[red]{workload.name} is wrong:[/red] {escape(str(wrong))}")
                    return None
                except KeyboardInterrupt:
                    left_out += [LeftOut(w.name, MLAKIT, INTERRUPTED) for w in workloads[number:]]
                    break
                rows += measured
                left_out += [LeftOut(workload.name, *each) for each in reasons.items()]
                memory += [Memory(workload.name, *each) for each in used.items()]
                progress.finish_workload()
    console.print(table(rows, "ms" if mode == WALL else "us", console.width, is_quick=quick))
    for line in (*memory_lines(memory), *left_out_lines(left_out)):
        console.print(escape(line), highlight=False)
    return Report(suite, command, facts, rows, left_out, mode, ceilings, tuple(memory))


def _measure(
    workload: Workload, method: Method, progress: SuiteProgress
) -> tuple[list[Row], dict[str, str], Mapping[str, MemoryUse]]:
    """The rows of a workload; by implementation the reason why it has no row, and its memory.

    Raises WrongResult before anything is timed if mlakit's result is wrong.
    """
    try:
        case = workload.build_case()
        case.check()
    except torch.OutOfMemoryError as error:
        return [], {MLAKIT: first_line(error)}, {}
    except AssertionError as wrong:
        raise WrongResult(str(wrong)) from wrong
    implementations, reasons = _implementations(workload, case, method)
    if MLAKIT in reasons:
        return [], reasons, {}
    progress.begin_workload(workload.name)
    seconds = time_interleaved(
        {each.name: each.call for each in implementations},
        budget_s=QUICK_BUDGET_S if method.quick else workload.budget_s,
        max_rounds=workload.max_rounds,
        timer=method.timer,
        after_round=progress.finish_round,
        out_of_memory=reasons,
    )
    if MLAKIT in reasons:  # there is nothing to compare the others with
        return [], reasons, {}
    timed = [each for each in implementations if each.name not in reasons]
    rows = list(_rows(workload, timed, workload.with_derived(seconds), method))
    return rows, reasons, case.memory


def _implementations(
    workload: Workload, case: BenchmarkCase, method: Method
) -> tuple[list[Baseline], dict[str, str]]:
    """mlakit and its baselines, ready to be timed, and the reasons of those left out."""
    peers, reasons = _peers(case, method.peers_of, workload.only_grid_peers)
    mlakit = Baseline(MLAKIT, case.call, sets_target=False)
    found = [mlakit, *case.baselines, *peers]
    if method.mode == WALL:
        reasons |= _too_slow(workload.small)
    elif method.mode == gpu_timers.HOST:
        computing = [each for each in case.baselines if each.name not in HARDWARE_BASELINES]
        found = [mlakit, *_replayed(case.call, reasons), *computing, *peers, _empty_kernel()]
    ready = []
    for each in found:
        if each.name in reasons:
            continue
        try:
            ready.append(Baseline(each.name, method.timer.prepared(each.call), each.sets_target))
        except RuntimeError as error:
            reasons[each.name] = f"cannot be captured: {first_line(error)}"
    return ready, reasons


def _peers(
    case: BenchmarkCase, peers_of: PeersOf | None, only_grid_peers: bool
) -> tuple[list[Baseline], dict[str, str]]:
    """Other libraries whose results are right, and the reasons of the others."""
    present: list[Baseline] = []
    absent: list[tuple[str, str]] = []
    if peers_of is not None and case.problem is not None:
        present, absent = peers_of(case.problem, only_grid_peers)
    reasons, right = dict(absent), []
    for peer in (*case.peers, *present):
        try:
            error = case.peer_error(peer.call())
        except PEER_ERRORS as failure:
            error = f"failed: {first_line(failure)}"
        if error is None:
            right.append(peer)
        else:
            reasons[peer.name] = error
    return right, reasons


def _replayed(call: Call, reasons: dict[str, str]) -> list[Baseline]:
    try:
        return [Baseline(REPLAY, gpu_timers.captured(call), sets_target=False)]
    except RuntimeError as error:
        reasons[REPLAY] = f"cannot be captured: {first_line(error)}"
        return []


def _empty_kernel() -> Baseline:
    from mlakit.tools.bench.gpu import empty_kernel_baseline  # imports `Baseline` from this module

    return empty_kernel_baseline()


def _too_slow(small: Workload) -> dict[str, str]:
    """Baselines without a target that could take minutes, and by how much they are slower."""
    baselines = small.build_case().baselines
    if all(each.sets_target for each in baselines):
        return {}
    times = time_interleaved({each.name: each.call for each in baselines}, budget_s=0.0)
    best = {name: min(seconds) for name, seconds in times.items()}
    fastest = min(best, key=best.__getitem__)
    slowdown = {name: seconds / best[fastest] for name, seconds in best.items()}
    return {
        each.name: f"{slowdown[each.name]:.0f}x slower than {fastest} on {small.name}"
        for each in baselines
        if not each.sets_target and slowdown[each.name] > TOO_SLOW
    }


def _rows(
    workload: Workload,
    implementations: Sequence[Baseline],
    seconds: Mapping[str, Sequence[float]],
    method: Method,
) -> Iterator[Row]:
    """A row for mlakit, then one for each baseline."""
    times = {name: Spread.of([1e6 * each for each in sample]) for name, sample in seconds.items()}
    baseline = _target_baseline(workload, implementations, times)
    target, ceilings = None, None
    if method.has_targets:
        target, ceilings = workload.min_speedup, method.ceilings
    for name, us in times.items():
        work = workload.work_of(name)
        roofline = None
        if ceilings is not None:
            kind = {"products": work.products, "traffic": workload.traffic}
            roofline = ceilings.roofline_us(work.flops, work.bytes, **kind) / us.p50
        speedup = None if name == MLAKIT else paired_speedup(seconds[MLAKIT], seconds[name])
        min_speedup = target if name == baseline else None
        met = None
        if min_speedup is not None and speedup is not None:
            met = speedup.p50 >= min_speedup or _reads_enough(workload, times[MLAKIT], ceilings)
        yield Row(
            workload=workload.name,
            op=workload.op,
            implementation=name,
            rounds=len(seconds[name]),
            us=us,
            flops=work.flops,
            bytes=work.bytes,
            speedup=speedup,
            min_speedup=min_speedup,
            met=met,
            roofline=roofline,
        )


def _target_baseline(
    workload: Workload, implementations: Sequence[Baseline], times: dict[str, Spread]
) -> str | None:
    """The implementation that the target refers to; None if it was not timed."""
    if workload.target_baseline is not None:
        return workload.target_baseline
    candidates = [each.name for each in implementations if each.sets_target]
    return min(candidates, key=lambda name: times[name].p50, default=None)


def _reads_enough(workload: Workload, us: Spread, ceilings: Ceilings | None) -> bool:
    if workload.min_read_share is None or ceilings is None:
        return False
    return workload.bytes / us.p50 / 1e3 >= workload.min_read_share * ceilings.read_gb_s


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """Run the block with so many threads of torch; None keeps their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """torch warns at length about every kind of product that it computes slowly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
