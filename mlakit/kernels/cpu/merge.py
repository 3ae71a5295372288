"""Combining partial softmaxes in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlakit.arguments import MergeArguments
from mlakit.kernels.cpu.workers import SMALL, for_each
from mlakit.kernels.cpu.workspace import rows_that_fit

ITEM_ELEMENTS = 2**18  # of the result, for one thread at a time


def merge_states(a: MergeArguments, out: Tensor, lse: Tensor) -> None:
    outs, lses, sink = a.outs, a.lses, a.sink
    tokens, heads, v_width = out.shape
    tile = rows_that_fit(4 * heads * (4 * v_width + len(outs) + 4))
    tile = min(tile, max(1, ITEM_ELEMENTS // (heads * v_width)))

    def merge(start: int) -> None:
        block = slice(start, start + tile)
        parts = [(part[block], part_lse[block]) for part, part_lse in zip(outs, lses, strict=True)]
        merged, lse[block] = merge_parts(parts, sink)
        out[block] = merged.to(out.dtype)

    for_each(merge, range(0, tokens, tile), is_small=out.numel() <= SMALL)


def merge_parts(
    parts: Sequence[tuple[Tensor, Tensor]],  # (out [..., v_width], lse [...])
    sink: Tensor | None,  # broadcasts over [...]
) -> tuple[Tensor, Tensor]:
    """out = Σ_p exp(lse_p − lse) out_p, lse = log Σ_p exp(lse_p); a sink joins out's divisor.

    What a part holds where its lse is −inf is not looked at.
    """
    lse = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
    empty = lse == -torch.inf
    divisor = lse.masked_fill(empty, 0.0)
    if sink is not None:
        divisor = torch.logaddexp(divisor, sink.expand_as(divisor))
    merged = torch.zeros(parts[0][0].shape, device="cpu")
    for part, part_lse in parts:
        weight = (part_lse - divisor).exp()[..., None]
        merged += torch.where((part_lse == -torch.inf)[..., None], 0.0, weight * part.float())
    return merged.masked_fill_(empty[..., None], 0.0), lse
