"""Rows that hold their scales as kernels multiply them which round the products.

The kernels `m64_fp8_kv` of `mla_decode` and `sparse_mla` round the product of a value and its scale
to float16, and have the scale as the sum of two float16. A float32 run over exact rows is too
precise to be their naive run, and so is one over rows that are rounded once: a scale that is within
2**-22 of a tie rounds all its values with the same mantissa the other way. `m64_fp8_qk` has the
scale as one float16. `n64_fp8_kv` of Blackwell rounds the product to bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.dispatch.specs import device_facts
from mlakit.formats import known_format, row_codec
from mlakit.model.geometry import RowShape

ROW = RowShape(512, 64)
TRAITS = row_codec("fp8_block128", ROW).traits
KERNELS = ("hopper:m64_fp8_kv", "hopper:m64_fp8_qk")
HOPPER_ARCH = 90
MAX_EXACT_HEADS = 32  # up to these `small_m_fp8_kv` multiplies scores and probabilities instead
BLACKWELL_ARCHS = (100, 103)
BITS = 11  # of float16, the leading one among them
BFLOAT16_BITS = 8


def holds_scales(format: str) -> bool:
    """Whether rows of a format hold a scale of each group of columns."""
    return row_codec(known_format(format), ROW).traits.SCALES_AT >= 0


def rounds_rows(device: torch.device, backend: str, *, format: str, heads: int) -> bool:
    """Whether such a call may use one of these kernels."""
    if not holds_scales(format) or device_facts(device) != ("cuda", HOPPER_ARCH):
        return False
    is_chosen = backend in ("auto", "hopper") and heads > MAX_EXACT_HEADS
    return is_chosen or backend in KERNELS


def row_bits(device: torch.device, backend: str, *, format: str, heads: int) -> int:
    """The bits that such a call may round products of values and scales to; 0 if it does not."""
    if rounds_rows(device, backend, format=format, heads=heads):
        return BITS
    kind, arch = device_facts(device)
    is_chosen = backend == "auto" or backend.partition(":")[0] == "blackwell"
    is_rounded = kind == "cuda" and arch in BLACKWELL_ARCHS and holds_scales(format) and is_chosen
    return BFLOAT16_BITS if is_rounded else 0


def block_scales(payload: Tensor) -> Tensor:
    """The scales inside of rows [..., bytes] of any rope columns: float64 [..., groups]."""
    scales = payload[..., ROW.kv_lora_rank : TRAITS.ROPE_AT].contiguous()
    return scales.view(torch.float32).double()


def rounded_rows(rows: Tensor, scales: Tensor, parts: int = 2, bits: int = BITS) -> Tensor:
    """`rows` float64 [..., width], whose latent columns are products of e4m3 and `scales`, rounded
    to the bits of float16 or bfloat16, not to their range.

    parts  float16 whose sum is a scale, 1 or 2; bfloat16 products have the scale as it is
    """
    latent = ROW.kv_lora_rank
    columns = rows[..., :latent]
    if bits == BFLOAT16_BITS:
        products = torch.where(columns.isfinite(), _rounded(columns, bits), columns)
        return torch.cat([products, rows[..., latent:]], dim=-1)
    scale = scales.repeat_interleave(latent // scales.shape[-1], -1)
    large = _rounded(scale)
    small = _rounded(scale - large) if parts == 2 else torch.zeros_like(scale)
    values = columns / torch.where(scale == 0, 1.0, scale)
    products = _rounded(values * large + _rounded(values * small))
    products = torch.where(columns.isfinite(), products, columns)
    return torch.cat([products, rows[..., latent:]], dim=-1)


def _rounded(numbers: Tensor, bits: int = BITS) -> Tensor:
    mantissa, exponent = torch.frexp(numbers)
    # torch computes 2**exponent of integers in its default dtype
    return torch.ldexp((mantissa * 2.0**bits).round(), (exponent - bits).float())
