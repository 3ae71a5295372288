"""Absorbed MLA attention over per-token lists of cache rows, portable Triton.

Maths      s = q·row · softmax_scale over the token's valid slots;  out = softmax(s) @ row
Valid      slot < topk_len and 0 ≤ row id < num_rows; no address is made of an invalid one
Work       one program per (token, tile of heads, part of the token's lists); where tokens are few,
           lists are cut into parts, which a second, small kernel merges
Memory     a tile of rows is gathered once for a tile of heads and serves as K and as V. Scratch:
           float32 partials where there are parts, 256 MiB of them at most
Limits     2**31 rows in a cache; widths are padded to powers of two
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.triton.configs import (
    RowTiles,
    pick_merge_config,
    pick_sparse_config,
    pick_sparse_parts,
)
from mlakit.kernels.triton.launch import launch, target
from mlakit.kernels.triton.primitives import (
    add_rope_values,
    add_values,
    fold_states,
    load_query,
    load_row_tile,
    score_keys,
    softmax_step,
    softmax_totals,
    store_merged,
)
from mlakit.kernels.triton.rows import (
    PLAIN,
    TRITON_TYPES,
    ComputeTypes,
    compute_types,
    row_tiles,
    rows_are_aligned,
    value_unit,
)
from mlakit.plan import EvenSplit

# these are divided by in the kernel as constants; one kernel serves all others
USUAL_PAGES = (1, 16, 32, 64, 128, 256)


def sparse_mla(
    q: Tensor,  # [tokens, heads, width]
    layer: CacheLayer,
    rows: Tensor,  # [tokens, topk] slots, any integer dtype
    topk_lens: Tensor | None,  # [tokens]: slots from here on do not count
    *,
    extra: tuple[CacheLayer, Tensor, Tensor | None] | None,  # a second cache with its own lists
    splits: EvenSplit | None,
    softmax_scale: float,
    sink: Tensor | None,  # [heads] float32
    out: Tensor,  # [tokens, heads, v_width]
    lse: Tensor,  # [tokens, heads] float32
    max_logits: Tensor,  # [tokens, heads] float32
) -> None:
    tokens, heads, _ = q.shape
    if tokens == 0 or heads == 0:
        return
    lists = [(layer, rows, topk_lens)] if extra is None else [(layer, rows, topk_lens), extra]
    types = [_types(q, each) for each, _, _ in lists]
    # sums over both caches stand in the same pieces: the narrower ones
    tiles = min((row_tiles(each) for each, _, _ in lists), key=lambda tiles: tiles.width)
    device = target(q.device)
    config = pick_sparse_config(
        tiles,
        heads=heads,
        itemsize=max(each.latent.itemsize for each in types),
        is_bytes=any(each.payload.dtype not in PLAIN for each, _, _ in lists),
        arch=device.arch,
        shared_bytes=device.shared_bytes,
    )
    head_tiles = triton.cdiv(heads, config.block_h)
    parts = pick_sparse_parts(
        wanted=None if splits is None else splits.num_splits,
        rows=tokens * heads,
        head_tiles=tokens * head_tiles,
        list_tiles=sum(triton.cdiv(each.shape[1], config.block_n) for _, each, _ in lists),
        num_sms=device.num_sms,
        row_bytes=4 * (tiles.v_width + 2),
    )
    results = [(out, out.stride()[:2]), (lse, lse.stride()), (max_logits, max_logits.stride())]
    if parts > 1:
        scratch = [
            out.new_empty(parts, tokens, heads, n, dtype=torch.float32)
            for n in (tiles.v_width, 1, 1)
        ]
        results = [(each, each.stride()[1:3]) for each in scratch]
    arguments = [_list_arguments(*each) for each in lists]
    launch(
        _sparse_mla_kernel,
        (tokens * parts * head_tiles,),
        q.view(torch.uint8) if q.dtype not in PLAIN else q,
        *arguments[0],
        *(arguments[1] if extra is not None else _NO_LIST),
        None if parts > 1 else sink,
        *(each for each, _ in results),
        # a scale of 0 would turn the −inf of an invalid slot into NaN
        max(abs(softmax_scale) * log2(e), SMALLEST_SCALE),
        tokens,
        heads,
        parts,
        *q.stride()[:2],
        0 if sink is None else sink.stride(0),
        *(stride for _, strides in results for stride in strides),
        HAS_EXTRA=extra is not None,
        **_list_constants("", lists[0][0], types[0]),
        **_list_constants("EXTRA_", lists[-1][0], types[-1]),
        D_C=tiles.d_c,
        D_R=tiles.d_r,
        V_WIDTH=tiles.v_width,
        PIECES=tiles.pieces,
        WIDTH=tiles.width,
        VALUE_PIECES=tiles.value_pieces,
        ROPE_WIDTH=tiles.rope_width,
        IS_NEGATIVE=softmax_scale < 0,
        HAS_FP8=device.has_fp8,
        BH=config.block_h,
        BN=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if parts > 1:
        _merge(scratch, sink, out, lse, max_logits, tiles)


def _merge(
    scratch: list[Tensor],
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor,
    tiles: RowTiles,
) -> None:
    parts, tokens, heads, _ = scratch[0].shape
    config = pick_merge_config(v_width=tiles.v_width)
    launch(
        _merge_lists_kernel,
        (triton.cdiv(tokens * heads, config.rows),),
        *scratch,
        sink,
        out,
        lse,
        max_logits,
        tokens * heads,
        heads,
        parts,
        0 if sink is None else sink.stride(0),
        *out.stride()[:2],
        *lse.stride(),
        *max_logits.stride(),
        V_WIDTH=tiles.v_width,
        COLUMNS=triton.next_power_of_2(tiles.v_width),
        ROWS=config.rows,
        num_warps=config.num_warps,
    )


def _types(q: Tensor, layer: CacheLayer) -> ComputeTypes:
    """Types that hold q and the rows exactly; the extra cache may have another float than q."""
    stored = layer.payload.dtype
    if stored in PLAIN and q.dtype in PLAIN and stored != q.dtype:
        return ComputeTypes(torch.float32, torch.float32)
    return compute_types(q, q, layer)


_NO_LIST = (*(None,) * 5, 1.0, *(0,) * 10)  # as `_list_arguments`, of no list


def _list_arguments(layer: CacheLayer, rows: Tensor, lens: Tensor | None) -> tuple[object, ...]:
    payload, scales, scale = layer.payload, layer.scales, layer.tensor_scale
    is_on_device = isinstance(scale, Tensor)
    return (
        payload.view(torch.uint8) if payload.dtype not in PLAIN else payload,
        scales,
        scale.to(payload.device) if is_on_device else None,
        rows,
        lens,
        1.0 if is_on_device else float(scale),
        layer.num_slots,
        layer.page_size,
        rows.shape[1],
        *payload.stride()[:2],
        *((0, 0) if scales is None else scales.stride()[:2]),
        *rows.stride(),
        0 if lens is None else lens.stride(0),
    )


def _list_constants(prefix: str, layer: CacheLayer, types: ComputeTypes) -> dict[str, object]:
    constants = {
        "FORMAT": layer.codec.name,
        "DTYPE": TRITON_TYPES[types.latent],
        "ROPE_DTYPE": TRITON_TYPES[types.rope],
        "UNIT": value_unit(types.latent, layer.codec.name),
        "PAGE": layer.page_size if layer.page_size in USUAL_PAGES else 0,
        "IS_ALIGNED": rows_are_aligned(layer),
    }
    return {prefix + name: value for name, value in constants.items()}


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
def _sparse_mla_kernel(
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
    denominator, row_lse = softmax_totals(peak, total, sink_log2)
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
        sums = add_values(weighted, weights, decay, latent, factors, VALUE_PIECES, FORMAT, UNIT)
        if V_WIDTH > D_C:
            rope_sum = add_rope_values(
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


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "heads",
        "parts",
        "stride_sink",
        "stride_lse_token",
        "stride_lse_head",
        "stride_max_token",
        "stride_max_head",
    ]
)
def _merge_lists_kernel(
    part_outs,  # [parts, rows, V_WIDTH] float32
    part_lses,  # [parts, rows] float32
    part_maxima,  # [parts, rows] float32
    sink,  # [heads] float32, or None
    out,
    lse,
    max_logits,
    num_rows,  # tokens · heads
    heads,
    parts,
    stride_sink,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_max_token,
    stride_max_head,
    V_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.arange(0, COLUMNS)
    in_row = (column < V_WIDTH)[None, :]
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, COLUMNS], tl.float32)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    num_nan = tl.zeros([ROWS], tl.int32)
    for part in range(parts):
        at = part * num_rows.to(tl.int64) + row
        part_lse = tl.load(part_lses + at, mask=is_row, other=-float("inf"))
        part_max = tl.load(part_maxima + at, mask=is_row, other=-float("inf"))
        # a part that saw nothing adds nothing
        is_live = is_row & (part_lse != -float("inf"))
        values = tl.load(
            part_outs + at[:, None] * V_WIDTH + column[None, :],
            mask=is_live[:, None] & in_row,
            other=0.0,
        )
        peak, total, weighted = fold_states(peak, total, weighted, part_lse, values)
        num_nan += (part_max != part_max).to(tl.int32)
        largest = tl.where(part_max > largest, part_max, largest)
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    store_merged(
        peak,
        total,
        weighted,
        sink,
        stride_sink,
        head,
        out + (token * stride_out_token + head * stride_out_head),
        lse + token * stride_lse_token + head * stride_lse_head,
        is_row,
        V_WIDTH,
    )
    largest = tl.where(num_nan > 0, float("nan"), largest)
    tl.store(max_logits + token * stride_max_token + head * stride_max_head, largest, mask=is_row)
