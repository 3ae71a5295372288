"""Batched products of half-precision matrices on the CPU, accumulated in float32.

Many CPUs have no bf16 or fp16 matrix units, and torch's products of such matrices are then far
slower than float32 ones. Blocks of the right operand are widened instead, as many rows at a time
as fit the workspace.
"""

from __future__ import annotations

from torch import Tensor

from mlakit.formats import saturating_cast
from mlakit.kernels.cpu.workspace import rows_that_fit


def batched_matmul(
    a: Tensor,  # [batch, M, K]
    b: Tensor,  # [batch, N, K]
    *,
    out: Tensor,  # [batch, M, N], any strides
) -> None:
    """out = a @ bᵀ, rounded once."""
    _, rows, depth = a.shape
    tile = rows_that_fit(4 * (depth + rows))
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        wide = left.float()
        for start in range(0, len(right), tile):
            block = slice(start, start + tile)
            product = wide @ right[block].float().T
            out[i, :, block] = saturating_cast(product, out.dtype)
