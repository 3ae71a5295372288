"""Group quantisation to e4m3 and the block-scaled matmul over it.

Maths      quantise: s = min(amax, bound) / 448, q = e4m3(x · 1/s), 0 where 1/s is not finite
           matmul: out[m, n] = Σ_k a[m, k] b[n, k] a_scale[k/g, m] b_scale[n/h, k/g]
Work       an item is some matrices of the batch, or a tile of one, on one thread
Memory     tiles are converted to float32, as large as fit the workspace
Lineage    own design; ideas: DeepSeek-V3's scales per 128 columns and 128x128 blocks
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlakit.arguments import QuantizeArguments, ScaledMatmulArguments
from mlakit.e4m3 import widen_e4m3
from mlakit.formats import E4M3_MAX, saturating_cast
from mlakit.kernels.cpu.matmul import ITEM_ELEMENTS, matmul_tiles, weight_items
from mlakit.kernels.cpu.workers import SMALL, for_each
from mlakit.kernels.cpu.workspace import rows_that_fit


def quantize_fp8(args: QuantizeArguments, out: Tensor, scales: Tensor) -> None:
    x, group, scale_ub = args.x, args.group, args.scale_ub
    if x.ndim == 2:
        x, out, scales = x[None], out[None], scales[None]
    _, rows, columns = x.shape
    scales[..., rows:] = 0.0

    def quantise(item: tuple[slice, slice]) -> None:
        grouped = pad(x[item].float(), (0, -columns % group)).unflatten(-1, (-1, group))
        amax = grouped.abs().amax(-1).clamp_max(scale_ub)
        # divided by a tensor, as on a GPU: division by a number may use a rounded reciprocal
        scale = amax / torch.full_like(amax, E4M3_MAX)
        inverse = 1.0 / scale
        # a scale too small to have a reciprocal: the group becomes zeros
        inverse = torch.where(inverse.isfinite() | scale.isnan(), inverse, 0.0)
        quantised = saturating_cast(grouped * inverse[..., None], torch.float8_e4m3fn)
        out[item] = quantised.flatten(-2)[..., :columns]
        matrices, tile = item
        scales[matrices, :, tile] = scale.mT

    for_each(quantise, _row_items(x), is_small=x.numel() <= SMALL)


def _row_items(x: Tensor) -> list[tuple[slice, slice]]:
    """(matrices, rows) of x [batch, rows, columns]: some matrices whole, or some rows of one."""
    batch, rows, columns = x.shape
    tile = min(rows_that_fit(2 * 4 * 4 * columns), max(1, ITEM_ELEMENTS // max(columns, 1)))
    matrices = max(1, tile // max(rows, 1))
    return [
        (slice(first, first + matrices), slice(start, min(start + tile, rows)))
        for first in range(0, batch, matrices)
        for start in range(0, rows, tile)
    ]


def scaled_mm_fp8(args: ScaledMatmulArguments, out: Tensor) -> None:
    """out[m, n] = Σ_k a[m, k] b[n, k] a_scale[k/g, m] b_scale[n/g, k/g], float32, rounded once."""
    a, a_scale, b, b_scale = args.a, args.a_scale, args.b, args.b_scale
    n_group, k_group = args.n_group, args.k_group
    if a.ndim == 2:
        a, a_scale, b, b_scale, out = (x[None] for x in (a, a_scale, b, b_scale, out))
    _, rows, depth = a.shape

    def dequantised(quantised: Tensor, scale: Tensor) -> Tensor:
        """quantised [..., K] · scale [..., groups], one scale per group of columns."""
        return (
            widen_e4m3(quantised, torch.float32) * scale.repeat_interleave(k_group, -1)[..., :depth]
        )

    def multiply(item: tuple[slice, slice]) -> None:
        matrices, right = item
        groups = b_scale[matrices, right.start // n_group : -(-right.stop // n_group)]
        by_row = groups.repeat_interleave(n_group, -2)[..., : right.stop - right.start, :]
        weight = dequantised(b[matrices, right], by_row)
        count, width, _ = weight.shape
        for left in matmul_tiles(rows, bytes_per_row=4 * count * (3 * depth + 2 * width)):
            product = dequantised(a[matrices, left], a_scale[matrices, :, left].mT) @ weight.mT
            out[matrices, left, right] = saturating_cast(product, out.dtype)

    # items hold whole groups of columns, so that each has its own rows of b_scale; while an item is
    # dequantised, the one before is still in memory
    for_each(multiply, weight_items(b, bytes_per_element=4 * 4, multiple=n_group))
