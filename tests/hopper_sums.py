"""How Hopper's tensor cores add e4m3 products: the naive run for results of torch's FP8 product.

The products of one instruction (32 columns) and the running sum are brought to the largest exponent
among them, that of a product being the sum of its factors', and cut off after 13 binary places; the
new sum keeps 14 bits. Sums of 128 columns are then scaled and added in float32. On an H200 every
bfloat16 result of the library is that of this model.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS_AT_ONCE = 32
PLACES = 13
BITS = 14
GROUP = 128
E4M3_LEAST = 2.0**-6  # the least normal number
SMALLEST = 2.0**-100
NO_EXPONENT = -100  # of zero
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
        products = a[:, None, together] * b[None, :, together]
        exponents = (
            _exponent(a, E4M3_LEAST)[:, None, together] + _exponent(b, E4M3_LEAST)[:, together]
        )
        exponents = torch.where(products == 0, NO_EXPONENT, exponents).amax(-1)
        own = torch.where(total == 0, NO_EXPONENT, _exponent(total, SMALLEST))
        place = torch.ldexp(torch.ones_like(total), torch.maximum(exponents, own) - PLACES)
        total = (products / place[..., None]).trunc().sum(-1) + (total / place).trunc()
        mantissa, exponent = torch.frexp(total * place)
        total = torch.ldexp((mantissa * 2**BITS).trunc() / 2**BITS, exponent)
    return total


def _exponent(x: Tensor, least: float) -> Tensor:
    """Of numbers below `least`, which are denormal, that of `least`."""
    return torch.frexp(x.abs().clamp_min(least))[1] - 1
