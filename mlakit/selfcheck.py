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

KINDS: dict[str, type[Case]] = {case.op: case for case in CASES}
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_MINUTES = 1.0


@dataclass(frozen=True)
class Settings:
    """What is checked, and for how long: until `minutes` are over or `count` cases are done."""

    ops: tuple[str, ...]
    seed: int
    device: str = "auto"  # as asked for
    backend: str = ""  # "": each that takes the problem
    minutes: float | None = DEFAULT_MINUTES
    count: int | None = None
    any_widths: bool = False

    @property
    def place(self) -> str:
        """The device itself."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def command(self, op: str, seed: int) -> str:
        """The command that checks one case again."""
        words = ["mlakit", "check", "--op", op, "--seed", str(seed), "--count", "1"]
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


@dataclass
class Outcome:
    settings: Settings
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)  # by op and backend
    seconds: float = 0.0
    miss: Miss | None = None

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


def random_cases(settings: Settings) -> Iterator[tuple[int, Case]]:
    """(seed, case) without end: for every seed one case of each op."""
    for seed in count(settings.seed):
        for op in settings.ops:
            draw = SeededDraw(f"{op} {seed}", model_widths=not settings.any_widths)
            yield seed, draw_case(draw, KINDS[op], settings.backend)


def run(
    settings: Settings, after_each: Callable[[int, float], None] = lambda done, seconds: None
) -> Outcome:
    """Check until time or count is over, or a result is wrong.

    after_each  is told how many cases are done, and after how many seconds
    """
    outcome = Outcome(settings)
    start = perf_counter()
    for done, (seed, case) in enumerate(random_cases(settings)):
        outcome.seconds = perf_counter() - start
        after_each(done, outcome.seconds)
        if _is_over(settings, done, outcome.seconds):
            break
        outcome.miss = _check(case, seed, settings, outcome.tallies)
        if outcome.miss is not None:
            outcome.seconds = perf_counter() - start
            break
    return outcome


def _is_over(settings: Settings, done: int, seconds: float) -> bool:
    if settings.count is not None and done >= settings.count:
        return True
    return settings.minutes is not None and seconds >= 60 * settings.minutes


def _check(
    case: Case, seed: int, settings: Settings, tallies: dict[tuple[str, str], Tally]
) -> Miss | None:
    for spec in dispatch.specs(case.op):
        if settings.backend not in ("", spec.backend):
            continue
        tally = tallies.get((case.op, spec.backend), Tally())
        try:
            case.run(settings.place, spec.backend)
        except UnsupportedError:
            tally = tally._replace(refused=tally.refused + 1)
        except AssertionError as wrong:
            python, _, error = str(wrong).partition("\n")
            command = settings.command(case.op, seed)
            return Miss(case.op, spec.backend, seed, error, command, python)
        else:
            tally = tally._replace(right=tally.right + 1)
        tallies[case.op, spec.backend] = tally
    return None


def run_with_progress(settings: Settings) -> Outcome:
    """`run`, with a bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = settings.count if settings.minutes is None else 60 * settings.minutes
        task = progress.add_task("checking", total=total)

        def advance(done: int, seconds: float) -> None:
            completed = done if settings.minutes is None else seconds
            progress.update(task, completed=completed, description=f"{done} cases")

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
    miss = outcome.miss
    if miss is not None:
        return (
            f"{miss.op} is wrong on {miss.backend}, seed {miss.seed}:\n{miss.error}\n"
            f"Again: {miss.command}\nOr: {miss.python}"
        )
    if not outcome.num_right:
        return f"Nothing was checked: no backend takes these calls on {outcome.settings.place}."
    return f"{outcome.num_right} calls, every result right."


def all_ops(names: Sequence[str]) -> tuple[str, ...]:
    """The ops named, each once; every op where none is."""
    return tuple(dict.fromkeys(names)) or tuple(KINDS)
