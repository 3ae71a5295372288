"""How Hopper's tensor cores add e4m3 products.

The products of one instruction (32 columns) and the running sum are brought to the largest exponent
among them, that of a product being the sum of its factors', and cut off after 13 binary places; the
new sum keeps 14 bits. On an H200 what multiplies e4m3 gives these very bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.autocast import without_autocast

COLUMNS_AT_ONCE = 32
PLACES = 13
BITS = 14
E4M3_LEAST = 2.0**-6  # the least normal number
SMALLEST = 2.0**-100
NO_EXPONENT = -100  # of zero
MOST_TERMS = 2**24  # at once in memory


@without_autocast
def add_products(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """float32 [M, N] of a [M, K] and b [N, K], numbers of e4m3, added to `start` [M, N]."""
    a, b = a.float(), b.float()  # whose 24 bits hold every sum of this here
    if start is None:
        start = a.new_zeros(a.shape[0], b.shape[0])
    step = max(MOST_TERMS // (max(b.shape[0], 1) * COLUMNS_AT_ONCE), 1)
    parts = zip(a.split(step), start.float().split(step), strict=True)
    return torch.cat([_add_products(part, b, before) for part, before in parts])


def _add_products(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
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
