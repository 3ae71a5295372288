"""The page allocator: reserve, append, fork shared prefixes, truncate, free.

The allocator works on page ids on the host; the cache has the rows. The row of token t of a
sequence is in page `pages[t // page_size]`, at offset t % page_size.

Sequences share the pages of a common prefix, copy on write. Before a sequence writes into its
partly filled last page while that page is shared, it gets a page of its own, and the caller copies
the existing rows (`PageCopy`). A full page is never copied.

A sequence whose first tokens are not read again, as behind a sliding window, drops their pages:
`drop_before`. New tokens that are not stored at all get no pages: `first_kept` of `append_batch`.
The places of such pages hold `UNUSED_PAGE`, in the page table too.

Every call is atomic, also with several threads. After each call, also a failed one:

    a page is either free or used by at least one live sequence
    the reference count of a page is the number of live sequences that use it
    a live sequence of `length` tokens uses exactly ceil(length / page_size) different pages, less
    those that it dropped or never got

A step of a serving loop:

    copies = allocator.append_batch(sequences, new_tokens)
    ...                                      # apply `copies` to every layer of the cache
    page_table = allocator.page_table(sequences, device=device)
    kv_lens = allocator.kv_lens(sequences, device=device)
    ...                                      # write the new rows, attend
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from threading import RLock
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from mlakit.dispatch.checks import Dims

_P = ParamSpec("_P")
_R = TypeVar("_R")

UNUSED_PAGE = -1
"""Page id in a page table after the last page of a sequence, and in place of dropped pages."""


class OutOfPagesError(RuntimeError):
    """Too few free pages. The call changed nothing: free some pages and call again."""


class PageCopy(NamedTuple):
    """The first `rows` rows of page `source` must be copied to page `target`."""

    source: int
    target: int
    rows: int


class PagedSequence:
    """The pages of one request: a handle that only its allocator changes.

    If a handle is dropped without `PageAllocator.free`, its pages stay allocated.
    """

    __slots__ = ("_allocator", "_dropped", "_length", "_pages")

    def __init__(
        self, allocator: PageAllocator, pages: Iterable[int], length: int, dropped: int = 0
    ) -> None:
        self._allocator = allocator
        self._pages = array("i", pages)
        self._length = length
        self._dropped = dropped  # so many of the first pages are unused

    def __repr__(self) -> str:
        if not self.is_live:
            return "PagedSequence(freed)"
        return f"PagedSequence(length={self.length}, pages={self.pages})"

    @property
    def is_live(self) -> bool:
        """False after `free`; `length` and `pages` then raise ValueError."""
        # stored in the allocator, so that a copy of the handle does not count as a second use
        return self in self._allocator._live

    @property
    def length(self) -> int:
        """Tokens of the sequence, including those of the latest `append`."""
        with self._allocator._lock:
            self._require_live("length")
            return self._length

    @property
    def pages(self) -> tuple[int, ...]:
        """Page ids, in token order; -1 in place of dropped pages."""
        with self._allocator._lock:
            self._require_live("pages")
            return tuple(self._pages)

    def _require_live(self, name: str) -> None:
        _require_live(Dims(f"PagedSequence.{name}"), "sequence", self)


def _locked(
    method: Callable[Concatenate[PageAllocator, _P], _R],
) -> Callable[Concatenate[PageAllocator, _P], _R]:
    """A method that holds the allocator's lock."""

    @wraps(method)
    def run(self: PageAllocator, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return run


class PageAllocator:
    """Allocates the pages of a pool with `num_pages` pages of `page_size` tokens.

    Every method checks all its arguments before it changes anything. It raises ValueError for a
    freed sequence, a sequence of another allocator, a negative count and a length beyond the
    sequence, and OutOfPagesError for too few free pages. The time of a call is proportional to the
    number of pages it touches.

    Threads may share an allocator: each call holds a lock. Other threads may change the allocator
    between two calls. It can be pickled and deep-copied, together with its sequences, while no
    other thread changes it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        dims = Dims("PageAllocator")
        self._num_pages = dims.integer("num_pages", num_pages, 1)
        self._page_size = dims.integer("page_size", page_size, 1)
        self._ref_counts = [0] * self._num_pages
        self._free = list(range(self._num_pages))[::-1]  # a stack with page 0 on top
        self._live: set[PagedSequence] = set()
        self._lock = RLock()  # reentrant: properties of a sequence take it inside a method

    def __getstate__(self) -> dict[str, object]:
        with self._lock:
            copies = {
                "_ref_counts": [*self._ref_counts],
                "_free": [*self._free],
                "_live": {*self._live},
            }
        state = {**vars(self), **copies}
        del state["_lock"]  # locks cannot be copied
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _lock=RLock())

    @_locked
    def __repr__(self) -> str:
        free = f"{self.num_free_pages} of {self.num_pages} pages free"
        return f"PageAllocator({free}, page_size={self.page_size})"

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that no live sequence uses."""
        return len(self._free)

    @_locked
    def grow(self, num_pages: int) -> None:
        """Give the pool `num_pages` pages in all; new pages are handed out after the free ones.

        Page ids stay valid. The cache grows with `PagedLatentCache.grown`, a copy.
        """
        dims = Dims("PageAllocator.grow")
        total = dims.integer("num_pages", num_pages, 1)
        must = f"not be below the {self._num_pages} pages of the pool"
        dims.require(total >= self._num_pages, "num_pages", must, total)
        self._free[:0] = range(total - 1, self._num_pages - 1, -1)
        self._ref_counts += [0] * (total - self._num_pages)
        self._num_pages = total

    @_locked
    def reserve(self, num_tokens: int) -> PagedSequence:
        """A new sequence of `num_tokens` tokens, in unshared pages."""
        dims = Dims("PageAllocator.reserve")
        length = dims.integer("num_tokens", num_tokens, 0)
        needed = self._pages_for(length)
        self._require_free(dims.op, needed)
        return self._admit(self._take(needed), length)

    @_locked
    def append(self, sequence: PagedSequence, num_tokens: int) -> list[PageCopy]:
        """Append `num_tokens` tokens to a sequence.

        Returns the copies (at most one) that the caller must apply to every layer of the cache
        before it writes any row of any sequence.
        """
        dims = Dims("PageAllocator.append")
        self._check_member(dims, "sequence", sequence)
        return self._grow(dims.op, [sequence], [dims.integer("num_tokens", num_tokens, 0)])

    @_locked
    def append_batch(
        self,
        sequences: Iterable[PagedSequence],
        counts: Iterable[int],
        *,
        first_kept: Iterable[int] | None = None,
    ) -> list[PageCopy]:
        """Append counts[i] tokens to each of several different sequences, all or none.

        first_kept  the first token of each sequence that is stored; None: all are. Pages of new
                    tokens that are all before it are not taken, as if they were dropped

        No page is the target of two copies or both source and target: copies may run in any order.
        """
        dims = Dims("PageAllocator.append_batch")
        members = self._members(dims, sequences)
        seen: dict[PagedSequence, int] = {}
        for i, sequence in enumerate(members):
            first = seen.setdefault(sequence, i)
            dims.require(first == i, f"sequences[{i}]", "appear once", f"sequences[{first}] again")
        checked = dims.integers("counts", counts, 0)
        must = f"have one entry per sequence, {len(members)}"
        dims.require(len(checked) == len(members), "counts", must, len(checked))
        if first_kept is None:
            return self._grow(dims.op, members, checked)
        firsts = dims.integers("first_kept", first_kept, 0)
        dims.require(len(firsts) == len(members), "first_kept", must, len(firsts))
        for i, (sequence, count, first) in enumerate(zip(members, checked, firsts, strict=True)):
            length = sequence._length + count
            within = f"not exceed the new length of sequence, {length}"
            dims.require(first <= length, f"first_kept[{i}]", within, first)
        return self._grow(dims.op, members, checked, firsts)

    @_locked
    def truncate(self, sequence: PagedSequence, length: int) -> None:
        """Keep the first `length` tokens, and free the pages of the others."""
        dims = Dims("PageAllocator.truncate")
        self._check_member(dims, "sequence", sequence)
        kept_tokens = _length_within(dims, sequence, length)
        kept_pages = self._pages_for(kept_tokens)
        self._release(sequence._pages[kept_pages:])
        del sequence._pages[kept_pages:]
        sequence._length = kept_tokens
        sequence._dropped = min(sequence._dropped, kept_pages)

    @_locked
    def drop_before(self, sequence: PagedSequence, token: int) -> None:
        """Free the pages of a sequence whose tokens are all before `token`; its length stays.

        The sequence can no longer be cut within the dropped tokens. Forks keep their pages.
        """
        dims = Dims("PageAllocator.drop_before")
        self._check_member(dims, "sequence", sequence)
        end = dims.integer("token", token, 0)
        must = f"not exceed the length of sequence, {sequence._length}"
        dims.require(end <= sequence._length, "token", must, end)
        first, last = sequence._dropped, end // self.page_size
        if last > first:
            self._release(sequence._pages[first:last])
            sequence._pages[first:last] = array("i", [UNUSED_PAGE]) * (last - first)
            sequence._dropped = last

    @_locked
    def fork(self, sequence: PagedSequence, length: int | None = None) -> PagedSequence:
        """A new sequence that shares the first `length` tokens (None: all); it needs no free page.

        A shared page is freed with the last sequence that uses it.
        """
        dims = Dims("PageAllocator.fork")
        self._check_member(dims, "sequence", sequence)
        shared = sequence._length if length is None else _length_within(dims, sequence, length)
        pages = sequence._pages[: self._pages_for(shared)]
        self._share(pages)
        return self._admit(pages, shared, min(sequence._dropped, len(pages)))

    @_locked
    def adopt(self, page_ids: Iterable[int], length: int) -> PagedSequence:
        """`fork` by page id: a new sequence of `length` tokens in pages of live sequences.

        For prefix caches that store page ids. Checks that the pages are in use and that their
        number fits `length`; the caller guarantees that they hold the rows of these tokens.
        """
        dims = Dims("PageAllocator.adopt")
        pages = self._pages_in_use(dims, page_ids)
        tokens = dims.integer("length", length, 0)
        most = len(pages) * self.page_size
        fewest = most - self.page_size + 1 if pages else 0
        dims.require(
            fewest <= tokens <= most, "length", f"be in [{fewest}, {most}] for page_ids", tokens
        )
        self._share(pages)
        return self._admit(pages, tokens)

    @_locked
    def free(self, sequence: PagedSequence) -> None:
        """Free the pages of `sequence`; the handle is invalid afterwards."""
        self._check_member(Dims("PageAllocator.free"), "sequence", sequence)
        self._live.remove(sequence)
        self._release(sequence._pages)
        sequence._pages = array("i")

    @_locked
    def page_table(
        self,
        sequences: Iterable[PagedSequence],
        *,
        columns: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return int32 [batch, columns]: the page ids of each sequence, padded with -1.

        `columns` defaults to the largest number of pages of a sequence, and may be larger.
        """
        dims = Dims("PageAllocator.page_table")
        members = self._members(dims, sequences)
        most = max((len(sequence._pages) for sequence in members), default=0)
        width = most if columns is None else dims.integer("columns", columns, most)
        table = array("i")
        for sequence in members:
            table.extend(sequence._pages)
            table.extend(array("i", [UNUSED_PAGE]) * (width - len(sequence._pages)))
        return _as_tensor(table, device).view(len(members), width)

    @_locked
    def kv_lens(
        self, sequences: Iterable[PagedSequence], device: torch.device | str = "cpu"
    ) -> Tensor:
        """int32 [batch]: the length of each sequence, including the tokens of its latest append.

        This is `kv_lens` of `norm_rope_quant_append`, `CachedBatch` and `mla_decode` in the step
        that writes those tokens.
        """
        members = self._members(Dims("PageAllocator.kv_lens"), sequences)
        return _as_tensor(array("i", [sequence._length for sequence in members]), device)

    def _grow(
        self,
        op: str,
        sequences: Sequence[PagedSequence],
        counts: Sequence[int],
        first_kept: Sequence[int] | None = None,
    ) -> list[PageCopy]:
        lengths = [s._length + count for s, count in zip(sequences, counts, strict=True)]
        new_pages = [
            self._pages_for(length) - len(s._pages)
            for s, length in zip(sequences, lengths, strict=True)
        ]
        unused = [
            min(max(first // self.page_size - len(s._pages), 0), needed)
            for s, first, needed in zip(
                sequences, first_kept or [0] * len(sequences), new_pages, strict=True
            )
        ]
        tails = self._tails_to_copy(sequences, counts)
        self._require_free(op, len(tails) + sum(new_pages) - sum(unused))
        copies = [self._copy_tail(sequence) for sequence in tails]
        for sequence, length, needed, skipped in zip(
            sequences, lengths, new_pages, unused, strict=True
        ):
            sequence._pages.extend(array("i", [UNUSED_PAGE]) * skipped)
            sequence._pages.extend(self._take(needed - skipped))
            sequence._length = length
        return copies

    def _tails_to_copy(
        self, sequences: Sequence[PagedSequence], counts: Sequence[int]
    ) -> list[PagedSequence]:
        """Sequences that would write into a last page that is shared."""
        tails = []
        remaining: dict[int, int] = {}  # reference counts once the sequences before have copied
        for sequence, count in zip(sequences, counts, strict=True):
            if count == 0 or sequence._length % self.page_size == 0:
                continue
            page = sequence._pages[-1]
            count_left = remaining.get(page, self._ref_counts[page])
            if count_left > 1:
                remaining[page] = count_left - 1
                tails.append(sequence)
        return tails

    def _copy_tail(self, sequence: PagedSequence) -> PageCopy:
        source = sequence._pages[-1]
        (target,) = self._take(1)
        self._release([source])
        sequence._pages[-1] = target
        return PageCopy(source, target, sequence._length % self.page_size)

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _admit(self, pages: Iterable[int], length: int, dropped: int = 0) -> PagedSequence:
        sequence = PagedSequence(self, pages, length, dropped)
        self._live.add(sequence)
        return sequence

    def _take(self, count: int) -> list[int]:
        pages = [self._free.pop() for _ in range(count)]
        self._share(pages)
        return pages

    def _share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page != UNUSED_PAGE:
                self._ref_counts[page] += 1

    def _release(self, pages: Sequence[int]) -> None:
        # last page first, so that the stack allocates them in the same order again
        for page in reversed(pages):
            if page == UNUSED_PAGE:
                continue
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)

    def _require_free(self, op: str, needed: int) -> None:
        if needed > self.num_free_pages:
            free = f"{self.num_free_pages} of {self.num_pages} are free"
            raise OutOfPagesError(f"{op}: needs {needed} pages, {free}")

    def _members(self, dims: Dims, sequences: Iterable[PagedSequence]) -> list[PagedSequence]:
        """The sequences, each checked; a generator is read once."""
        if not isinstance(sequences, Iterable):
            got = type(sequences).__name__
            raise TypeError(f"{dims.op}: sequences must be several PagedSequence, got {got}")
        members = list(sequences)
        for i, sequence in enumerate(members):
            self._check_member(dims, f"sequences[{i}]", sequence)
        return members

    def _check_member(self, dims: Dims, arg: str, sequence: object) -> None:
        if not isinstance(sequence, PagedSequence):
            got = type(sequence).__name__
            raise TypeError(f"{dims.op}: {arg} must be a PagedSequence, got {got}")
        mine = sequence._allocator is self
        dims.require(mine, arg, "belong to this allocator", "a sequence of another one")
        _require_live(dims, arg, sequence)

    def _pages_in_use(self, dims: Dims, page_ids: Iterable[int]) -> list[int]:
        seen: dict[int, int] = {}
        for i, page in enumerate(dims.integers("page_ids", page_ids, 0)):
            arg = f"page_ids[{i}]"
            dims.require(page < self.num_pages, arg, f"be below num_pages, {self.num_pages}", page)
            dims.require(
                self._ref_counts[page] > 0, arg, "be a page in use", f"the free page {page}"
            )
            first = seen.setdefault(page, i)
            dims.require(first == i, arg, "appear once", f"page_ids[{first}] again")
        return list(seen)


def _require_live(dims: Dims, arg: str, sequence: PagedSequence) -> None:
    dims.require(sequence.is_live, arg, "be live", "a freed sequence")


def _length_within(dims: Dims, sequence: PagedSequence, length: int) -> int:
    longest = sequence._length
    kept = dims.integer("length", length, 0)
    must = f"not exceed the length of sequence, {longest}"
    dims.require(kept <= longest, "length", must, kept)
    page = (kept - 1) // sequence._allocator._page_size
    is_dropped = 0 < kept < longest and sequence._pages[page] == UNUSED_PAGE
    dims.require(not is_dropped, "length", "be 0 or within the tokens that are not dropped", kept)
    return kept


def _as_tensor(values: array[int], device: torch.device | str) -> Tensor:
    """Return int32 [len(values)] on `device`; on the CPU it shares the memory of `values`."""
    if not values:  # torch.frombuffer rejects an empty buffer
        return torch.empty(0, dtype=torch.int32, device=device)
    return torch.frombuffer(values, dtype=torch.int32).to(device)
