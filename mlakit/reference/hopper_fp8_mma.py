"""How Hopper's tensor cores accumulate e4m3 products, to the bit.

One wgmma instruction adds the products of 32 columns to the accumulator. All terms are aligned to
the largest exponent among them (for a product, the sum of the exponents of its factors) and
truncated after 13 binary places; the new accumulator keeps 14 bits. An H200 gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.autocast import without_autocast

MMA_K = 32  # columns per instruction
ALIGNED_PLACES = 13
ACCUMULATOR_BITS = 14
E4M3_SMALLEST_NORMAL = 2.0**-6
SMALLEST_ACCUMULATOR = 2.0**-100
ZERO_EXPONENT = -100  # below every exponent
MAX_TERMS = 2**24  # in memory at the same time


@without_autocast
def fp8_mma(a: Tensor, b: Tensor, accumulator: Tensor | None = None) -> Tensor:
    """float32 [M, N]: a [M, K] bᵀ [K, N] of e4m3 values, added to `accumulator` [M, N]."""
    a, b = a.float(), b.float()  # 24 bits hold every sum exactly
    if accumulator is None:
        accumulator = a.new_zeros(a.shape[0], b.shape[0])
    step = max(MAX_TERMS // (max(b.shape[0], 1) * MMA_K), 1)
    row_tiles = zip(a.split(step), accumulator.float().split(step), strict=True)
    return torch.cat([_accumulate(rows, b, acc) for rows, acc in row_tiles])


def _accumulate(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    exponents_a, exponents_b = _factor_exponents(a), _factor_exponents(b)
    for first in range(0, a.shape[1], MMA_K):
        columns = slice(first, first + MMA_K)
        products = a[:, None, columns] * b[None, :, columns]
        exponents = (exponents_a[:, None, columns] + exponents_b[:, columns]).amax(-1)
        acc_exponent = torch.where(acc == 0, ZERO_EXPONENT, _exponent(acc, SMALLEST_ACCUMULATOR))
        exponents = torch.maximum(exponents.clamp_min(ZERO_EXPONENT), acc_exponent)
        ulp = _ldexp(torch.ones_like(acc), exponents - ALIGNED_PLACES)
        acc = (products / ulp[..., None]).trunc().sum(-1) + (acc / ulp).trunc()
        mantissa, exponent = torch.frexp(acc * ulp)
        acc = _ldexp((mantissa * 2**ACCUMULATOR_BITS).trunc() / 2**ACCUMULATOR_BITS, exponent)
    return acc


def _factor_exponents(x: Tensor) -> Tensor:
    """Exponents of e4m3 values; a product with a zero gets one below ZERO_EXPONENT."""
    return torch.where(x == 0, 2 * ZERO_EXPONENT, _exponent(x, E4M3_SMALLEST_NORMAL))


def _ldexp(mantissa: Tensor, exponent: Tensor) -> Tensor:
    # torch computes 2**exponent of integers in its default dtype
    return torch.ldexp(mantissa, exponent.float())


def _exponent(x: Tensor, smallest: float) -> Tensor:
    """The exponent of |x|, and that of `smallest` for subnormal x."""
    return torch.frexp(x.abs().clamp_min(smallest))[1] - 1
