"""Lanes: the pages of sequences whose rows stand for so many tokens each, and live so long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, from_host
from mlakit.cache.pages import PageAllocator, PageCopy, PagedSequence
from mlakit.formats import Format
from mlakit.model.geometry import RowShape

GROWTH = 8  # a full lane grows by 1 / GROWTH


@dataclass(frozen=True, slots=True)
class Advance:
    """How one sequence of a lane grows in a step, in rows of the lane.

    drop_before  earlier rows are not read again, by this step or a later one
    first_kept   earlier new rows are not stored
    """

    count: int
    drop_before: int = 0
    first_kept: int = 0


@dataclass(eq=False)
class Lane:
    """An allocator, and the caches that have its pages. It grows as its sequences do."""

    page_size: int
    device: torch.device
    caches: dict[str, PagedLatentCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(1, self.page_size)

    def add(self, name: str, row: RowShape, format: Format, num_layers: int) -> None:
        """Add a cache to the pages of the lane."""
        self.caches[name] = PagedLatentCache.allocate(
            row,
            format,
            num_pages=self.allocator.num_pages,
            page_size=self.page_size,
            num_layers=num_layers,
            device=self.device,
        )

    def make_room(self, sequences: Sequence[PagedSequence], steps: Sequence[Advance]) -> None:
        """Drop what is not read again, and grow if the new rows need it. No sequence grows."""
        allocator, needed = self.allocator, 0
        for sequence, step in zip(sequences, steps, strict=True):
            allocator.drop_before(sequence, step.drop_before)
            held = -(-sequence.length // self.page_size)
            held = max(held, step.first_kept // self.page_size)
            new = -(-(sequence.length + step.count) // self.page_size) - held
            needed += max(new, 0) + 1  # + 1: a copied tail
        needed -= allocator.num_free_pages
        if needed > 0:
            pages = allocator.num_pages
            pages = max(pages * (GROWTH + 1) // GROWTH, pages + needed)
            # first, since there may be no memory for it
            grown = {name: cache.grown(pages) for name, cache in self.caches.items()}
            allocator.grow(pages)
            self.caches = grown

    def advance(self, sequences: Sequence[PagedSequence], steps: Sequence[Advance]) -> None:
        """Append the new rows of a step, for which there is room."""
        copies: list[PageCopy] = self.allocator.append_batch(
            sequences,
            [step.count for step in steps],
            first_kept=[step.first_kept for step in steps],
        )
        if copies:
            for cache in self.caches.values():
                cache.copy_pages(copies)

    def page_table(self, sequences: Sequence[PagedSequence]) -> Tensor:
        """Return int32 [batch, pages], −1 where there is no page."""
        return from_host(self.allocator.page_table(sequences), torch.int32, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(cache.nbytes for cache in self.caches.values())
