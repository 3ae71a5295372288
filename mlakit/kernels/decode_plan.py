"""The split heuristic on the device: one kernel makes the plan of a decode batch from lengths that
the host does not read. `mlakit.plan.split_heuristic` is its twin on the host and has the rules.

Maths      even, where that is nearly as good as balanced: every request in as many equal splits as
           there are CTAs per request, or whole requests where they outnumber the CTAs. Else
           balanced: the key tiles of all requests are concatenated to one line, and CTA c of C
           takes [c·total/C, (c+1)·total/C), split where a request ends. With `OwnSplits` the splits
           of a request depend on its own length alone, and are assigned to the CTAs in order
Work       one program; requests × items of each at a time
Memory     reads q_starts and kv_lens twice; writes the plan
Limits     a request with more rows (queries × heads) than a slot holds is not split
Lineage    own design; ideas: FlashMLA's get_mla_metadata, stream-K. Ours prefers even splits where
           they are nearly as good, and needs no host copy of the lengths
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.cache import KVShard
from mlakit.kernels import workspace
from mlakit.kernels.launch import launch
from mlakit.kernels.triton.arguments import length_arguments
from mlakit.kernels.triton.primitives import mask_interval
from mlakit.model.masks import Mask, MaskTraits
from mlakit.plan import DecodePlanTensors
from mlakit.plan.split_heuristic import EVEN_SPLIT_MAX_LOAD_TENTHS

ELEMENTS = 512  # requests × items that are written together
# the four of a plan's items, then q_first, q_len and kv_len of the request, and one spare: a kernel
# reads them here instead of looking them up with the request's number
ITEM_COLUMNS = 8


class OwnSplits(NamedTuple):
    """Splits that depend on a request's length alone: `tiles` key tiles each or, where `tiles` is
    0, `splits` equal ones."""

    tiles: int
    splits: int = 1

    def max_splits(self, num_tiles: int) -> int:
        return triton.cdiv(num_tiles, self.tiles) if self.tiles else self.splits


class PlanArguments(NamedTuple):
    """The tensors of a plan; None without one."""

    items: Tensor | None  # [max_items, ITEM_COLUMNS] int32
    cta_starts: Tensor | None  # [num_ctas + 1] int32
    partial_starts: Tensor | None  # [batch + 1] int32


NO_PLAN = PlanArguments(None, None, None)


class Traits(NamedTuple):
    """The constants that the kernel is compiled for."""

    MASK: MaskTraits
    IS_SHARDED: bool
    HAS_OWN_SPLITS: bool
    TILE: int
    REQUESTS: int  # planned together
    ITEMS: int  # of each of them, written together
    LINE_TYPE: tl.dtype
    EVEN_TENTHS: int
    COLUMNS: int


def plan_decode(
    q_starts: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    *,
    shard: KVShard,
    mask: Mask,
    heads: int,
    num_ctas: int,
    tile: int,
    min_tiles: int,  # key tiles that are worth a CTA
    slot_rows: int,  # rows of a partial
    capacity: int,  # keys that a request may have
    own: OwnSplits | None = None,  # of requests with one query
    num_tokens: int = 0,
    out: DecodePlanTensors | None = None,  # a plan to fill in again
) -> DecodePlanTensors:
    """Make the plan of `mlakit.plan.plan_decode` on the device, with two differences: every request
    with queries has an item, with keys or without, and a CTA with items has at least `min_tiles`.

    With `own` the splits of a request depend on its own length alone."""
    batch = kv_lens.shape[0]
    max_items, max_partials = batch + num_ctas, 2 * num_ctas
    if own is not None:
        max_splits = own.max_splits(capacity // tile + 2)  # a window may begin inside a tile
        max_items, max_partials = batch * max_splits, batch * max_splits if max_splits > 1 else 0
    requests = min(triton.next_power_of_2(max(batch, 1)), 128)

    def int32(*shape: int) -> Tensor:
        return workspace.scratch(shape, torch.int32, kv_lens.device)

    plan = DecodePlanTensors.room(
        out,
        int32,
        max_items=max_items,
        columns=ITEM_COLUMNS,
        num_ctas=num_ctas,
        batch=batch,
        tile=tile,
        max_partials=max_partials,  # each boundary between two CTAs makes two partials at most
        slot_rows=slot_rows,
        num_tokens=num_tokens,
    )
    launch(
        _plan_decode_kernel,
        (1,),
        num_requests=batch,
        heads=heads,
        window=mask.window,
        plan_ctas=num_ctas,
        min_tiles=min_tiles,
        slot_rows=slot_rows,
        own_tiles=own.tiles if own else 0,
        own_splits=own.splits if own else 1,
        lengths=length_arguments(q_starts, kv_lens),
        shard=shard,
        plan=PlanArguments(plan.items, plan.cta_starts, plan.partial_starts),
        TRAITS=Traits(
            MASK=mask.traits,
            IS_SHARDED=shard.world > 1,
            HAS_OWN_SPLITS=own is not None,
            TILE=tile,
            REQUESTS=requests,
            ITEMS=ELEMENTS // requests,
            LINE_TYPE=_line_type(batch * (capacity // tile + 2), num_ctas),
            EVEN_TENTHS=EVEN_SPLIT_MAX_LOAD_TENTHS,
            COLUMNS=ITEM_COLUMNS,
        ),
        num_warps=4,
    )
    return plan


def _line_type(longest_line: int, num_ctas: int) -> tl.dtype:
    """The type of positions on the line: it holds them times CTAs, and loads times tenths."""
    return (
        tl.int32 if longest_line * max(num_ctas, EVEN_SPLIT_MAX_LOAD_TENTHS) < 2**31 else tl.int64
    )


@triton.jit
def local_count(position, shard, IS_SHARDED: tl.constexpr):
    """Return how many of the positions [0, position) this rank caches.

    shard  (rank, world, interleave)
    """
    count = position
    if IS_SHARDED:
        rank, world, interleave = shard
        period = world * interleave
        rest = tl.maximum(position % period - rank * interleave, 0)
        count = position // period * interleave + tl.minimum(rest, interleave)
    return count


@triton.jit
def seen_keys(query, q_len, kv_len, window, shard, MASK: tl.constexpr, IS_SHARDED: tl.constexpr):
    """Local keys [first, last) that query `query` of a request sees; both grow with `query`."""
    first, last = mask_interval(kv_len - q_len + query, kv_len, window, MASK)
    return local_count(first, shard, IS_SHARDED), local_count(last, shard, IS_SHARDED)


@triton.jit
def load_lengths(lengths, request, mask):
    """Return int32 (first query, queries, keys) of requests; nothing outside `mask`.

    lengths  `LengthArguments`
    """
    at = request.to(tl.int64)
    first_at = lengths.q_starts + at * lengths.stride_q_starts
    first = tl.load(first_at, mask=mask, other=0).to(tl.int32)
    last_at = lengths.q_starts + (at + 1) * lengths.stride_q_starts
    last = tl.load(last_at, mask=mask, other=0).to(tl.int32)
    kv_len_at = lengths.kv_lens + at * lengths.stride_kv_lens
    kv_len = tl.load(kv_len_at, mask=mask, other=0).to(tl.int32)
    return first, last - first, kv_len


@triton.jit
def key_tiles(
    q_len,
    kv_len,
    window,
    shard,
    MASK: tl.constexpr,
    IS_SHARDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return (first key tile, number of them) that the queries of a request see.

    One at least where there are queries: rows that see nothing are written, too.
    """
    first, _ = seen_keys(q_len * 0, q_len, kv_len, window, shard, MASK, IS_SHARDED)
    _, last = seen_keys(q_len - 1, q_len, kv_len, window, shard, MASK, IS_SHARDED)
    first_tile = first // TILE
    num_tiles = tl.maximum((last + TILE - 1) // TILE - first_tile, 1)
    return first_tile, tl.where(q_len > 0, num_tiles, 0)


@triton.jit
def find_tile(tile, lengths, num_requests, padded_heads, BM: tl.constexpr):
    """Return (request, row tile of it) of a row tile among all; request −1 past the last."""
    request = tl.zeros((), tl.int32) - 1
    row_tile = tile * 0
    before = tile * 0
    for start in range(0, num_requests, 128):
        each = start + tl.arange(0, 128)
        at = each.to(tl.int64) * lengths.stride_q_starts
        is_request = each < num_requests
        first = tl.load(lengths.q_starts + at, mask=is_request, other=0).to(tl.int32)
        last_at = lengths.q_starts + at + lengths.stride_q_starts
        last = tl.load(last_at, mask=is_request, other=0).to(tl.int32)
        tiles = (last - first) * (padded_heads // BM)
        ends = before + tl.cumsum(tiles, 0)
        is_it = (ends - tiles <= tile) & (tile < ends)
        request += tl.sum(tl.where(is_it, each + 1, 0), 0)
        row_tile += tl.sum(tl.where(is_it, tile - ends + tiles, 0), 0)
        before += tl.sum(tiles, 0)
    return request, row_tile


@triton.jit
def own_split_tiles(num_tiles, split_tiles, num_splits):
    """Return (key tiles of a split, number of splits) of a request with splits of its own."""
    even = (num_tiles + num_splits - 1) // num_splits
    tiles = tl.maximum(tl.where(split_tiles > 0, split_tiles, even), 1)
    return tiles, (num_tiles + tiles - 1) // tiles


@triton.jit
def _cta_at(position, used_ctas, total_tiles):
    """The CTA that has a position on the line."""
    return (((position + 1) * used_ctas - 1) // total_tiles).to(tl.int32)


# differ from call to call: specialised, each would compile further kernels
VARYING = [
    *("num_requests", "heads", "window", "plan_ctas", "min_tiles", "slot_rows"),
    *("own_tiles", "own_splits"),
]


@triton.jit(do_not_specialize=VARYING)
def _plan_decode_kernel(
    num_requests,
    heads,
    window,
    plan_ctas,  # not num_ctas, which is an option of a launch
    min_tiles,
    slot_rows,
    own_tiles,  # `OwnSplits`
    own_splits,
    lengths,  # `LengthArguments`
    shard,  # `KVShard`
    plan,  # `PlanArguments`
    TRAITS: tl.constexpr,
):
    MASK: tl.constexpr = TRAITS.MASK
    IS_SHARDED: tl.constexpr = TRAITS.IS_SHARDED
    HAS_OWN_SPLITS: tl.constexpr = TRAITS.HAS_OWN_SPLITS
    TILE: tl.constexpr = TRAITS.TILE
    REQUESTS: tl.constexpr = TRAITS.REQUESTS
    ITEMS: tl.constexpr = TRAITS.ITEMS
    LINE_TYPE: tl.constexpr = TRAITS.LINE_TYPE
    items, cta_starts, partial_starts = plan
    total_tiles = tl.zeros((), LINE_TYPE)
    longest = tl.zeros((), LINE_TYPE)
    active = tl.zeros((), LINE_TYPE)  # requests with queries
    for start in range(0, num_requests, 128):
        request = start + tl.arange(0, 128)
        _, q_len, kv_len = load_lengths(lengths, request, request < num_requests)
        _, num_tiles = key_tiles(q_len, kv_len, window, shard, MASK, IS_SHARDED, TILE)
        total_tiles += tl.sum(num_tiles.to(LINE_TYPE), 0)
        longest = tl.maximum(longest, tl.max(num_tiles, 0).to(LINE_TYPE))
        active += tl.sum((num_tiles > 0).to(LINE_TYPE), 0)
    used_ctas = tl.minimum(plan_ctas.to(LINE_TYPE), tl.maximum(total_tiles // min_tiles, 1))
    max_splits = tl.minimum(plan_ctas // tl.maximum(active, 1), longest // min_tiles)
    max_splits = tl.maximum(max_splits, 1)
    max_tiles = tl.maximum((longest + max_splits - 1) // max_splits, 1)  # of a split
    requests_each = (active + plan_ctas - 1) // plan_ctas
    share = (total_tiles + used_ctas - 1) // used_ctas
    is_even = 10 * max_tiles * requests_each <= TRAITS.EVEN_TENTHS * share
    if HAS_OWN_SPLITS:
        is_even = total_tiles >= 0
    total_tiles = tl.maximum(total_tiles, 1)

    line = tl.zeros((), LINE_TYPE)  # key tiles, items and partials of the requests before
    num_items = tl.zeros((), tl.int32)
    num_slots = tl.zeros((), tl.int32)
    tl.store(partial_starts, 0)
    for start in range(0, num_requests, REQUESTS):
        request = start + tl.arange(0, REQUESTS)
        q_first, q_len, kv_len = load_lengths(lengths, request, request < num_requests)
        first_tile, num_tiles = key_tiles(q_len, kv_len, window, shard, MASK, IS_SHARDED, TILE)
        wide = num_tiles.to(LINE_TYPE)
        position = line + tl.cumsum(wide, 0) - wide
        first_cta = _cta_at(position, used_ctas, total_tiles)
        last_cta = _cta_at(position + wide - 1, used_ctas, total_tiles)
        num_splits = tl.where(num_tiles > 0, last_cta - first_cta + 1, 0)
        even_splits = ((wide + max_tiles - 1) // max_tiles).to(tl.int32)
        num_splits = tl.where(is_even, even_splits, num_splits)
        split_tiles = num_tiles
        if HAS_OWN_SPLITS:
            split_tiles, num_splits = own_split_tiles(num_tiles, own_tiles, own_splits)
        line_splits = tl.where(is_even, 0, num_splits)  # of a balanced plan
        has_room = q_len.to(LINE_TYPE) * heads <= slot_rows
        own_items = tl.where(has_room, num_splits, tl.minimum(num_splits, 1))
        own_slots = tl.where(own_items > 1, own_items, 0)
        item = num_items + tl.cumsum(own_items, 0) - own_items
        slots_end = num_slots + tl.cumsum(own_slots, 0)
        tl.store(partial_starts + 1 + request, slots_end, mask=request < num_requests)
        for split_start in range(0, tl.max(num_splits, 0), ITEMS):
            split = split_start + tl.arange(0, ITEMS)[None, :]
            cta = first_cta[:, None] + split
            begins = (
                tl.maximum(cta * total_tiles // used_ctas, position[:, None]) - position[:, None]
            )
            ends = tl.minimum(
                (cta + 1) * total_tiles // used_ctas - position[:, None], wide[:, None]
            )
            splits = tl.maximum(num_splits, 1)[:, None]
            begins = tl.where(is_even, split * wide[:, None] // splits, begins)
            ends = tl.where(is_even, (split + 1) * wide[:, None] // splits, ends)
            if HAS_OWN_SPLITS:
                begins = split * split_tiles[:, None]
                ends = tl.minimum(begins + split_tiles[:, None], num_tiles[:, None])
            is_split = (own_items > 1)[:, None]
            first = tl.where(is_split, begins, 0).to(tl.int32)
            last = tl.where(is_split, ends, wide[:, None]).to(tl.int32)
            slot = tl.where(is_split, (slots_end - own_slots)[:, None] + split, -1)
            is_item = split < own_items[:, None]
            at = items + (item[:, None] + split) * TRAITS.COLUMNS
            tl.store(at, request[:, None] + split * 0, mask=is_item)
            tl.store(at + 1, (first_tile[:, None] + first) * TILE, mask=is_item)
            tl.store(at + 2, (first_tile[:, None] + last) * TILE, mask=is_item)
            tl.store(at + 3, slot, mask=is_item)
            tl.store(at + 4, q_first[:, None] + split * 0, mask=is_item)
            tl.store(at + 5, q_len[:, None] + split * 0, mask=is_item)
            tl.store(at + 6, kv_len[:, None] + split * 0, mask=is_item)
            # a CTA begins with the item that begins where its range does, or with the next one
            begins_here = (cta * total_tiles // used_ctas >= position[:, None]) & (
                split < line_splits[:, None]
            )
            first_item = item[:, None] + tl.minimum(split, own_items[:, None])
            tl.store(cta_starts + cta, first_item, mask=begins_here)
        line += tl.sum(wide, 0)
        num_items += tl.sum(own_items, 0)
        num_slots += tl.sum(own_slots, 0)
    if HAS_OWN_SPLITS:
        requests_each = ((num_items + plan_ctas - 1) // plan_ctas).to(LINE_TYPE)  # items, here
    for start in range(0, plan_ctas + 1, 128):
        cta = start + tl.arange(0, 128)
        even_start = tl.minimum(cta * requests_each, num_items).to(tl.int32)
        first_item = tl.where(is_even, even_start, num_items)
        is_due = (cta >= tl.where(is_even, 0, used_ctas)) & (cta <= plan_ctas)
        tl.store(cta_starts + cta, first_item, mask=is_due)
