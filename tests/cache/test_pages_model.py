"""The page allocator against a model of it, in random orders of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from mlakit.cache.pages import UNUSED_PAGE, OutOfPagesError, PageAllocator, PageCopy, PagedSequence
from tests.cache.page_states import assert_consistent, pages_in_use, raises, state

pytestmark = pytest.mark.slow


@dataclass(eq=False)
class Request:
    """A sequence, the tokens it must read back, and the pages that it dropped or never got."""

    sequence: PagedSequence
    tokens: list[int]
    lost: set[int] = field(default_factory=set)


class AllocatorMachine(RuleBasedStateMachine):
    """An allocator and a cache of rows against plain lists of tokens.

    Rows of free pages are wiped after every rule, so that a page given back too early shows.
    """

    allocator_class: ClassVar[Callable[[int, int], PageAllocator]] = PageAllocator
    has_holes: ClassVar[bool] = False

    live = Bundle("live")
    freed = Bundle("freed")
    amount = st.integers(0, 9)
    few = st.integers(0, 3)
    fraction = st.floats(0, 1)

    @initialize(num_pages=st.integers(1, 9), page_size=st.integers(1, 4))
    def make_pool(self, num_pages: int, page_size: int) -> None:
        self.allocator = self.allocator_class(num_pages, page_size)
        self.rows: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.requests: list[Request] = []
        self.next_token = count()

    def holders(self) -> Counter[int]:
        return Counter(page for r in self.requests for page in pages_in_use(r.sequence))

    def write(self, request: Request, num_tokens: int) -> None:
        size = self.allocator.page_size
        pages = request.sequence.pages
        for _ in range(num_tokens):
            position, token = len(request.tokens), next(self.next_token)
            if position // size not in request.lost:
                self.rows[pages[position // size]][position % size] = token
            request.tokens.append(token)

    def carry_out(self, copies: list[PageCopy]) -> None:
        for source, target, rows in copies:
            self.rows[target][:rows] = self.rows[source][:rows]

    def attempt(self, needed: int, call: Callable[[], object]) -> object | None:
        """The result of `call`, or None where it rightly finds too few pages."""
        if needed <= self.allocator.num_free_pages:
            free = self.allocator.num_free_pages
            result = call()
            assert self.allocator.num_free_pages == free - needed
            return result
        before = state(self.allocator)
        free = f"{self.allocator.num_free_pages} of {self.allocator.num_pages} are free"
        with pytest.raises(OutOfPagesError, match=f": needs {needed} pages, {free}$"):
            call()
        assert state(self.allocator) == before
        return None

    def copies_needed(self, batch: dict[Request, int]) -> int:
        """Of the sequences that write into one page, each copies it unless it is alone by then."""
        holders, copies = self.holders(), 0
        for request, num_tokens in batch.items():
            if num_tokens and len(request.tokens) % self.allocator.page_size:
                page = request.sequence.pages[-1]
                copies += holders[page] > 1
                holders[page] -= 1
        return copies

    def append_all(
        self,
        batch: dict[Request, int],
        call: Callable[[], list[PageCopy]],
        first_kept: dict[Request, int] | None = None,
    ) -> None:
        size, firsts = self.allocator.page_size, first_kept or {}
        num_copies, needed, lost = self.copies_needed(batch), 0, {}
        for request, n in batch.items():
            held, total = (ceil(len(request.tokens) / size), ceil((len(request.tokens) + n) / size))
            new = set(range(held, total))
            lost[request] = {page for page in new if (page + 1) * size <= firsts.get(request, 0)}
            needed += len(new - lost[request])
        needed += num_copies
        copies = self.attempt(needed, call)
        if copies is None:
            return
        assert len(copies) == num_copies
        assert all(0 < copy.rows < size for copy in copies)
        targets = {copy.target for copy in copies}
        assert len(targets) == num_copies
        assert not targets & {copy.source for copy in copies}
        self.carry_out(copies)
        for request, num_tokens in batch.items():
            request.lost |= lost[request]
            self.write(request, num_tokens)

    def track(
        self, sequence: PagedSequence, tokens: list[int], lost: set[int] | None = None
    ) -> Request:
        size = self.allocator.page_size
        kept = {page for page in lost or () if page * size < len(tokens)}
        request = Request(sequence, tokens, kept)
        self.requests.append(request)
        return request

    @rule(target=live, num_tokens=amount)
    def reserve(self, num_tokens):
        needed = ceil(num_tokens / self.allocator.page_size)
        sequence = self.attempt(needed, lambda: self.allocator.reserve(num_tokens))
        if sequence is None:
            return multiple()
        request = self.track(sequence, [])
        self.write(request, num_tokens)
        return request

    @rule(request=live, num_tokens=amount)
    def append(self, request, num_tokens):
        batch = {request: num_tokens}
        self.append_all(batch, lambda: self.allocator.append(request.sequence, num_tokens))

    @rule(requests=st.lists(live, max_size=4, unique=True), data=st.data())
    def append_batch(self, requests, data):
        batch = {request: data.draw(self.amount) for request in requests}
        sequences, first, kept = [request.sequence for request in requests], {}, {}
        if self.has_holes:  # mostly the newest tokens are stored
            first = {r: max(len(r.tokens) + n - data.draw(self.few), 0) for r, n in batch.items()}
            kept = {"first_kept": [*first.values()]}
        self.append_all(
            batch,
            lambda: self.allocator.append_batch(sequences, [*batch.values()], **kept),
            first,
        )

    @rule(request=live, fraction=fraction)
    def truncate(self, request, fraction):
        length = round(fraction * len(request.tokens))
        if self.is_refused("truncate", request, length):
            return
        self.allocator.truncate(request.sequence, length)
        del request.tokens[length:]
        size = self.allocator.page_size
        request.lost = {page for page in request.lost if page * size < length}

    @rule(request=live, fraction=fraction)
    def drop_before(self, request, fraction):
        size, token = self.allocator.page_size, round(fraction * len(request.tokens))
        holders, pages = self.holders(), request.sequence.pages
        gone = set(range(token // size)) - request.lost
        request.lost |= gone
        alone = sum(holders[pages[page]] == 1 for page in gone)
        self.attempt(-alone, lambda: self.allocator.drop_before(request.sequence, token))

    def is_refused(self, method: str, request: Request, length: int) -> bool:
        """Whether a cut is within the dropped tokens, which changes nothing."""
        page = (length - 1) // self.allocator.page_size
        if not 0 < length < len(request.tokens) or page not in request.lost:
            return False
        before = state(self.allocator)
        must = "length must be 0 or within the tokens that are not dropped"
        with raises(f"PageAllocator.{method}: {must}, got {length}"):
            getattr(self.allocator, method)(request.sequence, length)
        assert state(self.allocator) == before
        return True

    @rule(target=live, request=live, fraction=fraction)
    def fork(self, request, fraction):
        length = round(fraction * len(request.tokens))
        if self.is_refused("fork", request, length):
            return multiple()
        sequence = self.attempt(0, lambda: self.allocator.fork(request.sequence, length))
        return self.track(sequence, request.tokens[:length], request.lost)

    @rule(target=live, request=live)
    def fork_whole(self, request):
        sequence = self.attempt(0, lambda: self.allocator.fork(request.sequence))
        return self.track(sequence, request.tokens.copy(), request.lost)

    @rule(target=live, request=live, fraction=fraction)
    def adopt(self, request, fraction):
        length = round(fraction * len(request.tokens))
        if request.lost:  # a page id of -1 is no page
            return multiple()
        pages = request.sequence.pages[: ceil(length / self.allocator.page_size)]
        sequence = self.attempt(0, lambda: self.allocator.adopt(pages, length))
        return self.track(sequence, request.tokens[:length])

    @rule(target=freed, request=consumes(live))
    def free(self, request):
        holders = self.holders()
        alone = sum(holders[page] == 1 for page in pages_in_use(request.sequence))
        self.attempt(-alone, lambda: self.allocator.free(request.sequence))
        self.requests.remove(request)
        return request

    @rule(request=freed, method=st.sampled_from(["append", "truncate", "fork", "free"]))
    def use_after_free(self, request, method):
        before = state(self.allocator)
        arguments = {"append": [1], "truncate": [0]}.get(method, [])
        with raises(f"PageAllocator.{method}: sequence must be live, got a freed sequence"):
            getattr(self.allocator, method)(request.sequence, *arguments)
        assert state(self.allocator) == before

    @rule(more=st.integers(0, 2))
    def grow(self, more):
        free, size = self.allocator.num_free_pages, self.allocator.page_size
        self.allocator.grow(self.allocator.num_pages + more)
        self.rows += [[None] * size for _ in range(more)]
        assert self.allocator.num_free_pages == free + more

    @rule(data=st.data())
    def adopt_a_free_page(self, data):
        held = self.holders()
        free = [page for page in range(self.allocator.num_pages) if not held[page]]
        if not free:
            return
        page = data.draw(st.sampled_from(free))
        before = state(self.allocator)
        with raises(
            f"PageAllocator.adopt: page_ids[0] must be a page in use, got the free page {page}"
        ):
            self.allocator.adopt([page], 1)
        assert state(self.allocator) == before

    @invariant()
    def allocator_is_consistent(self):
        assert self.allocator._live == {request.sequence for request in self.requests}
        assert_consistent(self.allocator)

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        held = self.holders()
        for page, rows in enumerate(self.rows):
            if not held[page]:
                rows[:] = [None] * len(rows)
        sequences = [request.sequence for request in self.requests]
        table = self.allocator.page_table(sequences).tolist()
        kv_lens = self.allocator.kv_lens(sequences).tolist()
        size = self.allocator.page_size
        for request, pages, kv_len in zip(self.requests, table, kv_lens, strict=True):
            assert {pages[page] for page in request.lost} <= {UNUSED_PAGE}
            kept = [t for t in range(kv_len) if t // size not in request.lost]
            read = [self.rows[pages[t // size]][t % size] for t in kept]
            assert read == [request.tokens[t] for t in kept]


steps = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class MachineWithHoles(AllocatorMachine):
    """Most new tokens are not stored."""

    has_holes = True


@pytest.mark.parametrize("machine", [AllocatorMachine, MachineWithHoles])
def test_allocator_agrees_with_the_model(machine):
    run_state_machine_as_test(machine, settings=steps)


class KeepsSharedTails(PageAllocator):
    """Writes where others read."""

    def _tails_to_copy(self, sequences, counts):
        return []


class CopiesTooFewRows(PageAllocator):
    def _copy_tail(self, sequence):
        source, target, rows = super()._copy_tail(sequence)
        return PageCopy(source, target, rows - 1)


class CopiesAnotherPage(PageAllocator):
    def _copy_tail(self, sequence):
        first = sequence._pages[0]
        return super()._copy_tail(sequence)._replace(source=first)


class ForgetsToCount(PageAllocator):
    """A fork is not a holder: the page goes when the first sequence does."""

    def fork(self, sequence, length=None):
        fork = super().fork(sequence, length)
        for page in fork._pages:
            self._ref_counts[page] = max(1, self._ref_counts[page] - 1)
        return fork


class KeepsTruncatedPages(PageAllocator):
    def truncate(self, sequence, length):
        pages = sequence._pages[:]
        super().truncate(sequence, length)
        sequence._pages = pages


class DropsPagesOfForks(PageAllocator):
    """The pages go though a fork reads them."""

    def drop_before(self, sequence, token):
        for page in sequence._pages[: token // self.page_size]:
            if page >= 0:
                self._ref_counts[page] = 1
        super().drop_before(sequence, token)


class DropsThePageOfTheToken(PageAllocator):
    def drop_before(self, sequence, token):
        length, size = sequence._length, self.page_size
        super().drop_before(sequence, min(-(-token // size) * size, length))


class LeavesPagesAfterHoles(PageAllocator):
    """The pages between the dropped ones and those that were never taken stay allocated."""

    def drop_before(self, sequence, token):
        while UNUSED_PAGE in sequence._pages[sequence._dropped :]:
            sequence._dropped = sequence._pages.index(UNUSED_PAGE, sequence._dropped) + 1
        super().drop_before(sequence, token)


class TakesPagesBeforeItCounts(PageAllocator):
    """Half of a batch has grown when the pages run out."""

    def append_batch(self, sequences, counts, first_kept=None):
        pairs = zip(sequences, counts, strict=True)
        return [copy for sequence, n in pairs for copy in self.append(sequence, n)]


@pytest.mark.parametrize(
    "broken",
    [
        KeepsSharedTails,
        CopiesTooFewRows,
        CopiesAnotherPage,
        ForgetsToCount,
        KeepsTruncatedPages,
        DropsPagesOfForks,
        DropsThePageOfTheToken,
        LeavesPagesAfterHoles,
        TakesPagesBeforeItCounts,
    ],
)
def test_the_model_sees_a_broken_allocator(broken):
    class BrokenMachine(AllocatorMachine):
        allocator_class = broken
        has_holes = broken is LeavesPagesAfterHoles

    one_failure = settings(
        steps,
        max_examples=2000,  # it stops at the first failure
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, pytest.fail.Exception)):  # or no OutOfPagesError
        run_state_machine_as_test(BrokenMachine, settings=one_failure)
