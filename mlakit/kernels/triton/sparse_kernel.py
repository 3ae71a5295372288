"""Absorbed MLA attention over per-token lists of cache rows, portable Triton.

Maths      s = q·row · softmax_scale [· q_scale] over valid slots;  out = softmax(s) @ row
Valid      slot < topk_len and 0 ≤ row id < num_rows; no address is computed from an invalid slot
Work       one program per (token, head tile, split of the token's lists); `sparse_merge` combines
           the splits. Invalid entries at the end of a list, its usual padding, have no tile
Memory     a tile of rows is gathered once per head tile and serves as K and as V; slots are loaded
           one tile ahead
Limits     2**31 rows in a cache; widths are padded to powers of two
Lineage    own design; ideas: FlashMLA's token-wise sparse attention and its second ("extra") cache.
           Ours takes any head count, page size and cache format, and mixes formats in one call
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mlakit.kernels.triton.arguments import CacheArguments
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


class RowLists(NamedTuple):
    """A cache, and for each token a list of its rows."""

    cache: CacheArguments
    rows: Tensor  # [tokens, topk]
    lens: Tensor | None  # [tokens]
    stride_entry: int
    stride_lens: int


class Traits(NamedTuple):
    """The constants that the kernel is compiled for."""

    HAS_EXTRA: bool
    ROW: RowTraits
    EXTRA_ROW: RowTraits  # with the column tiles of ROW
    PAGE: int  # page_size, or 0 if it is not a constant
    EXTRA_PAGE: int
    IS_NEGATIVE: bool
    IS_UNCHAINED: bool
    BH: int
    BN: int


class TokenQueries(NamedTuple):
    """The queries of one token: a head tile, in the kernel."""

    rows: tl.tensor  # pointers [BH]
    rope_rows: tl.tensor
    factor: tl.tensor | None  # of the token's scores
    is_head: tl.tensor


class Entries(NamedTuple):
    """Some tiles of one token's list, in the kernel."""

    rows: tl.tensor  # the list
    length: tl.tensor
    first_tile: tl.tensor
    last_tile: tl.tensor
    num_slots: tl.tensor
    page_size: tl.tensor


# differ from call to call: specialised, each would compile further kernels
VARYING = [
    *("tokens", "heads", "num_splits", "stride_lse_token", "stride_max_token"),
    *("topk", "num_slots", "page_size", "stride_rows_token"),
    *("extra_topk", "extra_num_slots", "extra_page_size", "extra_stride_rows_token"),
]

SCANNED_ENTRIES = tl.constexpr(1024)  # of a list, at the same time


