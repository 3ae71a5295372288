"""Expanded MLA attention over ragged batches, portable Triton.

Maths      s = (q_n·k_n + q_r·k_r) · softmax_scale [+ slope · (key − query)];  out = softmax(s) v
           e4m3 q, k and v are multiplied as bf16, which is exact; scales multiply scores and
           probabilities
Work       one program per (query tile of one request, head), which finds its request by bisection:
           first the key tiles that every query sees, then those that need the mask
Memory     q stays on chip; K and V of a head are read once per query tile, k_rope by every head
Limits     none; widths are split into powers of two, and the last one is padded
Lineage    own design; ideas: FlashAttention-2, with unmasked tiles before masked ones. Ours also
           keeps values that are not finite from queries that do not see them
"""

from __future__ import annotations

from math import e, log2
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mlakit.cache.layouts import bits
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.arguments import PrefillArguments, stride_of
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.arguments import output_arguments
from mlakit.kernels.triton.configs import pick_prefill_config
from mlakit.kernels.triton.primitives import (
    finish_softmax,
    is_finite,
    mask_interval,
    softmax_step,
    widen_e4m3,
)
from mlakit.model.masks import MaskTraits


def mla_prefill(a: PrefillArguments, out: Tensor, lse: Tensor) -> None:
    q, k_nope, k_rope, v = (bits(each) for each in (a.q, a.k_nope, a.k_rope, a.v))
    q_starts, kv_starts, softmax_scale, mask = a.q_starts, a.kv_starts, a.softmax_scale, a.mask
    v_scale = a.v_scale
    (tokens, heads, _), batch = q.shape, q_starts.shape[0] - 1
    if tokens == 0 or heads == 0 or batch == 0:
        return
    d_n, d_r, d_v = k_nope.shape[2], k_rope.shape[1], v.shape[2]
    d_a = max(_power_of_two_below(d_n), 16)
    device = target(q.device)
    config = pick_prefill_config(
        qk_width=d_a + _padded(d_n - d_a) + _padded(d_r),
        v_width=_padded(d_v),
        itemsize=q.element_size(),
        mean_queries=tokens / batch,
        arch=device.arch,
        shared_bytes=device.shared_bytes,
    )
    num_slots = tokens // config.block_q + batch
    launch(
        _mla_prefill_kernel,
        (num_slots * heads,),
        # a scale of 0 would turn the −inf of a hidden key into NaN
        scale_log2=max(abs(softmax_scale) * log2(e), SMALLEST_SCALE),
        window=mask.window,
        num_requests=batch,
        heads=heads,
        num_slots=num_slots,
        stride_lse_token=lse.stride(0),
        stride_q_scale_token=stride_of(a.q_scale, 0),
        stride_v_scale_token=stride_of(v_scale, 0),
        queries=QueryArguments(q, a.q_scale, *q.stride()[:2], stride_of(a.q_scale, 1)),
        keys=KeyArguments(
            *(k_nope, k_rope, a.k_scale),
            *(*k_nope.stride()[:2], k_rope.stride(0), stride_of(a.k_scale, 0)),
        ),
        values=ValueArguments(v, v_scale, *v.stride(), stride_of(v_scale, 1)),
        starts=StartArguments(q_starts, kv_starts, *q_starts.stride(), *kv_starts.stride()),
        alibi=AlibiArguments(a.alibi_slopes, stride_of(a.alibi_slopes, 0)),
        outputs=output_arguments(out, lse, sink=a.sink),
        TRAITS=Traits(
            MASK=mask.traits,
            IS_NEGATIVE=softmax_scale < 0,
            KEYS_PER_SCALE=a.keys_per_scale,
            D_N=d_n,
            D_R=d_r,
            D_V=d_v,
            HAS_FP8=device.has_fp8,
        ),
        TILES=Tiles(
            A=d_a,
            B=_padded(d_n - d_a),
            R=_padded(d_r),
            V=_padded(d_v),
            Q=config.block_q,
            K=config.block_k,
            MASKED=config.block_masked,
            HEAD_GROUP=config.head_group,
            STAGES=config.num_stages,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _power_of_two_below(n: int) -> int:
    """The largest power of two ≤ n; 0 for 0."""
    return 1 << (n.bit_length() - 1) if n > 0 else 0


def _padded(width: int) -> int:
    """The width of a dot's operand: a power of two, 16 at least; 0 where there are no columns."""
    return max(triton.next_power_of_2(width), 16) if width > 0 else 0


class QueryArguments(NamedTuple):
    """The queries; e4m3 is uint8 here and below."""

    q: Tensor  # [tokens, heads, D_N + D_R]
    scale: Tensor | None  # [tokens, heads] float32
    stride_token: int
    stride_head: int
    stride_scale_head: int


class KeyArguments(NamedTuple):
    """The keys."""

    nope: Tensor  # [keys, heads, D_N]
    rope: Tensor  # [keys, D_R]
    scale: Tensor | None  # [keys] or [keys // KEYS_PER_SCALE + batch] float32
    stride_token: int
    stride_head: int
    stride_rope_token: int
    stride_scale: int


class ValueArguments(NamedTuple):
    """The values."""

    v: Tensor  # [keys, heads, D_V]
    scale: Tensor | None  # [keys, heads] or [keys // KEYS_PER_SCALE + batch, heads] float32
    stride_token: int
    stride_head: int
    stride_column: int
    stride_scale_head: int


class StartArguments(NamedTuple):
    """The places where the queries and the keys of each request start, [batch + 1]."""

    q_starts: Tensor
    kv_starts: Tensor
    stride_q_starts: int
    stride_kv_starts: int


class AlibiArguments(NamedTuple):
    """The slopes of a bias by distance."""

    slopes: Tensor | None  # [heads] float32
    stride: int


class Traits(NamedTuple):
    """The problem that the kernel is compiled for."""

    MASK: MaskTraits
    IS_NEGATIVE: bool  # the scale is −scale_log2
    KEYS_PER_SCALE: int
    D_N: int
    D_R: int
    D_V: int
    HAS_FP8: bool


class Tiles(NamedTuple):
    """The tiles that the kernel is compiled for."""

    A: int  # the first columns of D_N, a power of two of them
    B: int  # the others, 0 or rounded up to a power of two
    R: int  # rotated columns
    V: int  # columns of values
    Q: int  # queries
    K: int  # keys
    MASKED: int  # keys where the mask is applied
    HEAD_GROUP: int
    STAGES: int


class QueryTile(NamedTuple):
    """The queries of a program, in the kernel."""

    a: tl.tensor  # [Q, A]
    b: tl.tensor
    r: tl.tensor
    scale: tl.tensor | None  # [Q]


class RequestKeys(NamedTuple):
    """Pointers to the first key of a request, in the kernel."""

    nope: tl.tensor
    rope: tl.tensor
    scale: tl.tensor | None


class ResultRows(NamedTuple):
    """The stored results of some queries, in the kernel; each sees the keys [first, last)."""

    out: tl.tensor  # pointers [Q]
    is_query: tl.tensor
    denominator: tl.tensor
    first: tl.tensor
    last: tl.tensor


# differ from call to call: specialised, each would compile further kernels
VARYING = [
    *("window", "num_requests", "heads", "num_slots", "stride_lse_token"),
    *("stride_q_scale_token", "stride_v_scale_token"),
]


@triton.jit(do_not_specialize=VARYING)
def _mla_prefill_kernel(
    scale_log2,
    window,
    num_requests,
    heads,
    num_slots,
    stride_lse_token,
    stride_q_scale_token,
    stride_v_scale_token,
    queries,  # `QueryArguments`
    keys,  # `KeyArguments`
    values,  # `ValueArguments`
    starts,  # `StartArguments`
    alibi,  # `AlibiArguments`
    outputs,  # `OutputArguments`
    TRAITS: tl.constexpr,
    TILES: tl.constexpr,
):
    MASK: tl.constexpr = TRAITS.MASK
    KEYS_PER_SCALE: tl.constexpr = TRAITS.KEYS_PER_SCALE
    D_V: tl.constexpr = TRAITS.D_V
    HAS_FP8: tl.constexpr = TRAITS.HAS_FP8
    BLOCK_V: tl.constexpr = TILES.V
    BLOCK_Q: tl.constexpr = TILES.Q
    BLOCK_K: tl.constexpr = TILES.K
    BLOCK_MASKED: tl.constexpr = TILES.MASKED
    STAGES: tl.constexpr = TILES.STAGES
    head, slot = _head_and_slot(tl.program_id(0), heads, num_slots, TILES.HEAD_GROUP)
    request = _request_of(slot, starts, num_requests, BLOCK_Q)
    q_start = tl.load(starts.q_starts + request * starts.stride_q_starts).to(tl.int32)
    q_end = tl.load(starts.q_starts + (request + 1) * starts.stride_q_starts).to(tl.int32)
    q_len = q_end - q_start
    first_query = (slot - _first_slot(request, q_start, BLOCK_Q)) * BLOCK_Q
    if first_query >= q_len:
        return
    kv_start = tl.load(starts.kv_starts + request * starts.stride_kv_starts).to(tl.int64)
    kv_end = tl.load(starts.kv_starts + (request + 1) * starts.stride_kv_starts).to(tl.int64)
    kv_len = (kv_end - kv_start).to(tl.int32)
    offset = kv_len - q_len  # of a query's position from its index
    last_query = tl.minimum(first_query + BLOCK_Q, q_len) - 1

    # Both ends of the interval that a query sees grow with its position. So the first and the last
    # query decide which keys [any_first, any_last) some query of the tile sees, and which all see.
    any_first, all_last = mask_interval(offset + first_query, kv_len, window, MASK)
    all_first, any_last = mask_interval(offset + last_query, kv_len, window, MASK)
    head_tiles = tl.cdiv(tl.maximum(tl.minimum(all_first, any_last) - any_first, 0), BLOCK_MASKED)
    full_first = any_first + head_tiles * BLOCK_MASKED
    full_last = full_first + tl.maximum(all_last - full_first, 0) // BLOCK_K * BLOCK_K
    tail_tiles = tl.cdiv(tl.maximum(any_last - full_last, 0), BLOCK_MASKED)

    query = first_query + tl.arange(0, BLOCK_Q)
    position = offset + query  # [BLOCK_Q]
    is_query = query < q_len
    token = (q_start + query).to(tl.int64)
    q_rows = queries.q + token * queries.stride_token + head.to(tl.int64) * queries.stride_head
    q_a, q_b, q_r = _load_tiles(q_rows, q_rows, is_query, True, TRAITS.D_N, TRAITS, TILES)
    if TRAITS.IS_NEGATIVE:
        q_a, q_b, q_r = -q_a, -q_b, -q_r
    row_scale = None
    if queries.scale is not None:
        scale_at = queries.scale + head.to(tl.int64) * queries.stride_scale_head
        row_scale = tl.load(scale_at + token * stride_q_scale_token, mask=is_query, other=0.0)
    slope = 0.0
    if alibi.slopes is not None:
        slope = tl.load(alibi.slopes + head * alibi.stride) * 1.4426950408889634  # log2(e)

    k_nope = keys.nope + (kv_start * keys.stride_token + head.to(tl.int64) * keys.stride_head)
    k_rope = keys.rope + kv_start * keys.stride_rope_token
    first_scale = kv_start
    if KEYS_PER_SCALE > 1:
        first_scale = kv_start // KEYS_PER_SCALE + request
    k_scale = None
    if keys.scale is not None:
        k_scale = keys.scale + first_scale * keys.stride_scale
    v_scale = None
    if values.scale is not None:
        token_at = first_scale * stride_v_scale_token
        v_scale = values.scale + (token_at + head.to(tl.int64) * values.stride_scale_head)
    v = values.v + (kv_start * values.stride_token + head.to(tl.int64) * values.stride_head)
    query_tile = QueryTile(q_a, q_b, q_r, row_scale)
    request_keys = RequestKeys(k_nope, k_rope, k_scale)

    row_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    tile = tl.arange(0, BLOCK_K)
    for start in tl.range(full_first, full_last, BLOCK_K, num_stages=STAGES):
        key = start + tile
        is_key = tile >= 0
        scores = _scores(query_tile, request_keys, keys, key, is_key, False, TRAITS, TILES)
        if alibi.slopes is not None:
            scores = scores * scale_log2 + slope * (key[None, :] - position[:, None])
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
        else:
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        v_rows = v + key.to(tl.int64) * values.stride_token
        columns = _load_rows(v_rows, is_key, False, 0, D_V, BLOCK_V, HAS_FP8, values.stride_column)
        if v_scale is not None:
            scale = (key // KEYS_PER_SCALE).to(tl.int64)
            probs *= tl.load(v_scale + scale * stride_v_scale_token)[None, :]
        acc = acc * rescale[:, None]
        acc = tl.dot(probs.to(columns.dtype), columns, acc, input_precision="ieee")

    # computed again, with an opaque zero: kept through the loop, they would take registers
    query = first_query + tl.where(num_requests < 0, 1, 0) + tl.arange(0, BLOCK_Q)
    position = offset + query
    is_query = query < q_len
    token = (q_start + query).to(tl.int64)
    # [BLOCK_Q] each
    first, last = mask_interval(position, kv_len, window, MASK)
    all_finite = 1
    for i in tl.range(0, head_tiles + tail_tiles, num_stages=1):
        at_tail = full_last + (i - head_tiles) * BLOCK_MASKED
        start = tl.where(i < head_tiles, any_first + i * BLOCK_MASKED, at_tail)
        key = start + tl.arange(0, BLOCK_MASKED)
        # keys that no query of the tile sees are not read
        is_key = (key >= any_first) & (key < any_last)
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None])
        scores = _scores(query_tile, request_keys, keys, key, is_key, True, TRAITS, TILES)
        if alibi.slopes is not None:
            scores = scores * scale_log2 + slope * (key[None, :] - position[:, None])
            scores = tl.where(visible, scores, -float("inf"))
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
        else:
            scores = tl.where(visible, scores, -float("inf"))
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        v_rows = v + key.to(tl.int64) * values.stride_token
        columns = _load_rows(v_rows, is_key, True, 0, D_V, BLOCK_V, HAS_FP8, values.stride_column)
        is_value_finite = is_finite(columns)
        if v_scale is not None:
            scale = (key // KEYS_PER_SCALE).to(tl.int64)
            scales = tl.load(v_scale + scale * stride_v_scale_token, mask=is_key, other=0.0)
            is_scale_finite = is_finite(scales)
            is_value_finite &= is_scale_finite[:, None]
            probs *= tl.where(is_scale_finite, scales, 0.0)[None, :]
        all_finite &= tl.min(is_value_finite.to(tl.int32))
        acc = acc * rescale[:, None]
        # 0 · NaN is NaN: values that are not finite are left out here and added in the end
        columns = tl.where(is_value_finite, columns, 0.0)
        acc = tl.dot(probs.to(columns.dtype), columns, acc, input_precision="ieee")

    sink_log2 = None
    if outputs.sink is not None:
        sink_log2 = tl.load(outputs.sink + head * outputs.stride_sink) * 1.4426950408889634
    denominator, row_lse = finish_softmax(row_max, row_sum, sink_log2)
    column = tl.arange(0, BLOCK_V)
    head64 = head.to(tl.int64)
    out_rows = outputs.out + token * outputs.stride_out_token + head64 * outputs.stride_out_head
    tl.store(
        out_rows[:, None] + column[None, :],
        (acc / denominator[:, None]).to(outputs.out.dtype.element_ty),
        mask=is_query[:, None] & (column < D_V)[None, :],
    )
    lse_rows = outputs.lse + token * stride_lse_token + head64 * outputs.stride_lse_head
    tl.store(lse_rows, row_lse, mask=is_query)

    if all_finite == 0:
        tl.debug_barrier()  # out is read back, also where other threads wrote it
        rows = ResultRows(out_rows, is_query, denominator, first, last)
        _add_non_finite(rows, any_first, any_last, v, v_scale, stride_v_scale_token, values, TRAITS)


@triton.jit
def _head_and_slot(program, heads, num_slots, HEAD_GROUP: tl.constexpr):
    """Return (head, slot of a query tile) of a program.

    Programs start in order. The later queries of a request see more keys, so they come first. A
    group of heads ends before the next one begins, so that its keys stay in L2.
    """
    group = program // (num_slots * HEAD_GROUP)
    within = program - group * num_slots * HEAD_GROUP
    in_group = tl.minimum(heads - group * HEAD_GROUP, HEAD_GROUP)
    head = group * HEAD_GROUP + within % in_group
    return head, num_slots - 1 - within // in_group


@triton.jit
def _first_slot(request, q_start, BLOCK_Q: tl.constexpr):
    """The first slot of a request, which has at least as many slots as query tiles."""
    return q_start // BLOCK_Q + request


@triton.jit
def _request_of(slot, starts, num_requests, BLOCK_Q: tl.constexpr):
    """The last request whose first slot is not above `slot`, by bisection."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        q_start = tl.load(starts.q_starts + middle * starts.stride_q_starts).to(tl.int32)
        is_above = _first_slot(middle, q_start, BLOCK_Q) > slot
        low = tl.where(is_above, low, middle)
        high = tl.where(is_above, middle, high)
    return low


@triton.jit
def _load_rows(
    rows,  # [ROWS] pointers
    is_row,  # [ROWS]
    MASKED: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FP8: tl.constexpr,
    stride_column=1,
):
    """Columns [FIRST, FIRST + BLOCK) of rows, zeros from LAST on and, if MASKED, in other rows;
    uint8 is e4m3, and becomes bf16."""
    column = FIRST + tl.arange(0, BLOCK)
    pointers = rows[:, None] + (column * stride_column)[None, :]
    if FIRST + BLOCK > LAST:
        columns = tl.load(pointers, mask=is_row[:, None] & (column < LAST)[None, :], other=0)
    elif MASKED:
        columns = tl.load(pointers, mask=is_row[:, None], other=0)
    else:
        columns = tl.load(pointers)
    if columns.dtype == tl.uint8:
        columns = widen_e4m3(columns, tl.bfloat16, HAS_FP8)
    return columns


@triton.jit
def _load_tiles(
    nope_rows,
    rope_rows,
    is_row,
    MASKED: tl.constexpr,
    ROPE_AT: tl.constexpr,  # the first rotated column of rope_rows
    TRAITS: tl.constexpr,
    TILES: tl.constexpr,
):
    """The columns of rows in three tiles; a tile without columns is an unused number."""
    D_N: tl.constexpr = TRAITS.D_N
    D_R: tl.constexpr = TRAITS.D_R
    HAS_FP8: tl.constexpr = TRAITS.HAS_FP8
    BLOCK_A: tl.constexpr = TILES.A
    BLOCK_B: tl.constexpr = TILES.B
    BLOCK_R: tl.constexpr = TILES.R
    a = _load_rows(nope_rows, is_row, MASKED, 0, D_N, BLOCK_A, HAS_FP8)
    b = 0.0
    if BLOCK_B > 0:
        b = _load_rows(nope_rows, is_row, MASKED, BLOCK_A, D_N, BLOCK_B, HAS_FP8)
    r = 0.0
    if BLOCK_R > 0:
        r = _load_rows(rope_rows, is_row, MASKED, ROPE_AT, ROPE_AT + D_R, BLOCK_R, HAS_FP8)
    return a, b, r


@triton.jit
def _scores(
    query_tile,
    request_keys,
    keys,
    key,  # [BLOCK_K]
    is_key,
    MASKED: tl.constexpr,
    TRAITS: tl.constexpr,
    TILES: tl.constexpr,
):
    """q·k [BLOCK_Q, BLOCK_K] float32, without softmax_scale."""
    wide = key.to(tl.int64)
    nope_rows = request_keys.nope + wide * keys.stride_token
    rope_rows = request_keys.rope + wide * keys.stride_rope_token
    k_a, k_b, k_r = _load_tiles(nope_rows, rope_rows, is_key, MASKED, 0, TRAITS, TILES)
    scores = tl.dot(query_tile.a, tl.trans(k_a), input_precision="ieee")
    if TILES.B > 0:
        scores = tl.dot(query_tile.b, tl.trans(k_b), scores, input_precision="ieee")
    if TILES.R > 0:
        scores = tl.dot(query_tile.r, tl.trans(k_r), scores, input_precision="ieee")
    if query_tile.scale is not None:
        scores *= query_tile.scale[:, None]
    if request_keys.scale is not None:
        scale = (key // TRAITS.KEYS_PER_SCALE).to(tl.int64)
        scales_at = request_keys.scale + scale * keys.stride_scale
        scales = tl.load(scales_at, mask=is_key, other=0.0)
        scores *= scales[None, :]
    return scores


@triton.jit
def _add_non_finite(
    rows, any_first, any_last, v, v_scale, stride_v_scale_token, values, TRAITS: tl.constexpr
):
    """Add the values that are not finite to the stored results of the queries that see them.

    Their probabilities do not matter: NaN and infinity times a positive number are unchanged. This
    is rare and slow. It works in memory, so that the usual case needs no registers for it.
    """
    COLUMNS: tl.constexpr = 16
    D_V: tl.constexpr = TRAITS.D_V
    KEYS_PER_SCALE: tl.constexpr = TRAITS.KEYS_PER_SCALE
    BLOCK_Q: tl.constexpr = rows.is_query.shape[0]
    for start in tl.range(0, D_V, COLUMNS, num_stages=1):
        column = start + tl.arange(0, COLUMNS)
        special = tl.zeros([BLOCK_Q, COLUMNS], tl.float32)
        for i in tl.range(0, any_last - any_first, num_stages=1):
            key = any_first + i
            value_row = v + key.to(tl.int64) * values.stride_token
            is_column = column < D_V
            value = tl.load(value_row + column * values.stride_column, mask=is_column, other=0)
            if value.dtype == tl.uint8:
                value = widen_e4m3(value, tl.bfloat16, TRAITS.HAS_FP8)
            value = value.to(tl.float32)
            if v_scale is not None:
                scale = (key // KEYS_PER_SCALE).to(tl.int64)
                value *= tl.load(v_scale + scale * stride_v_scale_token)
            is_added = ((key >= rows.first) & (key < rows.last))[:, None] & ~is_finite(value)[
                None, :
            ]
            special += tl.where(is_added, value[None, :] / rows.denominator[:, None], 0.0)
        pointers = rows.out[:, None] + column[None, :]
        inside = rows.is_query[:, None] & (column < D_V)[None, :]
        written = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        tl.store(pointers, (written + special).to(rows.out.dtype.element_ty), mask=inside)
