"""torch's FP8 product on Hopper as a naive run: 128 columns are accumulated, then scaled."""

from __future__ import annotations

from torch import Tensor

from mlakit.reference.hopper_fp8_mma import fp8_mma

GROUP = 128


def scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """float32 [M, N] of a [M, K] and b [N, K], both e4m3.

    a_scale  [K / 128, M or more]
    b_scale  [N / 128, K / 128]
    """
    rows, depth = a.shape
    out = a_scale.new_zeros(rows, b.shape[0])
    for group in range(depth // GROUP):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        total = fp8_mma(a[:, columns], b[:, columns])
        of_b = b_scale[:, group].repeat_interleave(GROUP)[: b.shape[0]]
        out += total * a_scale[group, :rows, None] * of_b
    return out
