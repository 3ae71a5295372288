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

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.arguments import PrefillArguments
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.configs import pick_prefill_config
from mlakit.kernels.triton.primitives import (
    finish_softmax,
    is_finite,
    mask_interval,
    softmax_step,
    widen_e4m3,
)


def mla_prefill(a: PrefillArguments, out: Tensor, lse: Tensor) -> None:
    q, k_nope, k_rope, v = (_as_bytes(each) for each in (a.q, a.k_nope, a.k_rope, a.v))
    q_starts, kv_starts, softmax_scale, mask = a.q_starts, a.kv_starts, a.softmax_scale, a.mask
    alibi_slopes, sink, v_scale = a.alibi_slopes, a.sink, a.v_scale
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
        q,
        k_nope,
        k_rope,
        v,
        q_starts,
        kv_starts,
        a.q_scale,
        a.k_scale,
        v_scale,
        alibi_slopes,
        sink,
        out,
        lse,
        # a scale of 0 would turn the −inf of a hidden key into NaN
        max(abs(softmax_scale) * log2(e), SMALLEST_SCALE),
        mask.window,
        batch,
        heads,
        num_slots,
        *q.stride()[:2],
        *k_nope.stride()[:2],
        k_rope.stride(0),
        *v.stride(),
        *out.stride()[:2],
        *lse.stride(),
        q_starts.stride(0),
        kv_starts.stride(0),
        *((0, 0) if a.q_scale is None else a.q_scale.stride()),
        0 if a.k_scale is None else a.k_scale.stride(0),
        *((0, 0) if v_scale is None else v_scale.stride()),
        0 if alibi_slopes is None else alibi_slopes.stride(0),
        0 if sink is None else sink.stride(0),
        MASK=mask.traits,
        IS_NEGATIVE=softmax_scale < 0,
        KEYS_PER_SCALE=a.keys_per_scale,
        D_N=d_n,
        D_R=d_r,
        D_V=d_v,
        BLOCK_A=d_a,
        BLOCK_B=_padded(d_n - d_a),
        BLOCK_R=_padded(d_r),
        BLOCK_V=_padded(d_v),
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        BLOCK_MASKED=config.block_masked,
        HEAD_GROUP=config.head_group,
        STAGES=config.num_stages,
        HAS_FP8=device.has_fp8,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _as_bytes(x: Tensor) -> Tensor:
    """e4m3 as uint8: GPUs below sm_89 have no such type."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _power_of_two_below(n: int) -> int:
    """The largest power of two ≤ n; 0 for 0."""
    return 1 << (n.bit_length() - 1) if n > 0 else 0


def _padded(width: int) -> int:
    """The width of a dot's operand: a power of two, 16 at least; 0 where there are no columns."""
    return max(triton.next_power_of_2(width), 16) if width > 0 else 0


