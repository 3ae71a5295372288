"""Absorbed MLA attention of each request's newest tokens over its cached rows.

Maths      s = q·row · softmax_scale [· q_scale];  out = softmax(s) @ row[:, :v_width]
Work       an item is a split of a request's keys for a block of its queries, on one thread. The
           thread that finishes the last split of a block merges them
Memory     a key tile is gathered by whole pages and converted to float32; it serves as K and as V
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from threading import Lock

import torch
from torch import Tensor

from mlakit.arguments import DecodeArguments, DecodePlanArguments, Splits, filled
from mlakit.cache import CacheLayer, PageTable
from mlakit.geometry import RowShape
from mlakit.kernels.cpu.decode_fused import Request, attend_requests
from mlakit.kernels.cpu.merge import merge_partials
from mlakit.kernels.cpu.softmax import OnlineSoftmax
from mlakit.kernels.cpu.workers import for_each
from mlakit.kernels.cpu.workspace import rows_that_fit
from mlakit.plan import DecodePlanTensors
from mlakit.split_heuristic import equal_key_ranges

SPLIT_KEYS = 2048  # keys of a split without a plan: threads share a long request
KEY_TILE = 4096  # keys: every tile costs about twenty calls of torch (docs/measured.md, CPU)
QUERY_ROWS = 512  # queries × heads of a block: 1 MB of state at 512 columns
SPLIT_GRANULARITY = 64  # keys; even splits begin at multiples of it


def mla_decode(a: DecodeArguments, out: Tensor, lse: Tensor) -> None:
    q_latent, q_rope, q_scale, q_starts = a.q, filled(a.q_rope), a.q_scale, filled(a.q_starts)
    layer, page_table, shard, mask, sink = a.layer, a.page_table, a.shard, a.mask, a.sink
    lengths: list[int] = a.kv_lens.tolist()
    ranges = _split_ranges(a.splits, [shard.local_count(kv_len) for kv_len in lengths])

    def attend(item: tuple[_Block, int]) -> None:
        block, split = item
        q = torch.cat([q_latent[block.rows].float(), q_rope[block.rows].float()], -1)
        q.mul_(a.softmax_scale)
        if q_scale is not None:
            q *= q_scale[block.rows, None, None]
        state = _attend_split(
            q, layer, page_table, block.request, ranges[block.request][split], block.seen
        )
        whole = block.finish(split, state, sink)
        if whole is not None:
            block_out, lse[block.rows] = whole
            out[block.rows] = block_out.to(out.dtype)

    requests = []
    for request, (kv_len, (first, last)) in enumerate(
        zip(lengths, pairwise(q_starts.tolist()), strict=True)
    ):
        seen = [
            tuple(map(shard.local_count, mask.interval(kv_len - last + token, kv_len)))
            for token in range(first, last)
        ]
        if seen:
            requests.append(Request(request, range(first, last), seen))
    blocks = []
    for left in attend_requests(a, requests, out, lse):
        num_splits = len(ranges[left.number])
        tile = _query_tile(q_latent.shape[1], layer.codec.row, num_splits)
        for start in range(0, len(left.tokens), tile):
            rows = left.tokens[start : start + tile]
            own = left.seen[start : start + tile]
            blocks.append(_Block(left.number, slice(rows.start, rows.stop), own, num_splits))
    for_each(attend, [(block, split) for block in blocks for split in range(block.num_splits)])


class _Block:
    """A block of queries of one request, and the partials of its splits."""

    def __init__(
        self, request: int, rows: slice, seen: Sequence[tuple[int, ...]], num_splits: int
    ) -> None:
        self.request, self.rows, self.num_splits = request, rows, num_splits
        self.seen = seen  # per query, the local keys [low, high) it sees
        self._partials: list[tuple[Tensor, Tensor] | None] = [None] * num_splits
        self._missing, self._lock = num_splits, Lock()

    def finish(
        self, split: int, state: OnlineSoftmax, sink: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """(out, lse) of the block after its last split, in any order of splits; before it None."""
        if self.num_splits == 1:
            return state.finish(sink)
        self._partials[split] = state.finish()
        with self._lock:
            self._missing -= 1
            is_last = self._missing == 0
        if not is_last:
            return None
        partials, self._partials = [each for each in self._partials if each is not None], []
        return merge_partials(partials, sink)


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
        tile=SPLIT_GRANULARITY,
        max_partials=0,
        slot_rows=0,
        num_tokens=a.num_tokens,
    )
    items = [(request, 0, length, -1) for request, length in enumerate(lengths)]
    plan.items.copy_(torch.tensor(items, dtype=torch.int32, device="cpu").view(batch, 4))
    plan.cta_starts.copy_(torch.tensor([0, batch], device="cpu"))
    plan.partial_starts.zero_()
    return plan


def _query_tile(heads: int, row: RowShape, num_splits: int) -> int:
    """Queries per block: with their state and partials they take half of the workspace."""
    bytes_per_query = 4 * heads * (row.width + (3 + num_splits) * row.v_width)
    return min(max(1, QUERY_ROWS // heads), rows_that_fit(2 * bytes_per_query))


def _split_ranges(splits: Splits, lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Per request, the ranges of local keys that its splits have."""
    if isinstance(splits, DecodePlanTensors):
        ranges: list[list[tuple[int, int]]] = [[] for _ in lengths]
        for request, first, last, _ in splits.host_items():
            ranges[request].append((first, last))
        return [each or [(0, 0)] for each in ranges]
    if splits is None:
        return [
            [(first, min(first + SPLIT_KEYS, length)) for first in range(0, length, SPLIT_KEYS)]
            or [(0, 0)]
            for length in lengths
        ]
    return [equal_key_ranges(length, splits.num_splits, SPLIT_GRANULARITY) for length in lengths]


def _attend_split(
    q: Tensor,  # [q_len, heads, width] float32, scaled
    layer: CacheLayer,
    page_table: PageTable,
    request: int,
    key_range: tuple[int, int],
    seen: Sequence[tuple[int, ...]],  # per query, the local keys [low, high) it sees
) -> OnlineSoftmax:
    """The online softmax of every query over the keys of one split."""
    q_len, heads, width = q.shape
    v_width = layer.codec.row.v_width
    first = max(key_range[0], min(low for low, _ in seen))
    last = min(key_range[1], max(high for _, high in seen))
    common = (max(low for low, _ in seen), min(high for _, high in seen))
    # the other half of the workspace: a key tile (stored, dequantised, concatenated), its scores
    tile = min(KEY_TILE, rows_that_fit(2 * 4 * (3 * width + 2 * q_len * heads), at_least=16))
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
