"""Quantise finished latents and rope columns and store them as cache rows, in every format.

Maths      scale = max(amax / 448, smallest) ;  stored = c / scale
Memory     one row per token that has a slot, and its scales: in the row, beside it or in the page's
           footer
Limits     none: widths are padded to powers of two, rows may have any stride and alignment
Lineage    own design
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.formats import SMALLEST_SCALE, SMALLEST_TOKEN_SCALE, BlockScaleCodec, PageFooterCodec
from mlakit.kernels.triton.norm_quant import (
    BLOCK_SCALES,
    FOOTER_SCALES,
    NO_SCALE,
    TENSOR_SCALE,
    TOKEN_SCALE,
    divide,
    encode,
    find_scales,
    store_elements,
    store_scales,
)
from mlakit.kernels.triton.rope import store_pairs
from mlakit.kernels.triton.rows import rows_are_aligned

_SCALING = {
    "fp8": TENSOR_SCALE,
    "fp8_token": TOKEN_SCALE,
    "fp8_block128": BLOCK_SCALES,
    "fp8_block64": FOOTER_SCALES,
}


@triton.jit
def store_latent(
    latent,  # float32 [T, LATENT_TILE], 0 beyond D_C
    row,  # pointers [T] to the rows
    page,  # int64 [T]
    offset,  # int64 [T]
    is_stored,  # [T]
    scales,  # (scales, stride of pages, stride of rows)
    tensor_scale,  # (a number, or a pointer to the scale on the device)
    D_C: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SMALLEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Quantise and store the latent columns and their scales; gives the scale of the rope columns,
    [T, 1, 1]."""
    scales, scales_stride_page, scales_stride_row = scales
    tensor_scale, tensor_scale_at = tensor_scale
    STORED: tl.constexpr = tl.uint8 if SCALING != NO_SCALE else row.dtype.element_ty
    TOKENS: tl.constexpr = latent.shape[0]
    LATENT_TILE: tl.constexpr = latent.shape[1]
    rope_scale = tl.zeros_like(page).to(tl.float32)[:, None, None]
    if SCALING == TENSOR_SCALE:
        rope_scale += tensor_scale
        if tensor_scale_at is not None:
            rope_scale = tl.zeros_like(rope_scale) + tl.load(tensor_scale_at).to(tl.float32)
        latent = divide(latent, tl.reshape(rope_scale, [TOKENS, 1]))
    elif SCALING >= TOKEN_SCALE:
        grouped = tl.reshape(latent, [TOKENS, LATENT_TILE // GROUP, GROUP])
        scale = find_scales(grouped, SMALLEST, POWER_OF_TWO)  # [T, groups]
        grouped = divide(grouped, scale[:, :, None])
        latent = tl.reshape(grouped, [TOKENS, LATENT_TILE])
        beside = row
        if scales is not None:
            beside = scales + page * scales_stride_page + offset * scales_stride_row
        store_scales(row + D_C, beside, scale, is_stored, D_C, GROUP, SCALING, ALIGNED)
        if SCALING == TOKEN_SCALE:
            rope_scale = scale[:, :, None]
    encoded = encode(latent, STORED, HAS_FP8)
    column = tl.arange(0, LATENT_TILE)
    inside = is_stored[:, None] & (column < D_C)[None, :]
    store_elements(row[:, None], column[None, :], encoded, inside, ALIGNED)
    return rope_scale


@triton.jit
def store_rope(
    y0,  # float32 [T, 1, PAIRS]
    y1,
    row,  # pointers [T] to the rows
    is_stored,  # [T]
    rope_scale,  # [T, 1, 1], of `store_latent`
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Store pairs of rope columns, divided by a scale where the format has one for them."""
    STORED: tl.constexpr = tl.uint8 if SCALING != NO_SCALE else row.dtype.element_ty
    ROPE_STORED: tl.constexpr = tl.bfloat16 if SCALING >= TOKEN_SCALE else STORED
    # the scales of fp8_block128 lie between the latent and the rope, other scales elsewhere
    INLINE_BYTES: tl.constexpr = 4 * ((D_C + GROUP - 1) // GROUP) if SCALING == BLOCK_SCALES else 0
    if SCALING >= TENSOR_SCALE and SCALING <= TOKEN_SCALE:
        y0, y1 = divide(y0, rope_scale), divide(y1, rope_scale)
    store_pairs(
        (row + D_C + INLINE_BYTES)[:, None, None], is_stored[:, None, None], y0, y1,
        ROPE_STORED, D_R, PAIRS, INTERLEAVED, ALIGNED, HAS_FP8,
    )  # fmt: skip


def row_options(layer: CacheLayer, *, power_of_two: bool, has_fp8: bool) -> dict[str, Any]:
    """The constexpr arguments of a kernel that stores rows of a layer."""
    row = layer.codec.row
    scaling = _SCALING.get(layer.codec.name, NO_SCALE)
    group, latent_tile = _tile_of_latent(scaling, row.kv_lora_rank)
    return {
        "D_C": row.kv_lora_rank,
        "D_R": row.qk_rope_head_dim,
        "PAGE_SIZE": layer.page_size,
        "SCALING": scaling.value,
        "GROUP": group,
        "POWER_OF_TWO": power_of_two or bool(scaling == FOOTER_SCALES),
        "SMALLEST": SMALLEST_TOKEN_SCALE if scaling == TOKEN_SCALE else SMALLEST_SCALE,
        "ALIGNED": rows_are_aligned(layer),
        "HAS_FP8": has_fp8,
        "LATENT_TILE": latent_tile,
        "PAIRS": triton.next_power_of_2(max(row.qk_rope_head_dim // 2, 1)),
    }


def tensor_scale_of(layer: CacheLayer) -> tuple[float, Tensor | None]:
    """(the scale as a number, None), or (1.0, the scale on the device)."""
    scale = layer.tensor_scale
    if isinstance(scale, Tensor):
        return 1.0, scale.to(layer.payload.device)
    return float(scale), None


def stride_of(tensor: Tensor | None, axis: int) -> int:
    """0 for a tensor that is not there."""
    return 0 if tensor is None else tensor.stride(axis)


def _tile_of_latent(scaling: Any, d_c: int) -> tuple[int, int]:
    """(columns that share a scale, columns of the tile), powers of two."""
    width = triton.next_power_of_2(d_c)
    if scaling == BLOCK_SCALES:
        return BlockScaleCodec.group, max(width, BlockScaleCodec.group)
    if scaling == FOOTER_SCALES:  # one group per byte of a footer
        return PageFooterCodec.group, PageFooterCodec.group * PageFooterCodec.footer_bytes
    return width, width
