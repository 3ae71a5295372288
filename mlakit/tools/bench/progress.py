"""Progress bars of a suite: one for the suite with the remaining time, one for the workload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

STEPS = 100  # steps of the suite's bar per workload: it moves while a workload is measured


class SuiteProgress:
    """Moves the bars."""

    def __init__(self, bars: Progress, suite: TaskID, workload: TaskID) -> None:
        self._bars, self._suite, self._workload = bars, suite, workload
        self._finished = 0

    def begin_workload(self, name: str) -> None:
        self._bars.update(self._workload, description=name, completed=0, total=None)

    def finish_round(self, done: int, rounds: int) -> None:
        self._bars.update(self._workload, completed=done, total=rounds)
        self._bars.update(self._suite, completed=STEPS * (self._finished + done / rounds))

    def finish_workload(self) -> None:
        self._finished += 1
        self._bars.update(self._suite, completed=STEPS * self._finished)


@contextmanager
def suite_progress(
    suite: str, workloads: int, console: Console | None = None
) -> Iterator[SuiteProgress]:
    bars = progress_bars(console)
    with bars:
        whole = bars.add_task(f"suite {suite}", total=STEPS * workloads)
        yield SuiteProgress(bars, whole, bars.add_task("", total=None))


def progress_bars(console: Console | None = None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )
