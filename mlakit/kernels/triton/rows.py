"""What rows of a cache are to a kernel: types to multiply in, tiles of columns, alignment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.kernels.triton.configs import RowTiles

TRITON_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
PLAIN = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ComputeTypes:
    latent: torch.dtype  # of dots over latent columns, and of the weights of values
    rope: torch.dtype


def latent_type(q_dtype: torch.dtype, layer: CacheLayer) -> torch.dtype:
    """The type that queries of `q_dtype` and the latent columns of rows are multiplied in."""
    latent = layer.payload.dtype if layer.payload.dtype in PLAIN else q_dtype
    return latent if latent in PLAIN else torch.bfloat16


def compute_types(q_latent: Tensor, q_rope: Tensor, layer: CacheLayer) -> ComputeTypes:
    """Types that hold q and the rows exactly; float32 where the two have different halves."""
    latent = latent_type(q_latent.dtype, layer)
    stored_rope = layer.payload.dtype
    if stored_rope not in PLAIN:
        stored_rope = torch.float8_e4m3fn if layer.codec.name == "fp8" else torch.bfloat16
    exact = {dtype for dtype in (stored_rope, q_rope.dtype) if dtype in PLAIN} or {latent}
    return ComputeTypes(latent, exact.pop() if len(exact) == 1 else torch.float32)


def row_tiles(layer: CacheLayer, widest: int = 1024) -> RowTiles:
    row = layer.codec.row
    widths = (row.kv_lora_rank, row.qk_rope_head_dim, row.v_width)
    return RowTiles.of(layer.codec.name, *widths, widest)


def value_unit(dtype: torch.dtype, format: str) -> float:
    """Weights times the scales of rows: halves underflow where rows are small.

    A row that a half can hold has scales of at most 146, so the product stays below 65504.
    """
    is_scaled = format in ("fp8_token", "fp8_block128")
    return 256.0 if is_scaled and dtype == torch.float16 else 1.0


def rows_are_aligned(layer: CacheLayer) -> bool:
    """Do halves and floats among the bytes of a row lie at multiples of 4?"""
    payload = layer.payload
    bytes_at = (payload.data_ptr(), *payload.stride()[:2])
    return payload.dtype != torch.uint8 or all(at % 4 == 0 for at in bytes_at)


def as_bytes(tensor: Tensor) -> Tensor:
    """e4m3 as uint8: kernels know it by its bytes; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
