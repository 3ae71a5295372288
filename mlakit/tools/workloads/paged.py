"""Poisoned caches and page tables for the ops that read or write one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, PagedLatentCache, PageTable
from mlakit.cache.layouts import bits
from mlakit.formats import Format, PageFooterCodec, RowCodec, row_codec
from mlakit.model.geometry import RowShape
from mlakit.model.masks import Mask
from mlakit.tools.testing import NEVER_A_PAGE, poison
from mlakit.tools.workloads.case import Case
from mlakit.tools.workloads.inputs import GUARD, PAD_BYTES, Inputs

SPARE_PAGES = 3  # pages of a pool that no request uses
SPARE_COLUMNS = 2  # columns of a page table that no request uses


def scales_of(layer: CacheLayer, slots: Tensor) -> Tensor:
    """float64 [n]: the scale of each row at `slots` int64 [n]."""
    slots = slots.to(layer.payload.device)
    if layer.scales is not None:
        place = slots // layer.page_size, slots % layer.page_size
        return layer.scales[place].view(len(slots)).double()
    scale = layer.tensor_scale
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=torch.float32, device="cpu")
    return scale.to(slots.device, torch.float32).double().expand(slots.shape)


@dataclass(frozen=True, eq=False)
class Pool:
    """One layer of a cache that is poison except for the rows written to it."""

    inputs: Inputs
    name: str
    cache: PagedLatentCache
    layer_index: int

    @property
    def layer(self) -> CacheLayer:
        return self.cache.layer(self.layer_index)

    def write(self, slots: Tensor, rows: Tensor, *, power_of_two: bool = False) -> Tensor:
        """Store `rows` [n, width] at `slots` int64 [n]; returns what was stored, float64."""
        codec, scale = self.cache.codec, self.cache.tensor_scale
        payload, beside = codec.encode(rows, tensor_scale=scale, power_of_two=power_of_two)
        for stored, values in ((self.layer.payload, payload), (self.layer.beside, beside)):
            if stored is not None and values is not None:
                bits(stored)[self._place(slots)] = bits(values).to(stored.device)
        return codec.decode(payload, beside, tensor_scale=scale, dtype=torch.float64)

    def row_scales(self, slots: Tensor) -> Tensor:
        """float64 [n]: the scale of each row."""
        return scales_of(self.layer, slots)

    def read(self, slots: Tensor) -> Tensor:
        """Rows [n, width] float32 on the CPU."""
        payload, beside = (
            None if stored is None else bits(stored)[self._place(slots)].cpu().view(stored.dtype)
            for stored in (self.layer.payload, self.layer.beside)
        )
        assert payload is not None
        return self.cache.codec.decode(payload, beside, tensor_scale=self.cache.tensor_scale)

    def payload(self, slots: Tensor) -> Tensor:
        """Bytes of rows [n, bytes] on the CPU."""
        return bits(self.layer.payload)[self._place(slots)].cpu()

    def allow(self, slots: Tensor) -> None:
        """Allow the op to write to these rows."""
        for name, stored in ((self.name, self.layer.payload), (self._beside, self.layer.beside)):
            if stored is not None:
                page, offset = self._place(slots)
                self.inputs.allow(name, stored, (page.cpu(), offset.cpu()))

    @property
    def _beside(self) -> str:
        """The memory beside the rows: the pages themselves for formats with a page footer."""
        return self.name if isinstance(self.cache.codec, PageFooterCodec) else f"{self.name} beside"

    def _place(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = slots.to(self.inputs.device)
        return slots // self.cache.page_size, slots % self.cache.page_size


@dataclass(frozen=True, kw_only=True, repr=False)
class PagedCase(Case):
    """A case with a cache.

    num_layers              the last layer is used, the others are poison
    page_major              the pages of a layer have those of the others between them, as engines
                            lay them out
    tensor_scale            of format "fp8"; a tensor if `tensor_scale_on_device`
    power_of_two            scales of the rows
    wide_indices            int64 instead of int32 for tables, lengths and offsets
    """

    kv_lora_rank: int = 32
    qk_rope_head_dim: int = 8
    v_width: int = 0
    format: Format = "bf16"
    page_size: int = 16
    num_layers: int = 1
    page_major: bool = False
    tensor_scale: float = 1.0
    tensor_scale_on_device: bool = False
    power_of_two: bool = False
    wide_indices: bool = False

    @property
    def row(self) -> RowShape:
        """The columns of the cache's rows."""
        return RowShape(self.kv_lora_rank, self.qk_rope_head_dim, self.v_width)

    def pool(
        self,
        inputs: Inputs,
        name: str,
        num_pages: int,
        *,
        format: Format | None = None,
        row: RowShape | None = None,
        page_size: int | None = None,
    ) -> Pool:
        """A poisoned pool; of the case's own format, row and page size where none is given."""
        row = row or self.row
        codec = row_codec(format or self.format, row)
        shape = (num_pages, self.num_layers, page_size or self.page_size)
        footer = isinstance(codec, PageFooterCodec)
        columns = codec.bytes_per_token if footer else codec.payload_elements
        place = partial(_blocks, inputs, codec=codec, shape=shape, page_major=self.page_major)
        blocks = place(name, columns=columns, dtype=codec.payload_dtype)
        beside = None
        if codec.beside_dtype is not None and not footer:
            beside = place(
                f"{name} beside", columns=codec.beside_elements, dtype=codec.beside_dtype
            )
        scale: float | Tensor = self.tensor_scale if codec.has_tensor_scale else 1.0
        if codec.has_tensor_scale and self.tensor_scale_on_device:
            scale = inputs.place(
                f"{name} tensor_scale",
                torch.tensor([self.tensor_scale], dtype=torch.float32, device="cpu"),
            )
        if codec.is_split:
            cache = PagedLatentCache(codec, _layers_first(blocks), _layers_first(beside), scale)
        else:
            cache = PagedLatentCache.wrap(
                blocks, row, format=codec.name, scales=beside, tensor_scale=scale
            )
        return Pool(inputs, name, cache, self.num_layers - 1)


