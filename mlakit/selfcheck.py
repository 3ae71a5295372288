"""`mlakit check`: random calls of the ops on this device, every result held to the oracle."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import NamedTuple

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mlakit import dispatch
from mlakit.checks import UnsupportedError
from mlakit.workloads import CASES, Case
from mlakit.workloads.draw import SeededDraw, draw_case
from mlakit.workloads.draw_launches import LAUNCHES, draw_launch

KINDS: dict[str, type[Case]] = {case.op: case for case in CASES}
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_MINUTES = 1.0


@dataclass(frozen=True)
class Settings:
    """What is checked, and for how long: until `minutes` are over or `count` cases are done.

    launches  instead of cases: so many launches of few compiled kernels, from number `first` on
    calls     of each launch, all of which must give the same bits; None: one, or three at times
    """

    ops: tuple[str, ...]
    seed: int
    device: str = "auto"  # as asked for
    backend: str = ""  # "": each that takes the problem
    minutes: float | None = DEFAULT_MINUTES
    count: int | None = None
    any_widths: bool = False
    launches: int | None = None
    first: int = 0
    calls: int | None = None

    @property
    def place(self) -> str:
        """The device itself."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def limit(self) -> int | None:
        """How many cases or launches there are at most."""
        return self.count if self.launches is None else self.launches

    @property
    def noun(self) -> str:
        return "cases" if self.launches is None else "launches"

    def command(self, op: str, number: int) -> str:
        """The command that checks one case, or one launch, again."""
        words = ["mlakit", "check", "--op", op]
        if self.launches is None:
            words += ["--seed", str(number), "--count", "1"]
        else:
            words += ["--seed", str(self.seed), "--launches", "1", "--first", str(number)]
            words += ["--calls", str(self.calls)] if self.calls else []
        words += ["--device", self.device] if self.device != "auto" else []
        words += ["--backend", self.backend] if self.backend else []
        words += ["--any-widths"] if self.any_widths else []
        return shlex.join(words)


class Tally(NamedTuple):
    """How many cases of one op a backend got right, and how many it refused."""

    right: int = 0
    refused: int = 0


@dataclass(frozen=True)
class Miss:
    """A wrong result."""

    op: str
    backend: str
    seed: int
    error: str
    command: str  # checks the case again
    python: str  # the same without the drawing
    launch: int | None = None  # its number, where launches were asked for


@dataclass
class Outcome:
    settings: Settings
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)  # by op and backend
    seconds: float = 0.0
    miss: Miss | None = None
    num_done: int = 0  # cases or launches, a wrong one included

    @property
    def num_right(self) -> int:
        return sum(tally.right for tally in self.tallies.values())

    @property
    def is_well(self) -> bool:
        """Was something right, and nothing wrong?"""
        return self.miss is None and self.num_right > 0

    def as_json(self) -> dict[str, object]:
        return {
            "device": self.settings.place,
            "seed": self.settings.seed,
            "first": self.settings.first,
            "launches": None if self.settings.launches is None else self.num_done,
            "seconds": round(self.seconds, 3),
            "checked": [
                {"op": op, "backend": backend, **tally._asdict()}
                for (op, backend), tally in self.tallies.items()
            ],
            "miss": None if self.miss is None else vars(self.miss),
        }


def check_settings(settings: Settings) -> None:
    """Raise ValueError, naming the argument, where settings make no sense here."""
    for op in settings.ops:
        if op not in KINDS:
            raise ValueError(f"op must be of {', '.join(KINDS)}, got {op!r}")
    if settings.device not in DEVICES:
        raise ValueError(f"device must be of {', '.join(DEVICES)}, got {settings.device!r}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs a CUDA device, and torch sees none")
    if settings.backend not in ("", *dispatch.BACKENDS):
        known = ", ".join(dispatch.BACKENDS)
        raise ValueError(f"backend must be of {known}, got {settings.backend!r}")
    if settings.minutes is not None and not settings.minutes > 0:
        raise ValueError(f"minutes must be more than 0, got {settings.minutes:g}")
    _check_launches(settings)


def _check_launches(settings: Settings) -> None:
    if settings.launches is None:
        for name, value in (("first", settings.first), ("calls", settings.calls)):
            if value:
                raise ValueError(f"{name} is an option of launches, and needs launches")
        return
    for name, value in (("count", settings.count), ("any_widths", settings.any_widths)):
        if value:
            raise ValueError(f"launches are of fixed configurations, so {name} has no meaning")
    for op in settings.ops:
        if op not in LAUNCHES:
            raise ValueError(f"launches are made of {', '.join(LAUNCHES)} only, got op {op!r}")


