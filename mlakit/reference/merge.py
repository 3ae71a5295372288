"""Oracle of merging: partial attention results over disjoint keys become the whole result."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.autocast import without_autocast


@without_autocast
def merge_states(
    outs: Tensor,  # [parts, tokens, heads, D]
    lses: Tensor,  # [parts, tokens, heads]
    *,
    sink: Tensor | None = None,  # [heads]
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over parts of them.

        lse = log Σ_n exp lses[n]
        out = Σ_n exp(lses[n]) outs[n] / (exp lse + exp sink)

    The sink belongs to the whole and must not have entered any part. A part whose lse is -inf
    attended nothing: its out is never read and may hold anything. Returns out [tokens, heads, D]
    and lse [tokens, heads].
    """
    lses = lses.to(dtype)
    lse = lses.logsumexp(0)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(dtype).expand_as(lse))
    out = torch.zeros(outs.shape[1:], dtype=dtype, device=outs.device)
    for part_out, part_lse in zip(outs, lses, strict=True):
        share = (part_lse - total).exp()[..., None] * part_out.to(dtype)
        out += share.masked_fill((part_lse == -torch.inf)[..., None], 0.0)
    return out, lse
