"""`mlakit check`: random calls of the ops on this device, each compared with the oracle."""

from __future__ import annotations

import multiprocessing
import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.knobs import Backend
from mlakit.tools.columns import counted
from mlakit.tools.workloads import CASES, Case
from mlakit.tools.workloads.random_cases import SeededDraw, random_case
from mlakit.tools.workloads.random_launches import (
    LAUNCHES,
    backend_for,
    kernel_of,
    random_launch,
)

KINDS: dict[str, type[Case]] = {case.op: case for case in CASES}
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_MINUTES = 1.0
SECONDS_BETWEEN_LINES = 10.0  # of progress, where stderr is not a terminal
POLL_S = 0.5
MAX_MISSES = 300  # launches in a row that dispatch gives to other kernels than the one asked for


@dataclass(frozen=True)
class Settings:
    """What is checked, and for how long: until `minutes` have passed or `count` cases are done.

    launches  check this many launches of few compiled kernels instead of cases, from index `first`
    calls     calls per launch, which must all return the same bits; None: one, or sometimes three
    kernel    only launches that dispatch gives to this kernel of `backend`; see `with_kernel`
    record    a file to which the launches of each kernel are added; "": none
    jobs      processes that share the work. A process compiles on one core, and finds what others
              have compiled in Triton's cache on disk
    step      from a seed of cases, or an index of launches, to the next
    """

    ops: tuple[str, ...]
    seed: int
    device: str = "auto"  # auto, cpu or cuda
    backend: str = ""  # "": every backend that supports the problem
    minutes: float | None = DEFAULT_MINUTES
    count: int | None = None
    any_widths: bool = False
    launches: int | None = None
    first: int = 0
    calls: int | None = None
    kernel: str = ""
    record: str = ""
    jobs: int = 1
    step: int = 1

    @property
    def torch_device(self) -> str:
        """cpu or cuda."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def limit(self) -> int | None:
        """The maximum number of cases or launches."""
        return self.count if self.launches is None else self.launches

    @property
    def noun(self) -> str:
        return "cases" if self.launches is None else "launches"

    def share(self, job: int) -> Settings:
        """What one of the `jobs` processes checks."""
        limit = None if self.limit is None else len(range(job, self.limit, self.jobs))
        own = replace(self, jobs=1, step=self.jobs)
        if self.launches is None:
            return replace(own, seed=self.seed + job, count=limit)
        return replace(own, first=self.first + job, launches=limit)

    def command(self, op: str, number: int) -> str:
        """The command that repeats one case or launch."""
        words = ["mlakit", "check", "--op", op]
        if self.launches is None:
            words += ["--seed", str(number), "--count", "1"]
        else:
            words += ["--seed", str(self.seed), "--launches", "1", "--first", str(number)]
            words += ["--calls", str(self.calls)] if self.calls else []
            words += ["--kernel", self.kernel] if self.kernel else []
        words += ["--device", self.device] if self.device != "auto" else []
        words += ["--backend", self.backend] if self.backend else []
        words += ["--any-widths"] if self.any_widths else []
        return shlex.join(words)


@dataclass(frozen=True)
class CaseResult:
    """One call of an op on one backend, compared with the oracle."""

    op: str
    seconds: float
    unsupported: str | None = None  # why the backend does not support it
    error: str | None = None  # what is wrong, below the line of Python that repeats it

    def as_json(self) -> dict[str, object]:
        return {**vars(self), "seconds": round(self.seconds, 3)}


def run_case(case: Case, device: str, backend: Backend) -> CaseResult:
    """Call a case and check its results. Random checks and `mlakit doctor` both come here."""
    start = perf_counter()
    unsupported = error = None
    try:
        case.run(device, backend)
    except UnsupportedError as why:
        *_, last_line = str(why).splitlines()  # the reason of this backend
        unsupported = last_line.strip().removeprefix(f"{backend}: ")
    except AssertionError as wrong:
        error = str(wrong)
    return CaseResult(case.op, perf_counter() - start, unsupported, error)


class Tally(NamedTuple):
    """Cases of one op on one backend: correct, and not supported."""

    correct: int = 0
    unsupported: int = 0


@dataclass(frozen=True)
class Failure:
    """A wrong result."""

    op: str
    backend: str
    seed: int
    error: str
    command: str  # repeats the case
    python: str  # repeats it without the random draw
    launch: int | None = None  # its index; None for a case
    kernel: str = ""  # where launches are recorded by kernel


@dataclass
class Outcome:
    settings: Settings
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)  # by op and backend
    seconds: float = 0.0
    failure: Failure | None = None
    num_done: int = 0  # cases or launches, including a wrong one
    # correct launches by op, backend and kernel, where they are recorded
    kernels: dict[tuple[str, str, str], int] = field(default_factory=dict)

    @property
    def num_correct(self) -> int:
        return sum(tally.correct for tally in self.tallies.values())

    @property
    def passed(self) -> bool:
        """At least one result is correct, and none is wrong."""
        return self.failure is None and self.num_correct > 0

    def as_json(self) -> dict[str, object]:
        return {
            "device": self.settings.torch_device,
            "seed": self.settings.seed,
            "first": self.settings.first,
            "launches": None if self.settings.launches is None else self.num_done,
            "seconds": round(self.seconds, 3),
            "checked": [
                {"op": op, "backend": backend, **tally._asdict()}
                for (op, backend), tally in self.tallies.items()
            ],
            "failure": None if self.failure is None else vars(self.failure),
        }


def check_settings(settings: Settings) -> None:
    """Raise ValueError, naming the argument, for settings that cannot run here."""
    for op in settings.ops:
        if op not in KINDS:
            raise ValueError(f"op must be one of {', '.join(KINDS)}, got {op!r}")
    if settings.device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {settings.device!r}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs a CUDA device, and torch sees none")
    if settings.backend not in ("", *selection.BACKENDS):
        known = ", ".join(selection.BACKENDS)
        raise ValueError(f"backend must be one of {known}, got {settings.backend!r}")
    if settings.minutes is not None and not settings.minutes > 0:
        raise ValueError(f"minutes must be more than 0, got {settings.minutes:g}")
    _check_launches(settings)


def with_kernel(settings: Settings) -> Settings:
    """`settings` with the ops and the backend that have its kernel, if it names one."""
    if not settings.kernel:
        return settings
    specs = [
        spec
        for op in settings.ops
        for spec in selection.specs(op)
        if spec.kernel and settings.backend in ("", spec.backend)
    ]
    found = [spec for spec in specs if spec.kernel == settings.kernel]
    if not found:
        known = ", ".join(dict.fromkeys(spec.kernel for spec in specs)) or "no names"
        raise ValueError(f"kernel must be one of {known}, got {settings.kernel!r}")
    return replace(settings, ops=tuple(spec.op for spec in found), backend=found[0].backend)


def _check_launches(settings: Settings) -> None:
    if settings.launches is None:
        options = ("first", "calls", "kernel", "record")
        for name, value in ((name, getattr(settings, name)) for name in options):
            if value:
                raise ValueError(f"{name} needs launches")
        return
    for name, value in (("count", settings.count), ("any_widths", settings.any_widths)):
        if value:
            raise ValueError(f"launches have fixed configurations, so {name} has no effect")
    for op in settings.ops:
        if op not in LAUNCHES:
            raise ValueError(f"launches support only {', '.join(LAUNCHES)}, got op {op!r}")


def random_cases(settings: Settings) -> Iterator[tuple[int, Case]]:
    """An endless stream of (seed, case): for every seed one case of each op."""
    for seed in count(settings.seed, settings.step):
        for op in settings.ops:
            draw = SeededDraw(f"{op} {seed}", model_widths=not settings.any_widths)
            yield seed, random_case(draw, KINDS[op], settings.backend)


def random_launches(settings: Settings) -> Iterator[tuple[int, Case]]:
    """A stream of (index, launch): for every index one launch of each op.

    It is endless, unless `settings.kernel` is not selected for `MAX_MISSES` launches in a row.
    """
    misses = 0
    place, backend = settings.torch_device, settings.backend
    asked = backend_for(backend, settings.kernel)
    for number in count(settings.first, settings.step):
        for op in settings.ops:
            draw = SeededDraw(f"{op} {settings.seed} launch {number}")
            launch = random_launch(draw, op, backend, place, settings.calls)
            if not settings.kernel or kernel_of(launch, place, asked) == settings.kernel:
                misses = 0
                yield number, launch
                continue
            misses += 1
            if misses == MAX_MISSES:
                return


def run(
    settings: Settings,
    after_each: Callable[[int, float], None] = lambda done, seconds: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Check until the time or the count is reached, or a result is wrong.

    after_each  is called with the number of cases or launches done, and the seconds so far
    is_stopped  is asked before each of them
    """
    outcome = Outcome(settings)
    start = perf_counter()
    drawn = random_cases(settings) if settings.launches is None else random_launches(settings)
    for done, (number, case) in enumerate(drawn):
        outcome.num_done, outcome.seconds = done, perf_counter() - start
        after_each(done, outcome.seconds)
        if _is_over(settings, done, outcome.seconds) or is_stopped():
            break
        outcome.failure = _check(case, number, settings, outcome)
        outcome.num_done = done + 1
        if outcome.failure is not None:
            outcome.seconds = perf_counter() - start
            break
    return outcome


