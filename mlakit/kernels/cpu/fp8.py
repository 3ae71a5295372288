"""Group quantisation to e4m3 and the block-scaled matmul over it.

Memory     widened to float32 in tiles that fit the workspace, whatever the number of rows
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlakit.formats import E4M3_MAX, saturating_cast
from mlakit.kernels.cpu.matmul import matmul_tiles


def quantize_fp8(
    x: Tensor,  # [M, K] or [batch, M, K]
    group: int,
    *,
    scale_ub: float,
    out: Tensor,  # like x, e4m3
    scales: Tensor,  # [..., ceil(K / group), at least M] float32; columns from M on become 0
) -> None:
    if x.ndim == 3:
        for each, each_out, each_scales in zip(x, out, scales, strict=True):
            quantize_fp8(each, group, scale_ub=scale_ub, out=each_out, scales=each_scales)
        return
    rows, columns = x.shape
    scales[:, rows:] = 0.0
    for tile in matmul_tiles(rows, bytes_per_row=4 * 4 * columns):
        grouped = pad(x[tile].float(), (0, -columns % group)).unflatten(1, (-1, group))
        amax = grouped.abs().amax(-1).clamp_max(scale_ub)
        # by a tensor, as a GPU must: division by a number may become a rounded reciprocal there
        scale = amax / torch.full_like(amax, E4M3_MAX)
        inverse = 1.0 / scale
        # a group too small to have a reciprocal becomes zeros
        inverse = torch.where(inverse.isfinite() | scale.isnan(), inverse, 0.0)
        quantised = saturating_cast(grouped * inverse[..., None], torch.float8_e4m3fn)
        out[tile] = quantised.flatten(1)[:, :columns]
        scales[:, tile] = scale.T


def scaled_mm_fp8(
    a: Tensor,  # [M, K] or [batch, M, K] e4m3
    a_scale: Tensor,  # [..., ceil(K / k_group), at least M] float32
    b: Tensor,  # [..., N, K] e4m3
    b_scale: Tensor,  # [..., ceil(N / n_group), ceil(K / k_group)] float32
    *,
    n_group: int,
    k_group: int,
    out: Tensor,  # [..., M, N]
) -> None:
    """out[m, n] = Σ_k a[m, k] b[n, k] a_scale[k/g, m] b_scale[n/g, k/g], float32, rounded once."""
    if a.ndim == 3:
        for each in zip(a, a_scale, b, b_scale, out, strict=True):
            *operands, each_out = each
            scaled_mm_fp8(*operands, n_group=n_group, k_group=k_group, out=each_out)
        return
    (rows, depth), columns = a.shape, b.shape[0]

    def widened(quantised: Tensor, scale: Tensor) -> Tensor:
        """quantised [rows, K] · scale [rows, groups], each group of columns by its own."""
        return quantised.float() * scale.repeat_interleave(k_group, 1)[:, :depth]

    # tiles of output columns hold whole groups, so that each has its own rows of b_scale; while one
    # is widened (its numbers, scales and products) the one before is still there
    for right in matmul_tiles(columns, bytes_per_row=4 * 4 * depth, multiple=n_group):
        groups = b_scale[right.start // n_group : -(-right.stop // n_group)]
        by_row = groups.repeat_interleave(n_group, 0)[: right.stop - right.start]
        weight = widened(b[right], by_row)
        width = right.stop - right.start
        for left in matmul_tiles(rows, bytes_per_row=4 * (3 * depth + 2 * width)):
            product = widened(a[left], a_scale[:, left].T) @ weight.T
            out[left, right] = saturating_cast(product, out.dtype)
