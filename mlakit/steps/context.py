"""The cached context of a prefill step in parts: which keys and heads are expanded together.

K and V of the whole context would not fit memory: 64 KB per token and 128 heads. They are expanded
part by part, by keys and by heads, in two buffers: while attention reads one, a second stream fills
the other with the next part. Few heads and many keys per part are best, as long as there are enough
query tiles for all SMs: results over different keys must be merged, those of different heads not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, PageTable, token_slots
from mlakit.cache.page_table import range_slots
from mlakit.dispatch.knobs import Backend
from mlakit.kernels.cpu.workspace import row_blocks
from mlakit.model.geometry import MLAGeometry
from mlakit.model.masks import Mask
from mlakit.ops import merge_states
from mlakit.steps.side_stream import side_stream

WORKSPACE_BYTES = 512 << 20  # of expanded keys and values, and the cache rows they come from
NUM_BUFFERS = 2  # one is attended to, one is filled
QUERY_TILE = 128  # queries of a work tile of prefill
MIN_TILES = 512  # per part: about four for each SM of the largest GPUs
MAX_PARTIALS = 4  # results over ranges of keys that wait to be merged
ROW_MULTIPLE = 128  # keys of a part, so that no tile of keys is short but the last


@dataclass(frozen=True)
class KeyRange:
    """The tokens [first, last) of every request, and which of them its queries see."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    mask: Mask

    @property
    def num_rows(self) -> int:
        return sum(self.last) - sum(self.first)


@dataclass(frozen=True)
class Part:
    """Keys of some heads that are expanded together."""

    keys: KeyRange
    heads: slice

    @property
    def num_heads(self) -> int:
        return int(self.heads.stop) - int(self.heads.start)


class Expanded(NamedTuple):
    """K and V of a part."""

    k_nope: Tensor  # [n, heads, D_N]
    k_rope: Tensor  # [n, D_R]
    v: Tensor  # [n, heads, D_V]
    kv_starts: Tensor  # int32 [batch + 1]