def run_in_processes(
    settings: Settings, after_each: Callable[[int, float], None] = lambda done, seconds: None
) -> Outcome:
    """`run`, shared out among `settings.jobs` processes; a wrong result stops all of them."""
    jobs = settings.jobs if settings.limit is None else min(settings.jobs, settings.limit)
    settings = replace(settings, jobs=jobs)
    start, spawn = perf_counter(), multiprocessing.get_context("spawn")
    done: Any = spawn.Array("q", jobs)
    stop = spawn.Event()
    threads = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(
        jobs, spawn, initializer=_start_process, initargs=(done, stop, threads)
    ) as pool:
        shares = [pool.submit(_run_share, settings.share(job), job) for job in range(jobs)]
        while wait(shares, timeout=POLL_S).not_done:
            after_each(sum(done), perf_counter() - start)
            if any(each.done() and each.result().failure for each in shares):
                stop.set()
    return _joined(settings, [share.result() for share in shares], perf_counter() - start)


def _joined(settings: Settings, outcomes: Sequence[Outcome], seconds: float) -> Outcome:
    together = Outcome(settings, seconds=seconds)
    for each in outcomes:
        together.num_done += each.num_done
        together.failure = together.failure or each.failure
        for kernel, launches in each.kernels.items():
            together.kernels[kernel] = together.kernels.get(kernel, 0) + launches
        for key, tally in each.tallies.items():
            known = together.tallies.get(key, Tally())
            together.tallies[key] = Tally(*map(sum, zip(known, tally, strict=True)))
    return together


