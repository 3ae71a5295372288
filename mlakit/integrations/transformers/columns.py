"""The sequences of a padded batch: which columns of its mask are tokens, step by step.

transformers pads a batch to the same number of columns and masks the padding. Here padding is
never stored: a sequence has the tokens that the mask shows, in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mlakit.cache import from_host


@dataclass(frozen=True, eq=False)
class NewTokens:
    """The new tokens of one forward among the columns of a padded batch."""

    unpadded: Tensor | None  # indices of the new tokens among batch · length; None: all

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


S = TypeVar("S")  # a sequence
T = TypeVar("T", bound=NewTokens)


class BatchPool(ABC, Generic[S, T]):
    """The sequences of a batch in a cache, which grow by the tokens of a step.

    A step is part of the pool once it is committed. The pool drops a step that was begun and not
    committed, because the forward failed, before it does anything else.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sequences: list[S] = []
        self.columns = 0  # of the mask, padding included
        self._visible: Tensor | None = None  # [batch, columns] bool; None: no padding
        self._step: T | None = None
        self._uncommitted: Uncommitted | None = None

    @abstractmethod
    def _reserve(self) -> S:
        """A sequence without tokens."""

    @abstractmethod
    def _fork(self, sequence: S) -> S:
        """A sequence with the tokens of another."""

    @abstractmethod
    def _free(self, sequence: S) -> None:
        """Free the rows of a sequence."""

    @abstractmethod
    def _length(self, sequence: S) -> int:
        """The tokens of a sequence."""

    @abstractmethod
    def _truncate(self, lengths: Sequence[int]) -> None:
        """Keep so many tokens of each sequence; all or none."""

    @abstractmethod
    def _drop_step(self, lengths: Sequence[int]) -> None:
        """Give the sequences the lengths again that they had before the step."""

    @abstractmethod
    def _append(self, step: Uncommitted, counts: list[int], length: int) -> T:
        """Append so many tokens to each sequence, of the last `length` columns."""

    @property
    def step(self) -> T:
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
            self.sequences = [self._reserve() for _ in range(batch)]
        before = [self._length(sequence) for sequence in self.sequences]
        step = self._uncommitted = Uncommitted(before, columns, visible)
        self._step = self._append(step, counts, length)

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
        self._drop_step(dropped.lengths)
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

    def _unpadded(self, new: Uncommitted, tokens: int, length: int) -> Tensor | None:
        """Indices of the new tokens among batch · length; None: all."""
        if new.visible is None or tokens == len(new.visible) * length:
            return None
        column = new.visible[:, new.columns - length :].flatten()
        # the number of tokens is known: nonzero would synchronise
        return column.int().argsort(descending=True, stable=True)[:tokens]

    def select(self, rows: Sequence[int]) -> None:
        """Make the batch of these sequences; a repeated one shares its pages, copy on write."""
        self.roll_back()
        before = self.sequences
        self.sequences = [self._fork(before[row]) for row in rows]
        for sequence in before:
            self._free(sequence)
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
        lengths = map(self._length, self.sequences)
        self._truncate([length - tokens for length, tokens in zip(lengths, removed, strict=True)])
        if self._visible is not None:
            self._visible = self._visible[:, :kept]
        self.columns = kept

    def reset(self) -> None:
        """Forget all tokens; the memory is kept."""
        for sequence in self.sequences:
            self._free(sequence)
        self.sequences, self.columns = [], 0
        self._visible = self._step = self._uncommitted = None
