"""Batched matmul of 16-bit or float32 matrices on the CPU, accumulated in float32.

Maths      out[i] = a[i] @ b[i]ᵀ, accumulated in float32 and rounded once; e4m3 saturates
Work       bf16 where the CPU has its products: one call of torch. Otherwise one for each block,
           some matrices of the batch or some columns of one
Memory     operands of a block are converted to float32: many CPUs have no bf16 or fp16 matrix
           units, and torch's matmul of such matrices is then far slower than in float32
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mlakit.formats import E4M3_MAX
from mlakit.kernels.arguments import BatchedMatmulArguments
from mlakit.kernels.cpu.fused import has_products
from mlakit.kernels.cpu.workspace import MAX_BLOCK, rows_that_fit

FEW_ROWS = 16


def multiplies_bf16(dtype: torch.dtype) -> bool:
    """Return whether torch's matmul of this type adds in float32 and rounds once."""
    return dtype == torch.bfloat16 and has_products(dtype)


def matmul_tiles(rows: int, *, bytes_per_row: int) -> Iterator[slice]:
    """Slices of `rows`, each within half of the workspace."""
    tile = rows_that_fit(2 * bytes_per_row)
    for start in range(0, rows, tile):
        yield slice(start, min(start + tile, rows))


def weight_blocks(
    b: Tensor, *, bytes_per_element: int, multiple: int = 1
) -> list[tuple[slice, slice]]:
    """(matrices, columns) of out = a @ bᵀ for b [batch, N, K]: whole matrices, or columns of one.

    Each block fits half of the workspace, and MAX_BLOCK in float32. Columns of a matrix begin at a
    multiple of `multiple`.
    """
    batch, columns, depth = b.shape
    fit = rows_that_fit(2 * bytes_per_element * max(depth, 1))
    fit = min(fit, MAX_BLOCK // (4 * max(depth, 1)))
    if fit >= columns:
        matrices, tile = max(1, fit // max(columns, 1)), max(columns, 1)
    else:
        matrices, tile = 1, max(1, fit // multiple) * multiple
    return [
        (slice(first, first + matrices), slice(start, min(start + tile, columns)))
        for first in range(0, batch, matrices)
        for start in range(0, columns, tile)
    ]


def batched_matmul(args: BatchedMatmulArguments, out: Tensor) -> None:
    """out = a @ bᵀ, rounded once."""
    a, b = args.a, args.b
    if out.dtype == a.dtype and multiplies_bf16(a.dtype):
        torch.bmm(a, b.mT, out=out)
        return
    for matrices, columns in weight_blocks(b, bytes_per_element=2 * 4):
        weight = b[matrices, columns].float()
        count, width, depth = weight.shape
        for rows in matmul_tiles(a.shape[1], bytes_per_row=4 * count * (depth + 2 * width)):
            store_product(a[matrices, rows].float(), weight, out[matrices, rows, columns])
        del weight  # before the next one is made


def store_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a [batch, M, K] @ bᵀ for float32 b [batch, N, K], rounded once; e4m3 saturates."""
    rows = a.shape[1]
    if torch.backends.mkl.is_available() or rows > FEW_ROWS:
        result = torch.bmm(a, b.mT)
    elif rows == 2:  # with OpenBLAS two products with a vector take three quarters of the time
        result = torch.cat([torch.bmm(b, row[..., None]) for row in a.unbind(1)], -1).mT
    else:  # with few rows on the right OpenBLAS takes three quarters of the time, MKL 1.6 times
        result = torch.bmm(b, a.mT).mT
    if out.dtype == torch.float8_e4m3fn:
        result.clamp_(-E4M3_MAX, E4M3_MAX)
    out.copy_(result)