# of a process of `run_in_processes`, shared with the others: the cases that each has done, and
# whether a result is wrong
_DONE: Any = None
_STOP: Any = None


def _start_process(done: Any, stop: Any, threads: int) -> None:
    global _DONE, _STOP
    _DONE, _STOP = done, stop
    torch.set_num_threads(threads)


def _run_share(settings: Settings, job: int) -> Outcome:
    def count_done(done: int, _: float) -> None:
        _DONE[job] = done

    return run(settings, count_done, _STOP.is_set)


def _is_over(settings: Settings, done: int, seconds: float) -> bool:
    if settings.limit is not None and done >= settings.limit:
        return True
    return settings.minutes is not None and seconds >= 60 * settings.minutes


def _check(case: Case, number: int, settings: Settings, outcome: Outcome) -> Failure | None:
    tallies = outcome.tallies
    for backend in selection.backends(case.op):
        if settings.backend not in ("", backend):
            continue
        tally = tallies.get((case.op, backend), Tally())
        asked = cast("Backend", backend_for(backend, settings.kernel))
        result = run_case(case, settings.torch_device, asked)
        kernel = settings.kernel
        if settings.record and not kernel and result.unsupported is None:
            kernel = kernel_of(case, settings.torch_device, backend)
        if result.unsupported is not None:
            tally = tally._replace(unsupported=tally.unsupported + 1)
        elif result.error is not None:
            python, _, error = result.error.partition("\n")
            seed, launch = (number, None) if settings.launches is None else (settings.seed, number)
            command = settings.command(case.op, number)
            return Failure(case.op, backend, seed, error, command, python, launch, kernel)
        else:
            tally = tally._replace(correct=tally.correct + 1)
            if settings.record:
                key = (case.op, backend, kernel)
                outcome.kernels[key] = outcome.kernels.get(key, 0) + 1
        tallies[case.op, backend] = tally
    return None


