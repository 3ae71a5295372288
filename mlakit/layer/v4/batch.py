"""One step of DeepSeek-V4's layers: its new tokens, the rows they write, and the rows they see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mlakit.cache import token_slots
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.reprs import shapes_repr
from mlakit.model.masks import compressed_causal
from mlakit.model.v4 import CSA, HCA
from mlakit.ops import (
    ExtraRows,
    append_rows,
    compress_rows,
    indexer_select,
    physical_rows,
    sparse_mla,
)

if TYPE_CHECKING:
    from mlakit.layer.v4.cache import V4Cache, V4Sequence

MAX_LISTED = 1 << 24  # rows that are listed at a time: 64 MiB
ENTRY_STEP = 64  # lists of compressed rows have a multiple of so many places


class Pooling(NamedTuple):
    """What pools the tokens of a window to one row: the weights of a compressor."""

    bias: Tensor  # [rate, columns]
    gamma: Tensor  # [D]
    freqs: Tensor  # [positions, D_R]
    epsilon: float


@dataclass(frozen=True, eq=False)
class V4Batch:
    """The sequences of a step and where their rows are, shared by all layers.

    before     length and floor of each sequence before the step
    lengths    tokens of each sequence, the new ones included
    counts     new tokens of each sequence
    tables     page table of each lane
    request    [tokens] int64 sequence of each new token
    position   [tokens] int64 position of each new token in its sequence
    """

    cache: V4Cache
    sequences: tuple[V4Sequence, ...]
    before: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    tables: dict[str, Tensor]
    kv_lens: Tensor
    q_starts: Tensor
    request: Tensor
    position: Tensor
    _lists: dict[str, Tensor] = field(default_factory=dict, init=False)  # made by the first layer

    __repr__ = shapes_repr

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)

    def write_window(self, layer: int, kv: Tensor, *, backend: Backend = "auto") -> None:
        """Store the rows [tokens, D] of the new tokens, normed and rotated."""
        cache = self.cache.cache("window")
        slots = self._slots(cache.page_size)
        row = cache.row
        latent, rope = kv.split([row.kv_lora_rank, row.qk_rope_head_dim], dim=1)
        append_rows(latent, rope, cache, slots, layer=self.cache.number(layer), backend=backend)

    def compress(
        self,
        layer: int,
        kv: Tensor,
        gate: Tensor,
        pooling: Pooling,
        name: str = "rows",
        *,
        backend: Backend = "auto",
    ) -> None:
        """Pool the windows that new tokens complete, [tokens, columns] each, and store the rows.

        name  "rows" for compressed rows, "index" for index keys
        """
        kind, number = self.cache.kinds[layer], self.cache.number_in_kind(layer)
        lane = "csa" if kind == CSA else "hca"
        compress_rows(
            kv,
            gate,
            pooling.bias,
            pooling.gamma,
            pooling.freqs,
            self.cache.cache(lane, name),
            self.tables[lane],
            self.cache.cache(f"{lane}_state", name),
            self.tables[f"{lane}_state"],
            self.kv_lens,
            self.q_starts,
            rate=self.cache.config.rate(kind),
            overlap=kind == CSA,
            epsilon=pooling.epsilon,
            layer=number,
            state_layer=number,
            keep=self.cache.keep,
            backend=backend,
        )

    def select(
        self, layer: int, q: Tensor, weights: Tensor, *, backend: Backend = "auto"
    ) -> Tensor | None:
        """The compressed rows that an indexer selects for every new token; None if there are none.

        q        [tokens, heads, D] rotated, e4m3 where the index keys are FP8
        weights  [tokens, heads] float32
        """
        config = self.cache.config
        entries = self.max_length // config.csa_rate
        if not entries:
            return None
        listed = min(config.index_topk, -(-entries // ENTRY_STEP) * ENTRY_STEP)
        return indexer_select(
            q,
            weights,
            self.cache.cache("csa", "index"),
            self.tables["csa"],
            self.kv_lens,
            listed,
            q_starts=self.q_starts,
            layer=self.cache.number_in_kind(layer),
            mask=compressed_causal(config.csa_rate),
            max_kv_len=self.max_length,
            backend=backend,
        )

    def attend(
        self,
        layer: int,
        q: Tensor,
        sink: Tensor,
        softmax_scale: float,
        selected: Tensor | None = None,
        *,
        backend: Backend = "auto",
    ) -> Tensor:
        """Attention of q [tokens, heads, D] over the window and the compressed rows.

        selected  the rows of a CSA layer, from `select`

        Returns [tokens, heads, D], in which the last columns are still rotated.
        """
        kind = self.cache.kinds[layer]
        out = torch.empty_like(q)
        for part in self._parts():
            extra, extra_rows = None, None
            if kind == CSA and selected is not None:
                extra_rows = selected[part]
            elif kind == HCA:
                extra_rows = self._entries(part)
            if extra_rows is not None:
                rows = self.cache.cache("csa" if kind == CSA else "hca")
                extra = ExtraRows(rows, extra_rows, layer=self.cache.number_in_kind(layer))
            sparse_mla(
                q[part],
                self.cache.cache("window"),
                self._window(part),
                softmax_scale=softmax_scale,
                sink=sink,
                extra=extra,
                layer=self.cache.number(layer),
                out=out[part],
                backend=backend,
            )
        return out

    def _slots(self, page_size: int) -> Tensor:
        slots = self._lists.get("slots")
        if slots is None:
            slots = token_slots(self.tables["window"], page_size, self.request, self.position)
            self._lists["slots"] = slots
        return slots

    def _parts(self) -> Iterator[slice]:
        """The new tokens, so many at a time that their lists of rows fit in memory."""
        tokens = len(self.position)
        config = self.cache.config
        size = max(MAX_LISTED // (config.sliding_window + self.max_length // config.hca_rate), 1)
        for first in range(0, tokens, size):
            yield slice(first, min(first + size, tokens))

    def _window(self, part: slice) -> Tensor:
        """The rows [tokens, W] of each query's window, own row first, −1 before the first token."""

        def tokens() -> Tensor:
            back = torch.arange(self.cache.config.sliding_window, device=self.position.device)
            return self.position[part, None] - back

        return self._listed("window", part, tokens)

    def _entries(self, part: slice) -> Tensor | None:
        """All compressed rows [tokens, entries] of an HCA layer that each query sees."""
        rate = self.cache.config.hca_rate
        count = -(-(self.max_length // rate) // ENTRY_STEP) * ENTRY_STEP
        if not count:
            return None

        def entries() -> Tensor:
            entry = torch.arange(count, device=self.position.device)
            seen = entry < ((self.position[part] + 1) // rate)[:, None]
            return torch.where(seen, entry, -1)

        return self._listed("hca", part, entries)

    def _listed(self, lane: str, part: slice, listed: Callable[[], Tensor]) -> Tensor:
        """The rows of places in a lane [queries, n]; those of all queries serve all layers."""
        is_whole = part == slice(0, len(self.position))
        known = self._lists.get(lane) if is_whole else None
        if known is None:
            starts = (self.q_starts - part.start).clamp(0, part.stop - part.start)
            page_size = self.cache.lanes[lane].page_size
            known = physical_rows(listed(), self.tables[lane], page_size, starts)
            if is_whole:
                self._lists[lane] = known
        return known
