"""The rows of the MLA layers on a device: one paged cache, one allocator, one step at a time.

transformers pads a batch to the same number of columns and masks the padding. Here padding is
never stored: a sequence has the tokens that the mask shows, in order.
"""

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
from mlakit.plan import ContextPlan, DecodePlanTensors

GROWTH = 8  # a full cache grows by 1 / GROWTH
MAX_CONTEXT_ROWS = 32768  # cached keys that prefill expands at a time


@dataclass(frozen=True, eq=False)
class Step:
    """The new tokens of one forward, shared by all layers."""

    page_table: Tensor
    q_starts: Tensor  # [batch + 1] int32 new tokens per sequence, without padding
    kv_lens: Tensor  # [batch] int32 tokens per sequence, the new ones included
    context: ContextPlan
    unpadded: Tensor | None  # indices of the new tokens among batch · length; None: all
    slots: Tensor  # [tokens] int64
    request: Tensor  # [tokens] int64 sequence of each new token
    position: Tensor  # [tokens] int64 position of each new token in its sequence
    positions: Tensor  # [batch, columns] int32 position of each column, −1 for padding

    @property
    def is_padded(self) -> bool:
        """Whether any column is padding."""
        return min(self.context.kv_lens) < self.positions.shape[1]

    def take(self, padded: Tensor) -> Tensor:
        """The new tokens [tokens, …] of a padded batch [batch · length, …]."""
        return padded if self.unpadded is None else padded.index_select(0, self.unpadded)

    def put(self, tokens: Tensor, count: int) -> Tensor:
        """The padded batch [count, …] of the new tokens [tokens, …], with zeros as padding."""
        if self.unpadded is None:
            return tokens
        return tokens.new_zeros(count, *tokens.shape[1:]).index_copy_(0, self.unpadded, tokens)


@dataclass(frozen=True, eq=False)
class Uncommitted:
    """The tokens that a step adds to a pool, and the lengths that the sequences had before it."""

    lengths: list[int]
    columns: int
    visible: Tensor | None