def run_with_progress(settings: Settings) -> Outcome:
    """`run` with a progress bar on stderr; where that is not a terminal, with a line now and then.

    Most of the first minutes are spent on compiling kernels.
    """
    screen = Console(stderr=True)
    check = run if settings.jobs == 1 else run_in_processes
    if not screen.is_terminal:
        return check(settings, _reporter(settings, screen))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        total = settings.limit if settings.minutes is None else 60 * settings.minutes
        task = progress.add_task("checking", total=total)

        def advance(done: int, seconds: float) -> None:
            completed = done if settings.minutes is None else seconds
            progress.update(task, completed=completed, description=f"{done} {settings.noun}")

        return check(settings, advance)


def _reporter(settings: Settings, screen: Console) -> Callable[[int, float], None]:
    reported = 0.0

    def report(done: int, seconds: float) -> None:
        nonlocal reported
        if seconds - reported >= SECONDS_BETWEEN_LINES:
            reported = seconds
            screen.print(f"{done} {settings.noun} in {seconds:.0f} s", highlight=False)

    return report


def table(outcome: Outcome) -> Table:
    """Counts by op and backend; backends that support no case are left out."""
    title = (
        f"{outcome.settings.torch_device}, seed {outcome.settings.seed}, {outcome.seconds:.0f} s"
    )
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in ("op", "backend"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("correct", "unsupported"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for (op, backend), tally in outcome.tallies.items():
        if tally.correct:
            shown.add_row(op, backend, str(tally.correct), str(tally.unsupported))
    return shown


def summary(outcome: Outcome) -> str:
    """The last lines of the output."""
    failure, settings = outcome.failure, outcome.settings
    if failure is None and not outcome.num_correct:
        return f"Nothing was checked: no backend supports these calls on {settings.torch_device}."
    lines = []
    if failure is not None:
        launch = "" if failure.launch is None else f", launch {failure.launch}"
        where = f"{failure.op} is wrong on {failure.backend}, seed {failure.seed}{launch}"
        lines = [
            f"{where}:\n{failure.error}",
            f"Repeat: {failure.command}\nOr: {failure.python}",
        ]
    if settings.launches is not None:
        failures = "no failure" if failure is None else "1 failure"
        done, seconds = outcome.num_done, outcome.seconds
        launches = "launch" if done == 1 else "launches"
        lines.append(f"{done} {launches} of seed {settings.seed} in {seconds:.1f} s, {failures}.")
    elif failure is None:
        lines.append(f"{counted(outcome.num_correct, 'call')}, all results correct.")
    return "\n".join(lines)


def all_ops(names: Sequence[str], *, launched: bool = False) -> tuple[str, ...]:
    """The named ops, each once. Without names: every op, or every op with launches."""
    return tuple(dict.fromkeys(names)) or tuple(LAUNCHES if launched else KINDS)
