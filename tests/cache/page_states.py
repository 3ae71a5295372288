"""What there is to know of a page allocator, for tests."""

from __future__ import annotations

import re
from collections import Counter
from math import ceil

import pytest

from mlakit.cache.pages import UNUSED_PAGE, PageAllocator, PagedSequence


def raises(message: str, error: type[Exception] = ValueError):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def state(allocator: PageAllocator) -> tuple[list[int], list[int], dict[PagedSequence, tuple]]:
    """All there is to know of an allocator, to see that a call left it alone."""
    sequences = {s: (s.length, s.pages) for s in allocator._live}
    return allocator._free.copy(), allocator._ref_counts.copy(), sequences


def pages_in_use(sequence: PagedSequence) -> list[int]:
    """The pages of a sequence without those that it dropped."""
    return [page for page in sequence.pages if page != UNUSED_PAGE]


def assert_consistent(allocator: PageAllocator) -> None:
    """The invariants of the module's docstring."""
    held = Counter(page for sequence in allocator._live for page in pages_in_use(sequence))
    assert allocator._ref_counts == [held[page] for page in range(allocator.num_pages)]
    assert sorted([*allocator._free, *held]) == list(range(allocator.num_pages))
    assert allocator.num_free_pages == allocator.num_pages - len(held)
    for sequence in allocator._live:
        assert len(sequence.pages) == ceil(sequence.length / allocator.page_size)
        used = pages_in_use(sequence)
        assert len(set(used)) == len(used)
        dropped = sequence._dropped
        assert {*sequence.pages[:dropped]} <= {UNUSED_PAGE}
        if sequence.length % allocator.page_size:
            assert sequence.pages[-1] != UNUSED_PAGE
