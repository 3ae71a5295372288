"""Tests are dealt out to parts of equal time, those of one function together."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import pytest

from tests import gpu_parts
from tests.conftest import turn_of_large_tests
from tests.gpu_parts import (
    LARGE_AT_ONCE,
    Measured,
    Part,
    arrange,
    deal,
    digest_of_deal,
    expected_seconds,
    parse_part,
)
from tests.paths import ROOT


def ids_of(function: str, count: int) -> list[str]:
    return [f"{function}[{number}]" for number in range(count)]


# seconds of a test, number of tests
FUNCTIONS = {
    "a.py::test_long": (10.0, 2),
    "a.py::test_many": (0.5, 60),
    "b.py::test_some": (1.0, 12),
    "b.py::test_short": (0.1, 4),
    "c.py::test_huge": (4.0, 50),
    "d.py::test_one": (3.0, 1),
}
TESTS = [test for name, (_, count) in FUNCTIONS.items() for test in ids_of(name, count)]
TIMES = {
    name: Measured(seconds * count, tests=count) for name, (seconds, count) in FUNCTIONS.items()
}


SECONDS = expected_seconds(TIMES)


def load(parts: dict[str, int], number: int) -> float:
    functions = [gpu_parts.function_of(test) for test, part in parts.items() if part == number]
    return sum(FUNCTIONS[function][0] for function in functions)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_test_is_in_one_part_and_parts_are_equally_long(count):
    parts = deal(TESTS, SECONDS, count)
    assert set(parts) == set(TESTS)
    assert set(parts.values()) == set(range(1, count + 1))
    loads = [load(parts, number) for number in range(1, count + 1)]
    assert max(loads) <= 1.25 * sum(loads) / count


def test_only_a_function_longer_than_half_of_a_part_is_cut():
    parts = deal(TESTS, SECONDS, 3)
    spread = {
        name: len({parts[test] for test in ids_of(name, count)})
        for name, (_, count) in FUNCTIONS.items()
    }
    assert spread.pop("c.py::test_huge") > 1
    assert set(spread.values()) == {1}


def test_a_short_file_stays_together():
    parts = deal(TESTS, SECONDS, 4)
    assert len({part for test, part in parts.items() if test.startswith("b.py")}) == 1


def test_a_function_without_a_time_takes_the_median_of_its_file_or_of_all():
    times = {"a::x": (1.0, 1), "a::y": (6.0, 2), "a::z": (500.0, 5), "b::x": (0.5, 1)}
    measured = {function: Measured(*each) for function, each in times.items()}
    seconds = expected_seconds(measured, long={"a::long", "a::x", "c::long[1]"})
    assert [seconds(test) for test in ("a::y[1]", "a::new[2]", "b::new")] == [3.0, 3.0, 0.5]
    assert seconds("c::new") == 2.0
    assert [seconds(test) for test in ("a::long", "c::long[1]", "a::x")] == [60.0, 60.0, 1.0]
    assert expected_seconds({})("a::new") == gpu_parts.UNMEASURED


def test_every_part_has_its_share_of_large_tests():
    large = {f"c.py::test_huge[{number}]" for number in range(12)}
    parts = deal(TESTS, SECONDS, 4, large)
    assert set(parts) == set(TESTS)
    assert Counter(parts[test] for test in large) == {1: 3, 2: 3, 3: 3, 4: 3}


@pytest.mark.parametrize("workers", [1, 3, 14])
def test_some_workers_begin_with_the_large_tests(workers):
    tests = ids_of("a::x", 30) + ids_of("a::large", 7) + ids_of("a::y", 33)
    large = set(ids_of("a::large", 7))
    ordered = arrange(tests, expected_seconds({}), large, workers)
    assert sorted(ordered) == sorted(tests)
    begin = [len(tests) * worker // workers for worker in range(min(workers, LARGE_AT_ONCE))]
    assert large.issuperset(ordered[first] for first in begin)
    if workers == 14:
        at = [ordered.index(test) for test in sorted(large)]
        assert sorted(at) == [0, 1, 5, 6, 10, 11, 15]


@pytest.mark.parametrize("workers", [1, 4, 6])
def test_the_slowest_tests_begin(workers):
    """Each worker begins with some; beside workers with large tests, those without have them."""
    slow = {f"b::slow[{number}]": 10.0 + number for number in range(8)}
    large = {f"b::large[{number}]": 20.0 + number for number in range(4)}
    tests = [*ids_of("a::x", 30), *slow, *large, *ids_of("c::x", 30)]
    ordered = arrange(tests, lambda test: {**slow, **large}.get(test, 0.1), large, workers)
    assert sorted(ordered) == sorted(tests)
    ends = [len(tests) * worker // workers for worker in range(workers + 1)]
    pieces = [ordered[first:end] for first, end in pairwise(ends)]
    if workers == 6:
        assert [piece[0] for piece in pieces] == [
            *(f"b::large[{number}]" for number in (3, 2, 1, 0)),
            *("b::slow[7]", "b::slow[6]"),
        ]
        assert pieces[4][:4] == [f"b::slow[{number}]" for number in (7, 5, 3, 1)]
    for piece in pieces:
        begun = [test in slow or test in large for test in piece]
        assert begun == sorted(begun, reverse=True)


def test_the_tests_of_a_file_begin_with_different_ones_in_each_worker():
    """Kernels follow the parameters, so workers in the same order compile the same ones at once."""
    tests = [
        f"{file}.py::{function}[{heads}]"
        for file in ("a", "b")
        for function in ("test_x", "test_y", "test_z")
        for heads in (8, 16, 32, 128)
    ]
    seconds = expected_seconds({})
    ordered = arrange(tests, seconds, (), 6)
    assert ordered == arrange(tests, seconds, (), 6)
    pieces = [ordered[start : start + 4] for start in range(0, 24, 4)]
    assert [sorted(piece) for piece in pieces] == [
        sorted(tests[start : start + 4]) for start in range(0, 24, 4)
    ]
    assert len({piece[0].partition("[")[2] for piece in pieces}) > 1
    halves = arrange(tests, seconds, (), 1)
    assert [test[0] for test in halves] == ["a"] * 12 + ["b"] * 12, "files stay together"


def test_runs_that_deal_alike_have_the_same_digest():
    digests = {
        digest_of_deal(deal(tests, expected_seconds(times), count))
        for tests, times, count in (
            (TESTS, TIMES, 3),
            (TESTS, TIMES, 4),
            (TESTS, {}, 3),
            (TESTS[1:], TIMES, 3),
        )
    }
    assert len(digests) == 4
    assert digest_of_deal(deal(TESTS, SECONDS, 3)) == digest_of_deal(deal(TESTS, SECONDS, 3))


def test_times_are_written_and_read(tmp_path):
    path = tmp_path / "times.json"
    assert gpu_parts.read_times(path) == {}
    times = gpu_parts.add_up([("b.py::test[x]", 1.25), ("a.py::test", 0.5), ("b.py::test[y]", 2.0)])
    gpu_parts.write_times(path, times)
    lines = ["{", '"a.py::test": [0.5, 1],', '"b.py::test": [3.25, 2]', "}"]
    assert path.read_text().splitlines() == lines
    assert gpu_parts.read_times(path) == times
    assert times["b.py::test"].per_test == 1.625


def test_a_part_is_read():
    assert parse_part("2/4") == Part(2, 4)
    for wrong in ("0/4", "5/4", "2", "2/", "x/4", "-1/4", "1/4/2"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"like 1/4.*got {wrong}"):
            parse_part(wrong)


@pytest.mark.slow
def test_pytest_runs_the_tests_of_a_part(tmp_path):
    """All parts together run everything once, of what -m and -k leave."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = fast\n")
    (tmp_path / "conftest.py").write_text(
        "from tests import gpu_session\n"
        "pytest_addoption = gpu_session.add_options\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(gpu_session)\n"
    )
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.fast\n@pytest.mark.parametrize('case', range(5))\ndef test_a(case): pass\n"
        "@pytest.mark.fast\n@pytest.mark.parametrize('case', range(4))\ndef test_b(case): pass\n"
        "def test_slow(): pass\n"
    )
    listed = [
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "fast", "--part", part],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for part in ("1/2", "2/2")
    ]
    collected = [re.findall(r"test_some.py::(\S+)", each) for each in listed]
    assert sorted(collected[0] + collected[1]) == [*ids_of("test_a", 5), *ids_of("test_b", 4)]
    assert sorted(map(len, collected)) == [4, 5]


def test_a_large_test_with_several_turns_waits_for_all_of_them(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    began, order = threading.Event(), []

    def run(turns: int) -> None:
        began.set()
        with turn_of_large_tests(turns):
            order.append(turns)

    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        first.enter_context(turn_of_large_tests())
        stack.enter_context(turn_of_large_tests(turns=LARGE_AT_ONCE - 2))
        thread = threading.Thread(target=run, args=[2])
        thread.start()
        began.wait()
        with pytest.raises(AssertionError):  # one turn is left
            wait_for(lambda: order, seconds=0.3)
        first.close()
        wait_for(lambda: order, seconds=10)
        thread.join()
    assert order == [2]


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