@dataclass(frozen=True)
class PartSizes:
    """The sizes that fit one buffer: K and V of some heads and keys, and their cache rows."""

    geometry: MLAGeometry
    buffer_bytes: int
    itemsize: int
    head_group: int  # heads that must stay together
    min_heads: int  # fewer would leave SMs without work

    @property
    def columns_per_head(self) -> int:
        return self.geometry.qk_nope_head_dim + self.geometry.v_head_dim

    @property
    def max_rows(self) -> int:
        """The keys of a part of `min_heads` heads."""
        return self._rows(self.min_heads)

    def heads(self, rows: int) -> int:
        """The most heads of a part of `rows` keys. Few keys are expanded for all heads at once."""
        heads = self.geometry.num_heads
        while self._rows(heads) < rows and heads % (2 * self.head_group) == 0:
            heads //= 2
        return heads

    def _rows(self, heads: int) -> int:
        of_row = (heads * self.columns_per_head + self.geometry.row.width) * self.itemsize
        return max(self.buffer_bytes // of_row // ROW_MULTIPLE, 1) * ROW_MULTIPLE

    def parts(self, keys: KeyRange) -> Iterator[Part]:
        heads, total = self.heads(keys.num_rows), self.geometry.num_heads
        for first in range(0, total, heads):
            yield Part(keys, slice(first, min(first + heads, total)))


def pick_part_sizes(
    g: MLAGeometry,
    *,
    tokens: int,
    itemsize: int,
    head_group: int,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> PartSizes:
    """Sizes for `tokens` queries.

    head_group  heads that must stay together
    """
    tiles, heads = -(-tokens // QUERY_TILE), g.num_heads
    while heads % (2 * head_group) == 0 and tiles * heads // 2 >= MIN_TILES:
        heads //= 2
    return PartSizes(g, workspace_bytes // NUM_BUFFERS, itemsize, head_group, heads)


def divided(chunk: Sequence[tuple[int, int]], max_rows: int) -> Iterator[list[tuple[int, int]]]:
    """A chunk, [first, last) of every request, in chunks of about equal size with at most
    `max_rows` rows: the requests' rows are concatenated and cut."""
    total = sum(last - first for first, last in chunk)
    count = max(-(-total // max_rows), 1)
    rows = -(-total // count)
    rows = min(-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, max_rows)
    starts = list(accumulate((last - first for first, last in chunk), initial=0))
    for low in range(0, max(total, 1), max(rows, 1)):
        yield [
            (
                first + min(max(low - start, 0), last - first),
                first + min(max(low + rows - start, 0), last - first),
            )
            for (first, last), start in zip(chunk, starts, strict=False)
        ]


def read_keys(
    layer: CacheLayer, page_table: PageTable, keys: KeyRange, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (cache rows [n, width], kv_starts int32 [batch + 1]) of a range of keys."""
    device = layer.payload.device
    slots, kv_starts = _key_slots(page_table, layer.page_size, keys, device)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return _read_in_blocks(layer, slots, dtype), kv_starts
    return layer.read_unchecked(slots, dtype), kv_starts


def _key_slots(
    page_table: PageTable, page_size: int, keys: KeyRange, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (int64 slots [n], kv_starts int32 [batch + 1]) of a range of keys."""
    if len(keys.first) != 1:
        return range_slots(page_table, page_size, keys.first, keys.last, device)
    # one request: nothing is copied from the host, so that a CUDA graph can hold it
    position = torch.arange(keys.first[0], keys.last[0], device=device)
    slots = token_slots(page_table, page_size, torch.zeros_like(position), position)
    return slots, keys.num_rows * torch.arange(2, dtype=torch.int32, device=device)


def _read_in_blocks(layer: CacheLayer, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows in host memory: the operations of a block find it in the caches."""
    width = layer.codec.row.width
    rows = torch.empty(len(slots), width, dtype=dtype, device="cpu")
    for block in row_blocks(len(slots), layer.payload.shape[2], 4 * 3 * width):
        rows[block] = layer.read_unchecked(slots[block], dtype)
    return rows


def expand_ahead(
    parts: Sequence[Part],
    expand: Callable[[Part, Tensor], Expanded],
    sizes: PartSizes,
    q: Tensor,
) -> Iterator[tuple[Part, Expanded]]:
    """Each part with its K and V. They stay as they are until the part after the next.

    Parts are expanded on a second stream, each while attention reads the one before it; on the CPU
    and under torch.compile one after the other.

    expand  makes K and V of a part in memory of a buffer, of which it takes what it needs
    """
    device = q.device
    if len(parts) == 1 or device.type != "cuda" or torch.compiler.is_compiling():
        for part in parts:
            yield part, expand(part, q.new_empty(0))
        return
    most = max(part.keys.num_rows * part.num_heads for part in parts)
    buffers = q.new_empty(NUM_BUFFERS, most * sizes.columns_per_head)
    here, aside = torch.cuda.current_stream(device), side_stream(device)
    aside.wait_stream(here)
    kept: list[Expanded | None] = [None] * NUM_BUFFERS  # the cache rows are memory of `aside`

    def fill(i: int) -> torch.cuda.Event:
        with torch.cuda.stream(aside):
            kept[i % NUM_BUFFERS] = expand(parts[i], buffers[i % NUM_BUFFERS])
            event: torch.cuda.Event = aside.record_event()
            return event

    filled = fill(0)
    for i, part in enumerate(parts):
        here.wait_event(filled)
        if i + 1 < len(parts):
            # `here` has launched the attention of part i - 1, which read the other buffer
            aside.wait_event(here.record_event())
            filled = fill(i + 1)
        expanded = kept[i % NUM_BUFFERS]
        assert expanded is not None
        yield part, expanded
    here.wait_stream(aside)


class PartialResults:
    """Results over ranges of keys, merged in float32 whenever there are MAX_PARTIALS of them."""

    def __init__(self, q: Tensor, out: Tensor, sink: Tensor | None, backend: Backend) -> None:
        self._q, self._out, self._sink, self._backend = q, out, sink, backend
        self._outs: list[Tensor] = []
        self._lses: list[Tensor] = []

    def room(self, *, is_only: bool = False) -> tuple[Tensor, Tensor]:
        """Memory (out, lse) of the next range; after it the ranges before are complete."""
        if len(self._outs) == MAX_PARTIALS:
            # float32 between ranges, so that the result is rounded to q's dtype once
            first = self._outs[0]
            is_float32 = first.dtype == torch.float32
            self._merge(first if is_float32 else torch.empty_like(first, dtype=torch.float32), None)
        out = self._out if is_only else self._out.new_empty(self._out.shape)
        lse = self._q.new_empty(self._q.shape[:2], dtype=torch.float32)
        self._outs.append(out)
        self._lses.append(lse)
        return out, lse

    def finish(self) -> Tensor:
        """Merge into the step's result; gives its lse."""
        if self._outs[0] is not self._out:
            self._merge(self._out, self._sink)
        return self._lses[0]

    def _merge(self, out: Tensor, sink: Tensor | None) -> None:
        merged = merge_states(
            self._outs,
            self._lses,
            sink=sink,
            out=out,
            lse=self._lses[0],
            backend=self._backend,
        )
        self._outs, self._lses = [merged[0]], [merged[1]]
