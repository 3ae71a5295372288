"""Absorbed MLA attention of each request's newest tokens over its cached rows.

Maths      s = q·row · softmax_scale [· q_scale];  out = softmax(s) @ row[:, :v_width]
Work       few calls of torch's fused attention for many requests (`decode_fused`). What is left
           takes key tiles one after the other, for a block of a request's queries; torch shares
           each operation out among its threads. Splits of a plan do not matter
Memory     a key tile is gathered by whole pages and converted to float32; it serves as K and as V
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, PageTable
from mlakit.kernels.arguments import DecodeArguments, DecodePlanArguments, filled
from mlakit.kernels.cpu.decode_fused import Request, attend_requests
from mlakit.kernels.cpu.softmax import OnlineSoftmax
from mlakit.kernels.cpu.workspace import even_slices, rows_that_fit
from mlakit.model.geometry import RowShape
from mlakit.plan import DecodePlanTensors

KEY_TILE = 4096  # keys: every tile costs about twenty calls of torch (docs/measured.md, CPU)
QUERY_ROWS = 512  # queries × heads of a block: 1 MB of state at 512 columns
PLAN_TILE = 64  # keys, of a plan; it has no splits


def mla_decode(a: DecodeArguments, out: Tensor, lse: Tensor) -> None:
    if lse.numel() == 0:  # no tokens or no heads
        return
    shard, mask, requests = a.shard, a.mask, list[Request]()
    bounds = zip(a.kv_lens.tolist(), pairwise(filled(a.q_starts).tolist()), strict=True)
    for request, (kv_len, (first, last)) in enumerate(bounds):
        seen = [
            tuple(map(shard.local_count, mask.interval(kv_len - last + token, kv_len)))
            for token in range(first, last)
        ]
        if seen:
            requests.append(Request(request, range(first, last), seen))
    for left in attend_requests(a, requests, out, lse):
        tile = _query_tile(a.q.shape[1], a.layer.codec.row)
        for block in even_slices(len(left.tokens), tile):
            tokens = left.tokens[block]
            _attend_block(a, Request(left.number, tokens, left.seen[block]), out, lse)


def _attend_block(a: DecodeArguments, block: Request, out: Tensor, lse: Tensor) -> None:
    """Write the results of some queries of a request."""
    rows = slice(block.tokens.start, block.tokens.stop)
    q = torch.cat([a.q[rows].float(), filled(a.q_rope)[rows].float()], -1)
    q.mul_(a.softmax_scale)
    if a.q_scale is not None:
        q *= a.q_scale[rows, None, None]
    block_out, lse[rows] = _attend_keys(q, a.layer, a.page_table, block).finish(a.sink)
    out[rows] = block_out


def plan_mla_decode(a: DecodePlanArguments) -> DecodePlanTensors:
    """A plan of one CTA: no request is split, and each has an item, with keys or without."""
    lengths = [a.shard.local_count(kv_len) for kv_len in a.kv_lens.tolist()]
    batch = len(lengths)
    plan = DecodePlanTensors.room(
        a.out,
        partial(torch.zeros, dtype=torch.int32, device="cpu"),
        max_items=batch,
        columns=4,
        num_ctas=1,
        batch=batch,
        tile=PLAN_TILE,
        max_partials=0,
        slot_rows=0,
        num_tokens=a.num_tokens,
    )
    items = [(request, 0, length, -1) for request, length in enumerate(lengths)]
    plan.items.copy_(torch.tensor(items, dtype=torch.int32, device="cpu").view(batch, 4))
    plan.cta_starts.copy_(torch.tensor([0, batch], dtype=torch.int32, device="cpu"))
    plan.partial_starts.zero_()
    return plan


def _query_tile(heads: int, row: RowShape) -> int:
    """Queries per block: with their state they take half of the workspace."""
    bytes_per_query = 4 * heads * (row.width + 4 * row.v_width)
    fit = rows_that_fit(2 * bytes_per_query)
    return min(max(1, QUERY_ROWS // heads), fit)


def _attend_keys(
    q: Tensor,  # [q_len, heads, width] float32, scaled
    layer: CacheLayer,
    page_table: PageTable,
    queries: Request,
) -> OnlineSoftmax:
    """The online softmax of every query over the keys it sees."""
    (q_len, heads, width), v_width = q.shape, layer.codec.row.v_width
    request, seen = queries.number, queries.seen
    first, last = min(low for low, _ in seen), max(high for _, high in seen)
    common = (max(low for low, _ in seen), min(high for _, high in seen))
    # the other half of the workspace: a key tile (stored, dequantised, concatenated), its scores
    bytes_per_key = 4 * (3 * width + 2 * q_len * heads)
    tile = min(KEY_TILE, rows_that_fit(2 * bytes_per_key, at_least=16))
    tiles = list(_tiles(first, last, common, tile, layer.page_size))
    # keys on the left: with a transposed right side a matmul takes up to 3 times as long
    columns = q.flatten(0, 1).T.contiguous()
    if tiles == [(first, last)] and common[0] <= first and last <= common[1]:
        keys = layer.read_tokens(page_table, request, first, last)
        state = OnlineSoftmax.of((keys @ columns).T, keys[:, :v_width])
        return state.unflatten(q_len, heads)
    state = OnlineSoftmax.over(q_len * heads, v_width=v_width)
    for start, stop in tiles:
        keys = layer.read_tokens(page_table, request, start, stop)
        if common[0] <= start and stop <= common[1]:
            state.add((keys @ columns).T, keys[:, :v_width])
            continue
        for i, (low, high) in enumerate(seen):
            # a slice, not a mask: what this query does not see may hold NaN
            block = keys[max(low - start, 0) : max(high - start, 0)]
            if len(block):
                own = slice(i * heads, (i + 1) * heads)
                state[own].add((block @ columns[:, own]).T, block[:, :v_width])
    return state.unflatten(q_len, heads)


def _tiles(
    first: int, last: int, cuts: Sequence[int], tile: int, page_size: int
) -> Iterator[tuple[int, int]]:
    """Ranges of about `tile` keys that hold whole pages, or lie in one page if that is larger.

    No range has one of the `cuts` inside.
    """
    step = max(tile // page_size * page_size, 1) if page_size <= tile else tile
    start = first
    while start < last:
        stop = start - start % step + step
        if page_size > tile:
            stop = min(stop, start - start % page_size + page_size)
        stop = min(stop, last, *(cut for cut in cuts if cut > start))
        yield start, stop
        start = stop