# differ from call to call: specialised, each would compile further kernels
VARYING = [
    "window", "batch", "heads", "num_slots", "stride_q_starts", "stride_kv_starts", "stride_slopes",
    "stride_sink", "stride_lse_token", "stride_lse_head", "stride_qs_token", "stride_qs_head",
    "stride_ks", "stride_vs_token", "stride_vs_head",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _mla_prefill_kernel(
    q,  # [tokens, heads, D_N + D_R]
    k_nope,  # [keys, heads, D_N]
    k_rope,  # [keys, D_R]
    v,  # [keys, heads, D_V]
    q_starts,  # [batch + 1]
    kv_starts,  # [batch + 1]
    q_scale,  # [tokens, heads] float32 or None
    k_scale,  # [keys] or [keys // KEYS_PER_SCALE + batch] float32, or None
    v_scale,  # [keys, heads] or [keys // KEYS_PER_SCALE + batch, heads] float32, or None
    alibi_slopes,  # [heads] float32 or None
    sink,  # [heads] float32 or None
    out,  # [tokens, heads, D_V]
    lse,  # [tokens, heads] float32
    scale_log2,
    window,
    batch,
    heads,
    num_slots,
    stride_q_token,
    stride_q_head,
    stride_kn_token,
    stride_kn_head,
    stride_kr_token,
    stride_v_token,
    stride_v_head,
    stride_v_column,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_q_starts,
    stride_kv_starts,
    stride_qs_token,
    stride_qs_head,
    stride_ks,
    stride_vs_token,
    stride_vs_head,
    stride_slopes,
    stride_sink,
    MASK: tl.constexpr,  # `MaskTraits`
    IS_NEGATIVE: tl.constexpr,  # the scale is −scale_log2
    KEYS_PER_SCALE: tl.constexpr,
    D_N: tl.constexpr,
    D_R: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_A: tl.constexpr,  # the first columns of D_N, a power of two of them
    BLOCK_B: tl.constexpr,  # the others, 0 or rounded up to a power of two
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_MASKED: tl.constexpr,  # keys per iteration where the mask is applied
    HEAD_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    head, slot = _head_and_slot(tl.program_id(0), heads, num_slots, HEAD_GROUP)
    request = _request_of(slot, q_starts, stride_q_starts, batch, BLOCK_Q)
    q_start = tl.load(q_starts + request * stride_q_starts).to(tl.int32)
    q_len = tl.load(q_starts + (request + 1) * stride_q_starts).to(tl.int32) - q_start
    first_query = (slot - _first_slot(request, q_start, BLOCK_Q)) * BLOCK_Q
    if first_query >= q_len:
        return
    kv_start = tl.load(kv_starts + request * stride_kv_starts).to(tl.int64)
    kv_end = tl.load(kv_starts + (request + 1) * stride_kv_starts).to(tl.int64)
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
    q_rows = q + token * stride_q_token + head.to(tl.int64) * stride_q_head
    q_a, q_b, q_r = _load_tiles(
        q_rows, q_rows, is_query, True, D_N, D_N, D_R, BLOCK_A, BLOCK_B, BLOCK_R, HAS_FP8
    )
    if IS_NEGATIVE:
        q_a, q_b, q_r = -q_a, -q_b, -q_r
    row_scale = None
    if q_scale is not None:
        q_scale += head.to(tl.int64) * stride_qs_head
        row_scale = tl.load(q_scale + token * stride_qs_token, mask=is_query, other=0.0)
    slope = 0.0
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head * stride_slopes) * 1.4426950408889634  # log2(e)

    k_nope += kv_start * stride_kn_token + head.to(tl.int64) * stride_kn_head
    k_rope += kv_start * stride_kr_token
    first_scale = kv_start
    if KEYS_PER_SCALE > 1:
        first_scale = kv_start // KEYS_PER_SCALE + request
    if k_scale is not None:
        k_scale += first_scale * stride_ks
    if v_scale is not None:
        v_scale += first_scale * stride_vs_token + head.to(tl.int64) * stride_vs_head
    v += kv_start * stride_v_token + head.to(tl.int64) * stride_v_head

    row_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    tile = tl.arange(0, BLOCK_K)
    for start in tl.range(full_first, full_last, BLOCK_K, num_stages=STAGES):
        key = start + tile
        scores = _scores(
            q_a, q_b, q_r, k_nope, k_rope, row_scale, k_scale, key, tile >= 0, False,
            stride_kn_token, stride_kr_token, stride_ks, KEYS_PER_SCALE, D_N, D_R, BLOCK_A, BLOCK_B,
            BLOCK_R, HAS_FP8,
        )  # fmt: skip
        if alibi_slopes is not None:
            scores = scores * scale_log2 + slope * (key[None, :] - position[:, None])
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
        else:
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        values = _load_rows(
            v + key.to(tl.int64) * stride_v_token, tile >= 0, False, 0, D_V, BLOCK_V, HAS_FP8,
            stride_v_column,
        )  # fmt: skip
        if v_scale is not None:
            scale = (key // KEYS_PER_SCALE).to(tl.int64)
            probs *= tl.load(v_scale + scale * stride_vs_token)[None, :]
        acc = acc * rescale[:, None]
        acc = tl.dot(probs.to(values.dtype), values, acc, input_precision="ieee")

    # computed again, with an opaque zero: kept through the loop, they would take registers
    query = first_query + tl.where(batch < 0, 1, 0) + tl.arange(0, BLOCK_Q)
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
        scores = _scores(
            q_a, q_b, q_r, k_nope, k_rope, row_scale, k_scale, key, is_key, True,
            stride_kn_token, stride_kr_token, stride_ks, KEYS_PER_SCALE, D_N, D_R, BLOCK_A, BLOCK_B,
            BLOCK_R, HAS_FP8,
        )  # fmt: skip
        if alibi_slopes is not None:
            scores = scores * scale_log2 + slope * (key[None, :] - position[:, None])
            scores = tl.where(visible, scores, -float("inf"))
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
        else:
            scores = tl.where(visible, scores, -float("inf"))
            probs, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        rows = v + key.to(tl.int64) * stride_v_token
        values = _load_rows(rows, is_key, True, 0, D_V, BLOCK_V, HAS_FP8, stride_v_column)
        is_value_finite = is_finite(values)
        if v_scale is not None:
            scale = (key // KEYS_PER_SCALE).to(tl.int64)
            scales = tl.load(v_scale + scale * stride_vs_token, mask=is_key, other=0.0)
            is_scale_finite = is_finite(scales)
            is_value_finite &= is_scale_finite[:, None]
            probs *= tl.where(is_scale_finite, scales, 0.0)[None, :]
        all_finite &= tl.min(is_value_finite.to(tl.int32))
        acc = acc * rescale[:, None]
        # 0 · NaN is NaN: values that are not finite are left out here and added in the end
        values = tl.where(is_value_finite, values, 0.0)
        acc = tl.dot(probs.to(values.dtype), values, acc, input_precision="ieee")

    sink_log2 = None
    if sink is not None:
        sink_log2 = tl.load(sink + head * stride_sink) * 1.4426950408889634  # log2(e)
    denominator, row_lse = finish_softmax(row_max, row_sum, sink_log2)
    column = tl.arange(0, BLOCK_V)
    out_rows = out + token * stride_out_token + head.to(tl.int64) * stride_out_head
    tl.store(
        out_rows[:, None] + column[None, :],
        (acc / denominator[:, None]).to(out.dtype.element_ty),
        mask=is_query[:, None] & (column < D_V)[None, :],
    )
    lse_rows = lse + token * stride_lse_token + head.to(tl.int64) * stride_lse_head
    tl.store(lse_rows, row_lse, mask=is_query)

    if all_finite == 0:
        tl.debug_barrier()  # out is read back, also where other threads wrote it
        _add_non_finite(
            out_rows, is_query, denominator, first, last, v, v_scale, any_first, any_last,
            stride_v_token, stride_v_column, stride_vs_token, KEYS_PER_SCALE, D_V, BLOCK_Q, HAS_FP8,
        )  # fmt: skip


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
def _request_of(slot, q_starts, stride, batch, BLOCK_Q: tl.constexpr):
    """The last request whose first slot is not above `slot`, by bisection."""
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        q_start = tl.load(q_starts + middle * stride).to(tl.int32)
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
    D_N: tl.constexpr,
    D_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """The columns of rows in three tiles; a tile without columns is an unused number."""
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
    q_a,
    q_b,
    q_r,
    k_nope,
    k_rope,
    row_scale,  # [BLOCK_Q] or None
    k_scale,
    key,  # [BLOCK_K]
    is_key,
    MASKED: tl.constexpr,
    stride_kn_token,
    stride_kr_token,
    stride_ks,
    KEYS_PER_SCALE: tl.constexpr,
    D_N: tl.constexpr,
    D_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """q·k [BLOCK_Q, BLOCK_K] float32, without softmax_scale."""
    wide = key.to(tl.int64)
    k_a, k_b, k_r = _load_tiles(
        k_nope + wide * stride_kn_token, k_rope + wide * stride_kr_token,
        is_key, MASKED, 0, D_N, D_R, BLOCK_A, BLOCK_B, BLOCK_R, HAS_FP8,
    )  # fmt: skip
    scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
    if BLOCK_B > 0:
        scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee")
    if BLOCK_R > 0:
        scores = tl.dot(q_r, tl.trans(k_r), scores, input_precision="ieee")
    if row_scale is not None:
        scores *= row_scale[:, None]
    if k_scale is not None:
        scale = (key // KEYS_PER_SCALE).to(tl.int64)
        scales = tl.load(k_scale + scale * stride_ks, mask=is_key, other=0.0)
        scores *= scales[None, :]
    return scores


@triton.jit
def _add_non_finite(
    out_rows,  # [BLOCK_Q] pointers
    is_query,  # [BLOCK_Q]
    denominator,  # [BLOCK_Q]
    first,  # [BLOCK_Q]: query i sees the keys [first, last)
    last,
    v,
    v_scale,
    any_first,
    any_last,
    stride_v_token,
    stride_v_column,
    stride_vs_token,
    KEYS_PER_SCALE: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Add the values that are not finite to the stored results of the queries that see them.

    Their probabilities do not matter: NaN and infinity times a positive number are unchanged. This
    is rare and slow. It works in memory, so that the usual case needs no registers for it.
    """
    COLUMNS: tl.constexpr = 16
    for start in tl.range(0, D_V, COLUMNS, num_stages=1):
        column = start + tl.arange(0, COLUMNS)
        special = tl.zeros([BLOCK_Q, COLUMNS], tl.float32)
        for i in tl.range(0, any_last - any_first, num_stages=1):
            key = any_first + i
            row = v + key.to(tl.int64) * stride_v_token
            value = tl.load(row + column * stride_v_column, mask=column < D_V, other=0)
            if value.dtype == tl.uint8:
                value = widen_e4m3(value, tl.bfloat16, HAS_FP8)
            value = value.to(tl.float32)
            if v_scale is not None:
                value *= tl.load(v_scale + (key // KEYS_PER_SCALE).to(tl.int64) * stride_vs_token)
            counts = ((key >= first) & (key < last))[:, None] & ~is_finite(value)[None, :]
            special += tl.where(counts, value[None, :] / denominator[:, None], 0.0)
        pointers = out_rows[:, None] + column[None, :]
        inside = is_query[:, None] & (column < D_V)[None, :]
        written = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        tl.store(pointers, (written + special).to(out_rows.dtype.element_ty), mask=inside)
