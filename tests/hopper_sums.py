"""How Hopper's tensor cores add e4m3 products: the naive run for results of torch's FP8 product.

The products of one instruction (32 columns) and the running sum are brought to the largest exponent
among them and cut off after 13 binary places; sums of 128 columns are then scaled and added in
float32. A product of the library is as exact as that, and no more: on an H200 98 % of its bfloat16
results are those of this model, 94 % those of exact sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS_AT_ONCE = 32
PLACES = 13
GROUP = 128
SMALLEST = 2.0**-100
MOST_TERMS = 2**24  # at once in memory


def scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """float32 [M, N] of a [M, K] and b [N, K], both e4m3.

    a_scale  [K / 128, M or more]
    b_scale  [N / 128, K / 128]
    """
    rows, depth = a.shape
    out = a_scale.new_zeros(rows, b.shape[0])
    step = max(MOST_TERMS // (b.shape[0] * COLUMNS_AT_ONCE), 1)
    for group in range(depth // GROUP):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        parts = a[:, columns].double().split(step)
        total = torch.cat([_sum_of_products(part, b[:, columns].double()) for part in parts])
        of_b = b_scale[:, group].repeat_interleave(GROUP)[: b.shape[0]]
        out += total.float() * a_scale[group, :rows, None] * of_b
    return out


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    total = a.new_zeros(a.shape[0], b.shape[0])
    for first in range(0, a.shape[1], COLUMNS_AT_ONCE):
        together = slice(first, first + COLUMNS_AT_ONCE)
        terms = torch.cat([total[..., None], a[:, None, together] * b[None, :, together]], -1)
        _, exponent = torch.frexp(terms.abs().amax(-1, keepdim=True).clamp_min(SMALLEST))
        place = torch.ldexp(torch.ones_like(terms[..., :1]), exponent - 1 - PLACES)
        total = (terms / place).trunc().sum(-1) * place[..., 0]
    return total
