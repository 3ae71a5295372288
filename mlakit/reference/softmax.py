"""The softmax all attention oracles share."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_weights(
    scores: Tensor, sink: Tensor | None, rounded_to: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax weights over the attended keys, and the log of their sum.

        lse[h]        = log Σ_j exp scores[h, j]
        weights[h, j] = exp scores[h, j] / (exp lse[h] + exp sink[h])

    scores  [..., heads, keys]  of a key that is not attended -inf, if it is there at all; without
                                any lse is -inf
    sink    [heads]             natural-log logit; -inf is no sink, +inf makes every weight 0
    rounded_to                  the type weights are multiplied in, of a run that is not exact
    """
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(scores.dtype))
    # a row whose every score is -inf attends nothing, and -inf - (-inf) would be NaN
    shift = total.masked_fill(total == -torch.inf, 0.0)
    weights = (scores - shift[..., None]).exp()
    return weights if rounded_to is None else weights.to(rounded_to).to(scores.dtype), lse
