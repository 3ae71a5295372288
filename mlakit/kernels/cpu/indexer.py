"""The lightning indexer's logits and its top-k, in host memory.

Maths      logits[t, j] = Σ_h weights[t, h] · relu(q[t, h]·key[j]), −inf where j is not visible
Work       an item is a tile of a request's keys, or some rows of logits, on one thread
Order      top-k: by column; among equal logits the lower columns win; −inf is never selected; NaN
           ranks above every number
Lineage    own design; ideas: the maths of DeepSeek V3.2's indexer
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mlakit.arguments import LogitsArguments, TopkArguments, filled
from mlakit.cache import request_slots
from mlakit.kernels.cpu.workers import SMALL, for_each
from mlakit.kernels.cpu.workspace import rows_that_fit
from mlakit.masks import Mask

KEY_TILE = 1024
ITEM_ELEMENTS = 2**18  # of the logits, of an item


def indexer_logits(a: LogitsArguments, out: Tensor) -> None:
    q, layer, page_table, mask = a.q, a.layer, a.page_table, a.mask
    _fill(out, -torch.inf)
    # half of the workspace is for a key tile (stored, dequantised, concatenated), half for its dots
    tile = min(KEY_TILE, rows_that_fit(2 * 4 * 3 * q.shape[2], at_least=16))
    items = []
    requests = zip(a.kv_lens.tolist(), pairwise(filled(a.q_starts).tolist()), strict=True)
    for request, (kv_len, (start, end)) in enumerate(requests):
        if end == start:
            continue
        positions = torch.arange(start, end, device="cpu") - end + kv_len
        first = mask.interval(int(positions[0]), kv_len)[0]
        last = mask.interval(int(positions[-1]), kv_len)[1]
        items += [
            (request, slice(start, end), positions, slice(low, min(low + tile, last)))
            for low in range(first, last, tile)
        ]

    def score(item: tuple[int, slice, Tensor, slice]) -> None:
        request, tokens, positions, keys = item
        slots = request_slots(page_table, layer.page_size, request, keys.start, keys.stop)
        _score(
            q[tokens],
            a.weights[tokens],
            layer.read_unchecked(slots),
            mask,
            positions,
            torch.arange(keys.start, keys.stop, device="cpu"),
            out[tokens, keys],
        )

    for_each(score, items)


def _score(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,  # [keys, D] float32
    mask: Mask,
    positions: Tensor,  # [queries]
    key_positions: Tensor,  # [keys]
    out: Tensor,  # [queries, keys]
) -> None:
    """One tile of keys, for as many queries at a time as fit the workspace."""
    num_queries, heads, width = q.shape
    tile = rows_that_fit(2 * 4 * (heads * (len(keys) + width) + 2 * len(keys)))
    for start in range(0, num_queries, tile):
        block = slice(start, start + tile)
        dots = (q[block].float() @ keys.T).relu_()
        scores = (weights[block, None, :] @ dots).squeeze(1)
        seen = mask.visible(positions[block], key_positions)
        out[block] = scores.masked_fill_(~seen, -torch.inf)


def indexer_topk(a: TopkArguments, out: Tensor) -> None:
    logits, row_starts, row_ends = a.logits, a.row_starts, a.row_ends
    tokens, columns = logits.shape
    _fill(out, -1)
    column = torch.arange(columns, device="cpu")
    tile = rows_that_fit(columns * (2 * 4 + 2 * 8 + 4 + 1))
    tile = min(tile, max(1, ITEM_ELEMENTS // max(columns, 1)))

    def select(start: int) -> None:
        block = slice(start, min(start + tile, tokens))
        candidates = logits[block]
        if row_starts is not None:
            candidates = candidates.masked_fill(column < row_starts[block, None], -torch.inf)
        if row_ends is not None:
            candidates = candidates.masked_fill(column >= row_ends[block, None], -torch.inf)
        # a stable sort keeps equal logits in column order; torch.topk does not
        ordered, order = candidates.sort(dim=-1, descending=True, stable=True)
        found = ordered[:, : out.shape[1]] != -torch.inf
        best = torch.where(found, order[:, : out.shape[1]], columns).sort(dim=-1).values
        found = best < columns
        if row_starts is not None:
            best = best - row_starts[block, None]
        out[block, : best.shape[1]] = torch.where(found, best, -1).int()

    for_each(select, range(0, tokens, tile), is_small=logits.numel() <= SMALL)


def _fill(out: Tensor, value: float) -> None:
    rows = max(1, ITEM_ELEMENTS // max(out.shape[1], 1))
    for_each(lambda tile: tile.fill_(value), out.split(rows), is_small=out.numel() <= SMALL)
