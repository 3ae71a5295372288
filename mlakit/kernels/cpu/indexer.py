"""The lightning indexer's logits and its top-k, in host memory.

Maths      logits[t, j] = Σ_h weights[t, h] · relu(q[t, h]·key[j]), −inf where j is not visible
Work       a tile is some keys of one request for all of its queries. Tiles of one size share each
           operation, which torch shares out among its threads. How a request is cut depends on that
           request only
Order      top-k: by column; among equal logits the lower columns win; −inf is never selected; NaN
           ranks above every number
Lineage    own design; ideas: the maths of DeepSeek V3.2's indexer
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.cache import token_slots
from mlakit.cache.layouts import bits
from mlakit.kernels.arguments import LogitsArguments, TopkArguments, filled
from mlakit.kernels.cpu.workspace import MAX_BLOCK, even_slices, rows_that_fit

KEY_TILE = 1024
MIN_KEY_TILE = 64  # the last tile of a request is padded to a power of two


class _Tile(NamedTuple):
    """Keys of one request."""

    request: int
    tokens: range  # of q
    position: int  # of the first of these tokens
    keys: slice


def indexer_logits(a: LogitsArguments, out: Tensor) -> None:
    out.fill_(-torch.inf)
    alike: dict[tuple[int, int], list[_Tile]] = {}
    requests = zip(a.kv_lens.tolist(), pairwise(filled(a.q_starts).tolist()), strict=True)
    for request, (kv_len, (start, end)) in enumerate(requests):
        if end == start:
            continue
        position = kv_len - (end - start)
        first = a.mask.interval(position, kv_len)[0]
        last = a.mask.interval(kv_len - 1, kv_len)[1]
        for low in range(first, last, _key_tile(a)):
            high = min(low + _key_tile(a), last)
            tile = _Tile(request, range(start, end), position, slice(low, high))
            alike.setdefault((end - start, _padded(high - low)), []).append(tile)
    for (queries, length), tiles in alike.items():
        for some in even_slices(len(tiles), _tiles_at_once(a, queries, length)):
            _score(a, tiles[some], length, out)


def _padded(keys: int) -> int:
    return max(MIN_KEY_TILE, 1 << (keys - 1).bit_length())


def _bytes_per_key(a: LogitsArguments) -> int:
    return 4 * 3 * a.q.shape[2]  # stored, dequantised, concatenated


def _key_tile(a: LogitsArguments) -> int:
    """Keys that fit half of the workspace, a power of two."""
    fit = rows_that_fit(2 * _bytes_per_key(a), at_least=MIN_KEY_TILE)
    return min(KEY_TILE, 1 << (fit.bit_length() - 1))


def _queries_at_once(a: LogitsArguments, length: int) -> int:
    """Queries of which half of the workspace holds the dots with the keys of a tile."""
    heads, width = a.q.shape[1:]
    per_query = 4 * (heads * (length + width) + 2 * length)
    fit = rows_that_fit(2 * per_query)
    return min(fit, max(1, MAX_BLOCK // per_query))


def _tiles_at_once(a: LogitsArguments, queries: int, length: int) -> int:
    most = _queries_at_once(a, length) // queries
    keys = min(
        rows_that_fit(2 * length * _bytes_per_key(a)),
        MAX_BLOCK // (length * _bytes_per_key(a)),
    )
    return max(1, min(most, keys))


def _score(a: LogitsArguments, tiles: Sequence[_Tile], length: int, out: Tensor) -> None:
    """Logits of tiles with the same number of queries, and `length` keys with their padding."""
    request, first, last = torch.tensor(
        [(tile.request, tile.keys.start, tile.keys.stop - 1) for tile in tiles],
        dtype=torch.int64,
        device="cpu",
    ).T[..., None]
    # padding repeats the last key: what lies past it may be no number
    position = torch.minimum(first + torch.arange(length, device="cpu"), last)
    slots = token_slots(a.page_table, a.layer.page_size, request, position)
    keys = a.layer.read_unchecked(slots)  # [tiles, length, width]
    for queries in even_slices(len(tiles[0].tokens), _queries_at_once(a, length)):
        rows = [tile.tokens[queries] for tile in tiles]
        scores = _weighted_dots(a, rows, keys)
        for tile, tokens, own in zip(tiles, rows, scores, strict=True):
            logits = own[:, : tile.keys.stop - tile.keys.start]
            if len(tile.tokens) > 1:
                own_keys = torch.arange(tile.keys.start, tile.keys.stop, device="cpu")
                positions = torch.arange(queries.start, queries.stop, device="cpu") + tile.position
                seen = a.mask.visible(positions, own_keys)
                logits.masked_fill_(~seen, -torch.inf)
            out[tokens.start : tokens.stop, tile.keys] = logits


def _weighted_dots(a: LogitsArguments, rows: Sequence[range], keys: Tensor) -> Tensor:
    """Σ_h weights · relu(q·key) [tiles, queries, keys], of rows of q and keys [tiles, keys, D]."""
    heads, width = a.q.shape[1:]
    count, queries = len(keys), len(rows[0])
    if count == 1:
        tokens: slice | Tensor = slice(rows[0].start, rows[0].stop)
    else:
        tokens = torch.tensor(
            [token for each in rows for token in each], dtype=torch.int64, device="cpu"
        )
    q = bits(a.q)[tokens].view(a.q.dtype).float()
    q = q.reshape(count, queries * heads, width)
    # keys on the left where it is possible: with a transposed right side a matmul takes longer
    dots = torch.bmm(keys, q.mT).mT if queries == 1 else torch.bmm(q, keys.mT)
    dots = dots.relu_().view(count * queries, heads, keys.shape[1])
    return torch.bmm(a.weights[tokens][:, None], dots).view(count, queries, -1)


def indexer_topk(a: TopkArguments, out: Tensor) -> None:
    logits, row_starts, row_ends = a.logits, a.row_starts, a.row_ends
    tokens, columns = logits.shape
    out.fill_(-1)
    column = torch.arange(columns, device="cpu")
    tile = rows_that_fit(columns * (2 * 4 + 2 * 8 + 4 + 1))
    for block in even_slices(tokens, tile):
        candidates = logits[block]
        if row_starts is not None:
            candidates = candidates.masked_fill(column < row_starts[block, None], -torch.inf)
        if row_ends is not None:
            candidates = candidates.masked_fill(column >= row_ends[block, None], -torch.inf)
        best = _best_columns(candidates, min(out.shape[1], columns))
        found = best < columns
        if row_starts is not None:
            best = best - row_starts[block, None]
        out[block, : best.shape[1]] = torch.where(found, best, -1).int()


def _best_columns(candidates: Tensor, k: int) -> Tensor:
    """The columns of the k largest in ascending order; the number of columns in place of −inf."""
    best, order = candidates.topk(k, sorted=False)
    if 0 < k < candidates.shape[1]:
        # topk takes any of the columns that are equal to the least one taken
        least = best.amin(1, keepdim=True)
        taken, equal = ((x == least).sum(1) for x in (best, candidates))
        least = least[:, 0]
        open_rows = (((taken < equal) & (least != -torch.inf)) | least.isnan()).nonzero()[:, 0]
        if len(open_rows):  # a stable sort keeps equal logits in column order
            ordered = candidates[open_rows].sort(dim=-1, descending=True, stable=True)
            best[open_rows], order[open_rows] = ordered.values[:, :k], ordered.indices[:, :k]
    return torch.where(best != -torch.inf, order, candidates.shape[1]).sort(dim=-1).values
