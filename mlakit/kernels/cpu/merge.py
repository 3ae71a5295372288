"""Merging of partial softmaxes (`merge_states`) in host memory.

Maths      lse = log Σ_p exp lse_p;  out = Σ_p exp(lse_p) out_p / (exp lse + exp sink)
Work       a few operations for each block of tokens, which torch shares out among its threads
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlakit.kernels.arguments import MergeArguments
from mlakit.kernels.cpu.workspace import row_blocks


def merge_states(a: MergeArguments, out: Tensor, lse: Tensor) -> None:
    outs, lses, sink = a.outs, a.lses, a.sink
    tokens, heads, v_width = out.shape
    bytes_per_token = 4 * heads * (4 * v_width + len(outs) + 4)
    for block in row_blocks(tokens, heads * v_width, bytes_per_token):
        partials = [
            (partial[block], partial_lse[block])
            for partial, partial_lse in zip(outs, lses, strict=True)
        ]
        merged, lse[block] = merge_partials(partials, sink)
        out[block] = merged


def merge_partials(
    partials: Sequence[tuple[Tensor, Tensor]],  # (out [..., v_width], lse [...])
    sink: Tensor | None,  # broadcasts over [...]
) -> tuple[Tensor, Tensor]:
    """out = Σ_p exp(lse_p − lse) out_p, lse = log Σ_p exp(lse_p); a sink is part of out's divisor.

    A partial may hold anything where its lse is −inf.
    """
    lse = torch.stack([partial_lse for _, partial_lse in partials]).logsumexp(0)
    empty = lse == -torch.inf
    divisor = lse.masked_fill(empty, 0.0)
    if sink is not None:
        divisor = torch.logaddexp(divisor, sink.expand_as(divisor))
    merged: Tensor | None = None
    for partial, partial_lse in partials:
        weighted = (partial_lse - divisor).exp()[..., None] * partial  # float32
        is_empty = partial_lse == -torch.inf
        if bool(is_empty.any()):
            weighted.masked_fill_(is_empty[..., None], 0.0)
        merged = weighted if merged is None else merged.add_(weighted)
    assert merged is not None
    return merged, lse
