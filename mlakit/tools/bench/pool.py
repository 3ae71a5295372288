"""Paged caches filled with random latents, with the row of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, token_positions, token_slots
from mlakit.formats import Format
from mlakit.model.geometry import MLAGeometry, RowShape
from mlakit.steps import CachedBatch
from mlakit.tools.bench import gpu
from mlakit.tools.testing import shuffled_pages

MODEL = MLAGeometry.preset("deepseek-v3")
ROW = MODEL.row
SCALE = MODEL.softmax_scale
LATENT_STD = 0.3  # standard deviation of the cached numbers
ROWS_AT_ONCE = 1 << 18


def filled_cache(
    num_pages: int,
    page_size: int,
    format: Format,
    generator: torch.Generator,
    row: RowShape = ROW,
) -> PagedLatentCache:
    cache = PagedLatentCache.allocate(
        row, format, num_pages=num_pages, page_size=page_size, device=gpu.DEVICE
    )
    fill(cache, generator)
    return cache


def fill(cache: PagedLatentCache, generator: torch.Generator) -> None:
    layer = cache.layer(0)
    for first in range(0, layer.num_slots, ROWS_AT_ONCE):
        slots = torch.arange(first, min(first + ROWS_AT_ONCE, layer.num_slots), device=gpu.DEVICE)
        rows = torch.randn(len(slots), cache.row.width, generator=generator, device=gpu.DEVICE)
        layer.write(slots, LATENT_STD * rows)


def page_counts(kv_lens: Sequence[int], page_size: int) -> list[int]:
    return [-(-kv_len // page_size) for kv_len in kv_lens]


def filled_pages(
    kv_lens: Sequence[int],
    page_size: int,
    format: Format,
    generator: torch.Generator,
    row: RowShape = ROW,
) -> tuple[PagedLatentCache, Tensor]:
    """A pool with room for all requests, and a page table with shuffled pages."""
    counts = page_counts(kv_lens, page_size)
    cache = filled_cache(sum(counts), page_size, format, generator, row)
    return cache, shuffled_pages(len(counts), counts, sum(counts), generator)


@dataclass(eq=False)
class SharedPool:
    """A pool shared by many workloads, allocated at the first use."""

    num_pages: int
    page_size: int = 64
    format: Format = "bf16"
    _made: list[PagedLatentCache] = field(default_factory=list)

    def pages(
        self, kv_lens: Sequence[int], generator: torch.Generator
    ) -> tuple[PagedLatentCache, Tensor]:
        """The pool, and a page table with random pages of it."""
        if not self._made:
            own = gpu.generator()
            self._made.append(filled_cache(self.num_pages, self.page_size, self.format, own))
        counts = page_counts(kv_lens, self.page_size)
        return self._made[0], shuffled_pages(len(counts), counts, self.num_pages, generator)


def filled_index_keys(
    num_pages: int, page_size: int, width: int, generator: torch.Generator
) -> tuple[Tensor, PagedLatentCache]:
    """Pages of index keys, a key of `width` bytes and its scale per token, and their pool."""
    pages = torch.zeros(num_pages, page_size, width + 4, dtype=torch.uint8, device=gpu.DEVICE)
    cache = PagedLatentCache.wrap_index_keys(pages)
    fill(cache, generator)
    return pages, cache


@dataclass(eq=False)
class StepPool:
    """Latents and index keys in pages with the same numbers, allocated at the first use."""

    latents: SharedPool
    _keys: list[PagedLatentCache] = field(default_factory=list)

    def index_keys(self, width: int) -> PagedLatentCache:
        """Keys of `width` columns; all uses of a pool have the same width."""
        if not self._keys:
            size = (self.latents.num_pages, self.latents.page_size)
            self._keys.append(filled_index_keys(*size, width, gpu.generator(1))[1])
        return self._keys[0]


def clear_new_rows(batch: CachedBatch, tokens: int, *caches: PagedLatentCache) -> None:
    """Zero the rows that a step of `tokens` new tokens appends: an earlier call may have."""
    places = token_positions(batch.kv_lens, batch.q_starts, tokens)
    slots = token_slots(batch.page_table, batch.cache.page_size, *places)
    for cache in caches:
        cache.layer(0).write(slots, torch.zeros(len(slots), cache.row.width, device=slots.device))