class LatentPool:
    """The sequences of a batch in the pages of one cache, which grows as they do.

    A step is part of the pool once it is committed. The pool drops a step that was begun and not
    committed, because the forward failed, before it does anything else.

    generate() announces no length. A full cache is copied to one that is an eighth larger: the
    copies cost less than the reads of the cache in every step, and little memory is unused.
    """

    def __init__(
        self, num_layers: int, format: Format | None, page_size: int, device: torch.device
    ) -> None:
        """Make an empty pool; `format` None stands for the dtype of the latents."""
        self.num_layers, self.format, self.device = num_layers, format, device
        self.allocator = PageAllocator(1, page_size)
        self.cache: PagedLatentCache | None = None
        self.sequences: list[PagedSequence] = []
        self.columns = 0  # of the mask, padding included
        self._visible: Tensor | None = None  # [batch, columns] bool; None: no padding
        self._step: Step | None = None
        self._uncommitted: Uncommitted | None = None
        self._plan: DecodePlanTensors | None = None  # of the step, made by its first layer

    @property
    def step(self) -> Step:
        """The step that has begun."""
        assert self._step is not None
        return self._step

    def begin_step(self, batch: int, length: int, mask: Tensor | None) -> None:
        """Reserve rows for the tokens of the last `length` columns that `mask` shows.

        mask  [batch, columns] of all tokens so far; None: no padding
        """
        self.roll_back()
        size = len(self.sequences) or batch
        if batch != size:
            raise ValueError(f"mlakit: the cache has {size} sequences, got a batch of {batch}")
        columns = self.columns + length
        visible, counts = self._new_tokens(batch, columns, mask)
        if not self.sequences:
            self.sequences = [self.allocator.reserve(0) for _ in range(batch)]
        before = [sequence.length for sequence in self.sequences]
        step = self._uncommitted = Uncommitted(before, columns, visible)
        self._append(counts)
        self._step = self._make_step(step, counts, length)
        self._plan = None

    def whole_mask(self, new: Tensor) -> Tensor:
        """The mask [batch, columns] of all columns, where `new` is that of the new ones."""
        self.roll_back()
        known = self._visible
        if known is None:
            known = new.new_ones(len(new), self.columns, dtype=torch.bool)
        return torch.cat([known, new.bool()], 1)

    def commit(self) -> None:
        """Make the tokens of the step part of the sequences: every layer has written its rows."""
        if self._uncommitted is not None:
            self.columns, self._visible = self._uncommitted.columns, self._uncommitted.visible
            self._uncommitted = None

    def roll_back(self) -> None:
        """Drop a step that was not committed; its rows are in pages that become free."""
        dropped, self._uncommitted = self._uncommitted, None
        if dropped is None:
            return
        for sequence, length in zip(self.sequences, dropped.lengths, strict=True):
            self.allocator.truncate(sequence, length)
        if self.columns == 0:  # the next batch may have another size
            self.reset()

    def _new_tokens(
        self, batch: int, columns: int, mask: Tensor | None
    ) -> tuple[Tensor | None, list[int]]:
        """Return (the columns that are no padding, the new tokens of each sequence)."""
        length = columns - self.columns
        if mask is None and self._visible is None:
            return None, [length] * batch
        if mask is None:
            mask = torch.ones(batch, columns, dtype=torch.bool, device=self.device)
        if mask.shape != (batch, columns):
            expected = f"[{batch}, {columns}], the cached tokens and the new ones"
            raise ValueError(
                f"mlakit: attention_mask must have shape {expected}, got {list(mask.shape)}"
            )
        visible = mask.to(self.device).bool()
        known = True if self._visible is None else self._visible
        changed = (visible[:, : self.columns] != known).sum(1)
        # one transfer to the host
        changes, counts = torch.stack([changed, visible[:, self.columns :].sum(1)]).tolist()
        if any(changes):
            row = next(i for i, count in enumerate(changes) if count)
            raise ValueError(
                "mlakit: attention_mask must show the cached tokens as it did when they were "
                f"cached, and other columns not; row {row} differs in {changes[row]} columns"
            )
        return visible, counts

    def _append(self, counts: Sequence[int]) -> None:
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

    def _make_step(self, new: Uncommitted, counts: list[int], length: int) -> Step:
        device = self.device
        batch, tokens, before = len(counts), sum(counts), new.lengths
        page_table = self.allocator.page_table(self.sequences, device=device)
        q_starts = from_host([0, *accumulate(counts)], torch.int32, device)
        first = from_host(before, torch.int64, device)
        request, index = token_requests(q_starts, tokens)
        position = first[request] + index
        visible, unpadded = new.visible, None
        if visible is None:
            positions = torch.arange(new.columns, dtype=torch.int32, device=device)
            positions = positions.expand(batch, -1)
        else:
            positions = torch.where(visible, visible.cumsum(1) - 1, -1).int()
        if visible is not None and tokens < batch * length:
            column = visible[:, new.columns - length :].flatten()
            # the number of tokens is known: nonzero would synchronise
            unpadded = column.int().argsort(descending=True, stable=True)[:tokens]
        after = [low + count for low, count in zip(before, counts, strict=True)]
        return Step(
            page_table=page_table,
            q_starts=q_starts,
            kv_lens=from_host(after, torch.int32, device),
            context=plan_context(after, counts, max_rows=MAX_CONTEXT_ROWS),
            unpadded=unpadded,
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

    def select(self, rows: Sequence[int]) -> None:
        """Make the batch of these sequences; a repeated one shares its pages, copy on write."""
        self.roll_back()
        before = self.sequences
        self.sequences = [self.allocator.fork(before[row]) for row in rows]
        for sequence in before:
            self.allocator.free(sequence)
        if self._visible is not None:
            index = from_host(list(rows), torch.int64, self._visible.device)
            self._visible = self._visible.index_select(0, index)

    def crop(self, count: int) -> None:
        """Remove the last `count` columns."""
        self.roll_back()
        kept = self.columns - count
        removed = [count] * len(self.sequences)
        if self._visible is not None:
            removed = self._visible[:, kept:].sum(1).tolist()
            self._visible = self._visible[:, :kept]
        for sequence, tokens in zip(self.sequences, removed, strict=True):
            self.allocator.truncate(sequence, sequence.length - tokens)
        self.columns = kept

    def reset(self) -> None:
        """Forget all tokens; the memory is kept."""
        for sequence in self.sequences:
            self.allocator.free(sequence)
        self.sequences, self.columns = [], 0
        self._visible = self._step = self._plan = self._uncommitted = None
