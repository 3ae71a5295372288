"""Merging of partial softmaxes (`merge_states`) in host memory.

Maths      lse = log Σ_p exp lse_p;  out = Σ_p exp(lse_p) out_p / (exp lse + exp sink)
Work       an item is some tokens, on one thread
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlakit.arguments import MergeArguments
from mlakit.kernels.cpu.workers import SMALL, for_each
from mlakit.kernels.cpu.workspace import rows_that_fit

ITEM_ELEMENTS = 2**18  # of the result, of an item


def merge_states(a: MergeArguments, out: Tensor, lse: Tensor) -> None:
    outs, lses, sink = a.outs, a.lses, a.sink
    tokens, heads, v_width = out.shape
    tile = rows_that_fit(4 * heads * (4 * v_width + len(outs) + 4))
    tile = min(tile, max(1, ITEM_ELEMENTS // (heads * v_width)))

    def merge(start: int) -> None:
        block = slice(start, start + tile)
        partials = [
            (partial[block], partial_lse[block])
            for partial, partial_lse in zip(outs, lses, strict=True)
        ]
        merged, lse[block] = merge_partials(partials, sink)
        out[block] = merged.to(out.dtype)

    for_each(merge, range(0, tokens, tile), is_small=out.numel() <= SMALL)


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
    merged = torch.zeros(partials[0][0].shape, device="cpu")
    for partial, partial_lse in partials:
        weight = (partial_lse - divisor).exp()[..., None]
        is_empty = (partial_lse == -torch.inf)[..., None]
        merged += torch.where(is_empty, 0.0, weight * partial.float())
    return merged.masked_fill_(empty[..., None], 0.0), lse
