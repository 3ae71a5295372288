"""Batched products of half-precision matrices on the CPU, accumulated in float32.

Many CPUs have no bf16 or fp16 matrix units, and torch's products of such matrices are then far
slower than float32 ones. Tiles of both operands are widened instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from mlakit.formats import saturating_cast
from mlakit.kernels.cpu.workspace import rows_that_fit


def matmul_tiles(rows: int, *, bytes_per_row: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of `rows`, each a multiple of rows long and within half of the workspace."""
    tile = rows_that_fit(2 * bytes_per_row * multiple) * multiple
    for start in range(0, rows, tile):
        yield slice(start, min(start + tile, rows))


def batched_matmul(
    a: Tensor,  # [batch, M, K]
    b: Tensor,  # [batch, N, K]
    *,
    out: Tensor,  # [batch, M, N], any strides
) -> None:
    """out = a @ bᵀ, rounded once."""
    _, rows, depth = a.shape
    for left, right, result in zip(a, b, out, strict=True):
        # while a tile is widened the one before is still there
        for columns in matmul_tiles(len(right), bytes_per_row=2 * 4 * depth):
            weight = right[columns].float().T
            width = columns.stop - columns.start
            for tile in matmul_tiles(rows, bytes_per_row=4 * (depth + 2 * width)):
                product = left[tile].float() @ weight
                result[tile, columns] = saturating_cast(product, out.dtype)
