"""Batched matmul of 16-bit or float32 matrices on the CPU, accumulated in float32.

Maths      out[i] = a[i] @ b[i]ᵀ, accumulated in float32 and rounded once; e4m3 saturates
Work       bf16 where the CPU has its products: one call of torch. Otherwise an item is some
           matrices of the batch, or some columns of one, on one thread
Memory     operands of an item are converted to float32: many CPUs have no bf16 or fp16 matrix
           units, and torch's matmul of such matrices is then far slower than in float32
Lineage    own design
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mlakit.arguments import BatchedMatmulArguments
from mlakit.formats import saturating_cast
from mlakit.kernels.cpu.fused import has_products
from mlakit.kernels.cpu.workers import for_each
from mlakit.kernels.cpu.workspace import rows_that_fit

ITEM_ELEMENTS = 2**20  # of b, of an item: they take about half a millisecond to read


def multiplies_bf16(dtype: torch.dtype) -> bool:
    """Is `batched_matmul` of this type a matmul of torch, which adds in float32 and rounds once?"""
    return dtype == torch.bfloat16 and has_products(dtype)


def matmul_tiles(rows: int, *, bytes_per_row: int) -> Iterator[slice]:
    """Slices of `rows`, each within half of the workspace."""
    tile = rows_that_fit(2 * bytes_per_row)
    for start in range(0, rows, tile):
        yield slice(start, min(start + tile, rows))


def weight_items(
    b: Tensor, *, bytes_per_element: int, multiple: int = 1
) -> list[tuple[slice, slice]]:
    """(matrices, columns) of out = a @ bᵀ for b [batch, N, K]: whole matrices, or columns of one.

    Each item fits half of the workspace and has at most ITEM_ELEMENTS. Columns of a matrix begin at
    a multiple of `multiple`.
    """
    batch, columns, depth = b.shape
    fit = rows_that_fit(2 * bytes_per_element * max(depth, 1))
    fit = min(fit, ITEM_ELEMENTS // max(depth, 1))
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
    _, rows, depth = a.shape

    def multiply(item: tuple[slice, slice]) -> None:
        matrices, columns = item
        weight = b[matrices, columns].float().mT
        count, _, width = weight.shape
        for tile in matmul_tiles(rows, bytes_per_row=4 * count * (depth + 2 * width)):
            product = a[matrices, tile].float() @ weight
            out[matrices, tile, columns] = saturating_cast(product, out.dtype)

    # while an operand is converted, the one before is still in memory
    for_each(multiply, weight_items(b, bytes_per_element=2 * 4))
