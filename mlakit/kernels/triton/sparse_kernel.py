"""Absorbed MLA attention over per-token lists of cache rows, portable Triton.

Maths      s = q·row · softmax_scale over the token's valid slots;  out = softmax(s) @ row
Valid      slot < topk_len and 0 ≤ row id < num_rows; no address is made of an invalid one
Work       one program per (token, tile of heads, part of the token's lists)
Memory     a tile of rows is gathered once for a tile of heads and serves as K and as V
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlakit.kernels.triton.primitives import (
    accumulate_pv,
    accumulate_rope_pv,
    finish_softmax,
    load_query,
    load_row_tile,
    score_keys,
    softmax_step,
)

VARYING = [
    "scale_log2",
    "tokens",
    "heads",
    "parts",
    "stride_sink",
    "stride_lse_token",
    "stride_lse_head",
    "stride_max_token",
    "stride_max_head",
    *(
        prefix + name
        for prefix in ("", "extra_")
        for name in (
            "tensor_scale",
            "num_slots",
            "page_size",
            "topk",
            "stride_rows_token",
            "stride_rows_entry",
            "stride_lens",
        )
    ),
]


@triton.jit(do_not_specialize=VARYING)
def sparse_mla_kernel(
    q,  # [tokens, heads, D_C + D_R], e4m3 as bytes
    payload,  # [pages, page_size, row], bytes as uint8
    scales,  # [pages, page_size, n], or None
    device_scale,  # one number that multiplies all rows, or None
    rows,  # [tokens, topk]
    lens,  # [tokens], or None
    tensor_scale,
    num_slots,
    page_size,
    topk,
    stride_page,
    stride_row,
    stride_scales_page,
    stride_scales_row,
    stride_rows_token,
    stride_rows_entry,
    stride_lens,
    extra_payload,
    extra_scales,
    extra_device_scale,
    extra_rows,
    extra_lens,
    extra_tensor_scale,
    extra_num_slots,
    extra_page_size,
    extra_topk,
    extra_stride_page,
    extra_stride_row,
    extra_stride_scales_page,
    extra_stride_scales_row,
    extra_stride_rows_token,
    extra_stride_rows_entry,
    extra_stride_lens,
    sink,  # [heads] float32, or None
    out,  # [tokens, heads, V_WIDTH]; these three with `parts` in front where there are several
    lse,  # [tokens, heads] float32
    max_logits,  # [tokens, heads] float32
    scale_log2,  # |softmax_scale| · log2(e)
    tokens,
    heads,
    parts,
    stride_q_token,
    stride_q_head,
    stride_sink,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_max_token,
    stride_max_head,
    HAS_EXTRA: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    EXTRA_FORMAT: tl.constexpr,
    EXTRA_DTYPE: tl.constexpr,
    EXTRA_ROPE_DTYPE: tl.constexpr,
    EXTRA_UNIT: tl.constexpr,
    EXTRA_PAGE: tl.constexpr,
    EXTRA_IS_ALIGNED: tl.constexpr,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_PIECES: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    IS_NEGATIVE: tl.constexpr,
    HAS_FP8: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
):
    head_tiles = tl.cdiv(heads, BH)
    program = tl.program_id(0)
    # the tiles of heads of a token are neighbours: they gather the same rows
    first_head = program % head_tiles * BH
    part = program // head_tiles % parts
    token = (program // head_tiles // parts).to(tl.int64)

    # the tiles of both lists, one after the other, in `parts` runs of like length
    length = _list_length(lens, token, topk, stride_lens)
    tiles = tl.cdiv(length, BN)
    all_tiles = tiles
    if HAS_EXTRA:
        extra_length = _list_length(extra_lens, token, extra_topk, extra_stride_lens)
        all_tiles += tl.cdiv(extra_length, BN)
    run = tl.cdiv(all_tiles, parts)
    first_tile = part * run
    last_tile = tl.minimum(first_tile + run, all_tiles)

    head = first_head + tl.arange(0, BH)
    is_head = head < heads
    head64 = head.to(tl.int64)
    q_rows = q + token * stride_q_token + head64 * stride_q_head
    peak = tl.full([BH], -float("inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    weighted = ()
    for _ in tl.static_range(VALUE_PIECES):
        weighted += (tl.zeros([BH, WIDTH], tl.float32),)
    if V_WIDTH > D_C:
        weighted += (tl.zeros([BH, ROPE_WIDTH], tl.float32),)

    tensor_scale = _number(tensor_scale, device_scale)
    peak, total, weighted = _attend_list(
        peak, total, weighted, q_rows, is_head,
        rows + token * stride_rows_token, length, first_tile, tl.minimum(last_tile, tiles),
        payload, scales, scale_log2 * tensor_scale, num_slots, page_size, stride_page, stride_row,
        stride_scales_page, stride_scales_row, stride_rows_entry, FORMAT, DTYPE, ROPE_DTYPE, UNIT,
        PAGE, IS_ALIGNED, D_C, D_R, V_WIDTH, PIECES, WIDTH, VALUE_PIECES, ROPE_WIDTH, IS_NEGATIVE,
        HAS_FP8, BN,
    )  # fmt: skip
    unit, rope_unit = _units_of(tensor_scale, FORMAT, UNIT)
    if HAS_EXTRA:
        extra_tensor_scale = _number(extra_tensor_scale, extra_device_scale)
        extra_unit, extra_rope_unit = _units_of(extra_tensor_scale, EXTRA_FORMAT, EXTRA_UNIT)
        weighted = _scaled(weighted, unit / extra_unit, rope_unit / extra_rope_unit, VALUE_PIECES)
        peak, total, weighted = _attend_list(
            peak, total, weighted, q_rows, is_head,
            extra_rows + token * extra_stride_rows_token, extra_length,
            tl.maximum(first_tile - tiles, 0), last_tile - tiles,
            extra_payload, extra_scales, scale_log2 * extra_tensor_scale, extra_num_slots,
            extra_page_size, extra_stride_page, extra_stride_row, extra_stride_scales_page,
            extra_stride_scales_row, extra_stride_rows_entry, EXTRA_FORMAT, EXTRA_DTYPE,
            EXTRA_ROPE_DTYPE, EXTRA_UNIT, EXTRA_PAGE, EXTRA_IS_ALIGNED, D_C, D_R, V_WIDTH, PIECES,
            WIDTH, VALUE_PIECES, ROPE_WIDTH, IS_NEGATIVE, HAS_FP8, BN,
        )  # fmt: skip
        unit = extra_unit
        rope_unit = extra_rope_unit

    # made anew, with a 0 that no compiler knows: kept, these would cost the loop its registers
    head = first_head + tl.where(tokens < 0, 1, 0) + tl.arange(0, BH)
    is_head = head < heads
    head64 = head.to(tl.int64)
    sink_log2 = None
    if sink is not None:
        sink_log2 = tl.load(sink + head * stride_sink, mask=is_head, other=0.0)
        sink_log2 *= 1.4426950408889634  # log2(e)
    denominator, row_lse = finish_softmax(peak, total, sink_log2)
    row = part.to(tl.int64) * tokens + token
    lse_at = row * stride_lse_token + head64 * stride_lse_head
    tl.store(lse + lse_at, row_lse, mask=is_head)
    max_at = row * stride_max_token + head64 * stride_max_head
    tl.store(max_logits + max_at, _largest_logit(peak, total), mask=is_head)
    out_rows = out + row * stride_out_token + head64 * stride_out_head
    values = _scaled(
        weighted, (unit / denominator)[:, None], (rope_unit / denominator)[:, None], VALUE_PIECES
    )
    for piece in tl.static_range(VALUE_PIECES):
        _store_columns(out_rows, is_head, values[piece], piece * WIDTH, min(V_WIDTH, D_C))
    if V_WIDTH > D_C:
        _store_columns(out_rows, is_head, values[VALUE_PIECES], D_C, V_WIDTH)


@triton.jit
def _number(on_host, on_device):
    """A float32 that is given as a number or as a tensor."""
    number = on_host
    if on_device is not None:
        number = tl.load(on_device).to(tl.float32)
    return number


@triton.jit
def _units_of(tensor_scale, FORMAT: tl.constexpr, UNIT: tl.constexpr):
    """What multiplies the sums of latent columns, and those of rotated ones."""
    ROPE_UNIT: tl.constexpr = UNIT if FORMAT == "fp8_token" else 1.0
    return tensor_scale * (1.0 / UNIT), tensor_scale * (1.0 / ROPE_UNIT)


@triton.jit
def _scaled(weighted, factor, rope_factor, VALUE_PIECES: tl.constexpr):
    scaled = ()
    for piece in tl.static_range(len(weighted)):
        scaled += (weighted[piece] * (factor if piece < VALUE_PIECES else rope_factor),)
    return scaled


@triton.jit
def _list_length(lens, token, topk, stride_lens):
    """Entries of a token's list that may count."""
    length = topk
    if lens is not None:
        length = tl.minimum(tl.load(lens + token * stride_lens), topk).to(tl.int32)
    return length


