"""Scores of e4m3 queries and rows with the accumulator precision of Hopper's FP8 tensor cores.

The decode kernel `m64_fp8_qk` and the indexer kernels multiply e4m3 by e4m3. The hardware
accumulates such products with fewer bits than float32, so a float32 run is too precise to be the
naive run of these kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, PageTable
from mlakit.dispatch import selection
from mlakit.dispatch.specs import device_facts
from mlakit.kernels.triton.indexer_configs import has_fp8_dots
from mlakit.model.geometry import RowShape
from mlakit.model.masks import Mask
from mlakit.ops.indexer import LOGITS, logits_problem
from mlakit.reference.hopper_fp8_mma import fp8_mma

FORMATS = ("fp8", "fp8_token", "fp8_split")
HOPPER_ARCH = 90
MAX_DEQUANTIZED_HEADS = 32  # up to these the small_m kernels convert FP8 to bf16


def uses_fp8_qk(
    device: torch.device, backend: str, *, format: str, q_dtype: str, heads: int
) -> bool:
    """Whether such a call may use the kernel `m64_fp8_qk`."""
    if device_facts(device) != ("cuda", HOPPER_ARCH):
        return False
    if backend == "hopper:m64_fp8_qk":
        return True
    is_fp8_qk = q_dtype == "e4m3" and format in FORMATS and heads > MAX_DEQUANTIZED_HEADS
    return is_fp8_qk and backend in ("auto", "hopper")


def fp8_qk_scores(
    q: Tensor,  # [n, width] as stored
    rows: Tensor,  # [keys, width] dequantised
    row_scales: Tensor,  # [keys] the scale of each row, or [keys, groups]
    row: RowShape,
    format: str,
) -> Tensor:
    """float32 [n, keys]: q · row, without the scale of the query."""
    latent, rope = row.kv_lora_rank, row.qk_rope_head_dim
    if row_scales.ndim == 2:
        return _grouped_scores(q, rows, row_scales, latent)
    stored = torch.where(row_scales == 0, 0.0, rows.T / row_scales).T
    if format != "fp8_token":  # the kernel adds the rope columns first
        order = torch.arange(latent + rope, device=q.device).roll(rope)
        sums = fp8_mma(q[:, order], stored[:, order])
    else:
        rotated = q[:, latent:].float() @ stored[:, latent:].float().T
        sums = fp8_mma(q[:, :latent], stored[:, :latent], rotated)
    return sums * row_scales.float()


def _grouped_scores(q: Tensor, rows: Tensor, scales: Tensor, latent: int) -> Tensor:
    """`fp8_qk_scores` of rows with a scale per group of columns.

    The sum so far is divided by a group's scale before the group's products are added to it, and
    multiplied by the last scale in the end. Scales count as at least 2**-24 of a power of two
    """
    groups = scales.shape[1]
    width = latent // groups
    power = torch.ldexp(torch.ones_like(scales[:, 0]), torch.frexp(scales.amax(1)).exponent - 7)
    divisors = torch.maximum(scales, power[:, None] * 2.0**-24)
    divisors = torch.where(divisors == 0, 1.0, divisors)
    sums = q[:, latent:].float() @ rows[:, latent:].float().T
    before = torch.ones_like(power)
    for group in range(groups):
        columns = slice(group * width, (group + 1) * width)
        scale, divisor = scales[:, group], divisors[:, group]
        stored = torch.where(scale == 0, 0.0, rows[:, columns].T / scale).T
        sums = fp8_mma(q[:, columns], stored, sums * (before / divisor).float())
        before = divisor
    return sums * before.float()


def uses_fp8_logits(
    q: Tensor, layer: CacheLayer, page_table: PageTable, mask: Mask, backend: str
) -> bool:
    """Whether the kernel of such a call of `indexer_logits` multiplies e4m3 by e4m3 on Hopper."""
    problem = logits_problem(q, layer, page_table, mask)
    if problem.arch != HOPPER_ARCH:
        return False
    kernel = selection.select(LOGITS, problem, backend)
    return kernel.backend == "hopper" or has_fp8_dots(problem.dtype, layer.codec)


def fp8_logits(
    q: Tensor,  # [tokens, index_heads, width] as stored
    weights: Tensor,  # [tokens, index_heads] float32
    keys: Tensor,  # [keys, width] dequantised
    key_scales: Tensor,  # [keys] the scale of each key
) -> Tensor:
    """float32 [tokens, keys]: Σ_h weights[t, h] · relu(q[t, h]·key)."""
    stored = torch.where(key_scales == 0, 0.0, keys.T / key_scales).T
    products = fp8_mma(q.flatten(0, 1), stored).relu().view(*q.shape[:2], len(keys))
    return torch.einsum("th,thk->tk", weights.float(), products) * key_scales.float()