@triton.jit(do_not_specialize=VARYING)
def sparse_mla_kernel(
    scale_log2,  # |softmax_scale| · log2(e)
    tokens,
    heads,
    num_splits,
    topk,
    num_slots,
    page_size,
    stride_rows_token,
    extra_topk,
    extra_num_slots,
    extra_page_size,
    extra_stride_rows_token,
    stride_lse_token,
    stride_max_token,
    query,  # `QueryArguments`
    lists,  # `RowLists`
    extra,  # `RowLists` of a second cache, or None
    outputs,  # `OutputArguments`; of several splits float32 [num_splits, ...]
    TRAITS: tl.constexpr,
):
    ROW: tl.constexpr = TRAITS.ROW
    EXTRA_ROW: tl.constexpr = TRAITS.EXTRA_ROW
    BH: tl.constexpr = TRAITS.BH
    BN: tl.constexpr = TRAITS.BN
    head_tiles = tl.cdiv(heads, BH)
    program = tl.program_id(0)
    # head tiles of a token are neighbours: they gather the same rows
    first_head = program % head_tiles * BH
    split = program // head_tiles % num_splits
    token = (program // head_tiles // num_splits).to(tl.int64)

    # the tiles of both lists, one list after the other, in splits of equal length
    rows = lists.rows + token * stride_rows_token
    length = _list_length(lists, token, topk)
    length = _without_invalid_end(rows, length, lists.stride_entry, num_slots)
    tiles = tl.cdiv(length, BN)
    all_tiles = tiles
    if TRAITS.HAS_EXTRA:
        extra_rows = extra.rows + token * extra_stride_rows_token
        extra_length = _list_length(extra, token, extra_topk)
        extra_length = _without_invalid_end(
            extra_rows, extra_length, extra.stride_entry, extra_num_slots
        )
        all_tiles += tl.cdiv(extra_length, BN)
    split_tiles = tl.cdiv(all_tiles, num_splits)
    first_tile = split * split_tiles
    last_tile = tl.minimum(first_tile + split_tiles, all_tiles)

    head = first_head + tl.arange(0, BH)
    is_head = head < heads
    head64 = head.to(tl.int64)
    q_rows = query.latent + token * query.stride_token + head64 * query.stride_head
    rope_rows = query.rope + token * query.stride_rope_token + head64 * query.stride_rope_head
    factor = None
    if query.scale is not None:
        factor = tl.load(query.scale + token * query.stride_scale)
    row_max = tl.full([BH], -float("inf"), tl.float32)
    row_sum = tl.zeros([BH], tl.float32)
    acc = zero_acc(BH, ROW)
    if ROW.V_WIDTH > ROW.D_C:
        ROPE_WIDTH: tl.constexpr = ROW.ROPE_WIDTH
        acc += (tl.zeros([BH, ROPE_WIDTH], tl.float32),)

    queries = TokenQueries(q_rows, rope_rows, factor, is_head)
    state = (row_max, row_sum, acc)
    entries = Entries(rows, length, first_tile, tl.minimum(last_tile, tiles), num_slots, page_size)
    tensor_scale = _tensor_scale(lists.cache)
    scale = scale_log2 * tensor_scale
    PAGE: tl.constexpr = TRAITS.PAGE
    state = _attend_list(state, queries, lists, entries, scale, ROW, PAGE, TRAITS)
    acc_scale, rope_scale = _acc_scales(tensor_scale, ROW)
    if TRAITS.HAS_EXTRA:
        EXTRA_PAGE: tl.constexpr = TRAITS.EXTRA_PAGE
        extra_tensor_scale = _tensor_scale(extra.cache)
        extra_acc_scale, extra_rope_scale = _acc_scales(extra_tensor_scale, EXTRA_ROW)
        row_max, row_sum, acc = state
        acc = _scale_acc(acc, acc_scale / extra_acc_scale, rope_scale / extra_rope_scale, ROW)
        state = (row_max, row_sum, acc)
        first_tile = tl.maximum(first_tile - tiles, 0)
        last_tile -= tiles
        entries = Entries(
            extra_rows, extra_length, first_tile, last_tile, extra_num_slots, extra_page_size
        )
        scale = scale_log2 * extra_tensor_scale
        state = _attend_list(state, queries, extra, entries, scale, EXTRA_ROW, EXTRA_PAGE, TRAITS)
        acc_scale = extra_acc_scale
        rope_scale = extra_rope_scale
    row_max, row_sum, acc = state

    # computed again, with an opaque zero: kept through the loop, they would take registers
    head = first_head + tl.where(tokens < 0, 1, 0) + tl.arange(0, BH)
    is_head = head < heads
    head64 = head.to(tl.int64)
    sink_log2 = None
    if outputs.sink is not None:
        sink_log2 = load_sink(outputs, head, is_head)
    denominator, row_lse = finish_softmax(row_max, row_sum, sink_log2)
    row = split.to(tl.int64) * tokens + token
    lse_at = row * stride_lse_token + head64 * outputs.stride_lse_head
    tl.store(outputs.lse + lse_at, row_lse, mask=is_head)
    max_at = row * stride_max_token + head64 * outputs.stride_max_head
    tl.store(outputs.max_logits + max_at, _max_logit(row_max, row_sum), mask=is_head)
    out_rows = outputs.out + row * outputs.stride_out_token + head64 * outputs.stride_out_head
    values = _scale_acc(
        acc, (acc_scale / denominator)[:, None], (rope_scale / denominator)[:, None], ROW
    )
    VALUE_PIECES: tl.constexpr = ROW.VALUE_PIECES
    for piece in tl.static_range(VALUE_PIECES):
        _store_columns(
            out_rows, is_head, values[piece], piece * ROW.WIDTH, min(ROW.V_WIDTH, ROW.D_C)
        )
    if ROW.V_WIDTH > ROW.D_C:
        _store_columns(out_rows, is_head, values[ROW.VALUE_PIECES], ROW.D_C, ROW.V_WIDTH)


@triton.jit
def _tensor_scale(cache):
    """The scale of all rows, a number or on the device."""
    scale = cache.tensor_scale
    if cache.device_scale is not None:
        scale = tl.load(cache.device_scale).to(tl.float32)
    return scale


@triton.jit
def _acc_scales(tensor_scale, ROW: tl.constexpr):
    """Return the factors of the accumulators of latent columns, and that of rotated columns."""
    ROPE_UNIT: tl.constexpr = ROW.VALUE_UNIT if ROW.FACTORS == "row" else 1.0
    return tensor_scale * (1.0 / ROW.VALUE_UNIT), tensor_scale * (1.0 / ROPE_UNIT)


@triton.jit
def _scale_acc(acc, scale, rope_scale, ROW: tl.constexpr):
    scaled = ()
    for piece in tl.static_range(len(acc)):
        scaled += (acc[piece] * (scale if piece < ROW.VALUE_PIECES else rope_scale),)
    return scaled


@triton.jit
def _list_length(lists, token, topk):
    """Return how many entries of a token's list may be valid."""
    length = topk
    if lists.lens is not None:
        length = tl.minimum(tl.load(lists.lens + token * lists.stride_lens), topk).to(tl.int32)
    return length


@triton.jit
def _without_invalid_end(entries, length, stride_entry, num_slots):
    """The length of a list without the invalid entries at its end: usual padding of short lists."""
    end = length
    last = 0
    while (last == 0) & (end > 0):
        entry = end - SCANNED_ENTRIES + tl.arange(0, SCANNED_ENTRIES)
        slot = tl.load(entries + entry.to(tl.int64) * stride_entry, mask=entry >= 0, other=-1)
        is_valid = (slot >= 0) & (slot < num_slots)
        last = tl.max(tl.where(is_valid, entry + 1, 0), 0)
        end -= SCANNED_ENTRIES
    return last


@triton.jit
def _attend_list(
    state,  # (row_max, row_sum, acc): the online softmax
    queries,
    lists,
    entries,
    scale_log2,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    TRAITS: tl.constexpr,
):
    """Return the online softmax of a token's heads after some tiles of a list.

    acc has the pieces that hold values, then rotated columns if they hold values.
    """
    IS_UNCHAINED: tl.constexpr = TRAITS.IS_UNCHAINED
    BN: tl.constexpr = TRAITS.BN
    row_max, row_sum, acc = state
    cache = lists.cache
    is_head, factor = queries.is_head, queries.factor
    q = load_latent_query(queries.rows, queries.rope_rows, is_head, ROW)
    q_rope = None
    if ROW.ROPE_WIDTH > 0:
        q_rope = load_query(
            queries.rope_rows, is_head, 0, ROW.ROPE_WIDTH, ROW.D_R, ROW.ROPE_DTYPE, ROW.HAS_FP8
        )
    slot = _load_slots(entries, entries.first_tile, lists.stride_entry, BN)
    for tile in tl.range(entries.first_tile, entries.last_tile, disable_licm=IS_UNCHAINED):
        is_valid = slot >= 0
        page, in_page = _split_slot(tl.maximum(slot, 0), entries.page_size, PAGE)
        rows = cache.payload + (page * cache.stride_page + in_page * cache.stride_row)
        beside = None
        if cache.beside is not None:
            beside_at = page * cache.stride_beside_page + in_page * cache.stride_beside_row
            beside = cache.beside + beside_at
        # looked up one tile ahead: its row loads then wait for no other load
        slot = _load_slots(entries, tile + 1, lists.stride_entry, BN)
        latent, rope, factors = load_row_tile(rows, beside, is_valid, ROW, True)
        if IS_UNCHAINED:
            scores = score_keys(q, q_rope, latent, rope, factors, ROW, scale_log2)
        else:
            scores = score_keys(q, q_rope, latent, rope, factors, ROW)
        if factor is not None:
            scores *= factor
        if TRAITS.IS_NEGATIVE:
            scores = -scores
        scores = tl.where(is_valid[None, :], scores, -float("inf"))
        if IS_UNCHAINED:
            # The branch hides from the compiler that P feeds another dot. Otherwise each of the two
            # warpgroups gets all 64 rows of the scores, and the scores are computed twice.
            probs, rescale = scores, row_max
            if entries.length > 0:  # always true inside this loop
                probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
        else:
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        new_acc = accumulate_pv(acc, probs, rescale, latent, factors, ROW)
        if ROW.V_WIDTH > ROW.D_C:
            acc_rope = accumulate_rope_pv(acc[ROW.VALUE_PIECES], probs, rescale, rope, factors, ROW)
            new_acc += (acc_rope,)
        acc = new_acc
    return row_max, row_sum, acc


@triton.jit
def _load_slots(entries, tile, stride_entry, BN: tl.constexpr):
    """Return int32 [BN]: the slots of a tile of a list, −1 where invalid."""
    entry = tile * BN + tl.arange(0, BN)
    is_entry = entry < entries.length
    at = entries.rows + entry.to(tl.int64) * stride_entry
    slot = tl.load(at, mask=is_entry, other=-1)
    return tl.where((slot >= 0) & (slot < entries.num_slots), slot, -1).to(tl.int32)


@triton.jit
def _split_slot(slot, page_size, PAGE: tl.constexpr):
    """Return int64 (page, row in the page)."""
    if PAGE > 0:
        page = slot // PAGE
        in_page = slot % PAGE
    else:
        page = slot // page_size
        in_page = slot - page * page_size
    return page.to(tl.int64), in_page.to(tl.int64)


@triton.jit
def _max_logit(row_max, row_sum):
    """The largest logit [rows] in natural units; NaN if one is NaN, which row_max skips."""
    has_nan = (row_sum != row_sum) & (row_max != float("inf"))
    return tl.where(has_nan, float("nan"), row_max * 0.6931471805599453)  # log(2)


@triton.jit
def _store_columns(rows, is_row, values, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Store values [rows, n] to columns [FIRST, LAST)."""
    column = FIRST + tl.arange(0, values.shape[1])
    mask = is_row[:, None]
    if FIRST + values.shape[1] > LAST:
        mask = mask & (column < LAST)[None, :]
    tl.store(rows[:, None] + column[None, :], values.to(rows.dtype.element_ty), mask=mask)
