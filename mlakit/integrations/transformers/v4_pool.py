"""The rows of DeepSeek-V4's attention layers on a device, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mlakit import V4Batch, V4Cache
from mlakit.formats import Format
from mlakit.integrations.transformers.columns import BatchPool, NewTokens, Uncommitted
from mlakit.layer.v4 import V4Sequence

KEEP = 8  # newest tokens that `crop` takes back


@dataclass(frozen=True, eq=False)
class V4Step(NewTokens):
    """The new tokens of one forward, shared by all layers."""

    tokens: V4Batch


class V4Pool(BatchPool[V4Sequence, V4Step]):
    """The sequences of a batch in the lanes of one `V4Cache`."""

    def __init__(
        self,
        config: Any,
        layers: Sequence[int],
        format: Format,
        page_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(device)
        self.cache = V4Cache(
            config, format, layers=layers, page_size=page_size, keep=KEEP, device=device
        )

    def _reserve(self) -> V4Sequence:
        return self.cache.reserve()

    def _fork(self, sequence: V4Sequence) -> V4Sequence:
        return self.cache.fork(sequence)

    def _free(self, sequence: V4Sequence) -> None:
        self.cache.free(sequence)

    def _length(self, sequence: V4Sequence) -> int:
        return sequence.length

    def _truncate(self, lengths: Sequence[int]) -> None:
        pairs = list(zip(self.sequences, lengths, strict=True))
        lost = next((row for row, (each, n) in enumerate(pairs) if 0 < n < each.floor), None)
        if lost is not None:
            sequence = self.sequences[lost]
            raise ValueError(
                f"mlakit: crop must take back at most {sequence.length - sequence.floor} tokens of "
                f"row {lost}, whose older windows are compressed, got "
                f"{sequence.length - lengths[lost]}"
            )
        for sequence, length in pairs:
            self.cache.truncate(sequence, length)

    def _drop_step(self, lengths: Sequence[int]) -> None:
        if self._step is not None:  # else it failed before it got rows
            self.cache.roll_back(self._step.tokens)

    def _append(self, step: Uncommitted, counts: list[int], length: int) -> V4Step:
        self._step = None
        tokens = self.cache.append_batch(self.sequences, counts)
        return V4Step(self._unpadded(step, sum(counts), length), tokens)
