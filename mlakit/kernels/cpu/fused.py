"""torch's fused attention on the CPU: one call that torch shares out among its threads.

Maths      scores are float32 sums; for a 16-bit type the weights exp(s − row_max) and the result
           are rounded to it, and lse is less accurate (`is_accurate`)
Limits     V must be as wide as K. `is_finite` and `has_scores` find results that may be wrong, to
           be computed in another way: the weight 0 of a hidden key is multiplied by its value, and
           0 · NaN is NaN; where all scores of a row are −inf its lse is 0
Lineage    torch's `_scaled_dot_product_flash_attention_for_cpu`
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]  # (out [..., v_width], lse [...] float32)

# For a 16-bit type torch's exponential is wrong by up to 1.3e-4, and lse with it; over the keys of
# a query the errors partly cancel. A query must see MIN_KEYS, and lse must be so large that its
# tolerance as a float32 sum (`mlakit.tools.testing`) is 8.5e-5: errors of 5.4e-5 (AVX-512) and 7e-5
# (ARM) were measured there (docs/notes/cpu.md).
MIN_KEYS = 128
MIN_LSE = 5.5

# torch multiplies by the scale last: scores of a smaller one may have overflowed before
SMALLEST_SCALE = 1e-20


@lru_cache(maxsize=8)
def has_products(dtype: torch.dtype) -> bool:
    """Return whether the CPU multiplies a 16-bit type into float32 sums; torch emulates others."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    if dtype == torch.float16 and torch.cpu._is_avx512_supported():
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The type to multiply in: that of the tensors if the CPU has its products, or float32."""
    dtype = tensors[0].dtype
    is_one = all(tensor.dtype == dtype for tensor in tensors)
    return dtype if is_one and has_products(dtype) else torch.float32


def attend(
    q: Tensor,  # [batch, heads, queries, width]
    k: Tensor,  # [batch, heads, keys, width]
    v: Tensor,  # [batch, heads, keys, width], of which the first v_width columns count
    v_width: int,
    softmax_scale: float,
    *,
    is_causal: bool = False,  # query i sees the keys up to i
    bias: Tensor | None = None,  # [batch, 1, queries or 1, keys], added to scores
) -> Partial:
    """Return (out [batch, heads, queries, v_width], lse [batch, heads, queries])."""
    if softmax_scale < 0:  # torch would multiply the −inf of the causal mask by it
        q, softmax_scale = -q, -softmax_scale
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=bias, scale=softmax_scale
    )
    return out[..., :v_width], lse


def is_accurate(lse: Tensor) -> bool:
    """Return whether a 16-bit lse is as accurate as float32, with MIN_KEYS keys per query."""
    return 2 * int((lse.abs() >= MIN_LSE).sum()) >= lse.numel()


def is_finite(out: Tensor) -> bool:
    """Return whether results, or sums of them, are finite. A lse of NaN or +inf has out = NaN."""
    # A finite sum has finite terms; if the sum overflows, the other way is also right. Rows first:
    # torch converts a whole tensor before it sums it in another type.
    return isfinite(out.sum(-1).sum(dtype=torch.float32).item())


def has_scores(out: Tensor, lse: Tensor) -> bool:
    """Return whether every row has a score above −inf. A row without one has lse and out of 0."""
    return bool(lse.all()) or bool(out[lse == 0].any(-1).all())
