"""Group quantisation to e4m3 and the block-scaled matmul over it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlakit.formats import E4M3_MAX, saturating_cast
from mlakit.kernels.cpu.workspace import rows_that_fit

SCALE_ALIGNMENT = 4  # entries; 16 bytes of float32 scales


def quantize_fp8(x: Tensor, group: int, *, scale_ub: float) -> tuple[Tensor, Tensor]:
    """x [M, K] as e4m3 with one scale per row and `group` columns.

    Returns q [M, K] and scales [ceil(K / group), align(M, 4)] float32, transposed as the matmul
    reads them. A group too small to have a reciprocal becomes zeros.
    """
    rows, columns = x.shape
    grouped = pad(x.float(), (0, -columns % group)).unflatten(1, (-1, group))
    scale = grouped.abs().amax(-1).clamp_max(scale_ub) / E4M3_MAX
    inverse = 1.0 / scale
    inverse = torch.where(inverse.isfinite() | scale.isnan(), inverse, 0.0)
    q = saturating_cast(grouped * inverse[..., None], torch.float8_e4m3fn)
    scales = pad(scale.T, (0, -rows % SCALE_ALIGNMENT))
    return q.flatten(1)[:, :columns], scales


def scaled_mm_fp8(
    a: Tensor,  # [M, K] e4m3
    a_scale: Tensor,  # [ceil(K / k_group), >= M] float32
    b: Tensor,  # [N, K] e4m3
    b_scale: Tensor,  # [ceil(N / n_group), ceil(K / k_group)] float32
    *,
    n_group: int,
    k_group: int,
    out: Tensor,  # [M, N]
) -> None:
    """out[m, n] = Σ_k a[m, k] b[n, k] a_scale[k/g, m] b_scale[n/g, k/g], float32, rounded once."""
    rows, depth = a.shape
    by_column = a_scale[:, :rows].T.repeat_interleave(k_group, 1)[:, :depth]
    left = a.float() * by_column
    # whole groups of output columns per block keep the scaled weight within the workspace
    block = rows_that_fit(4 * (depth + rows) * n_group) * n_group
    for first in range(0, b.shape[0], block):
        weight = b[first : first + block]
        groups = b_scale[first // n_group : -(-(first + len(weight)) // n_group)]
        scale = groups.repeat_interleave(n_group, 0)[: len(weight)]
        right = weight.float() * scale.repeat_interleave(k_group, 1)[:, :depth]
        out[:, first : first + block] = left @ right.T
