"""Quantise finished latents and rope columns and store them as cache rows, in every format.

Maths      scale = max(amax / 448, smallest) ;  stored = c / scale
Memory     one row per token that has a slot, and its scales: in the row, beside it or in the page's
           footer
Limits     none: widths are padded to powers of two, rows may have any stride and alignment
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mlakit.cache import CacheLayer
from mlakit.formats import (
    E2M1_MAX,
    E4M3_MAX,
    SMALLEST_SCALE,
    SMALLEST_TOKEN_SCALE,
    FormatTraits,
    PageFooterCodec,
    RowCodec,
)
from mlakit.kernels.triton.norm_quant import (
    BLOCK_SCALES,
    FOOTER_SCALES,
    FOUR_BIT_SCALES,
    GROUP_SCALES,
    NO_SCALE,
    ROW_SCALE,
    TENSOR_SCALE,
    TOKEN_SCALE,
    divide,
    encode,
    find_scales,
    largest_magnitude,
    store_elements,
    store_scales,
)
from mlakit.kernels.triton.primitives import pack_e2m1
from mlakit.kernels.triton.rope import store_pairs
from mlakit.kernels.triton.rows import rows_are_aligned


class StoreTraits(NamedTuple):
    """The cache rows that a kernel is compiled to store."""

    D_C: int
    D_R: int
    PAGE_SIZE: int
    SCALING: int  # a constant of `norm_quant`
    GROUP: int  # columns of the tile that share a scale
    POWER_OF_TWO: bool  # scales are
    SMALLEST: float  # scale
    ALIGNED: bool  # rows start at multiples of 4 bytes
    HAS_FP8: bool
    IS_SPLIT: bool  # rope columns are beside the rows
    CODES: int  # elements of a row that hold latent columns
    ROPE_AT: int  # the element of a row where its rope columns begin
    LARGEST: float  # value that the latent columns are stored as
    SCALE_BYTES: int  # of e8m0 scales, with bytes that hold none
    LATENT_TILE: int  # D_C padded
    PAIRS: int  # D_R / 2 padded


@triton.jit
def store_latent(
    latent,  # float32 [T, LATENT_TILE], 0 beyond D_C
    rope,  # (y0, y1) of `store_rope`, or None
    row,  # pointers [T] to the rows
    page,  # int64 [T]
    offset,  # int64 [T]
    is_stored,  # [T]
    cache,  # `CacheArguments`
    ROW: tl.constexpr,  # `StoreTraits`
):
    """Quantise and store the latent columns and their scales. Returns the scale of the rope
    columns, [T, 1, 1], and pointers [T] to where their own scales, or they, are stored."""
    D_C: tl.constexpr = ROW.D_C
    SCALING: tl.constexpr = ROW.SCALING
    GROUP: tl.constexpr = ROW.GROUP
    STORED: tl.constexpr = tl.uint8 if SCALING != NO_SCALE else row.dtype.element_ty
    TOKENS: tl.constexpr = latent.shape[0]
    LATENT_TILE: tl.constexpr = latent.shape[1]
    rope_scale = tl.zeros_like(page).to(tl.float32)[:, None, None]
    beside = row
    if cache.beside is not None:
        beside = cache.beside + page * cache.stride_beside_page + offset * cache.stride_beside_row
    if SCALING == TENSOR_SCALE:
        rope_scale += cache.tensor_scale
        if cache.device_scale is not None:
            rope_scale = tl.zeros_like(rope_scale) + tl.load(cache.device_scale).to(tl.float32)
        latent = divide(latent, tl.reshape(rope_scale, [TOKENS, 1]))
    elif SCALING >= ROW_SCALE:
        grouped = tl.reshape(latent, [TOKENS, LATENT_TILE // GROUP, GROUP])
        magnitude = largest_magnitude(grouped)  # [T, groups]
        if SCALING == ROW_SCALE and rope is not None:
            y0, y1 = rope
            magnitude = tl.maximum(magnitude, largest_magnitude(y0))
            magnitude = tl.maximum(magnitude, largest_magnitude(y1))
        scale = find_scales(magnitude, ROW.SMALLEST, ROW.POWER_OF_TWO, ROW.LARGEST)
        grouped = divide(grouped, scale[:, :, None])
        latent = tl.reshape(grouped, [TOKENS, LATENT_TILE])
        store_scales(
            *(row + ROW.CODES, beside, scale, is_stored, D_C, GROUP),
            *(SCALING, ROW.ALIGNED, ROW.SCALE_BYTES),
        )
        if SCALING <= TOKEN_SCALE:
            rope_scale = scale[:, :, None]
    if SCALING == FOUR_BIT_SCALES:
        encoded = pack_e2m1(latent)
    else:
        encoded = encode(latent, STORED, ROW.HAS_FP8)
    column = tl.arange(0, encoded.shape[1])
    inside = is_stored[:, None] & (column < ROW.CODES)[None, :]
    store_elements(row[:, None], column[None, :], encoded, inside, ROW.ALIGNED)
    return rope_scale, beside + (D_C // GROUP if SCALING == GROUP_SCALES else 0)


@triton.jit
def store_rope(
    y0,  # float32 [T, 1, PAIRS]
    y1,
    row,  # pointers [T] to the rows
    is_stored,  # [T]
    rope_scale,  # (scale, pointers beside the rows) of `store_latent`
    ROW: tl.constexpr,  # `StoreTraits`
    INTERLEAVED: tl.constexpr,
):
    """Store pairs of rope columns, divided by a scale where the format has one for them."""
    SCALING: tl.constexpr = ROW.SCALING
    scale, beside = rope_scale
    STORED: tl.constexpr = tl.uint8 if SCALING != NO_SCALE else row.dtype.element_ty
    IS_BF16: tl.constexpr = SCALING >= TOKEN_SCALE and SCALING <= FOOTER_SCALES
    ROPE_STORED: tl.constexpr = tl.bfloat16 if IS_BF16 else STORED
    if SCALING >= TENSOR_SCALE and SCALING <= TOKEN_SCALE:
        y0, y1 = divide(y0, scale), divide(y1, scale)
    elif SCALING == GROUP_SCALES:
        y0, y1 = _scale_groups(y0, y1, beside, is_stored, ROW, INTERLEAVED)
    at = beside if ROW.IS_SPLIT else row + ROW.ROPE_AT
    store_pairs(
        *(at[:, None, None], is_stored[:, None, None], y0, y1),
        *(ROPE_STORED, ROW.D_R, ROW.PAIRS, INTERLEAVED, ROW.ALIGNED, ROW.HAS_FP8),
    )


@triton.jit
def _scale_groups(
    y0,
    y1,
    scales_at,  # pointers [T] to the scale of the first group
    is_stored,
    ROW: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Divide pairs of rope columns by the scale of each GROUP columns, and store these scales."""
    D_R: tl.constexpr = ROW.D_R
    PAIRS: tl.constexpr = ROW.PAIRS
    GROUP: tl.constexpr = ROW.GROUP
    pair = tl.arange(0, PAIRS)[None, None, :]
    column0 = 2 * pair if INTERLEAVED else pair
    column1 = column0 + 1 if INTERLEAVED else D_R // 2 + pair
    for group in tl.static_range((D_R + GROUP - 1) // GROUP):
        in0, in1 = column0 // GROUP == group, column1 // GROUP == group
        magnitude = tl.maximum(
            largest_magnitude(tl.where(in0, y0, 0.0)), largest_magnitude(tl.where(in1, y1, 0.0))
        )
        scale = find_scales(magnitude, ROW.SMALLEST, ROW.POWER_OF_TWO)  # [T, 1]
        tl.store((scales_at + group)[:, None], scale, mask=is_stored[:, None])
        y0 = tl.where(in0, divide(y0, scale[:, :, None]), y0)
        y1 = tl.where(in1, divide(y1, scale[:, :, None]), y1)
    return y0, y1


def store_traits(layer: CacheLayer, *, power_of_two: bool, has_fp8: bool) -> StoreTraits:
    row = layer.codec.row
    scaling = _scaling(layer.codec.traits)
    group, latent_tile = _tile_of_latent(scaling, layer.codec)
    format = layer.codec.traits
    # elements of a row are bytes where columns of several types lie in it
    is_bytes = layer.payload.dtype == torch.uint8
    return StoreTraits(
        D_C=row.kv_lora_rank,
        D_R=row.qk_rope_head_dim,
        PAGE_SIZE=layer.page_size,
        SCALING=scaling.value,
        GROUP=group,
        POWER_OF_TWO=power_of_two or format.HAS_E8M0_SCALES,
        SMALLEST=SMALLEST_TOKEN_SCALE if scaling == TOKEN_SCALE else SMALLEST_SCALE,
        ALIGNED=rows_are_aligned(layer),
        HAS_FP8=has_fp8,
        IS_SPLIT=layer.codec.is_split,
        CODES=row.kv_lora_rank // 2 if format.IS_E2M1 else row.kv_lora_rank,
        ROPE_AT=format.ROPE_AT if is_bytes else row.kv_lora_rank,
        LARGEST=E2M1_MAX if format.IS_E2M1 else E4M3_MAX,
        SCALE_BYTES=_scale_bytes(format),
        LATENT_TILE=latent_tile,
        PAIRS=triton.next_power_of_2(max(row.qk_rope_head_dim // 2, 1)),
    )


def _scaling(format: FormatTraits) -> Any:
    """How rows of a format are scaled when they are stored: a constant of `norm_quant`."""
    if format.IS_E2M1:
        return FOUR_BIT_SCALES
    if not format.IS_E4M3:
        return NO_SCALE
    if format.SCALED_BY == "tensor":
        return TENSOR_SCALE
    if format.SCALED_BY == "row":
        return TOKEN_SCALE if format.IS_BF16_ROPE else ROW_SCALE
    if format.HAS_E8M0_SCALES:
        return FOOTER_SCALES
    return GROUP_SCALES if format.SCALES_AT < 0 else BLOCK_SCALES


def _scale_bytes(format: FormatTraits) -> int:
    if not format.HAS_E8M0_SCALES:
        return 0
    return format.ROPE_AT - format.SCALES_AT if format.IS_E2M1 else PageFooterCodec.footer_bytes


def _tile_of_latent(scaling: Any, codec: RowCodec) -> tuple[int, int]:
    """Return (columns that share a scale, columns of the tile), powers of two."""
    width = triton.next_power_of_2(codec.row.kv_lora_rank)
    if scaling in (BLOCK_SCALES, FOUR_BIT_SCALES, GROUP_SCALES):
        return codec.scale_group, max(width, codec.scale_group)
    if scaling == FOOTER_SCALES:  # one group per byte of a footer
        return codec.scale_group, codec.scale_group * PageFooterCodec.footer_bytes
    return width, width
