"""Partial results of several ranks in one byte buffer: one collective carries out and lse.

Two collectives would take twice the latency, and lse is a small message.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: kernels read rows of out in vectors


class Partials(NamedTuple):
    """Views of one buffer: per rank, out [tokens, heads, v_width] and lse [tokens, heads]."""

    buffer: Tensor  # [ranks, bytes] uint8
    outs: list[Tensor]
    lses: list[Tensor]

    @classmethod
    def allocate(cls, ranks: int, like: Tensor, heads: int) -> Partials:
        """Uninitialised; tokens, v_width, dtype and device are those of `like`."""
        tokens, _, v_width = like.shape
        shape = (tokens, heads, v_width)
        out_bytes = tokens * heads * v_width * like.element_size()
        lse_bytes = tokens * heads * torch.float32.itemsize
        lse_start = _aligned(out_bytes)
        size = _aligned(lse_start + lse_bytes)
        buffer = torch.empty(ranks, size, dtype=torch.uint8, device=like.device)
        outs = [row[:out_bytes].view(like.dtype).view(shape) for row in buffer]
        lses = [
            row[lse_start : lse_start + lse_bytes].view(torch.float32).view(shape[:2])
            for row in buffer
        ]
        return cls(buffer, outs, lses)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
