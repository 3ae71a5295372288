"""Group quantisation to e4m3 and the block-scaled matmul over it.

Maths      quantise: s = min(amax, bound) / 448, q = e4m3(x · 1/s), 0 where 1/s is not finite
           matmul: out[m, n] = Σ_k a[m, k] b[n, k] a_scale[k/g, m] b_scale[n/h, k/g]
Work       a few operations for each block, which torch shares out among its threads
Memory     a block is some matrices of the batch, or a tile of one, in float32
Lineage    own design; ideas: DeepSeek-V3's scales per 128 columns and 128x128 blocks
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlakit.formats import E4M3_MAX, saturating_cast
from mlakit.formats.e4m3 import dequantise_e4m3
from mlakit.kernels.arguments import QuantizeArguments, ScaledMatmulArguments
from mlakit.kernels.cpu.matmul import matmul_tiles, store_product, weight_blocks
from mlakit.kernels.cpu.workspace import CACHED_BLOCK, row_blocks, rows_that_fit


def quantize_fp8(args: QuantizeArguments, out: Tensor, scales: Tensor) -> None:
    x, group, scale_ub = args.x, args.group, args.scale_ub
    if x.ndim == 2:
        x, out, scales = x[None], out[None], scales[None]
    _, rows, columns = x.shape
    group = min(group, max(columns, 1))  # a larger one would be padded to its size
    scales[..., rows:] = 0.0
    for block in _row_blocks(x):
        grouped = pad(x[block].float(), (0, -columns % group)).unflatten(-1, (-1, group))
        amax = grouped.abs().amax(-1).clamp_max(scale_ub)
        # divided by a tensor, as on a GPU: division by a number may use a rounded reciprocal
        scale = amax / torch.full_like(amax, E4M3_MAX)
        inverse = 1.0 / scale
        # a scale too small to have a reciprocal: the group becomes zeros
        inverse = torch.where(inverse.isfinite() | scale.isnan(), inverse, 0.0)
        quantised = saturating_cast(grouped * inverse[..., None], torch.float8_e4m3fn)
        out[block] = quantised.flatten(-2)[..., :columns]
        matrices, tile = block
        scales[matrices, :, tile] = scale.mT


def _row_blocks(x: Tensor) -> list[tuple[slice, slice]]:
    """(matrices, rows) of x [batch, rows, columns]: some matrices whole, or some rows of one."""
    batch, rows, columns = x.shape
    per_row = 2 * 4 * 4 * columns
    if rows * per_row <= min(8 * CACHED_BLOCK, rows_that_fit(1)):
        whole = slice(0, rows)
        return [(some, whole) for some in row_blocks(batch, rows * columns, rows * per_row)]
    return [
        (slice(matrix, matrix + 1), some)
        for matrix in range(batch)
        for some in row_blocks(rows, columns, per_row)
    ]


def scaled_mm_fp8(args: ScaledMatmulArguments, out: Tensor) -> None:
    """out[m, n] = Σ_k a[m, k] b[n, k] a_scale[k/g, m] b_scale[n/g, k/g], float32, rounded once."""
    a, a_scale, b, b_scale = args.a, args.a_scale, args.b, args.b_scale
    n_group, k_group = args.n_group, args.k_group
    if a.ndim == 2:
        a, a_scale, b, b_scale, out = (x[None] for x in (a, a_scale, b, b_scale, out))
    # larger groups would repeat their scales beyond the matrix
    n_group, k_group = min(n_group, max(b.shape[1], 1)), min(k_group, max(b.shape[2], 1))
    for matrices, right in weight_blocks(b, bytes_per_element=4 * 4, multiple=n_group):
        # blocks hold whole groups of columns, so that each has its own rows of b_scale
        groups = b_scale[matrices, right.start // n_group : -(-right.stop // n_group)]
        by_row = groups.repeat_interleave(n_group, -2)[..., : right.stop - right.start, :]
        weight = _dequantised(b[matrices, right], by_row, k_group)
        count, width, depth = weight.shape
        for left in matmul_tiles(a.shape[1], bytes_per_row=4 * count * (3 * depth + 2 * width)):
            rows = _dequantised(a[matrices, left], a_scale[matrices, :, left].mT, k_group)
            store_product(rows, weight, out[matrices, left, right])
        del weight  # before the next one is made


def _dequantised(quantised: Tensor, scale: Tensor, group: int) -> Tensor:
    """quantised [..., K] · scale [..., groups] float32, one scale per group of columns."""
    out = torch.empty(quantised.shape, dtype=torch.float32, device="cpu")
    dequantise_e4m3(quantised, scale, group, out)
    return out