@triton.jit
def _attend_list(
    peak,
    total,
    weighted,  # of the pieces that hold values, then of rotated columns if they do
    q_rows,
    is_head,
    entries,  # the token's list
    length,
    first_tile,
    last_tile,
    payload,
    scales,
    scale_log2,
    num_slots,
    page_size,
    stride_page,
    stride_row,
    stride_scales_page,
    stride_scales_row,
    stride_entry,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_PIECES: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    IS_NEGATIVE: tl.constexpr,
    HAS_FP8: tl.constexpr,
    BN: tl.constexpr,
):
    """Running softmaxes of the heads of a token with some tiles of one list taken in."""
    q = ()
    for piece in tl.static_range(PIECES):
        q += (load_query(q_rows, is_head, piece * WIDTH, WIDTH, D_C, DTYPE, HAS_FP8),)
    q_rope = None
    if ROPE_WIDTH > 0:
        q_rope = load_query(q_rows, is_head, D_C, ROPE_WIDTH, D_C + D_R, ROPE_DTYPE, HAS_FP8)
    for tile in range(first_tile, last_tile):
        entry = tile * BN + tl.arange(0, BN)
        at = entries + entry.to(tl.int64) * stride_entry
        slot = tl.load(at, mask=entry < length, other=-1)
        is_valid = (slot >= 0) & (slot < num_slots)
        slot = tl.where(is_valid, slot, 0).to(tl.int32)
        page, in_page = _split_slot(slot, page_size, PAGE)
        rows = payload + (page * stride_page + in_page * stride_row)
        scales_at = None
        if scales is not None:
            scales_at = scales + (page * stride_scales_page + in_page * stride_scales_row)
        latent, rope, factors = load_row_tile(
            rows, scales_at, is_valid, PIECES, WIDTH, ROPE_WIDTH, D_C, D_R, FORMAT, DTYPE,
            ROPE_DTYPE, HAS_FP8, IS_ALIGNED,
        )  # fmt: skip
        scores = score_keys(q, q_rope, latent, rope, factors, PIECES, FORMAT)
        if IS_NEGATIVE:
            scores = -scores
        scores = tl.where(is_valid[None, :], scores, -float("inf"))
        weights, decay, peak, total = softmax_step(scores, peak, total, scale_log2)
        sums = accumulate_pv(weighted, weights, decay, latent, factors, VALUE_PIECES, FORMAT, UNIT)
        if V_WIDTH > D_C:
            rope_sum = accumulate_rope_pv(
                weighted[VALUE_PIECES], weights, decay, rope, factors, FORMAT, DTYPE, UNIT
            )
            sums += (rope_sum,)
        weighted = sums
    return peak, total, weighted


@triton.jit
def _split_slot(slot, page_size, PAGE: tl.constexpr):
    """(page, row of it), int64."""
    if PAGE > 0:
        page = slot // PAGE
        in_page = slot % PAGE
    else:
        page = slot // page_size
        in_page = slot - page * page_size
    return page.to(tl.int64), in_page.to(tl.int64)


@triton.jit
def _largest_logit(peak, total):
    """The largest logit [rows] in natural units; a NaN among them, which a maximum skips, is it."""
    has_nan = (total != total) & (peak != float("inf"))
    return tl.where(has_nan, float("nan"), peak * 0.6931471805599453)  # log(2)


@triton.jit
def _store_columns(rows, is_row, values, FIRST: tl.constexpr, LAST: tl.constexpr):
    """values [rows, n] into columns from FIRST on, before LAST."""
    column = FIRST + tl.arange(0, values.shape[1])
    mask = is_row[:, None]
    if FIRST + values.shape[1] > LAST:
        mask = mask & (column < LAST)[None, :]
    tl.store(rows[:, None] + column[None, :], values.to(rows.dtype.element_ty), mask=mask)
