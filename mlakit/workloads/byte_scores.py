"""Scores of e4m3 queries over e4m3 rows as Hopper's tensor cores add them: a naive run for those.

The kernel `m64_fp8_qk` multiplies bytes as they are. What the hardware keeps of such sums is less
than float32, so a run in float32 is not one of the same precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.geometry import RowShape
from mlakit.reference.hopper_fp8_mma import fp8_mma

FORMATS = ("fp8", "fp8_token")
MORE_HEADS_THAN = 32  # with fewer of them bytes are widened


def adds_bytes(
    device: torch.device, backend: str, *, format: str, q_dtype: str, heads: int
) -> bool:
    """May the scores of such a call be sums of bytes?"""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if backend == "hopper:m64_fp8_qk":
        return True
    is_of_bytes = q_dtype == "e4m3" and format in FORMATS and heads > MORE_HEADS_THAN
    return is_of_bytes and backend in ("auto", "hopper")


def byte_scores(
    q: Tensor,  # [n, width] as it is stored
    rows: Tensor,  # [keys, width] as they are decoded
    units: Tensor,  # [keys] of rows: what their stored numbers were multiplied with
    row: RowShape,
    format: str,
) -> Tensor:
    """float32 [n, keys]: q · row, without a scale of the query."""
    latent, rope = row.kv_lora_rank, row.qk_rope_head_dim
    stored = torch.where(units == 0, 0.0, rows.T / units).T
    if format == "fp8":  # rotated columns come first
        order = torch.arange(latent + rope, device=q.device).roll(rope)
        sums = fp8_mma(q[:, order], stored[:, order])
    else:
        rotated = q[:, latent:].float() @ stored[:, latent:].float().T
        sums = fp8_mma(q[:, :latent], stored[:, :latent], rotated)
    return sums * units.float()
