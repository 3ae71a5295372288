"""Rows of fp8_block128 as Hopper's `sparse_mla` with 64 heads per CTA multiplies them.

The kernel `m64_fp8_kv` rounds the product of a value and its scale to float16, once. A float32 run
over exact rows is too precise to be its naive run.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMAT = "fp8_block128"
MAX_EXACT_HEADS = 32  # up to these `small_m_fp8_kv` multiplies scores and probabilities instead
BITS = 11  # of float16, the leading one among them


def rounds_rows(device: torch.device, backend: str, *, format: str, heads: int) -> bool:
    """Whether such a call of `sparse_mla` may use the kernel."""
    if format != FORMAT or device.type != "cuda":
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    is_chosen = backend in ("auto", "hopper") and heads > MAX_EXACT_HEADS
    return is_chosen or backend == "hopper:m64_fp8_kv"


def rounded_rows(rows: Tensor, latent: int) -> Tensor:
    """`rows` [..., width] with so many columns rounded to the bits of float16, not to its range."""
    columns = rows[..., :latent]
    mantissa, exponent = torch.frexp(columns)
    rounded = torch.ldexp((mantissa * 2.0**BITS).round(), exponent - BITS)
    rounded = torch.where(columns.isfinite(), rounded, columns)
    return torch.cat([rounded.to(rows.dtype), rows[..., latent:]], dim=-1)
