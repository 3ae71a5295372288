"""References of FP8 activations: group quantisation and the block-scaled matrix product.

Quantisation is defined by its float32 steps: `quantize_fp8` makes the same steps and is bit-exact.
Products of quantised values are computed in float64.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.formats import E4M3_MAX, saturating_cast

E4M3 = torch.float8_e4m3fn
SCALE_ALIGNMENT = 4  # a row of float32 scales is a multiple of 16 bytes


@without_autocast
def quantize_fp8(x: Tensor, group: int, *, scale_ub: float = inf) -> tuple[Tensor, Tensor]:
    """Quantise [M, K] with one scale per `group` columns of a row; the last group may be short.

        scale = min(max|x|, scale_ub) / 448            over one row's group
        q     = e4m3(clamp(x · (1 / scale), ±448))     0 where 1 / scale is not finite

    `scale_ub` bounds the amax, not the scale: larger values saturate. Returns q e4m3 [M, K] and
    scales float32 [ceil(K / group), M rounded up to 4], transposed and padded with zeros.
    """
    rows, columns = x.shape
    x = x.float()
    largest = x.new_tensor(E4M3_MAX)
    q = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    padded = -(-rows // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    scales = torch.zeros(-(-columns // group), padded, dtype=torch.float32, device=x.device)
    for row in range(rows):
        for g, first in enumerate(range(0, columns, group)):
            columns_of_group = x[row, first : first + group]
            # divide by a tensor: CUDA replaces division by a number with a rounded reciprocal
            scale = columns_of_group.abs().amax().clamp(max=scale_ub) / largest
            inverse = 1.0 / scale
            if not inverse.isfinite():
                inverse = torch.zeros_like(scale)
            q[row, first : first + group] = saturating_cast(columns_of_group * inverse, E4M3)
            scales[g, row] = scale
    return q, scales


@without_autocast
def dequantize_fp8(
    q: Tensor,  # e4m3 [M, K]
    scales: Tensor,  # [ceil(K / group), >= M]
    group: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """x[m, k] = q[m, k] · scales[k // group, m]; the padding of `scales` is not read."""
    rows, columns = q.shape
    per_column = scales[:, :rows].repeat_interleave(min(group, columns), dim=0)[:columns]
    return q.to(dtype) * per_column.T.to(dtype)


@without_autocast
def scaled_mm_fp8(
    a: Tensor,  # e4m3 [M, K]
    a_scale: Tensor,  # [ceil(K / k_group), >= M]
    b: Tensor,  # e4m3 [N, K]
    b_scale: Tensor,  # [ceil(N / n_group), ceil(K / k_group)]
    *,
    n_group: int,
    k_group: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Block-scaled product a bᵀ, [M, N].

    out[m, n] = Σ_k a[m, k] · a_scale[k // k_group, m]
                  · b[n, k] · b_scale[n // n_group, k // k_group]
    """
    n, k = b.shape
    by_row = b_scale.repeat_interleave(min(n_group, n), dim=0)
    per_weight = by_row.repeat_interleave(min(k_group, k), dim=1)
    weight = b.to(dtype) * per_weight[:n, :k].to(dtype)
    return dequantize_fp8(a, a_scale, k_group, dtype) @ weight.T
