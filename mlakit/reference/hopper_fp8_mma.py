"""The sums of products of Hopper's tensor cores, for e4m3 and 16-bit numbers, to the bit.

One wgmma instruction adds the products of 32 columns of e4m3, or of 16 columns of bf16 or fp16, to
the accumulator. All terms are aligned to the largest exponent among them (for a product, the sum of
the exponents of its factors) and truncated after 13 binary places, or after 25. The new accumulator
is truncated to 14 bits, or to the 24 of float32. An H200 gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast

SMALLEST_ACCUMULATOR = 2.0**-100
ZERO_EXPONENT = -100  # below every exponent
MAX_TERMS = 2**24  # in memory at the same time


class Accumulation(NamedTuple):
    """The precision of a kind of wgmma."""

    columns: int  # per instruction
    aligned_places: int
    accumulator_bits: int
    smallest_normal: float  # factors below have its exponent
    computed_in: torch.dtype  # holds every sum exactly


OF_E4M3 = Accumulation(32, 13, 14, 2.0**-6, torch.float32)
OF_BF16 = Accumulation(16, 25, 24, 2.0**-126, torch.float64)
OF_FP16 = Accumulation(16, 25, 24, 2.0**-14, torch.float64)


@without_autocast
def fp8_mma(a: Tensor, b: Tensor, accumulator: Tensor | None = None) -> Tensor:
    """Return float32 [M, N]: a [M, K] bᵀ [K, N] of e4m3 values, added to `accumulator` [M, N]."""
    return _mma(OF_E4M3, a, b, accumulator)


@without_autocast
def bf16_mma(a: Tensor, b: Tensor, accumulator: Tensor | None = None) -> Tensor:
    """Return the same of values of bf16, which may be given as float32."""
    return _mma(OF_BF16, a, b, accumulator)


@without_autocast
def fp16_mma(a: Tensor, b: Tensor, accumulator: Tensor | None = None) -> Tensor:
    """Return the same of values of fp16, which may be given as float32."""
    return _mma(OF_FP16, a, b, accumulator)


def _mma(kind: Accumulation, a: Tensor, b: Tensor, accumulator: Tensor | None) -> Tensor:
    a, b = a.to(kind.computed_in), b.to(kind.computed_in)
    if accumulator is None:
        accumulator = a.new_zeros(a.shape[0], b.shape[0])
    step = max(MAX_TERMS // (max(b.shape[0], 1) * kind.columns), 1)
    row_tiles = zip(a.split(step), accumulator.to(a.dtype).split(step), strict=True)
    return torch.cat([_accumulate(kind, rows, b, acc) for rows, acc in row_tiles]).float()


def _accumulate(kind: Accumulation, a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    exponents_a, exponents_b = (_factor_exponents(each, kind.smallest_normal) for each in (a, b))
    bits = 2.0**kind.accumulator_bits
    for first in range(0, a.shape[1], kind.columns):
        columns = slice(first, first + kind.columns)
        products = a[:, None, columns] * b[None, :, columns]
        exponents = (exponents_a[:, None, columns] + exponents_b[:, columns]).amax(-1)
        acc_exponent = torch.where(acc == 0, ZERO_EXPONENT, _exponent(acc, SMALLEST_ACCUMULATOR))
        exponents = torch.maximum(exponents.clamp_min(ZERO_EXPONENT), acc_exponent)
        ulp = _ldexp(torch.ones_like(acc), exponents - kind.aligned_places)
        acc = (products / ulp[..., None]).trunc().sum(-1) + (acc / ulp).trunc()
        mantissa, exponent = torch.frexp(acc * ulp)
        acc = _ldexp((mantissa * bits).trunc() / bits, exponent)
    return acc


def _factor_exponents(x: Tensor, smallest_normal: float) -> Tensor:
    """Exponents of factors; a product with a zero gets one below ZERO_EXPONENT."""
    return torch.where(x == 0, 2 * ZERO_EXPONENT, _exponent(x, smallest_normal))


def _ldexp(mantissa: Tensor, exponent: Tensor) -> Tensor:
    # torch computes 2**exponent of integers in its default dtype
    return torch.ldexp(mantissa, exponent.to(mantissa.dtype))


def _exponent(x: Tensor, smallest: float) -> Tensor:
    """The exponent of |x|, and that of `smallest` for subnormal x."""
    return torch.frexp(x.abs().clamp_min(smallest))[1] - 1
