"""Which tests are slow, as measured: `--quick` leaves them out, `--measure-slow` finds them anew.

Tests marked `thorough` repeat a code path of others with other numbers, in Triton's interpreter,
which takes seconds for each. Without a GPU they run with `--thorough` only: `make test-all`. Tests
marked `exhaustive` have every combination where others have every pair: with `--thorough` only.

A test function is slow if its tests take more than LIMIT seconds of processor time on average. LIST
has the functions, one on a line. Others are run.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any

import pytest
import torch

from tests.paths import ROOT

LIST = ROOT / "tests" / "slow_tests.txt"
LIMIT = 0.03
MEASURED = 5  # tests of each function, spread over its parameters
SECONDS = "processor seconds"
LEFT_OUT = pytest.StashKey[int]()
THOROUGH = pytest.StashKey[int]()
# of fixtures that several tests share, so that each of them is as slow as the first
_fixture_seconds: dict[str, float] = {}


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("slow tests")
    group.addoption("--quick", action="store_true", help=f"leave out what {LIST.name} lists")
    group.addoption(
        "--thorough", action="store_true", help="also run tests marked thorough or exhaustive"
    )
    group.addoption(
        "--measure-slow",
        action="store_true",
        help=f"run {MEASURED} tests of each function and write {LIST.name}",
    )


def slow_functions() -> frozenset[str]:
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def function_of(nodeid: str) -> str:
    """The test function; its tests in Triton's interpreter, which are slower, count apart."""
    function, _, parameters = nodeid.partition("[")
    return f"{function}[interpreted]" if "interpreted" in parameters else function


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave in `items` what this run is for."""
    if config.getoption("--measure-slow"):
        kept: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            kept[function_of(item.nodeid)].append(item)
        chosen = {
            id(each) for tests in kept.values() for each in tests[:: -(-len(tests) // MEASURED)]
        }
        items[:] = [item for item in items if id(item) in chosen]
    elif config.getoption("--quick"):
        slow = slow_functions()
        left_out = [item for item in items if function_of(item.nodeid) in slow]
        items[:] = [item for item in items if function_of(item.nodeid) not in slow]
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT] = len(left_out)
        if hasattr(config, "workeroutput"):
            config.workeroutput["slow_tests"] = len(left_out)


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


def left_out(config: pytest.Config) -> str:
    count = config.stash.get(LEFT_OUT, 0)
    files = sorted({function.partition("::")[0] for function in slow_functions()})
    return (
        f"slow tests left out: {count} in {len(files)} files ({LIST.name} lists them), "
        "among them kernels in Triton's interpreter, torch.compile, random problems and mutation "
        "tests; make test runs all"
    )


def write_list(reports: Iterable[pytest.TestReport]) -> str:
    """Write the functions that are slow by these reports; what is said of them."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        measured = dict(report.user_properties).get(SECONDS)
        if report.when == "call" and isinstance(measured, float):
            seconds[function_of(report.nodeid)].append(measured)
    slow = sorted(name for name, each in seconds.items() if mean(each) > LIMIT)
    head = f"# Measured by `make slow-tests`: over {LIMIT} s of processor time on average\n"
    LIST.write_text(head + "".join(f"{name}\n" for name in slow), encoding="utf-8")
    return f"{len(slow)} of {len(seconds)} test functions are slow: {LIST.name}"
