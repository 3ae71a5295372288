"""Absorbed MLA attention over per-token lists of cache rows.

Maths      s = q·row · softmax_scale [· q_scale] over valid slots;  out = softmax(s) @ row
Valid      slot < topk_len and 0 ≤ row id < num_rows; the row of an invalid slot is not read
Work       an item is a few tokens, on one thread; tiles of their lists come one after the other
Memory     tiles of the lists are gathered, for as many tokens as fit the workspace
Lineage    own design; ideas: FlashMLA's token-wise sparse attention and its second ("extra") cache
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.arguments import SparseArguments, filled
from mlakit.cache import CacheLayer
from mlakit.kernels.cpu.softmax import OnlineSoftmax
from mlakit.kernels.cpu.workers import for_each
from mlakit.kernels.cpu.workspace import rows_that_fit

LIST_TILE = 256  # list entries gathered at a time for each token
TOKEN_TILE = 4  # tokens of an item, which stays on one thread


@dataclass(frozen=True)
class RowList:
    """The rows of one cache that each token attends to."""

    layer: CacheLayer
    rows: Tensor
    lens: Tensor | None

    def gather(self, tokens: slice, entries: slice) -> tuple[Tensor, Tensor]:
        """(rows [tokens, entries, width] float32, zeros where invalid; valid [tokens, entries])."""
        chosen = self.rows[tokens, entries].long()
        valid = (chosen >= 0) & (chosen < self.layer.num_slots)
        if self.lens is not None:
            entry = torch.arange(entries.start, entries.start + chosen.shape[1], device="cpu")
            valid &= entry < self.lens[tokens, None]
        gathered = torch.zeros(*chosen.shape, self.layer.codec.row.width, device="cpu")
        gathered[valid] = self.layer.read_unchecked(chosen[valid])
        return gathered, valid


def sparse_mla(a: SparseArguments, out: Tensor, lse: Tensor, max_logits: Tensor) -> None:
    q = a.q
    lists = [RowList(a.layer, a.rows, a.topk_lens)]
    if a.extra is not None:
        lists.append(RowList(a.extra, filled(a.extra_rows), a.extra_topk_lens))
    tokens, heads, _ = q.shape
    width, v_width = a.layer.codec.row.width, out.shape[-1]
    bytes_per_entry = 4 * (4 * width + 2 * heads)
    entries = min(LIST_TILE, rows_that_fit(2 * bytes_per_entry, at_least=16))
    bytes_per_token = 4 * heads * (width + 4 * v_width) + entries * bytes_per_entry
    tile = min(TOKEN_TILE, rows_that_fit(bytes_per_token))

    def attend(start: int) -> None:
        block = slice(start, min(start + tile, tokens))
        scaled = q[block].float() * a.softmax_scale
        if a.q_rope is not None:
            scaled = torch.cat([scaled, a.q_rope[block].float() * a.softmax_scale], dim=-1)
        if a.q_scale is not None:
            scaled *= a.q_scale[block, None, None]
        state = OnlineSoftmax.over(len(scaled), heads, v_width=v_width)
        for each in lists:
            for first in range(0, each.rows.shape[1], entries):
                keys, valid = each.gather(block, slice(first, first + entries))
                scores = (scaled @ keys.mT).masked_fill_(~valid[:, None, :], -torch.inf)
                state.add(scores, keys[..., :v_width])
        block_out, lse[block] = state.finish(a.sink)
        out[block] = block_out.to(out.dtype)
        max_logits[block] = state.row_max

    for_each(attend, range(0, tokens, tile))