def _layers_first(blocks: Tensor | None) -> Tensor:
    """Blocks [pages, 1, layers, page_size, 1, columns] as `PagedLatentCache` has them."""
    assert blocks is not None
    return blocks[:, 0, :, :, 0].transpose(0, 1)


def _blocks(
    inputs: Inputs,
    name: str,
    *,
    codec: RowCodec,
    shape: tuple[int, int, int],
    page_major: bool,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """Poisoned [pages, 1, layers, page_size, 1, columns] for `PagedLatentCache.wrap`.

    Packed; with padded inputs page-major, with gaps between rows and pages.
    """
    pages, layers, page_size = shape
    pad = max(PAD_BYTES // dtype.itemsize, 1) if inputs.padded else 0
    if isinstance(codec, PageFooterCodec):
        by_row, by_page = columns, codec.page_bytes(page_size) + bool(pad) * codec.payload_elements
    else:
        by_row = columns + pad
        by_page = page_size * by_row + pad
    page_stride, layer_stride = (
        (layers * by_page, by_page) if inputs.padded or page_major else (by_page, pages * by_page)
    )
    memory = torch.empty(2 * GUARD + pages * layers * by_page, dtype=dtype, device=inputs.device)
    inputs.watch(name, poison(memory))
    return memory.as_strided(
        (pages, 1, layers, page_size, 1, columns),
        (page_stride, by_page, layer_stride, by_row, by_row, 1),
        GUARD,
    )


def num_pages_for(counts: Sequence[int], page_size: int) -> int:
    """Pages for requests of so many tokens, and some spare pages."""
    return sum(-(-count // page_size) for count in counts) + SPARE_PAGES


def map_tokens(
    pool: Pool,
    used: Sequence[Tensor],
    *,
    flat: bool,
    wide: bool,
    spare_columns: int = SPARE_COLUMNS,
    repeats: int = 1,
) -> tuple[PageTable, list[Tensor]]:
    """(page table on the device, per request int64 [tokens]: the slots of its tokens).

    used           per request, bool [tokens]: tokens the op may read; the entries of other pages
                   are garbage
    spare_columns  of a page table, past the longest request
    repeats        consecutive places of a page in a page table, whose tokens share its slots
    """
    dtype = torch.int64 if wide else torch.int32
    if flat:
        return _flat_table(pool, used, dtype)
    return _paged_table(pool, used, dtype, spare_columns, repeats)


def _garbage(pool: Pool, *shape: int) -> Tensor:
    """Table entries that must not be read: invalid pages, or poisoned ones."""
    return pool.inputs.any_of([NEVER_A_PAGE, -1, pool.cache.layer(0).num_slots, 0], *shape)


def _paged_table(
    pool: Pool, used: Sequence[Tensor], dtype: torch.dtype, spare_columns: int, repeats: int
) -> tuple[PageTable, list[Tensor]]:
    page_size, inputs = pool.cache.page_size, pool.inputs
    counts = [-(-len(tokens) // page_size) for tokens in used]
    pages = torch.randperm(pool.cache.num_pages, generator=inputs.generator, device=inputs.drawn_on)
    table = _garbage(pool, len(used), max([1, *counts]) + spare_columns)
    slots = []
    for row, tokens, first, count in zip(table, used, starts_of(counts), counts, strict=False):
        own = pages[first : first + -(-count // repeats)].repeat_interleave(repeats)[:count]
        token = torch.arange(len(tokens), device=inputs.drawn_on)
        slots.append(own[token // page_size] * page_size + token % page_size)
        whole = torch.nn.functional.pad(tokens, (0, count * page_size - len(tokens)))
        looked_up = whole.view(count, page_size).any(1)
        row[:count] = torch.where(looked_up, own, row[:count])
    return inputs.place(f"{pool.name} page_table", table.to(dtype)), slots


def _flat_table(
    pool: Pool, used: Sequence[Tensor], dtype: torch.dtype
) -> tuple[PageTable, list[Tensor]]:
    inputs = pool.inputs
    num_slots = pool.cache.layer(0).num_slots
    free = torch.randperm(num_slots, generator=inputs.generator, device=inputs.drawn_on)
    slots = list(free[: sum(map(len, used))].split([len(tokens) for tokens in used]))
    lists = []
    for tokens, own in zip(used, slots, strict=True):
        room = _garbage(pool, len(own) + int(inputs.integers(0, 3)))
        room[: len(own)][tokens] = own[tokens]
        lists.append(room)
    starts = torch.tensor(starts_of(list(map(len, lists))), dtype=dtype, device="cpu")
    flat = joined(lists, torch.int64, inputs.drawn_on).to(dtype)
    names = (f"{pool.name} kv_starts", f"{pool.name} slots")
    return (inputs.place(names[0], starts), inputs.place(names[1], flat)), slots


def write_tokens(
    pool: Pool,
    slots: Sequence[Tensor],
    used: Sequence[Tensor],
    rows: Tensor,  # [tokens of all requests, width]
    *,
    power_of_two: bool = False,
) -> list[Tensor]:
    """Store the rows of the `used` tokens; per request float64 [tokens, width], NaN for others."""
    is_used = joined(used, torch.bool, pool.inputs.drawn_on)
    stored = pool.write(used_slots(slots, used), rows[is_used], power_of_two=power_of_two)
    return spread(stored, used, torch.nan)


def used_slots(slots: Sequence[Tensor], used: Sequence[Tensor]) -> Tensor:
    """int64 [n]: the slots of the `used` tokens of all requests."""
    return joined(slots, torch.int64)[joined(used, torch.bool)]


def spread(values: Tensor, used: Sequence[Tensor], other: float) -> list[Tensor]:
    """Per request the `values` [n, ...] of its `used` tokens, and `other` for its other tokens."""
    is_used = joined(used, torch.bool, values.device)
    whole = values.new_full((len(is_used), *values.shape[1:]), other)
    whole[is_used] = values
    return list(whole.split([len(tokens) for tokens in used]))


def joined(
    parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """All parts in one tensor; `dtype` and `device` if there is none."""
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype, device=device)


def seen_tokens(
    mask: Mask,
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Per request bool [kv_len]: tokens that at least one of its newest q_len queries sees."""
    seen = []
    for kv_len, q_len in zip(kv_lens, q_lens, strict=True):
        position = torch.arange(kv_len - q_len, kv_len, device=device)
        seen.append(mask.visible(position, torch.arange(kv_len, device=device)).any(0))
    return seen


def starts_of(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]
