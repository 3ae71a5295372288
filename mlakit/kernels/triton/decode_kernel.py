"""Absorbed MLA attention of each request's newest tokens over its paged cache, portable Triton.

Maths      s = q·row · softmax_scale [· q_scale];  out = softmax(s) @ row[:, :v_width]
Work       a row tile is `block_m` heads of one query. With a plan, persistent CTA c of the plan is
           as many programs as an item has row tiles on average; they compute its items one after
           the other. Without a plan a program computes one split of one row tile
Memory     a tile of keys is read once for all rows of a row tile and serves as K and as V
Limits     none; widths are padded to powers of two, heads to a multiple of `block_m`. Queries share
           no row tile: a key that one of them does not see could reach it as 0 · NaN
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mlakit.kernels.decode_plan import (
    find_tile,
    key_tiles,
    load_lengths,
    own_split_tiles,
    seen_keys,
)
from mlakit.kernels.triton.primitives import (
    accumulate_pv,
    accumulate_rope_pv,
    finish_softmax,
    load_latent_query,
    load_query,
    load_row_tile,
    load_sink,
    score_keys,
    softmax_step,
    zero_acc,
)
from mlakit.kernels.triton.rows import RowTraits
from mlakit.model.masks import MaskTraits


class Traits(NamedTuple):
    """The constants that the kernel is compiled for."""

    MASK: MaskTraits
    IS_SHARDED: bool
    ROW: RowTraits
    PAGE: int  # rows of a page
    STRIDE_ROW: int
    STRIDE_BESIDE_ROW: int
    IS_NEGATIVE: bool
    IS_UNCHAINED: bool
    CUTS_TILES: bool  # items may begin inside a tile
    ITEM_COLUMNS: int
    BM: int
    BN: int


class Numbers(NamedTuple):
    """The arguments that are no tuples, in the kernel."""

    scale_log2: tl.tensor
    tensor_scale: tl.tensor
    heads: tl.tensor
    padded_heads: tl.tensor
    window: tl.tensor
    stride_table_request: tl.tensor
    stride_lse_token: tl.tensor


class WorkTile(NamedTuple):
    """BM heads of one query over the keys [first_key, last_key) of its request, in the kernel."""

    first_row: tl.tensor
    first_key: tl.tensor
    last_key: tl.tensor
    is_final: tl.tensor  # stores results, else a partial
    partial_row: tl.tensor  # of the scratch
    request: tl.tensor
    q_first: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor
    opaque_zero: tl.tensor  # a zero that the compiler cannot see


@triton.jit
def _load_pages(
    entries, tile, end, stride_entry, BN: tl.constexpr, PAGE: tl.constexpr, IS_FLAT: tl.constexpr
):
    """int64: the page of a tile; where a tile has several, the page (flat: slot) of each key."""
    if not IS_FLAT and PAGE % BN == 0:
        column = tl.zeros((), tl.int64) + tile // (PAGE // BN)
        pages = tl.load(entries + column * stride_entry, mask=tile * BN < end, other=0)
    else:
        key = tile * BN + tl.arange(0, BN)
        # keys of the tile before the first attended one have entries, maybe of no page
        column = (key if IS_FLAT else key // PAGE).to(tl.int64)
        pages = tl.load(entries + column * stride_entry, mask=key < end, other=0)
    return pages.to(tl.int64)


@triton.jit
def _find_rows(
    pool,
    pages,
    tile,
    stride_page,
    STRIDE_ROW: tl.constexpr,
    BN: tl.constexpr,
    PAGE: tl.constexpr,
    IS_FLAT: tl.constexpr,
):
    """Pointers [BN] to what a pool [pages, PAGE, n] holds of the keys of a tile."""
    offset = tl.arange(0, BN)
    if IS_FLAT:
        rows = pool + (pages // PAGE * stride_page + pages % PAGE * STRIDE_ROW)
    elif PAGE % BN == 0:
        # offsets within a tile are constants and take no registers
        first = pages * stride_page + (tile % (PAGE // BN)) * (BN * STRIDE_ROW)
        rows = pool + first + offset * STRIDE_ROW
    else:
        in_page = (tile * BN + offset) % PAGE
        rows = pool + (pages * stride_page + in_page.to(tl.int64) * STRIDE_ROW)
    return rows


@triton.jit
def _store_columns(
    out_at, partial_at, is_final, is_row, values, FIRST: tl.constexpr, LAST: tl.constexpr
):
    """Store values [rows, n] to columns [FIRST, LAST) of the results or of a partial."""
    column = FIRST + tl.arange(0, values.shape[1])
    mask = is_row[:, None] & (column < LAST)[None, :]
    if is_final:
        at = out_at[:, None] + column[None, :]
        tl.store(at, values.to(out_at.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_at[:, None] + column[None, :], values, mask=mask)


@triton.jit
def _attend(
    work, numbers, query, cache, page_table, shard, partials, outputs, TRAITS: tl.constexpr
):
    """Attention of one work tile."""
    MASK: tl.constexpr = TRAITS.MASK
    IS_SHARDED: tl.constexpr = TRAITS.IS_SHARDED
    ROW: tl.constexpr = TRAITS.ROW
    PAGE: tl.constexpr = TRAITS.PAGE
    STRIDE_ROW: tl.constexpr = TRAITS.STRIDE_ROW
    STRIDE_BESIDE_ROW: tl.constexpr = TRAITS.STRIDE_BESIDE_ROW
    IS_UNCHAINED: tl.constexpr = TRAITS.IS_UNCHAINED
    BM: tl.constexpr = TRAITS.BM
    BN: tl.constexpr = TRAITS.BN
    first_row, is_final, request = work.first_row, work.is_final, work.request
    scale_log2, heads, padded_heads = numbers.scale_log2, numbers.heads, numbers.padded_heads
    table = page_table.entries
    IS_FLAT: tl.constexpr = page_table.starts is not None
    # keys may begin inside a tile
    HAS_LOW: tl.constexpr = TRAITS.CUTS_TILES or MASK.IS_SLIDING or MASK.IS_CHUNKED
    ROPE_WIDTH: tl.constexpr = ROW.ROPE_WIDTH
    ROPE_UNIT: tl.constexpr = ROW.VALUE_UNIT if ROW.FACTORS == "row" else 1.0
    index = first_row // padded_heads
    head = first_row % padded_heads + tl.arange(0, BM)
    is_row = head < heads
    token = (work.q_first + index).to(tl.int64)
    begin, end = seen_keys(index, work.q_len, work.kv_len, numbers.window, shard, MASK, IS_SHARDED)
    begin = tl.maximum(begin, work.first_key)
    end = tl.minimum(end, work.last_key)

    entries = table + request.to(tl.int64) * numbers.stride_table_request
    if IS_FLAT:
        start_at = page_table.starts + request.to(tl.int64) * page_table.stride_starts
        first_entry = tl.load(start_at)
        entries = table + first_entry.to(tl.int64) * page_table.stride_entry
    pages = _load_pages(entries, begin // BN, end, page_table.stride_entry, BN, PAGE, IS_FLAT)
    q_at = token * query.stride_token + head.to(tl.int64) * query.stride_head
    q_rows = query.latent + q_at
    rope_at = token * query.stride_rope_token + head.to(tl.int64) * query.stride_rope_head
    rope_rows = query.rope + rope_at
    q = load_latent_query(q_rows, rope_rows, is_row, ROW)
    rotated_q = None
    if ROW.ROPE_WIDTH > 0:
        rotated_q = load_query(
            rope_rows, is_row, 0, ROW.ROPE_WIDTH, ROW.D_R, ROW.ROPE_DTYPE, ROW.HAS_FP8
        )
    if query.scale is not None:
        factor = tl.load(query.scale + token * query.stride_scale)
    row_max = tl.full([BM], -float("inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    acc = zero_acc(BM, ROW)
    if ROW.V_WIDTH > ROW.D_C:
        acc_rope = tl.zeros([BM, ROPE_WIDTH], tl.float32)
    for tile in tl.range(begin // BN, (end + BN - 1) // BN, disable_licm=IS_UNCHAINED):
        key = tile * BN + tl.arange(0, BN)
        is_read = key < end
        if HAS_LOW:
            is_read = is_read & (key >= begin)
        rows = _find_rows(
            cache.payload, pages, tile, cache.stride_page, STRIDE_ROW, BN, PAGE, IS_FLAT
        )
        beside = None
        if cache.beside is not None:
            beside = _find_rows(
                *(cache.beside, pages, tile, cache.stride_beside_page, STRIDE_BESIDE_ROW),
                *(BN, PAGE, IS_FLAT),
            )
        # looked up one tile ahead: its row loads then wait for no other load
        pages = _load_pages(entries, tile + 1, end, page_table.stride_entry, BN, PAGE, IS_FLAT)
        latent, rope, factors = load_row_tile(rows, beside, is_read, ROW)
        if IS_UNCHAINED:
            scores = score_keys(q, rotated_q, latent, rope, factors, ROW, scale_log2)
        else:
            scores = score_keys(q, rotated_q, latent, rope, factors, ROW)
        if query.scale is not None:
            scores *= factor
        if TRAITS.IS_NEGATIVE:
            scores = -scores
        scores = tl.where(is_read[None, :], scores, -float("inf"))
        if IS_UNCHAINED:
            # The branch hides from the compiler that P feeds another dot. Otherwise each of the two
            # warpgroups gets all 64 rows of the scores, and the scores are computed twice.
            probs, rescale = scores, row_max
            if end > 0:  # always true inside this loop
                probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
        else:
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        acc = accumulate_pv(acc, probs, rescale, latent, factors, ROW)
        if ROW.V_WIDTH > ROW.D_C:
            acc_rope = accumulate_rope_pv(acc_rope, probs, rescale, rope, factors, ROW)

    # computed again, with an opaque zero: kept through the loop, they would take registers
    head = (first_row + work.opaque_zero) % padded_heads + tl.arange(0, BM)
    is_row = head < heads
    head = head.to(tl.int64)
    # a partial has no sink: the merge kernel adds it once
    sink_log2 = None
    if outputs.sink is not None:
        sink_log2 = load_sink(outputs, head, is_row)
        sink_log2 = tl.where(is_final, sink_log2, -float("inf"))
    denominator, row_lse = finish_softmax(row_max, row_sum, sink_log2)
    scale = (numbers.tensor_scale / denominator)[:, None]
    partial_rows = work.partial_row + tl.arange(0, BM)
    if is_final:
        lse_at = outputs.lse + token * numbers.stride_lse_token + head * outputs.stride_lse_head
        tl.store(lse_at, row_lse, mask=is_row)
    else:
        tl.store(partials.lse + partial_rows, row_lse, mask=is_row)
    out_at = outputs.out + (token * outputs.stride_out_token + head * outputs.stride_out_head)
    partial_at = partials.out + partial_rows * ROW.V_WIDTH
    VALUE_PIECES: tl.constexpr = ROW.VALUE_PIECES
    for piece in tl.static_range(VALUE_PIECES):
        values = acc[piece] * (scale * (1.0 / ROW.VALUE_UNIT))
        _store_columns(
            *(out_at, partial_at, is_final, is_row, values),
            *(piece * ROW.WIDTH, min(ROW.V_WIDTH, ROW.D_C)),
        )
    if ROW.V_WIDTH > ROW.D_C:
        values = acc_rope * (scale * (1.0 / ROPE_UNIT))
        _store_columns(out_at, partial_at, is_final, is_row, values, ROW.D_C, ROW.V_WIDTH)


# differ from call to call: specialised, each would compile further kernels
VARYING = [
    *("heads", "padded_heads", "window", "slot_rows", "split_tiles", "num_requests"),
    *("stride_table_request", "stride_lse_token"),
]


@triton.jit(do_not_specialize=VARYING)
def mla_decode_kernel(
    scale_log2,  # times the tensor scale, where that is on the host
    heads,
    padded_heads,
    window,
    slot_rows,
    split_tiles,
    num_requests,
    stride_table_request,
    stride_lse_token,
    query,  # `QueryArguments`
    cache,  # `CacheArguments`
    page_table,  # `PageTableArguments`
    lengths,  # `LengthArguments`
    shard,  # `KVShard`
    plan,  # `PlanArguments`
    partials,  # `PartialArguments`
    outputs,  # `OutputArguments`
    TRAITS: tl.constexpr,
):
    """All items of a CTA of the plan, one after the other, or one split of one row tile."""
    MASK: tl.constexpr = TRAITS.MASK
    IS_SHARDED: tl.constexpr = TRAITS.IS_SHARDED
    ITEM_COLUMNS: tl.constexpr = TRAITS.ITEM_COLUMNS
    BM: tl.constexpr = TRAITS.BM
    BN: tl.constexpr = TRAITS.BN
    IS_PLANNED: tl.constexpr = plan.items is not None
    tensor_scale = cache.tensor_scale
    if cache.device_scale is not None:
        tensor_scale = tl.load(cache.device_scale).to(tl.float32)
        scale_log2 *= tensor_scale
    numbers = Numbers(
        *(scale_log2, tensor_scale, heads, padded_heads, window),
        *(stride_table_request, stride_lse_token),
    )

    first_item = tl.program_id(1)
    last_item = first_item + 1
    if IS_PLANNED:
        first_item = tl.load(plan.cta_starts + tl.program_id(1))
        last_item = tl.load(plan.cta_starts + tl.program_id(1) + 1)
    for item in range(first_item, last_item):
        if IS_PLANNED:
            request = tl.load(plan.items + ITEM_COLUMNS * item)
            first_key = tl.load(plan.items + ITEM_COLUMNS * item + 1)
            last_key = tl.load(plan.items + ITEM_COLUMNS * item + 2)
            slot = tl.load(plan.items + ITEM_COLUMNS * item + 3)
            q_first, q_len, kv_len = load_lengths(lengths, request, request >= 0)
            row_begin = tl.program_id(0) * BM
            row_end = q_len * padded_heads
            row_step = tl.num_programs(0) * BM
            slot_row = slot.to(tl.int64) * slot_rows + row_begin
            if (slot >= 0) & (row_end > slot_rows):
                # a slot does not hold its partials: its first item computes the whole request
                is_first = slot == tl.load(plan.partial_starts + request)
                row_end = tl.where(is_first, row_end, 0)
                first_key, last_key, slot = 0, 0x7FFFFFFF, -1
        else:
            request, row_tile = find_tile(tl.program_id(1), lengths, num_requests, padded_heads, BM)
            q_first, q_len, kv_len = load_lengths(lengths, request, request >= 0)
            first_tile, num_tiles = key_tiles(q_len, kv_len, window, shard, MASK, IS_SHARDED, BN)
            tiles, num_splits = own_split_tiles(num_tiles, split_tiles, tl.num_programs(0))
            split = tl.program_id(0)
            first_key = (first_tile + split * tiles) * BN
            last_key = first_key + tiles * BN
            is_split = (request >= 0) & (split < num_splits)
            slot = tl.where(num_splits > 1, tl.program_id(1) * tl.num_programs(0) + split, -1)
            slot_row = slot.to(tl.int64) * slot_rows
            row_begin = row_tile * BM
            row_end = tl.where(is_split, row_begin + BM, 0)
            row_step = BM
        for first_row in range(row_begin, row_end, row_step):
            is_final = slot < 0
            partial_row = slot_row + (first_row - row_begin)
            work = WorkTile(
                *(first_row, first_key, last_key, is_final, partial_row),
                *(request, q_first, q_len, kv_len, num_requests >> 31),
            )
            _attend(work, numbers, query, cache, page_table, shard, partials, outputs, TRAITS)
