"""One allocator for many threads: no page is handed out twice, none is lost, none is held on."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import sleep
from types import FrameType
from typing import Any

import pytest

from mlakit.cache import pages
from mlakit.cache.pages import OutOfPagesError, PageAllocator, PagedSequence
from tests.cache.page_states import assert_consistent

THREADS = 4
ROUNDS = 6


def yielding_in_pages(frame: FrameType, event: str, arg: object) -> Any:
    """A trace function: let another thread run before every instruction of the allocator."""
    if frame.f_code.co_filename != pages.__file__:
        return None
    frame.f_trace_opcodes = True
    sleep(0)
    return yielding_in_pages


def in_threads(work: Callable[[int], None]) -> None:
    """`work` of a number in each of `THREADS` threads, which take turns all the time."""
    start = Barrier(THREADS)

    def run(number: int) -> None:
        start.wait()
        sys.settrace(yielding_in_pages)
        try:
            work(number)
        finally:
            sys.settrace(None)

    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(run, number) for number in range(THREADS)]:
            done.result()


@pytest.mark.slow
def test_a_page_is_handed_to_one_thread_at_a_time():
    allocator = PageAllocator(2 * THREADS, 4)
    holder: list[int | None] = [None] * allocator.num_pages

    def claim(sequence: PagedSequence, number: int, first: int = 0) -> None:
        for page in sequence.pages[first:]:
            assert holder[page] is None
            holder[page] = number

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(ROUNDS):
            try:
                sequence = allocator.reserve(draw.randint(1, 16))
            except OutOfPagesError:
                continue
            claim(sequence, number)
            try:
                before = len(sequence.pages)
                assert allocator.append(sequence, draw.randint(0, 8)) == []
                claim(sequence, number, before)
            except OutOfPagesError:
                pass
            assert len(sequence.pages) == -(-sequence.length // 4)
            for page in sequence.pages:
                assert holder[page] == number
                holder[page] = None
            allocator.free(sequence)

    in_threads(work)
    assert allocator.num_free_pages == allocator.num_pages
    assert_consistent(allocator)


@pytest.mark.slow
def test_shared_pages_are_counted_by_every_thread():
    """Threads share one prefix, write behind it, and let go of it in any order."""
    allocator = PageAllocator(40, 4)
    prefix = allocator.reserve(14)

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(ROUNDS):
            fork = allocator.fork(prefix, draw.choice([None, 5, 8, 14]))
            try:
                copies = allocator.append_batch([fork], [draw.randint(0, 6)])
            except OutOfPagesError:
                copies = []
            assert all(copied.target in fork.pages for copied in copies)
            assert all(copied.target not in prefix.pages for copied in copies)
            (row,) = allocator.page_table([fork]).tolist()
            assert row == list(fork.pages)
            allocator.truncate(fork, draw.randint(0, fork.length))
            allocator.free(fork)

    in_threads(work)
    assert_consistent(allocator)
    assert prefix.length == 14
    assert allocator.num_free_pages == 40 - 4
    allocator.free(prefix)
    assert allocator.num_free_pages == 40


@pytest.mark.slow
def test_one_sequence_may_be_grown_by_many_threads():
    allocator = PageAllocator(THREADS * ROUNDS, 1)
    sequence = allocator.reserve(0)
    in_threads(lambda _: [allocator.append(sequence, 1) for _ in range(ROUNDS)])
    assert sequence.length == THREADS * ROUNDS
    assert Counter(sequence.pages).most_common(1)[0][1] == 1
    assert_consistent(allocator)


def test_a_sequence_is_freed_once():
    """Of threads that free the same sequence one succeeds; the others get an error."""
    for _ in range(2):
        allocator = PageAllocator(2, 4)
        sequence = allocator.reserve(8)
        told = []

        def work(number: int, allocator=allocator, sequence=sequence, told=told) -> None:
            try:
                allocator.free(sequence)
            except ValueError as error:
                told.append(str(error))

        in_threads(work)
        assert told == ["PageAllocator.free: sequence must be live, got a freed sequence"] * (
            THREADS - 1
        )
        assert allocator.num_free_pages == 2


def pickled(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_a_copied_allocator_works_on_its_own(copied):
    allocator = PageAllocator(8, 4)
    sequences = [allocator.reserve(10)]
    sequences.append(allocator.fork(sequences[0], 5))
    again, (first, second) = copied((allocator, sequences))
    assert (first.pages, second.pages) == tuple(sequence.pages for sequence in sequences)
    (moved,) = again.append(second, 1)
    assert moved.source == first.pages[1]
    again.free(first)
    assert_consistent(again)
    assert_consistent(allocator)
    assert (again.num_free_pages, allocator.num_free_pages) == (6, 5)
