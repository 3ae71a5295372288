"""Who holds which page of a pool: requests reserve, grow, share prefixes, roll back, give back.

The allocator deals in numbers on the host and never sees a row: rows are the cache's. Token t of a
sequence has its row in page `pages[t // page_size]`, at offset t % page_size.

Sequences share pages by prefix. A shared page is only read: a sequence about to write into its
partly filled last page while another holds it moves to a page of its own first, and the caller
copies the rows it already has there (`PageCopy`). A page that is full for the sequence that grows
is never copied, shared or not.

Every call is done as a whole, whichever threads call. True after each, a failed one included:

    a page is either free or held by at least one live sequence
    the count of a page is the number of live sequences that hold it
    a live sequence of `length` tokens holds ceil(length / page_size) different pages, none spare

A step of a serving loop:

    copies = allocator.append_batch(sequences, new_tokens)
    ...                                      # carry out `copies` in every layer of the cache
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

from mlakit.checks import Dims

_P = ParamSpec("_P")
_R = TypeVar("_R")

UNUSED_PAGE = -1
"""Fills a page table past the last page of a sequence."""


class OutOfPagesError(RuntimeError):
    """A call needs more pages than are free. It changed nothing: free some and call again."""


class PageCopy(NamedTuple):
    """The first `rows` rows of page `source` must be copied to page `target`."""

    source: int
    target: int
    rows: int


class PagedSequence:
    """The pages that hold the tokens of one request: a handle that only its allocator changes.

    Pages of a handle that is dropped without `PageAllocator.free` are never given back.
    """

    __slots__ = ("_allocator", "_length", "_pages")

    def __init__(self, allocator: PageAllocator, pages: Iterable[int], length: int) -> None:
        self._allocator = allocator
        self._pages = array("i", pages)
        self._length = length

    def __repr__(self) -> str:
        if not self.is_live:
            return "PagedSequence(freed)"
        return f"PagedSequence(length={self.length}, pages={self.pages})"

    @property
    def is_live(self) -> bool:
        """False once it is freed; its length and its pages can then no longer be asked for."""
        # the allocator knows, so that a copy of the handle is not a second holder
        return self in self._allocator._live

    @property
    def length(self) -> int:
        """Tokens it has room for, those of the latest `append` included."""
        with self._allocator._lock:
            self._require_live("length")
            return self._length

    @property
    def pages(self) -> tuple[int, ...]:
        """Page ids in the order of the tokens."""
        with self._allocator._lock:
            self._require_live("pages")
            return tuple(self._pages)

    def _require_live(self, name: str) -> None:
        _require_live(Dims(f"PagedSequence.{name}"), "sequence", self)


def _exclusive(
    method: Callable[Concatenate[PageAllocator, _P], _R],
) -> Callable[Concatenate[PageAllocator, _P], _R]:
    """A method that runs while no other thread is in one."""

    @wraps(method)
    def run(self: PageAllocator, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return run


class PageAllocator:
    """Hands out the pages of a pool of `num_pages` pages of `page_size` tokens.

    Every method checks all its arguments before it changes anything. ValueError: a sequence that
    is freed or belongs to another allocator, a negative count, a length that is not there.
    OutOfPagesError: too few free pages. Each call costs time proportional to the pages it touches.

    Threads may share an allocator: a lock lets one call in at a time. What several calls find out
    one after another, other threads may have changed in between. It can be pickled and deep-copied,
    together with its sequences, while no other thread changes it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        dims = Dims("PageAllocator")
        self._num_pages = dims.integer("num_pages", num_pages, 1)
        self._page_size = dims.integer("page_size", page_size, 1)
        self._holders = [0] * self._num_pages
        self._free = list(range(self._num_pages))[::-1]  # a stack: page 0 is on top
        self._live: set[PagedSequence] = set()
        self._lock = RLock()  # a sequence that is asked by a method takes it again

    def __getstate__(self) -> dict[str, object]:
        with self._lock:
            copies = {"_holders": [*self._holders], "_free": [*self._free], "_live": {*self._live}}
        state = {**vars(self), **copies}
        del state["_lock"]  # which cannot be copied
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _lock=RLock())

    @_exclusive
    def __repr__(self) -> str:
        free = f"{self.num_free_pages} of {self.num_pages} pages free"
        return f"PageAllocator({free}, page_size={self.page_size})"

    @property
    def num_pages(self) -> int:
        """Pages of the pool, free or not."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that no live sequence holds."""
        return len(self._free)

    @_exclusive
    def reserve(self, num_tokens: int) -> PagedSequence:
        """A new sequence with room for `num_tokens` tokens, in pages of its own."""
        dims = Dims("PageAllocator.reserve")
        length = dims.integer("num_tokens", num_tokens, 0)
        needed = self._pages_for(length)
        self._require_free(dims.op, needed)
        return self._admit(self._take(needed), length)

    @_exclusive
    def append(self, sequence: PagedSequence, num_tokens: int) -> list[PageCopy]:
        """Make room for `num_tokens` more tokens.

        Returns the copies (here one at most) that the caller carries out in every layer of the
        cache before it writes any further row, of whichever sequence.
        """
        dims = Dims("PageAllocator.append")
        self._check_member(dims, "sequence", sequence)
        return self._grow(dims.op, [sequence], [dims.integer("num_tokens", num_tokens, 0)])

    @_exclusive
    def append_batch(
        self, sequences: Sequence[PagedSequence], counts: Sequence[int]
    ) -> list[PageCopy]:
        """`append` counts[i] tokens to each of several different sequences: all of it or nothing.

        No page is the target of two copies, or both a source and a target: their order is free.
        """
        dims = Dims("PageAllocator.append_batch")
        self._check_members(dims, sequences)
        seen: dict[PagedSequence, int] = {}
        for i, sequence in enumerate(sequences):
            first = seen.setdefault(sequence, i)
            dims.require(first == i, f"sequences[{i}]", "appear once", f"sequences[{first}] again")
        batch = len(sequences)
        dims.require(
            len(counts) == batch, "counts", f"have one entry per sequence, {batch}", len(counts)
        )
        checked = [dims.integer(f"counts[{i}]", count, 0) for i, count in enumerate(counts)]
        return self._grow(dims.op, sequences, checked)

    @_exclusive
    def truncate(self, sequence: PagedSequence, length: int) -> None:
        """Forget all but the first `length` tokens, and let go of the pages that held the rest."""
        dims = Dims("PageAllocator.truncate")
        self._check_member(dims, "sequence", sequence)
        kept_tokens = _length_within(dims, sequence, length)
        kept_pages = self._pages_for(kept_tokens)
        self._release(sequence._pages[kept_pages:])
        del sequence._pages[kept_pages:]
        sequence._length = kept_tokens

    @_exclusive
    def fork(self, sequence: PagedSequence, length: int | None = None) -> PagedSequence:
        """A new sequence that shares the first `length` tokens (None: all), and takes no page.

        The pages stay until every sequence that holds them has let go: the order does not matter.
        """
        dims = Dims("PageAllocator.fork")
        self._check_member(dims, "sequence", sequence)
        shared = sequence._length if length is None else _length_within(dims, sequence, length)
        pages = sequence._pages[: self._pages_for(shared)]
        self._share(pages)
        return self._admit(pages, shared)

    @_exclusive
    def adopt(self, page_ids: Sequence[int], length: int) -> PagedSequence:
        """`fork` by page id: a new sequence of `length` tokens in pages that live sequences hold.

        For prefix caches that remember pages. That those pages hold the rows of these tokens is
        the caller's word; that they are pages in use, and as many as `length` takes, is checked.
        """
        dims = Dims("PageAllocator.adopt")
        pages = self._pages_in_use(dims, page_ids)
        tokens = dims.integer("length", length, 0)
        most = len(pages) * self.page_size
        fewest = most - self.page_size + 1 if pages else 0
        dims.require(
            fewest <= tokens <= most, "length", f"lie in [{fewest}, {most}] for page_ids", tokens
        )
        self._share(pages)
        return self._admit(pages, tokens)

    @_exclusive
    def free(self, sequence: PagedSequence) -> None:
        """Let go of every page of `sequence`; the handle is of no use afterwards."""
        self._check_member(Dims("PageAllocator.free"), "sequence", sequence)
        self._live.remove(sequence)
        self._release(sequence._pages)
        sequence._pages = array("i")

    @_exclusive
    def page_table(
        self,
        sequences: Sequence[PagedSequence],
        *,
        columns: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """int32 [batch, columns]: the page ids of each sequence, then -1.

        `columns=None` is the most pages any of them has; a given number may be larger.
        """
        dims = Dims("PageAllocator.page_table")
        self._check_members(dims, sequences)
        most = max((len(sequence._pages) for sequence in sequences), default=0)
        width = most if columns is None else dims.integer("columns", columns, most)
        table = array("i")
        for sequence in sequences:
            table.extend(sequence._pages)
            table.extend(array("i", [UNUSED_PAGE]) * (width - len(sequence._pages)))
        return _as_tensor(table, device).view(len(sequences), width)

    @_exclusive
    def kv_lens(
        self, sequences: Sequence[PagedSequence], device: torch.device | str = "cpu"
    ) -> Tensor:
        """int32 [batch]: the length of each sequence, the tokens of its latest append included.

        This is what `kv_lens` means everywhere: of `norm_rope_quant_append`, `CachedBatch` and
        `mla_decode` in the step that writes those tokens.
        """
        self._check_members(Dims("PageAllocator.kv_lens"), sequences)
        return _as_tensor(array("i", [sequence._length for sequence in sequences]), device)

    def _grow(
        self, op: str, sequences: Sequence[PagedSequence], counts: Sequence[int]
    ) -> list[PageCopy]:
        lengths = [s._length + count for s, count in zip(sequences, counts, strict=True)]
        new_pages = [
            self._pages_for(length) - len(s._pages)
            for s, length in zip(sequences, lengths, strict=True)
        ]
        tails = self._tails_to_copy(sequences, counts)
        self._require_free(op, len(tails) + sum(new_pages))
        copies = [self._copy_tail(sequence) for sequence in tails]
        for sequence, length, needed in zip(sequences, lengths, new_pages, strict=True):
            sequence._pages.extend(self._take(needed))
            sequence._length = length
        return copies

    def _tails_to_copy(
        self, sequences: Sequence[PagedSequence], counts: Sequence[int]
    ) -> list[PagedSequence]:
        """Those that would write into a last page while another sequence holds it."""
        tails = []
        remaining: dict[int, int] = {}  # who leaves for a copy no longer counts for those after it
        for sequence, count in zip(sequences, counts, strict=True):
            if count == 0 or sequence._length % self.page_size == 0:
                continue
            page = sequence._pages[-1]
            holders = remaining.get(page, self._holders[page])
            if holders > 1:
                remaining[page] = holders - 1
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

    def _admit(self, pages: Iterable[int], length: int) -> PagedSequence:
        sequence = PagedSequence(self, pages, length)
        self._live.add(sequence)
        return sequence

    def _take(self, count: int) -> list[int]:
        pages = [self._free.pop() for _ in range(count)]
        self._share(pages)
        return pages

    def _share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def _release(self, pages: Sequence[int]) -> None:
        # last page first: the stack then hands them out in their old order
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def _require_free(self, op: str, needed: int) -> None:
        if needed > self.num_free_pages:
            free = f"{self.num_free_pages} of {self.num_pages} are free"
            raise OutOfPagesError(f"{op}: allocator needs {needed} pages, {free}")

    def _check_members(self, dims: Dims, sequences: Sequence[PagedSequence]) -> None:
        for i, sequence in enumerate(sequences):
            self._check_member(dims, f"sequences[{i}]", sequence)

    def _check_member(self, dims: Dims, arg: str, sequence: object) -> None:
        if not isinstance(sequence, PagedSequence):
            got = type(sequence).__name__
            raise TypeError(f"{dims.op}: {arg} must be a PagedSequence, got {got}")
        mine = sequence._allocator is self
        dims.require(mine, arg, "belong to this allocator", "one of another")
        _require_live(dims, arg, sequence)

    def _pages_in_use(self, dims: Dims, page_ids: Sequence[int]) -> list[int]:
        seen: dict[int, int] = {}
        for i, page_id in enumerate(page_ids):
            arg = f"page_ids[{i}]"
            page = dims.integer(arg, page_id, 0)
            dims.require(page < self.num_pages, arg, f"be below num_pages, {self.num_pages}", page)
            dims.require(self._holders[page] > 0, arg, "be a page in use", f"{page}, a free one")
            first = seen.setdefault(page, i)
            dims.require(first == i, arg, "appear once", f"page_ids[{first}] again")
        return list(seen)


def _require_live(dims: Dims, arg: str, sequence: PagedSequence) -> None:
    dims.require(sequence.is_live, arg, "be live", "a freed one")


def _length_within(dims: Dims, sequence: PagedSequence, length: int) -> int:
    whole = sequence._length
    part = dims.integer("length", length, 0)
    dims.require(part <= whole, "length", f"not exceed that of sequence, {whole}", part)
    return part


def _as_tensor(values: array[int], device: torch.device | str) -> Tensor:
    """int32 [len(values)] on `device`; on the CPU the memory of `values` itself."""
    if not values:  # which torch.frombuffer does not take
        return torch.empty(0, dtype=torch.int32, device=device)
    return torch.frombuffer(values, dtype=torch.int32).to(device)
