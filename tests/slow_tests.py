"""Slow and thorough tests: which of them runs leave out, and where markers `slow` are wrong.

A test function marked `slow` takes more than LIMIT seconds of processor time on average. Tests in
Triton's interpreter are slow, too. `make quick` leaves them out; `make slow-tests` measures, and
names the functions whose marker is wrong.

Tests marked `thorough` repeat a code path of others with other numbers, in Triton's interpreter,
which takes seconds for each. Without a GPU they run with `--thorough` only: `make test-all`. Tests
marked `exhaustive` have every combination where others have every pair: with `--thorough` only.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any

import pytest
import torch

LIMIT = 0.03
MARGIN = 2  # a marker is wrong where the seconds are beyond LIMIT by this factor
MEASURED = 5  # tests of each function, spread over its parameters
SECONDS = "processor seconds"
THOROUGH = pytest.StashKey[int]()
# of fixtures that several tests share, so that each of them is as slow as the first
_fixture_seconds: dict[str, float] = {}


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("slow tests")
    group.addoption(
        "--thorough", action="store_true", help="also run tests marked thorough or exhaustive"
    )
    group.addoption(
        "--measure-slow",
        action="store_true",
        help=f"run {MEASURED} tests of each function and name wrong markers `slow`",
    )


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def select_measured(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave in `items` the tests that `--measure-slow` measures; the interpreter is always slow."""
    if not config.getoption("--measure-slow"):
        return
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "interpreted" not in item.nodeid:
            functions[function_of(item.nodeid)].append(item)
    items[:] = [
        each for tests in functions.values() for each in tests[:: -(-len(tests) // MEASURED)]
    ]


def leave_out_thorough(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave marked tests to `--thorough`; on a GPU those marked `thorough` are quick and run."""
    if config.getoption("--thorough"):
        return
    marks = ("exhaustive",) if torch.cuda.is_available() else ("exhaustive", "thorough")

    def is_left_out(item: pytest.Item) -> bool:
        return any(item.get_closest_marker(mark) for mark in marks)

    left_out = [item for item in items if is_left_out(item)]
    items[:] = [item for item in items if not is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    config.stash[THOROUGH] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["thorough_tests"] = len(left_out)


def processor_seconds() -> float:
    """Of this process and of those that it waited for."""
    return sum(os.times()[:4])


def measure_fixture(fixture: pytest.FixtureDef[Any]) -> Iterator[None]:
    started = processor_seconds()
    yield
    if fixture.scope != "function":
        _fixture_seconds[fixture.baseid + fixture.argname] = processor_seconds() - started


def measure_call(item: pytest.Item) -> Iterator[None]:
    started = processor_seconds()
    yield
    shared = {
        fixture.baseid + name
        for name, fixtures in item._fixtureinfo.name2fixturedefs.items()
        for fixture in fixtures
    }
    seconds = sum(_fixture_seconds.get(each, 0.0) for each in shared)
    item.user_properties.append((SECONDS, processor_seconds() - started + seconds))


def wrong_markers(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Yield the functions that are slow by these reports and not marked, or marked and quick."""
    seconds: dict[str, list[float]] = defaultdict(list)
    marked: dict[str, bool] = {}
    for report in reports:
        measured = dict(report.user_properties).get(SECONDS)
        if report.when == "call" and isinstance(measured, float):
            name = function_of(report.nodeid)
            seconds[name].append(measured)
            marked[name] = "slow" in report.keywords
    for name, each in sorted(seconds.items()):
        if marked[name] and mean(each) < LIMIT / MARGIN:
            yield f"{name} is marked slow and takes {mean(each):.3f} s"
        if not marked[name] and mean(each) > LIMIT * MARGIN:
            yield f"{name} is not marked slow and takes {mean(each):.3f} s"
