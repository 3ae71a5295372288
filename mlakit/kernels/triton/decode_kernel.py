"""Absorbed MLA attention of each request's newest tokens over its paged cache, portable Triton.

Maths      s = q·row · softmax_scale [· q_scale];  out = softmax(s) @ row[:, :v_width]
Work       a row tile is `block_m` heads of one query. With a plan a persistent CTA computes a row
           tile of one item of its worker after the other; without one it computes a split of the
           keys of one row tile
Memory     a tile of keys is read once for all rows of a row tile and serves as K and as V
Limits     none; widths are padded to powers of two, heads to a multiple of `block_m`. Queries share
           no row tile: a key that one of them does not see could reach it as 0 · NaN
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlakit.kernels.triton.decode_plan import (
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
    load_query,
    load_row_tile,
    score_keys,
    softmax_step,
)


@triton.jit
def _load_pages(
    entries, tile, end, stride_entry, BN: tl.constexpr, PAGE: tl.constexpr, IS_FLAT: tl.constexpr
):
    """The page of a tile, or where it has several the page (flat: the slot) of each key, int64."""
    if not IS_FLAT and PAGE % BN == 0:
        column = tl.zeros((), tl.int64) + tile // (PAGE // BN)
        pages = tl.load(entries + column * stride_entry, mask=tile * BN < end, other=0)
    else:
        key = tile * BN + tl.arange(0, BN)
        # earlier keys of the tile than those attended to have entries, if of no page
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
        # offsets within a tile are constants: they take no registers
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
    """values [rows, n] as the columns from FIRST on, before LAST, of results or of a partial."""
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
    CUTS_TILES: tl.constexpr, MASK: tl.constexpr, IS_SHARDED: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, ROPE_DTYPE: tl.constexpr, D_C: tl.constexpr, D_R: tl.constexpr,
    V_WIDTH: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, VALUE_PIECES: tl.constexpr,
    ROPE_WIDTH: tl.constexpr, VALUE_UNIT: tl.constexpr, PAGE: tl.constexpr,
    STRIDE_ROW: tl.constexpr, STRIDE_SCALES_ROW: tl.constexpr, IS_NEGATIVE: tl.constexpr,
    HAS_FP8: tl.constexpr, IS_ALIGNED: tl.constexpr, IS_UNCHAINED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM heads of one query over the keys [first_key, last_key) of its request.

    Writes results if `is_final`, else a partial to the scratch rows from `partial_row` on.
    """
    stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_q_scale = q_strides
    stride_page, stride_scales_page = pool_strides
    stride_table_request, stride_table_entry, stride_starts = table_strides
    stride_out_token, stride_out_head, stride_lse_token, stride_lse_head = result_strides
    IS_FLAT: tl.constexpr = starts is not None
    # keys may begin inside a tile
    HAS_LOW: tl.constexpr = CUTS_TILES or (MASK != "null" and MASK != "causal")
    ROPE_UNIT: tl.constexpr = VALUE_UNIT if FORMAT == "fp8_token" else 1.0
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
    q = ()
    for piece in tl.static_range(PIECES):
        q += (load_query(q_rows, is_row, piece * WIDTH, WIDTH, D_C, DTYPE, HAS_FP8),)
    rotated_q = None
    if ROPE_WIDTH > 0:
        rope_rows = q_rope + (token * stride_rope_token + head.to(tl.int64) * stride_rope_head)
        rotated_q = load_query(rope_rows, is_row, 0, ROPE_WIDTH, D_R, ROPE_DTYPE, HAS_FP8)
    if q_scale is not None:
        sign = tl.load(q_scale + token * stride_q_scale)
    row_max = tl.full([BM], -float("inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    acc = ()
    for _ in tl.static_range(VALUE_PIECES):
        acc += (tl.zeros([BM, WIDTH], tl.float32),)
    if V_WIDTH > D_C:
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
        latent, rope, factors = load_row_tile(
            rows, scales_at, is_read, PIECES, WIDTH, ROPE_WIDTH, D_C, D_R, FORMAT, DTYPE,
            ROPE_DTYPE, HAS_FP8, IS_ALIGNED,
        )  # fmt: skip
        if IS_UNCHAINED:
            scores = score_keys(q, rotated_q, latent, rope, factors, PIECES, FORMAT, scale_log2)
        else:
            scores = score_keys(q, rotated_q, latent, rope, factors, PIECES, FORMAT)
        if q_scale is not None:
            scores *= sign
        if IS_NEGATIVE:
            scores = -scores
        scores = tl.where(is_read[None, :], scores, -float("inf"))
        if IS_UNCHAINED:
            # The branch hides from the compiler that P feeds another dot. It would otherwise give
            # each group of four warps all rows of the scores (64 rows are shared by four warps),
            # and eight warps would compute all of them twice.
            probs, rescale = scores, row_max
            if end > 0:  # always so where there is a key
                probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
        else:
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        acc = accumulate_pv(acc, probs, rescale, latent, factors, VALUE_PIECES, FORMAT, VALUE_UNIT)
        if V_WIDTH > D_C:
            acc_rope = accumulate_rope_pv(
                acc_rope, probs, rescale, rope, factors, FORMAT, DTYPE, ROPE_UNIT
            )

    # computed again, with an opaque zero: kept through the loop, they would take registers
    head = (first_row + opaque_zero) % padded_heads + tl.arange(0, BM)
    is_row = head < heads
    head = head.to(tl.int64)
    # a partial has no sink: it joins the merge, once
    sink_log2 = None
    if sink is not None:
        sink_log2 = tl.load(sink + head * stride_sink, mask=is_row, other=0.0)
        sink_log2 *= 1.4426950408889634  # log2(e)
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
    partial_at = partial_out + partial_rows * V_WIDTH
    for piece in tl.static_range(VALUE_PIECES):
        values = acc[piece] * (scale * (1.0 / VALUE_UNIT))
        _store_columns(
            out_at, partial_at, is_final, is_row, values, piece * WIDTH, min(V_WIDTH, D_C)
        )
    if V_WIDTH > D_C:
        values = acc_rope * (scale * (1.0 / ROPE_UNIT))
        _store_columns(out_at, partial_at, is_final, is_row, values, D_C, V_WIDTH)


VARYING = [
    "scale_log2",
    "tensor_scale",
    "heads",
    "padded_heads",
    "window",
    "rank",
    "world",
    "interleave",
    "slot_rows",
    "split_tiles",
    "batch",
    "stride_q_scale",
    "stride_table_request",
    "stride_table_entry",
    "stride_starts",
    "stride_q_starts",
    "stride_kv_lens",
    "stride_sink",
    "stride_lse_token",
    "stride_lse_head",
]


@triton.jit(do_not_specialize=VARYING)
def mla_decode_kernel(
    q_latent,
    q_rope,
    q_scale,
    payload,
    scales,
    table,
    starts,
    q_starts,
    kv_lens,
    sink,
    device_scale,
    out,
    lse,
    partial_out,  # [slots, slot_rows, V_WIDTH] float32
    partial_lse,  # [slots, slot_rows] float32
    items,
    worker_starts,
    partial_starts,
    scale_log2,
    tensor_scale,
    heads,
    padded_heads,
    window,
    rank,
    world,
    interleave,
    slot_rows,
    split_tiles,
    batch,
    stride_q_token,
    stride_q_head,
    stride_rope_token,
    stride_rope_head,
    stride_q_scale,
    stride_page,
    stride_scales_page,
    stride_table_request,
    stride_table_entry,
    stride_starts,
    stride_q_starts,
    stride_kv_lens,
    stride_sink,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    MASK: tl.constexpr,
    IS_SHARDED: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_PIECES: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_SCALES_ROW: tl.constexpr,
    IS_NEGATIVE: tl.constexpr,
    HAS_FP8: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_UNCHAINED: tl.constexpr,
    CUTS_TILES: tl.constexpr,  # items may begin inside a tile
    ITEM_COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One item after another of a worker, or one split of one row tile."""
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
        first_item = tl.load(worker_starts + tl.program_id(1))
        last_item = tl.load(worker_starts + tl.program_id(1) + 1)
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
                CUTS_TILES, MASK, IS_SHARDED, FORMAT, DTYPE, ROPE_DTYPE, D_C, D_R, V_WIDTH, PIECES,
                WIDTH, VALUE_PIECES, ROPE_WIDTH, VALUE_UNIT, PAGE, STRIDE_ROW, STRIDE_SCALES_ROW,
                IS_NEGATIVE, HAS_FP8, IS_ALIGNED, IS_UNCHAINED, BM, BN,
            )  # fmt: skip