def random_cases(settings: Settings) -> Iterator[tuple[int, Case]]:
    """(seed, case) without end: for every seed one case of each op."""
    for seed in count(settings.seed):
        for op in settings.ops:
            draw = SeededDraw(f"{op} {seed}", model_widths=not settings.any_widths)
            yield seed, draw_case(draw, KINDS[op], settings.backend)


def random_launches(settings: Settings) -> Iterator[tuple[int, Case]]:
    """(number, launch) without end: for every number one launch of each op."""
    for number in count(settings.first):
        for op in settings.ops:
            draw = SeededDraw(f"{op} {settings.seed} launch {number}")
            yield number, draw_launch(draw, op, settings.backend, settings.place, settings.calls)


def run(
    settings: Settings, after_each: Callable[[int, float], None] = lambda done, seconds: None
) -> Outcome:
    """Check until time or count is over, or a result is wrong.

    after_each  is told how many cases or launches are done, and after how many seconds
    """
    outcome = Outcome(settings)
    start = perf_counter()
    drawn = random_cases(settings) if settings.launches is None else random_launches(settings)
    for done, (number, case) in enumerate(drawn):
        outcome.num_done, outcome.seconds = done, perf_counter() - start
        after_each(done, outcome.seconds)
        if _is_over(settings, done, outcome.seconds):
            break
        outcome.miss = _check(case, number, settings, outcome.tallies)
        if outcome.miss is not None:
            outcome.num_done, outcome.seconds = done + 1, perf_counter() - start
            break
    return outcome


def _is_over(settings: Settings, done: int, seconds: float) -> bool:
    if settings.limit is not None and done >= settings.limit:
        return True
    return settings.minutes is not None and seconds >= 60 * settings.minutes


def _check(
    case: Case, number: int, settings: Settings, tallies: dict[tuple[str, str], Tally]
) -> Miss | None:
    for backend in dispatch.backends(case.op):
        if settings.backend not in ("", backend):
            continue
        tally = tallies.get((case.op, backend), Tally())
        try:
            case.run(settings.place, backend)
        except UnsupportedError:
            tally = tally._replace(refused=tally.refused + 1)
        except AssertionError as wrong:
            python, _, error = str(wrong).partition("\n")
            seed, launch = (number, None) if settings.launches is None else (settings.seed, number)
            command = settings.command(case.op, number)
            return Miss(case.op, backend, seed, error, command, python, launch)
        else:
            tally = tally._replace(right=tally.right + 1)
        tallies[case.op, backend] = tally
    return None


def run_with_progress(settings: Settings) -> Outcome:
    """`run`, with a bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = settings.limit if settings.minutes is None else 60 * settings.minutes
        task = progress.add_task("checking", total=total)

        def advance(done: int, seconds: float) -> None:
            completed = done if settings.minutes is None else seconds
            progress.update(task, completed=completed, description=f"{done} {settings.noun}")

        return run(settings, advance)


def table(outcome: Outcome) -> Table:
    """What was right, by op and backend; backends that refused everything are left out."""
    title = f"{outcome.settings.place}, seed {outcome.settings.seed}, {outcome.seconds:.0f} s"
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in ("op", "backend"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("right", "refused"):
        shown.add_column(heading, justify="right")
    for (op, backend), tally in outcome.tallies.items():
        if tally.right:
            shown.add_row(op, backend, str(tally.right), str(tally.refused))
    return shown


def verdict(outcome: Outcome) -> str:
    """The last lines for people."""
    miss, settings = outcome.miss, outcome.settings
    if miss is None and not outcome.num_right:
        return f"Nothing was checked: no backend takes these calls on {settings.place}."
    lines = []
    if miss is not None:
        launch = "" if miss.launch is None else f", launch {miss.launch}"
        lines = [
            f"{miss.op} is wrong on {miss.backend}, seed {miss.seed}{launch}:\n{miss.error}",
            f"Again: {miss.command}\nOr: {miss.python}",
        ]
    if settings.launches is not None:
        misses = "no miss" if miss is None else "1 miss"
        done, seconds = outcome.num_done, outcome.seconds
        lines.append(f"{done} launches of seed {settings.seed} in {seconds:.1f} s, {misses}.")
    elif miss is None:
        lines.append(f"{outcome.num_right} calls, every result right.")
    return "\n".join(lines)


def all_ops(names: Sequence[str], *, launched: bool = False) -> tuple[str, ...]:
    """The ops named, each once; every op where none is, or every one that can be `launched`."""
    return tuple(dict.fromkeys(names)) or tuple(LAUNCHES if launched else KINDS)
