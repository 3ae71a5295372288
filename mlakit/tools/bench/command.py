"""Turns the options of `mlakit bench` into suites and runs them; `outputs` writes the reports."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from threading import current_thread, main_thread
from typing import Any

from rich.console import Console

from mlakit.tools.bench import (
    GPU_SUITES,
    GRAPH_SUITES,
    ONLY_IF_NAMED,
    STEP_SUITES,
    SUITES,
    WALL_SUITES,
    busy,
    ceilings,
    gpu,
    gpu_timers,
    peers,
    suite,
)
from mlakit.tools.bench.ceilings import Ceilings
from mlakit.tools.bench.heatmap import heat_maps, heat_table
from mlakit.tools.bench.progress import progress_bars
from mlakit.tools.bench.report import WALL, Report
from mlakit.tools.bench.shapes import Shape
from mlakit.tools.bench.suite import Workload


def checked_mode(mode: str | None, *, host: bool) -> str | None:
    """The timing mode, None if neither option is given. Raises ValueError for an unknown mode."""
    if mode is not None and mode not in gpu_timers.MODES:
        raise ValueError(f"--mode must be one of {', '.join(gpu_timers.MODES)}, got {mode!r}")
    return gpu_timers.HOST if host else mode


@dataclass(frozen=True)
class Settings:
    """What is measured, and how.

    command  the command line, for the report
    only     run only workloads whose name contains this
    mode     one of `gpu_timers.MODES`, or its `HOST`; the suite cpu uses wall-clock time. None:
             graph for the suites in `GRAPH_SUITES`, the wall clock for those in `WALL_SUITES`,
             cold for the others
    busy     number of busy processes next to the suite cpu; 0: none
    """

    suites: Sequence[str]
    command: str
    shape: Shape | None = None
    only: str = ""
    mode: str | None = None
    with_peers: bool = True
    quick: bool = False
    threads: int | None = None
    busy: int = 0


def workloads_of(settings: Settings) -> dict[str, list[Workload]]:
    """The workloads of each suite. Raises ValueError for options that cannot be combined."""
    names = settings.suites or (("cpu",) if settings.busy else _default_suites())
    if settings.busy and tuple(names) != ("cpu",):
        raise ValueError(f"--busy works with suite cpu only, not with {', '.join(names)}")
    found = {}
    for name in names:
        if name not in SUITES:
            raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {name!r}")
        if name in GPU_SUITES and (reason := gpu.why_not()):
            raise ValueError(f"suite {name} {reason}")
        if name.startswith("transformers") and find_spec("transformers") is None:
            raise ValueError(f"suite {name} needs it; pip install 'mlakit[transformers]'")
        workloads = [
            each
            for each in _workloads(name, settings.shape, settings.busy)
            if settings.only in each.name
        ]
        if not workloads:
            raise ValueError(
                f"--only: no workload of suite {name} has {settings.only!r} in its name"
            )
        found[name] = workloads
    return found


def _default_suites() -> tuple[str, ...]:
    """All GPU suites except those that are run only if named."""
    if gpu.why_not():
        return ("cpu",)
    return tuple(name for name in GPU_SUITES if name not in ONLY_IF_NAMED)


def _workloads(name: str, shape: Shape | None, busy: int) -> Sequence[Workload]:
    own = "steps" if name in STEP_SUITES else "busy" if busy else name.replace("-", "_")
    module: Any = import_module(f"mlakit.tools.bench.{own}")
    if shape is None:
        known: Sequence[Workload] = module.WORKLOADS
        if name in STEP_SUITES:
            known = module.WORKLOADS[name]
        return known
    if name == "cpu":
        raise ValueError("suite cpu does not take --shape")
    found: Sequence[Workload]
    found = module.of_shape(*([name] if name in STEP_SUITES else []), shape)
    return found


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM, by which batch systems end a job, is the same as Ctrl-C here."""
    if current_thread() is not main_thread():  # Python lets no other thread handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(settings: Settings, workloads: dict[str, list[Workload]]) -> list[Report] | None:
    """Measure suite by suite; None, after an error message, on a wrong result.

    Ctrl-C and SIGTERM end the run early; the last report has what was measured until then.
    """
    with _interrupted_by_sigterm():
        return _run(settings, workloads)


def _run(settings: Settings, workloads: dict[str, list[Workload]]) -> list[Report] | None:
    if settings.busy:
        loaded = busy.run(
            workloads["cpu"],
            settings.busy,
            command=settings.command,
            quick=settings.quick,
            threads=settings.threads,
        )
        return None if loaded is None else [loaded]
    reports: list[Report] = []
    found: Ceilings | None = None
    with_peers = settings.with_peers and any(name in GPU_SUITES for name in workloads)
    builds = peers.origins() if with_peers else {}
    for name, own in workloads.items():
        on_gpu = name in GPU_SUITES
        if on_gpu and found is None and not settings.quick and settings.mode != gpu_timers.HOST:
            found = _measured_ceilings()
        report = suite.run(
            name,
            own,
            command=settings.command,
            quick=settings.quick,
            threads=settings.threads,
            mode=_mode_of(name, settings.mode) if on_gpu else WALL,
            peers_of=peers.baselines if with_peers and on_gpu else None,
            peer_builds=builds if on_gpu else None,
            ceilings=found if on_gpu else None,
        )
        if report is None:
            return None
        for heat in heat_maps(report.rows):
            Console().print(heat_table(heat))
        reports.append(report)
        if report.is_interrupted:
            break
    return reports


def _mode_of(suite: str, given: str | None) -> str:
    if given is not None:
        return given
    if suite in WALL_SUITES:
        return WALL
    return "graph" if suite in GRAPH_SUITES else "cold"


def _measured_ceilings() -> Ceilings:
    with progress_bars() as bars:
        task = bars.add_task("ceilings", total=len(ceilings.STEPS))
        found = ceilings.measure(gpu_timers.timer_for("cold"), lambda: bars.advance(task))
    Console().print(str(found), highlight=False)
    return found
