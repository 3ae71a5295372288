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
    first_row, first_key, last_key, is_final, partial_row, request, q_first, q_len, kv_len,
    q_latent, q_rope, q_scale, payload, scales, table, starts, sink, out, lse, partial_out,
    partial_lse, scale_log2, tensor_scale, heads, padded_heads, window, shard, q_strides,
    pool_strides, table_strides, stride_sink, result_strides, opaque_zero,
    CUTS_TILES: tl.constexpr, MASK: tl.constexpr, IS_SHARDED: tl.constexpr, ROW: tl.constexpr,
    PAGE: tl.constexpr, STRIDE_ROW: tl.constexpr, STRIDE_SCALES_ROW: tl.constexpr,
    IS_NEGATIVE: tl.constexpr, IS_UNCHAINED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attention of BM heads of one query over the keys [first_key, last_key) of its request.

    Stores results if `is_final`, else a partial to the scratch rows from `partial_row` on.
    """
    stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_q_scale = q_strides
    stride_page, stride_scales_page = pool_strides
    stride_table_request, stride_table_entry, stride_starts = table_strides
    stride_out_token, stride_out_head, stride_lse_token, stride_lse_head = result_strides
    IS_FLAT: tl.constexpr = starts is not None
    # keys may begin inside a tile
    HAS_LOW: tl.constexpr = CUTS_TILES or MASK.IS_SLIDING or MASK.IS_CHUNKED
    ROPE_WIDTH: tl.constexpr = ROW.ROPE_WIDTH
    ROPE_UNIT: tl.constexpr = ROW.VALUE_UNIT if ROW.FACTORS == "row" else 1.0
    query = first_row // padded_heads
    head = first_row % padded_heads + tl.arange(0, BM)
    is_row = head < heads
    token = (q_first + query).to(tl.int64)
    begin, end = seen_keys(query, q_len, kv_len, window, shard, MASK, IS_SHARDED)
    begin = tl.maximum(begin, first_key)
    end = tl.minimum(end, last_key)

    entries = table + request.to(tl.int64) * stride_table_request
    if IS_FLAT:
        first_entry = tl.load(starts + request.to(tl.int64) * stride_starts)
        entries = table + first_entry.to(tl.int64) * stride_table_entry
    pages = _load_pages(entries, begin // BN, end, stride_table_entry, BN, PAGE, IS_FLAT)
    q_rows = q_latent + (token * stride_q_token + head.to(tl.int64) * stride_q_head)
    rope_rows = q_rope + (token * stride_rope_token + head.to(tl.int64) * stride_rope_head)
    q = load_latent_query(q_rows, rope_rows, is_row, ROW)
    rotated_q = None
    if ROW.ROPE_WIDTH > 0:
        rotated_q = load_query(
            rope_rows, is_row, 0, ROW.ROPE_WIDTH, ROW.D_R, ROW.ROPE_DTYPE, ROW.HAS_FP8
        )
    if q_scale is not None:
        sign = tl.load(q_scale + token * stride_q_scale)
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
        rows = _find_rows(payload, pages, tile, stride_page, STRIDE_ROW, BN, PAGE, IS_FLAT)
        scales_at = None
        if scales is not None:
            scales_at = _find_rows(
                scales, pages, tile, stride_scales_page, STRIDE_SCALES_ROW, BN, PAGE,
                IS_FLAT,
            )  # fmt: skip
        # looked up one tile ahead: its row loads then wait for no other load
        pages = _load_pages(entries, tile + 1, end, stride_table_entry, BN, PAGE, IS_FLAT)
        latent, rope, factors = load_row_tile(rows, scales_at, is_read, ROW)
        if IS_UNCHAINED:
            scores = score_keys(q, rotated_q, latent, rope, factors, ROW, scale_log2)
        else:
            scores = score_keys(q, rotated_q, latent, rope, factors, ROW)
        if q_scale is not None:
            scores *= sign
        if IS_NEGATIVE:
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
    head = (first_row + opaque_zero) % padded_heads + tl.arange(0, BM)
    is_row = head < heads
    head = head.to(tl.int64)
    # a partial has no sink: the merge kernel adds it once
    sink_log2 = None
    if sink is not None:
        sink_log2 = load_sink(sink, head, stride_sink, is_row)
        sink_log2 = tl.where(is_final, sink_log2, -float("inf"))
    denominator, row_lse = finish_softmax(row_max, row_sum, sink_log2)
    scale = (tensor_scale / denominator)[:, None]
    partial_rows = partial_row + tl.arange(0, BM)
    if is_final:
        lse_at = lse + token * stride_lse_token + head * stride_lse_head
        tl.store(lse_at, row_lse, mask=is_row)
    else:
        tl.store(partial_lse + partial_rows, row_lse, mask=is_row)
    out_at = out + (token * stride_out_token + head * stride_out_head)
    partial_at = partial_out + partial_rows * ROW.V_WIDTH
    VALUE_PIECES: tl.constexpr = ROW.VALUE_PIECES
    for piece in tl.static_range(VALUE_PIECES):
        values = acc[piece] * (scale * (1.0 / ROW.VALUE_UNIT))
        _store_columns(
            out_at, partial_at, is_final, is_row, values, piece * ROW.WIDTH,
            min(ROW.V_WIDTH, ROW.D_C),
        )  # fmt: skip
    if ROW.V_WIDTH > ROW.D_C:
        values = acc_rope * (scale * (1.0 / ROPE_UNIT))
        _store_columns(out_at, partial_at, is_final, is_row, values, ROW.D_C, ROW.V_WIDTH)


# differ from call to call: specialised, each would compile further kernels
VARYING = [
    "scale_log2", "tensor_scale", "heads", "padded_heads", "window", "rank", "world", "interleave",
    "slot_rows", "split_tiles", "batch", "stride_q_scale", "stride_table_request",
    "stride_table_entry", "stride_starts", "stride_q_starts", "stride_kv_lens", "stride_sink",
    "stride_lse_token", "stride_lse_head",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def mla_decode_kernel(
    q_latent, q_rope, q_scale,  # [tokens, heads, D_C], [tokens, heads, D_R], [tokens] or None
    payload, scales,  # [pages, PAGE, row], and the scales beside it or None
    table, starts,  # [batch, max_pages], None; or [slots], [batch + 1]
    q_starts, kv_lens,  # [batch + 1], [batch]
    sink,  # [heads] float32 or None
    device_scale,  # the tensor scale on the device, or None
    out, lse,
    partial_out, partial_lse,  # float32 [slots, slot_rows, V_WIDTH], [slots, slot_rows]
    items, cta_starts, partial_starts,  # the plan, or None
    scale_log2, tensor_scale, heads, padded_heads,
    window, rank, world, interleave,  # of the mask and of the KV shard
    slot_rows, split_tiles, batch,
    stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_q_scale,
    stride_page, stride_scales_page,
    stride_table_request, stride_table_entry, stride_starts, stride_q_starts, stride_kv_lens,
    stride_sink,
    stride_out_token, stride_out_head, stride_lse_token, stride_lse_head,
    MASK: tl.constexpr,  # `MaskTraits`
    IS_SHARDED: tl.constexpr,
    ROW: tl.constexpr,  # `rows.RowTraits`
    PAGE: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_SCALES_ROW: tl.constexpr,
    IS_NEGATIVE: tl.constexpr,
    IS_UNCHAINED: tl.constexpr,
    CUTS_TILES: tl.constexpr,  # items may begin inside a tile
    ITEM_COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """All items of a CTA of the plan, one after the other, or one split of one row tile."""
    shard = (rank, world, interleave)
    q_strides = (
        stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_q_scale
    )  # fmt: skip
    IS_PLANNED: tl.constexpr = items is not None
    if device_scale is not None:
        tensor_scale = tl.load(device_scale).to(tl.float32)
        scale_log2 *= tensor_scale

    first_item = tl.program_id(1)
    last_item = first_item + 1
    if IS_PLANNED:
        first_item = tl.load(cta_starts + tl.program_id(1))
        last_item = tl.load(cta_starts + tl.program_id(1) + 1)
    for item in range(first_item, last_item):
        if IS_PLANNED:
            request = tl.load(items + ITEM_COLUMNS * item)
            first_key = tl.load(items + ITEM_COLUMNS * item + 1)
            last_key = tl.load(items + ITEM_COLUMNS * item + 2)
            slot = tl.load(items + ITEM_COLUMNS * item + 3)
            q_first, q_len, kv_len = load_lengths(
                q_starts, kv_lens, stride_q_starts, stride_kv_lens, request, request >= 0
            )
            row_begin = tl.program_id(0) * BM
            row_end = q_len * padded_heads
            row_step = tl.num_programs(0) * BM
            slot_row = slot.to(tl.int64) * slot_rows + row_begin
            if (slot >= 0) & (row_end > slot_rows):
                # a slot does not hold its partials: its first item computes the whole request
                is_first = slot == tl.load(partial_starts + request)
                row_end = tl.where(is_first, row_end, 0)
                first_key, last_key, slot = 0, 0x7FFFFFFF, -1
        else:
            request, row_tile = find_tile(
                tl.program_id(1), q_starts, stride_q_starts, batch, padded_heads, BM
            )
            q_first, q_len, kv_len = load_lengths(
                q_starts, kv_lens, stride_q_starts, stride_kv_lens, request, request >= 0
            )
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
            _attend(
                first_row, first_key, last_key, slot < 0,
                slot_row + (first_row - row_begin), request, q_first, q_len, kv_len, q_latent,
                q_rope, q_scale, payload, scales, table, starts, sink, out, lse, partial_out,
                partial_lse, scale_log2, tensor_scale, heads, padded_heads, window, shard,
                q_strides, (stride_page, stride_scales_page),
                (stride_table_request, stride_table_entry, stride_starts), stride_sink,
                (stride_out_token, stride_out_head, stride_lse_token, stride_lse_head), batch >> 31,
                CUTS_TILES, MASK, IS_SHARDED, ROW, PAGE, STRIDE_ROW, STRIDE_SCALES_ROW,
                IS_NEGATIVE, IS_UNCHAINED, BM, BN,
            )  # fmt: skip
