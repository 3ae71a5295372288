"""The rows of the MLA layers on a device: one paged cache, one allocator, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mlakit import (
    CachedBatch,
    PageAllocator,
    PagedLatentCache,
    RowShape,
    append_rows,
    format_of_dtype,
    plan_context,
    plan_mla_decode,
    token_requests,
    token_slots,
)
from mlakit.cache import from_host
from mlakit.cache.pages import PagedSequence
from mlakit.formats import Format
from mlakit.integrations.transformers.columns import BatchPool, NewTokens, Uncommitted
from mlakit.plan import ContextPlan, DecodePlanTensors

GROWTH = 8  # a full cache grows by 1 / GROWTH
MAX_CONTEXT_ROWS = 32768  # cached keys that prefill expands at a time


@dataclass(frozen=True, eq=False)
class Step(NewTokens):
    """The new tokens of one forward, shared by all layers."""

    page_table: Tensor
    q_starts: Tensor  # [batch + 1] int32 new tokens per sequence, without padding
    kv_lens: Tensor  # [batch] int32 tokens per sequence, the new ones included
    context: ContextPlan
    slots: Tensor  # [tokens] int64
    request: Tensor  # [tokens] int64 sequence of each new token
    position: Tensor  # [tokens] int64 position of each new token in its sequence
    positions: Tensor  # [batch, columns] int32 position of each column, −1 for padding

    @property
    def is_padded(self) -> bool:
        """Whether any column is padding."""
        return min(self.context.kv_lens) < self.positions.shape[1]


class LatentPool(BatchPool[PagedSequence, Step]):
    """The latents of a batch in the pages of one cache, which grows as the sequences do.

    generate() announces no length. A full cache is copied to one that is an eighth larger: the
    copies cost less than the reads of the cache in every step, and little memory is unused.
    """

    def __init__(
        self, num_layers: int, format: Format | None, page_size: int, device: torch.device
    ) -> None:
        """Make an empty pool; `format` None stands for the dtype of the latents."""
        super().__init__(device)
        self.num_layers, self.format = num_layers, format
        self.allocator = PageAllocator(1, page_size)
        self.cache: PagedLatentCache | None = None
        self._plan: DecodePlanTensors | None = None  # of the step, made by its first layer

    def _reserve(self) -> PagedSequence:
        return self.allocator.reserve(0)

    def _fork(self, sequence: PagedSequence) -> PagedSequence:
        return self.allocator.fork(sequence)

    def _free(self, sequence: PagedSequence) -> None:
        self.allocator.free(sequence)

    def _length(self, sequence: PagedSequence) -> int:
        return sequence.length

    def _truncate(self, lengths: Sequence[int]) -> None:
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self.allocator.truncate(sequence, length)

    _drop_step = _truncate

    def _append(self, step: Uncommitted, counts: list[int], length: int) -> Step:
        allocator, page = self.allocator, self.allocator.page_size
        new_pages = (
            -(-(sequence.length + count) // page) - len(sequence.pages) + 1  # + 1: a copied tail
            for sequence, count in zip(self.sequences, counts, strict=True)
        )
        needed = allocator.num_pages - allocator.num_free_pages + sum(new_pages)
        if needed > allocator.num_pages:
            pages = max(allocator.num_pages * (GROWTH + 1) // GROWTH, needed)
            if self.cache is not None:  # first, since there may be no memory for it
                self.cache = self.cache.grown(pages)
            allocator.grow(pages)
        copies = allocator.append_batch(self.sequences, counts)
        if copies and self.cache is not None:
            self.cache.copy_pages(copies)
        self._plan = None
        return self._make_step(step, counts, length)

    def _make_step(self, new: Uncommitted, counts: list[int], length: int) -> Step:
        device = self.device
        batch, tokens, before = len(counts), sum(counts), new.lengths
        page_table = self.allocator.page_table(self.sequences, device=device)
        q_starts = from_host([0, *accumulate(counts)], torch.int32, device)
        first = from_host(before, torch.int64, device)
        request, index = token_requests(q_starts, tokens)
        position = first[request] + index
        visible = new.visible
        if visible is None:
            positions = torch.arange(new.columns, dtype=torch.int32, device=device)
            positions = positions.expand(batch, -1)
        else:
            positions = torch.where(visible, visible.cumsum(1) - 1, -1).int()
        after = [low + count for low, count in zip(before, counts, strict=True)]
        return Step(
            page_table=page_table,
            q_starts=q_starts,
            kv_lens=from_host(after, torch.int32, device),
            context=plan_context(after, counts, max_rows=MAX_CONTEXT_ROWS),
            unpadded=self._unpadded(new, tokens, length),
            slots=token_slots(page_table, self.allocator.page_size, request, position),
            request=request,
            position=position,
            positions=positions,
        )

    def write(self, layer: int, latent: Tensor, k_rope: Tensor) -> None:
        """Store the latents and keys [batch, 1, length, ·] of the step, less the padding."""
        if self.cache is None:
            self.cache = PagedLatentCache.allocate(
                RowShape(latent.shape[-1], k_rope.shape[-1]),
                self.format or format_of_dtype(latent.dtype),
                num_pages=self.allocator.num_pages,
                page_size=self.allocator.page_size,
                num_layers=self.num_layers,
                device=latent.device,
            )
        step = self.step
        tokens = [step.take(part[:, 0].flatten(0, 1)) for part in (latent, k_rope)]
        append_rows(tokens[0], tokens[1], self.cache, step.slots, layer=layer)

    def batch(self, layer: int) -> CachedBatch:
        """The sequences as the branches take them, with the tokens of the step."""
        assert self.cache is not None
        step = self.step
        return CachedBatch(self.cache, step.page_table, step.kv_lens, step.q_starts, layer)

    def decode_plan(self, heads: int, dtype: torch.dtype) -> DecodePlanTensors:
        """The plan of absorbed attention in this step: one for all layers."""
        if self._plan is None:
            assert self.cache is not None
            step = self.step
            self._plan = plan_mla_decode(
                self.cache,
                step.page_table,
                step.kv_lens,
                heads=heads,
                num_tokens=len(step.request),
                q_starts=step.q_starts,
                dtype=dtype,
            )
        return self._plan
