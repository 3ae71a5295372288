"""The softmax that all attention references share."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_weights(
    scores: Tensor, sink: Tensor | None, rounded_to: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax weights of the attended keys, and lse.

        lse[h]        = log Σ_j exp scores[h, j]
        weights[h, j] = exp scores[h, j] / (exp lse[h] + exp sink[h])

    scores      [..., heads, keys]  -inf for a masked key; without keys lse is -inf
    sink        [heads]             natural-log logit; -inf is no sink, +inf makes every weight 0
    rounded_to                      dtype of the weights in a naive run; None: exact
    """
    lse = scores.logsumexp(-1)
    denominator = lse if sink is None else torch.logaddexp(lse, sink.to(scores.dtype))
    # if every score is -inf, -inf - (-inf) would be NaN
    shift = denominator.masked_fill(denominator == -torch.inf, 0.0)
    weights = (scores - shift[..., None]).exp()
    return weights if rounded_to is None else weights.to(rounded_to).to(scores.dtype), lse
