"""Reference of the merge: partial attention results over disjoint keys become one result."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast


@without_autocast
def merge_states(
    outs: Tensor,  # [partials, tokens, heads, D]
    lses: Tensor,  # [partials, tokens, heads]
    *,
    sink: Tensor | None = None,  # [heads]
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from partial attention results.

        lse = log Σ_n exp lses[n]
        out = Σ_n exp(lses[n]) outs[n] / (exp lse + exp sink)

    The partials must not include the sink. The out of a partial with lse -inf (no keys) is never
    read and may hold anything. Returns out [tokens, heads, D] and lse [tokens, heads].
    """
    lses = lses.to(dtype)
    lse = lses.logsumexp(0)
    denominator = lse if sink is None else torch.logaddexp(lse, sink.to(dtype).expand_as(lse))
    out = torch.zeros(outs.shape[1:], dtype=dtype, device=outs.device)
    for partial_out, partial_lse in zip(outs, lses, strict=True):
        term = (partial_lse - denominator).exp()[..., None] * partial_out.to(dtype)
        out += term.masked_fill((partial_lse == -torch.inf)[..., None], 0.0)
    return out, lse
