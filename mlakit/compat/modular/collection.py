"""MAX's paged cache object: 6-D blocks, a lookup table, lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, PagedLatentCache, token_positions, token_slots
from mlakit.cache.layouts import as_integers
from mlakit.dispatch.checks import E4M3, FLOATS, INTEGERS, Dims, as_signed
from mlakit.dispatch.reprs import fields_repr, shapes_repr
from mlakit.formats import Format, row_codec
from mlakit.model.geometry import RowShape

FORMAT_BY_GROUP: dict[int, Format] = {
    32: "fp8_group32",
    64: "fp8_group64",
    128: "fp8_group128",
}
"""Formats by the columns that share a scale."""
ALL_FP8_ROW = (576, 512)  # documented (head_size, kv_lora_rank) of rows with e4m3 rope columns


@dataclass(frozen=True, eq=False)
class KeyCache:
    """One layer of a `KVCollection`: the result of `get_key_cache`."""

    layer: CacheLayer
    lookup_table: Tensor  # [batch, columns] int32 or int64
    cache_lengths: Tensor  # [batch] tokens cached before this step
    scales_lookup_table: Tensor | None = None
    max_prompt_length: int | None = None

    __repr__ = shapes_repr

    @property
    def row(self) -> RowShape:
        """The columns of a row."""
        return self.layer.codec.row

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.layer.page_size

    def kv_lens(self, row_offsets: Tensor) -> Tensor:
        """Return [batch] cached tokens including those of this step: `kv_lens` of the ops."""
        return self.cache_lengths + row_offsets.diff()

    @property
    def is_rope_aware(self) -> bool:
        """Return whether rope columns are bf16 beside e4m3 latents with one scale per token."""
        return self.layer.codec.name == "fp8_token"

    def with_scales_by_page(self, first: Tensor, last: Tensor) -> KeyCache:
        """The cache with the scales of tokens [first, last) copied to the pages of their rows.

        With a `scales_lookup_table`, scales have their own pages. Copying the scales lets every
        kernel use one page table. `store_scales` copies those of new tokens back.
        """
        if self.scales_lookup_table is None or self.layer.scales is None:
            return self
        num_pages, page_size = self.layer.payload.shape[:2]
        start = torch.arange(self.lookup_table.shape[1], device=last.device) * page_size
        used = (start < last[:, None]) & (start + page_size > first[:, None])
        used &= (first < last)[:, None]
        # unused entries may hold garbage: they read page 0 and write a page past the last one
        source = torch.where(used, self.scales_lookup_table, 0).long()
        target = torch.where(used, self.lookup_table, num_pages).long()
        copied = self.layer.scales.new_empty(num_pages + 1, *self.layer.scales.shape[1:])
        copied[target] = self.layer.scales[source]
        layer = replace(self.layer, beside=copied[:num_pages])
        return replace(self, layer=layer, scales_lookup_table=None)

    def new_slots(self, row_offsets: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Slots of the new tokens' rows, and those of their scales."""
        request, position = token_positions(self.kv_lens(row_offsets), row_offsets, num_tokens)
        rows = token_slots(self.lookup_table, self.page_size, request, position)
        if self.scales_lookup_table is None:
            return rows, rows
        return rows, token_slots(self.scales_lookup_table, self.page_size, request, position)

    def store_scales(self, by_page: KeyCache, row_offsets: Tensor, num_tokens: int) -> None:
        """Copy the scales of the new tokens from `with_scales_by_page` to their own pages."""
        if by_page is self or self.layer.scales is None or by_page.layer.scales is None:
            return
        rows, own = self.new_slots(row_offsets, num_tokens)
        size = self.page_size
        scales = as_integers(by_page.layer.scales)[rows // size, rows % size]
        as_integers(self.layer.scales)[own // size, own % size] = scales


class KVCollection:
    """A paged latent cache of several layers and the requests of one step in it.

    blocks         [pages, 1, layers, page_size, 1, head_size] bf16, f16, f32 or float8_e4m3fn;
                   float8 without `scales` has unit scale
    lookup_table   [batch, columns]: page id of each logical page; unused entries are not read
    cache_lengths  [batch]: tokens cached before this step
    scales         [pages, 1, layers, page_size, 1, groups] float32, which multiply float8 rows: one
                   per token, or one per 32, 64 or 128 columns (18, 9 or 5 for 576 columns)
    per_token_scale_rope_aware  whether a row with one scale is `kv_lora_rank` e4m3 latent columns,
                   then the rope columns in bf16, divided by the scale as well (640 bytes for
                   512 + 64); else all columns are e4m3. None: True, except for rows of 512 + 64
                   bytes
    scales_lookup_table  [batch, columns]: the pages of scales that have a pool of their own. Every
                   function copies the scales of the tokens it uses to the pages of their rows
    """

    def __init__(
        self,
        blocks: Tensor,
        lookup_table: Tensor,
        cache_lengths: Tensor,
        *,
        scales: Tensor | None = None,
        scales_lookup_table: Tensor | None = None,
        max_prompt_length: int | None = None,
        max_cache_length: int | None = None,
        kv_lora_rank: int = 512,
        per_token_scale_rope_aware: bool | None = None,
    ) -> None:
        dims = Dims("KVCollection")
        axes = ("pages", "kv", "layers", "page_size", "kv_heads")
        dims.bind("kv", 1, "the one latent row of MLA")
        dims.bind("kv_heads", 1, "the one KV head of MLA")
        dims.match("blocks", blocks, *axes, "head_size", dtypes=[*FLOATS, E4M3])
        dims.writable("blocks", blocks)
        dims.require(blocks.shape[2] >= 1, "blocks", "have at least one layer", 0)
        dims.require(blocks.shape[3] >= 1, "blocks", "have a page_size of at least 1", 0)
        dims.match("lookup_table", lookup_table, "batch", "columns", dtypes=INTEGERS)
        dims.match("cache_lengths", cache_lengths, "batch", dtypes=INTEGERS)
        capacity = dims["columns"] * dims["page_size"]
        dims.lengths("cache_lengths", cache_lengths, capacity, "what the lookup_table holds")
        if scales is not None:
            dims.require(
                blocks.dtype == E4M3,
                "scales",
                "be None unless blocks are float8_e4m3fn",
                f"scales for {blocks.dtype}",
            )
            pages = "pages" if scales_lookup_table is None else "scale_pages"
            dims.match("scales", scales, pages, *axes[1:], "groups", dtypes=[torch.float32])
            dims.writable("scales", scales)
        if scales_lookup_table is not None:
            dims.require(scales is not None, "scales_lookup_table", "come with scales", "no scales")
            dims.match(
                "scales_lookup_table", scales_lookup_table, "batch", "columns", dtypes=INTEGERS
            )
            scales_lookup_table = as_signed(scales_lookup_table)
        for name, maximum in (
            ("max_prompt_length", max_prompt_length),
            ("max_cache_length", max_cache_length),
        ):
            if maximum is not None:
                dims.integer(name, maximum, 0)

        self.lookup_table = as_signed(lookup_table)
        self.cache_lengths = as_signed(cache_lengths)
        self.scales_lookup_table = scales_lookup_table
        self.max_prompt_length = max_prompt_length
        self.max_cache_length = max_cache_length
        self.cache = _pool(dims, blocks, scales, kv_lora_rank, per_token_scale_rope_aware)

    @property
    def num_layers(self) -> int:
        """Layers of `blocks`."""
        return self.cache.num_layers

    def __repr__(self) -> str:
        return fields_repr(self, **vars(self))

    def get_key_cache(self, layer_idx: int) -> KeyCache:
        """The cache of one layer, in the memory of `blocks`."""
        return self.key_cache(Dims("KVCollection.get_key_cache"), layer_idx)

    def key_cache(self, dims: Dims, layer_idx: int) -> KeyCache:
        """`get_key_cache` whose errors name the op of `dims`."""
        index = dims.integer("layer_idx", layer_idx, 0)
        dims.require(
            index < self.num_layers, "layer_idx", f"be below the {self.num_layers} layers", index
        )
        return KeyCache(
            self.cache.layer(index),
            self.lookup_table,
            self.cache_lengths,
            self.scales_lookup_table,
            self.max_prompt_length,
        )


def _pool(
    dims: Dims, blocks: Tensor, scales: Tensor | None, kv_lora_rank: int, rope_aware: bool | None
) -> PagedLatentCache:
    """The blocks as a pool; scales may have their own pages (`scales_lookup_table`)."""
    head_size = dims["head_size"]
    rank = dims.integer("kv_lora_rank", kv_lora_rank, 1)
    dims.require(rank <= head_size, "kv_lora_rank", f"not exceed head_size {head_size}", rank)
    rope_width = head_size - rank
    if scales is None:
        dims.require(
            not rope_aware, "per_token_scale_rope_aware", "be None or False without scales", True
        )
        return PagedLatentCache.wrap(blocks, _row_shape(dims, rank, rope_width))
    format = _scaled_format(dims, rank, rope_aware)
    if format == "fp8_token":
        dims.require(
            rope_width % 2 == 0,
            "blocks",
            f"have rows of {rank} latent bytes and whole bf16 rope columns",
            f"head_size {head_size}",
        )
        dims.require(
            rank % 4 == 0, "kv_lora_rank", "be a multiple of 4 for bf16 rope columns", rank
        )
        rope_width //= 2
    codec = row_codec(format, _row_shape(dims, rank, rope_width))
    payload = _by_layer(blocks).view(codec.payload_dtype)
    return PagedLatentCache(codec, payload, _by_layer(scales))


def _scaled_format(dims: Dims, rank: int, rope_aware: bool | None) -> Format:
    """The format of float8 rows with the given number of scales each."""
    head_size, groups = dims["head_size"], dims["groups"]
    if groups == 1:
        if rope_aware is None:
            rope_aware = (head_size, rank) != ALL_FP8_ROW
        return "fp8_token" if rope_aware else "fp8_row"
    sizes = {-(-head_size // size): size for size in FORMAT_BY_GROUP}
    known = ", ".join(f"{count} (per {size} columns)" for count, size in sizes.items() if count > 1)
    dims.require(
        groups in sizes, "scales", f"have 1 scale per token{known and f', or {known}'}", groups
    )
    size = sizes[groups]
    dims.require(
        not rope_aware,
        "per_token_scale_rope_aware",
        f"be None or False for one scale per {size} columns",
        True,
    )
    dims.require(
        rank % size == 0,
        "kv_lora_rank",
        f"be a multiple of {size} for one scale per {size} columns",
        rank,
    )
    return FORMAT_BY_GROUP[size]


def _row_shape(dims: Dims, kv_lora_rank: int, rope_width: int) -> RowShape:
    dims.require(rope_width % 2 == 0, "blocks", "have an even number of rope columns", rope_width)
    return RowShape(kv_lora_rank, rope_width)


def _by_layer(blocks: Tensor) -> Tensor:
    """6-D blocks as [layers, pages, page_size, columns]."""
    return blocks[:, 0, :, :, 0].transpose(0, 1)
