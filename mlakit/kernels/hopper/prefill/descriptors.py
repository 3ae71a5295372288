"""TMA descriptors of the tensors of a prefill, of any element size."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.kernels.hopper.device.primitives import smem_layout

PITCH_BYTES = 16  # rows of a descriptor lie at multiples of it

# kept: what a layout checks of itself takes the host longer than the rest of a descriptor
_smem_layout = lru_cache(maxsize=64)(smem_layout)


def as_rows(heads: Tensor) -> Tensor:
    """Return [n, heads, columns] as [n, all columns from the first head's to the last one's]."""
    n, count, columns = heads.shape
    span = (count - 1) * heads.stride(1) + columns
    return row_pitch(heads.as_strided((n, span), (heads.stride(0), 1)))


def row_pitch(rows: Tensor) -> Tensor:
    """rows [n, columns]; with one row the stride says nothing, and TMA wants a possible one."""
    n, columns = rows.shape
    unit = PITCH_BYTES // rows.element_size()
    return rows.as_strided(rows.shape, (-(-columns // unit) * unit, 1)) if n == 1 else rows


def tma_tiles(rows: Tensor, tile_rows: int, columns: int) -> TensorDescriptor:
    layout = _smem_layout(columns, 8 * rows.element_size())
    return TensorDescriptor(
        rows, list(rows.shape), list(rows.stride()), [tile_rows, columns], layout
    )
