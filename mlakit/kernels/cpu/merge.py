"""Combining partial softmaxes in host memory."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(
    outs: Tensor,  # [parts, ..., v_width]; what a part with lse = −inf holds is not looked at
    lses: Tensor,  # [parts, ...] float32
    sink: Tensor | None,  # broadcasts over [...]
) -> tuple[Tensor, Tensor]:
    """out = Σ_p exp(lse_p − lse) out_p, lse = log Σ_p exp(lse_p); a sink joins out's divisor."""
    lse = lses.logsumexp(0)
    empty = lse == -torch.inf
    divisor = torch.where(empty, 0.0, lse)
    if sink is not None:
        divisor = torch.logaddexp(divisor, sink.expand_as(divisor))
    weights = (lses - divisor).exp()
    parts = torch.where((lses == -torch.inf)[..., None], 0.0, outs.float())
    out = (weights[..., None] * parts).sum(0)
    return torch.where(empty[..., None], 0.0, out), lse
