"""Traits of cache rows that a kernel is compiled for: types of dots, column tiles, alignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.formats import FormatTraits
from mlakit.kernels.triton.configs import RowTiles

TRITON_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
PLAIN = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ComputeTypes:
    latent: torch.dtype  # of dots over latent columns, and of probabilities
    rope: torch.dtype


class RowTraits(NamedTuple):
    """The cache rows that a kernel is compiled for: one constexpr argument."""

    FORMAT: FormatTraits
    FACTORS: str  # "row", "piece" or "", see `_factors`
    DTYPE: Any  # Triton's types of `ComputeTypes`
    ROPE_DTYPE: Any
    D_C: int  # columns of all pieces
    D_R: int
    Q_COLUMNS: int  # of the latent query; the pieces from here on belong to the rotated query
    V_WIDTH: int
    PIECES: int  # column tiles of the latent
    WIDTH: int  # columns of a piece, a power of two
    VALUE_PIECES: int  # the first pieces, which hold values
    ROPE_WIDTH: int  # D_R padded; 0 where rows have no rotated columns
    VALUE_UNIT: float  # see `value_unit`
    HAS_FP8: bool  # e4m3 conversions in hardware
    IS_ALIGNED: bool  # 16-bit and float32 values in a row are aligned to 4 bytes


def row_traits(
    layer: CacheLayer, tiles: RowTiles, types: ComputeTypes, *, has_fp8: bool
) -> RowTraits:
    return RowTraits(
        layer.codec.traits,
        _factors(layer.codec.traits),
        TRITON_TYPES[types.latent],
        TRITON_TYPES[types.rope],
        tiles.d_c,
        tiles.d_r,
        layer.codec.row.kv_lora_rank,
        tiles.v_width,
        tiles.pieces,
        tiles.width,
        tiles.value_pieces,
        tiles.rope_width,
        value_unit(types.latent, layer.codec.traits),
        has_fp8,
        rows_are_aligned(layer),
    )


def _factors(format: FormatTraits) -> str:
    """What multiplies dot products with the columns as stored: a factor per key ("row"), or one per
    key and piece ("piece").

    Columns with e8m0 scales are dequantised instead, and the scale of a tensor is part of the
    softmax scale.
    """
    if format.HAS_E8M0_SCALES:
        return ""
    return {"row": "row", "group": "piece"}.get(format.SCALED_BY, "")


def latent_type(q_dtype: torch.dtype, layer: CacheLayer) -> torch.dtype:
    """The type of dots between queries of `q_dtype` and the latent columns of rows."""
    latent = layer.payload.dtype if layer.payload.dtype in PLAIN else q_dtype
    return latent if latent in PLAIN else torch.bfloat16


def compute_types(q_latent: Tensor, q_rope: Tensor, layer: CacheLayer) -> ComputeTypes:
    """Types that hold q and the rows exactly; float32 where they have different 16-bit types."""
    latent = latent_type(q_latent.dtype, layer)
    stored_rope = layer.payload.dtype
    if stored_rope == torch.uint8:
        stored_rope = torch.bfloat16
    exact = {dtype for dtype in (stored_rope, q_rope.dtype) if dtype in PLAIN} or {latent}
    return ComputeTypes(latent, exact.pop() if len(exact) == 1 else torch.float32)


def row_tiles(layer: CacheLayer, widest: int = 1024) -> RowTiles:
    """The tiles of a layer's rows; where factors belong to pieces, each piece has one scale.

    Groups of e4m3 columns may be narrower than the rotated columns: those are pieces as well.
    """
    codec, row = layer.codec, layer.codec.row
    if _factors(codec.traits) != "piece":
        return RowTiles.of(row.kv_lora_rank, row.qk_rope_head_dim, row.v_width, widest)
    widest = min(widest, codec.scale_group)
    if not codec.traits.IS_BF16_ROPE:
        return RowTiles.of(row.width, 0, row.v_width, widest)
    return RowTiles.of(row.kv_lora_rank, row.qk_rope_head_dim, row.v_width, widest)


def value_unit(dtype: torch.dtype, format: FormatTraits) -> float:
    """Return the factor of probabilities besides row scales, which keeps float16 from underflow.

    A row that float16 can hold has scales of at most 146, so the product stays below 65504.
    """
    return 256.0 if _factors(format) and dtype == torch.float16 else 1.0


def rows_are_aligned(layer: CacheLayer) -> bool:
    """Return whether 16-bit and float32 values in the bytes of a row are at multiples of 4."""
    payload = layer.payload
    bytes_at = (payload.data_ptr(), *payload.stride()[:2])
    return payload.dtype != torch.uint8 or all(at % 4 == 0 for at in bytes_at)
