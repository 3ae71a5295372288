"""Deals tests out to parts of equal measured time, so that each part fits one run: `--part 2/3`.

TIMES has the seconds of every test function, as measured on a GPU. Tests of one file stay together
as far as parts can be balanced, because they share compiled kernels: a file is cut between its
functions, and a function between its parameters, only where it is longer than half of a part.

Tests marked `large` take turns at the memory of the GPU: LARGE_AT_ONCE of them run at a time, one
with `turns=3` in place of three. They are dealt out by themselves, so that every part has its
share, and come first, on as many workers. The other workers begin with the slowest tests. One that
is not measured is marked `long` if it may take a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import ceil
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from tests.paths import ROOT

TIMES = ROOT / "docs" / "data" / "gpu-test-times.json"
UNMEASURED = 1.0  # seconds of a test where nothing at all is measured
LONG = 60.0  # seconds of a test that is marked `long` and not measured
SLOW = 5.0  # seconds from which a test is among those that begin
LARGE_AT_ONCE = 4
WORKERS = 14  # of `make test-gpu`


class Part(NamedTuple):
    """The part `number`, from 1, of `count`."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


class Measured(NamedTuple):
    """The seconds that `tests` tests of one function took together."""

    seconds: float
    tests: int

    @property
    def per_test(self) -> float:
        return self.seconds / self.tests


class Piece(NamedTuple):
    """Tests that run in the same part, and the seconds that they are expected to take."""

    tests: list[str]
    seconds: float


def parse_part(text: str) -> Part:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"--part must be like 1/4, the first of four, got {text}")
    return Part(int(number), int(count))


def function_of(test: str) -> str:
    return test.partition("[")[0]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read_times(path: Path = TIMES) -> dict[str, Measured]:
    """Return what was measured of each test function, which is nothing where no file is."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return {function: Measured(*measured) for function, measured in content.items()}


def write_times(path: Path, times: Mapping[str, Measured]) -> None:
    """Write one line for each function, sorted: [seconds of its tests, their number]."""
    lines = [
        f"{json.dumps(function)}: {json.dumps([round(seconds, 2), tests])}"
        for function, (seconds, tests) in sorted(times.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def add_up(tests: Iterable[tuple[str, float]]) -> dict[str, Measured]:
    """Add up the seconds of each test by function."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for test, each in tests:
        seconds[function_of(test)].append(each)
    return {function: Measured(sum(each), len(each)) for function, each in seconds.items()}


def expected_seconds(
    times: Mapping[str, Measured], long: Container[str] = ()
) -> Callable[[str], float]:
    """Return the function that gives the expected seconds of one test.

    A function that is not measured takes the median of its file's, or of all; `long` tests LONG.
    """
    by_file: dict[str, list[float]] = defaultdict(list)
    for function, each in times.items():
        by_file[file_of(function)].append(each.per_test)
    usual = {file: median(each) for file, each in by_file.items()}
    of_others = median(each.per_test for each in times.values()) if times else UNMEASURED

    def seconds(test: str) -> float:
        measured = times.get(function_of(test))
        if measured is not None:
            return measured.per_test
        return LONG if test in long else usual.get(file_of(test), of_others)

    return seconds


def deal(
    tests: Sequence[str], seconds: Callable[[str], float], count: int, large: Container[str] = ()
) -> dict[str, int]:
    """Return the number of the part, from 1 to `count`, that each test runs in."""
    parts: dict[str, int] = {}
    for is_large in (False, True):
        group = [test for test in tests if (test in large) == is_large]
        # large tests are spread over all parts
        parts.update(_deal(group, seconds, count, share=1 / 10 if is_large else 1 / 2))
    return {test: parts[test] for test in tests}


def _deal(
    tests: Sequence[str], seconds: Callable[[str], float], count: int, share: float
) -> dict[str, int]:
    """Deal pieces, each at most a `share` of a part, longest first to the part that has least."""
    pieces = _cut(tests, seconds, limit=share * sum(map(seconds, tests)) / count)
    loads = [0.0] * count
    parts: dict[str, int] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.seconds):
        lightest = loads.index(min(loads))
        loads[lightest] += piece.seconds
        parts.update(dict.fromkeys(piece.tests, lightest + 1))
    return parts


def arrange(
    tests: Sequence[str], seconds: Callable[[str], float], large: Container[str], workers: int
) -> list[str]:
    """Return the tests in the order in which `workers` workers are to run them.

    The scheduler `worksteal` cuts the list into as many pieces of equal length as there are
    workers; a worker that is done takes tests from the end of another's piece. LARGE_AT_ONCE
    workers begin with the large tests, the others with those that take SLOW seconds or more, the
    slowest first. The tests of a file are shuffled in each piece, always alike: workers with tests
    of the same file would otherwise all compile its first kernel, then all its second, where each
    can compile another and find the rest in Triton's cache.
    """
    slowest = sorted(tests, key=lambda test: -seconds(test))
    listed = [test for test in slowest if test in large]
    slow = [test for test in slowest if test not in large and seconds(test) >= SLOW]
    begun = {*listed, *slow}
    others = [test for test in tests if test not in begun]
    at_once = min(workers, LARGE_AT_ONCE)
    # where all workers have large tests, all have slow ones after them
    starts = [slow[worker::workers] for worker in range(workers)]
    if workers > at_once:
        starts = [slow[worker :: workers - at_once] for worker in range(workers - at_once)]
        starts = [[]] * at_once + starts
    ordered: list[str] = []
    end = 0
    for worker in range(workers):
        end += (len(tests) - end) // (workers - worker)
        if worker < at_once:
            ordered += listed[worker::at_once]
        ordered += starts[worker]
        taken = max(end - len(ordered), 0)
        ordered += _shuffled_by_file(others[:taken], seed=worker)
        others = others[taken:]
    return ordered + others


def _shuffled_by_file(tests: list[str], seed: int) -> Iterator[str]:
    draw = Random(seed)
    for _, own in groupby(tests, key=file_of):
        shuffled = list(own)
        draw.shuffle(shuffled)
        yield from shuffled


def digest_of_deal(parts: Mapping[str, int]) -> str:
    """Return a digest that is the same for all runs that deal the same tests out alike."""
    lines = "\n".join(f"{part} {test}" for test, part in sorted(parts.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _cut(tests: Sequence[str], seconds: Callable[[str], float], limit: float) -> Iterator[Piece]:
    """Cut the tests of each file into pieces of at most `limit` seconds."""
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for test in tests:
        files[file_of(test)][function_of(test)].append(test)
    for functions in files.values():
        piece = Piece([], 0.0)
        for own in functions.values():
            length = sum(map(seconds, own))
            if piece.tests and piece.seconds + length > limit:
                yield piece
                piece = Piece([], 0.0)
            if length > limit:
                yield from _cut_function(own, length, limit)
            else:
                piece = Piece(piece.tests + own, piece.seconds + length)
        if piece.tests:
            yield piece


def _cut_function(tests: list[str], seconds: float, limit: float) -> Iterator[Piece]:
    size = ceil(len(tests) / ceil(seconds / limit))
    for start in range(0, len(tests), size):
        chunk = tests[start : start + size]
        yield Piece(chunk, seconds * len(chunk) / len(tests))
