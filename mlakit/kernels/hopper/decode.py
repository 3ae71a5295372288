"""Absorbed attention over paged rows of 576 columns, 512 of them values: the seesaw.

Work       a program: 64 heads of one query over a range of its request's keys, 64 keys a block;
           one such unit after the other, as the plan's items say
Two warpgroups of four warps, no producer. Each owns half of the value columns of the sum:

             even (columns 0 to 255)                  odd (columns 256 to 511)
  a pair     S0 = Q·K0ᵀ, begun in the pair before     S1 = Q·K1ᵀ, likewise
  of blocks  reload K0 rope                           reload K1 rope
             m0 = max(m, S0)  ------- max_even ---->  m1 = max(m0, S1)
             P0 = exp2(S0 − m0)   <-- max_odd -----   P1 = exp2(S1 − m1)
             O = O·a + P0·V0 left                     O = O·a' + P1·V1 right
             --- p_even = P0·exp2(m0 − m1) ------>    <--- p_odd = P1 ---
             reload K0 left                           O += P0·V0 right
             O = O·b + P1·V1 left                     reload K1 right
             reload K1 left                           reload K0 right
             S0 = Q·K0ᵀ of the next pair              S1 = Q·K1ᵀ of the next pair

Barriers   one per half of a block and per rope part, counted in pairs. None says that a buffer is
           free: a warpgroup reloads only what it was the last to read, the exchange of maxima and
           of P orders the rest
Memory     231 KB of shared memory, 255 registers; partials of units that do not see all keys of
           their query go to scratch in float32, `merge_partials` joins them
Numbers    P is rounded to the cache's dtype, sums are float32; rows past a query's last key are
           zeroed before they are multiplied, for 0 · NaN is NaN
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import CacheLayer, KVShard
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.hopper.compat import record, tma_load
from mlakit.kernels.hopper.primitives import (
    add_scores,
    load_box,
    new_barrier,
    opaque_zero,
    zero_rows,
)
from mlakit.kernels.triton.decode_merge import merge_partials
from mlakit.kernels.triton.decode_plan import plan_decode
from mlakit.kernels.triton.launch import launch, target
from mlakit.masks import Mask
from mlakit.plan import DecodePlanTensors

ROWS = 64  # of a unit: heads of one query
BLOCK = 64  # keys
LEAST_TILES = 2  # pairs of blocks that are worth a worker
BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
WORKER_REGISTERS = gl.constexpr(248)

NOTHING = gl.constexpr(float("-inf"))
FIRST_PEAK = gl.constexpr(-1.0e30)  # finite: the difference of two peaks is never inf − inf
LN2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
HALF_BYTES = gl.constexpr(64 * 256 * 2)
ROPE_BYTES = gl.constexpr(64 * 64 * 2)
NO_ROW = gl.constexpr(2**30)  # past the end of every cache: reads as zeros


def mla_decode(
    q_latent: Tensor,  # [tokens, heads, 512], rows at one distance
    q_rope: Tensor,  # [tokens, heads, 64], likewise
    q_scale: None,
    layer: CacheLayer,
    page_table: Tensor,
    q_starts: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch] cached tokens, these queries included
    *,
    shard: KVShard,  # all of them
    splits: DecodePlanTensors | None,
    softmax_scale: float,
    mask: Mask,
    sink: Tensor | None,  # [heads] float32
    deterministic: bool,  # not
    out: Tensor,  # [tokens, heads, 512]
    lse: Tensor,  # [tokens, heads] float32
) -> None:
    (tokens, heads, _), batch = q_latent.shape, kv_lens.shape[0]
    if tokens == 0 or heads == 0:
        return
    plan = splits
    if plan is None:
        plan = plan_mla_decode(
            layer,
            page_table,
            q_starts,
            kv_lens,
            shard=shard,
            mask=mask,
            heads=heads,
            num_tokens=tokens,
            dtype=q_latent.dtype,
        )
    elif plan.empty_requests.shape[0] > 0:
        out.zero_()  # no item of a plan writes these
        lse.fill_(-torch.inf)
    head_blocks = triton.cdiv(heads, ROWS)
    units = triton.cdiv(tokens, batch) * head_blocks
    slot_rows = plan.slot_rows or units * ROWS
    partial_out = out.new_empty(plan.max_partials * slot_rows, out.shape[-1], dtype=torch.float32)
    partial_lse = lse.new_empty(plan.max_partials * slot_rows)
    rows, page_rows = _as_rows(layer.payload)
    q_rows, q_token_rows = _as_rows(q_latent)
    rope_rows, rope_token_rows = _as_rows(q_rope)
    launch(
        _mla_decode_kernel,
        (units, plan.worker_starts.shape[0] - 1),
        _boxes(q_rows, 256),
        _boxes(rope_rows, 64),
        _boxes(rows, 256),
        _boxes(rows, 64),
        page_table,
        q_starts,
        kv_lens,
        sink,
        out,
        lse,
        partial_out,
        partial_lse,
        plan.items,
        plan.worker_starts,
        plan.partial_starts,
        # a scale of 0 would turn the −inf of a hidden key into NaN
        max(abs(softmax_scale) * log2(e), SMALLEST_SCALE),
        *page_table.stride(),
        q_starts.stride(0),
        kv_lens.stride(0),
        *out.stride()[:2],
        *lse.stride(),
        0 if sink is None else sink.stride(0),
        q_token_rows,
        rope_token_rows,
        heads,
        slot_rows,
        HEAD_BLOCKS=head_blocks,
        PAGE_ROWS=page_rows,
        PAGE_BLOCKS=layer.page_size // BLOCK,
        IS_CAUSAL=mask.kind == "causal",
        IS_NEGATIVE=softmax_scale < 0,
        IS_GIVEN=plan.slot_rows != units * ROWS or plan.tile % BLOCK > 0,
        ITEM_COLUMNS=plan.items.shape[1],
        num_warps=4,
    )
    if plan.max_partials == 0:
        return
    merge_partials(
        partial_out,
        partial_lse,
        partial_starts=plan.partial_starts,
        q_starts=q_starts,
        kv_lens=kv_lens,
        padded_heads=head_blocks * ROWS,
        slot_rows=slot_rows,
        sink=sink,
        out=out,
        lse=lse,
    )


def plan_mla_decode(
    layer: CacheLayer,
    page_table: Tensor,
    q_starts: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    *,
    shard: KVShard,
    mask: Mask,
    heads: int,
    num_tokens: int,
    dtype: torch.dtype,  # of the queries, which changes nothing
) -> DecodePlanTensors:
    """A plan, made on the device, for as many workers as run at the same time."""
    padded_heads = triton.cdiv(heads, ROWS) * ROWS
    rows = triton.cdiv(num_tokens, max(kv_lens.shape[0], 1)) * padded_heads
    return plan_decode(
        q_starts,
        kv_lens,
        shard=shard,
        mask=mask,
        heads=padded_heads,
        num_workers=max(target(kv_lens.device).num_sms * ROWS // max(rows, ROWS), 1),
        tile=2 * BLOCK,
        least_tiles=LEAST_TILES,
        slot_rows=rows,
        capacity=page_table.shape[1] * layer.page_size,
    )


def _boxes(rows: Tensor, columns: int) -> TensorDescriptor:
    """Of 64 rows by so many columns."""
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [BLOCK, columns], BOX)


def _as_rows(pool: Tensor) -> tuple[Tensor, int]:
    """[n, m, columns] as rows at one distance, and how many of them the n are apart."""
    num_pages, page_size, columns = pool.shape
    distance = pool.stride(1)
    apart = pool.stride(0) // distance if num_pages > 1 else page_size
    rows = (num_pages - 1) * apart + page_size if num_pages else 0
    return pool.as_strided((rows, columns), (distance, 1)), apart


@record
class Inputs:
    """Where a unit's operands are."""

    q: object  # descriptors
    q_rope: object
    kv: object
    kv_rope: object
    q_token_rows: object  # rows of a descriptor from a token to the next
    q_rope_token_rows: object
    table: object
    stride_request: object
    stride_entry: object
    PAGE_ROWS: object  # rows of the cache's descriptor from a page to the next
    PAGE_BLOCKS: object


@record
class Work:
    """What there is to do."""

    items: object
    partial_starts: object
    q_starts: object
    kv_lens: object
    stride_q_starts: object
    stride_kv_lens: object
    heads: object
    HEAD_BLOCKS: object
    slot_rows: object
    last_item: object
    IS_CAUSAL: object
    IS_GIVEN: object  # the plan is not of this kernel
    ITEM_COLUMNS: object


@record
class Results:
    out: object
    lse: object
    partial_out: object
    partial_lse: object
    sink: object
    stride_out_token: object
    stride_out_head: object
    stride_lse_token: object
    stride_lse_head: object
    stride_sink: object


@record
class Buffers:
    """Shared memory. `left` and `right` are halves of the 512 latent columns, of two blocks."""

    q_left: object
    q_right: object
    left: object
    right: object
    rope: object
    p_even: object  # q's rope part until P0 replaces it
    p_odd: object
    max_even: object
    max_odd: object
    sum_even: object
    sum_odd: object


@record
class Arrivals:
    """Barriers: of loads, then of what one warpgroup tells the other."""

    q: object
    left_even: object
    left_odd: object
    right_even: object
    right_odd: object
    rope_even: object
    rope_odd: object
    max_even: object
    max_odd: object
    p_even: object
    p_odd: object
    sum_even: object
    sum_odd: object


@record
class Keys:
    """A unit's keys [low, end)."""

    entries: object  # the request's row of the page table
    first_block: object
    end_block: object
    low: object
    end: object


@record
class Place:
    """Where a unit's queries are and its results go."""

    token: object
    first_head: object
    slot: object  # −1: the result is final
    slot_row: object


@gluon.jit
def _load_item(work, item):
    """(request, first key, last key, slot; of the request: first query, queries, keys)."""
    at = work.items + work.ITEM_COLUMNS * item
    request = gl.load(at)
    first = gl.load(at + 1)
    last = gl.load(at + 2)
    slot = gl.load(at + 3)
    if work.ITEM_COLUMNS > 4:
        q_first = gl.load(at + 4)
        q_len = gl.load(at + 5)
        kv_len = gl.load(at + 6)
    else:
        starts = work.q_starts + request.to(gl.int64) * work.stride_q_starts
        q_first = gl.load(starts).to(gl.int32)
        q_len = gl.load(starts + work.stride_q_starts).to(gl.int32) - q_first
        kv_len = gl.load(work.kv_lens + request.to(gl.int64) * work.stride_kv_lens).to(gl.int32)
    return request, first, last, slot, q_first, q_len, kv_len


@gluon.jit
def _has_room(work, q_len, slot):
    """For the partials of a request that is split. Else the first of its items does all of it.

    Plans that are made for this kernel split no request without.
    """
    if work.IS_GIVEN:
        return (slot < 0) | (q_len * work.HEAD_BLOCKS * 64 <= work.slot_rows)
    else:  # noqa: RET505
        return slot == slot


@gluon.jit
def _num_units(work, item):
    """Units of an item, one per block of heads of each query."""
    request, _, _, slot, _, q_len, _ = _load_item(work, item)
    num_units = q_len * work.HEAD_BLOCKS
    if work.IS_GIVEN:
        is_first = slot == gl.load(work.partial_starts + request)
        num_units = gl.where(is_first | _has_room(work, q_len, slot), num_units, 0)
    return num_units


@gluon.jit
def _next_unit(work, item, index):
    """The first (item, unit of it) from these on that exists; item is `last_item` past the end."""
    is_found = item >= work.last_item
    while not is_found:
        is_found = index < _num_units(work, item)
        if not is_found:
            item += 1
            index = gl.program_id(0)
            is_found = item >= work.last_item
    return item, index


@gluon.jit
def _find_keys(inputs, work, item, index):
    request, low, last, slot, _, q_len, kv_len = _load_item(work, item)
    has_room = _has_room(work, q_len, slot)
    low = gl.where(has_room, low, 0)
    end = gl.where(has_room, gl.minimum(last, kv_len), kv_len)
    if work.IS_CAUSAL:
        end = gl.minimum(end, kv_len - q_len + index // work.HEAD_BLOCKS + 1)
    entries = inputs.table + request.to(gl.int64) * inputs.stride_request
    return Keys(entries, low // 64, (gl.maximum(end, 0) + 63) // 64, low, end)


@gluon.jit
def _find_place(work, item, index):
    _, _, _, slot, q_first, q_len, _ = _load_item(work, item)
    slot = gl.where(_has_room(work, q_len, slot), slot, -1)
    token = q_first + index // work.HEAD_BLOCKS
    slot_row = slot.to(gl.int64) * work.slot_rows + index * 64
    return Place(token, index % work.HEAD_BLOCKS * 64, slot, slot_row)


@gluon.jit
def _row_of(inputs, keys, block):
    """The first row of a block in the cache's descriptor; past the last key rows of zeros."""
    exists = block < keys.end_block
    entry = (block // inputs.PAGE_BLOCKS).to(gl.int64) * inputs.stride_entry
    page = gl.load(keys.entries + entry, mask=exists, other=0)
    row = page * inputs.PAGE_ROWS + block % inputs.PAGE_BLOCKS * 64
    return gl.where(exists, row, NO_ROW)


@gluon.jit
def _find_start(inputs, work, item, index):
    """Where a unit's operands begin: (token, first head, row of its first block, of its second)."""
    token, first_head, row, next_row = item * 0, item * 0, item * 0, item * 0
    if item < work.last_item:
        keys = _find_keys(inputs, work, item, index)
        place = _find_place(work, item, index)
        token, first_head = place.token, place.first_head
        row = _row_of(inputs, keys, keys.first_block)
        next_row = _row_of(inputs, keys, keys.first_block + 1)
    return token, first_head, row, next_row


@gluon.jit
def _load_even(inputs, token, first_head, row, buffers, arrivals):
    """Start with the queries of a unit and its first block."""
    q_row = token * inputs.q_token_rows + first_head
    rope_row = token * inputs.q_rope_token_rows + first_head
    load_box(inputs.kv_rope, row, 512, arrivals.rope_even, buffers.rope.index(0), ROPE_BYTES)
    load_box(inputs.kv, row, 0, arrivals.left_even, buffers.left.index(0), HALF_BYTES)
    mbarrier.expect(arrivals.q, ROPE_BYTES + 2 * HALF_BYTES)
    tma_load(inputs.q_rope, [rope_row, 0], arrivals.q, buffers.p_even)
    tma_load(inputs.q, [q_row, 0], arrivals.q, buffers.q_left.index(0))
    tma_load(inputs.q, [q_row, 256], arrivals.q, buffers.q_right.index(0))
    load_box(inputs.kv, row, 256, arrivals.right_even, buffers.right.index(0), HALF_BYTES)


@gluon.jit
def _load_odd_left(inputs, row, buffers, arrivals):
    """The left half of a unit's second block: it goes where the even warpgroup's result was."""
    load_box(inputs.kv, row, 0, arrivals.left_odd, buffers.left.index(1), HALF_BYTES)


@gluon.jit
def _load_odd_right(inputs, row, buffers, arrivals):
    """The rest of the second block."""
    load_box(inputs.kv_rope, row, 512, arrivals.rope_odd, buffers.rope.index(1), ROPE_BYTES)
    load_box(inputs.kv, row, 256, arrivals.right_odd, buffers.right.index(1), HALF_BYTES)


@gluon.jit
def _mask(scores, block, keys, IS_NEGATIVE: gl.constexpr, IS_GIVEN: gl.constexpr):
    """−inf for keys of a block that are not to be seen."""
    LAYOUT: gl.constexpr = scores.type.layout
    if IS_NEGATIVE:
        scores = -scores
    is_inside = block * 64 + 64 <= keys.end
    if IS_GIVEN:
        is_inside = is_inside & (block * 64 >= keys.low)
    if not is_inside:
        key = gl.expand_dims(block * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0)
        is_seen = key < keys.end
        if IS_GIVEN:
            is_seen = is_seen & (key >= keys.low)
        scores = gl.where(is_seen, scores, NOTHING)
    return scores


@gluon.jit
def _even_pair(
    pair, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak, total, scores,
    next_even, next_odd, scale, IS_LAST: gl.constexpr, IS_NEGATIVE: gl.constexpr,
    IS_GIVEN: gl.constexpr,
):  # fmt: skip
    """The even warpgroup's part of a pair of blocks; `next_*` are the rows of the next pair."""
    SCORES: gl.constexpr = scores.type.layout
    SUMS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    DTYPE: gl.constexpr = buffers.left.dtype
    phase = (pairs_before + pair) & 1
    zero = opaque_zero()
    block = keys.first_block + 2 * pair
    row_even = next_even
    row_odd = next_odd
    if not IS_LAST:
        load_box(
            inputs.kv_rope, row_even, 512, arrivals.rope_even, buffers.rope.index(0), ROPE_BYTES
        )
        next_even = _row_of(inputs, keys, block + 4)
        next_odd = _row_of(inputs, keys, block + 5)
    scores = _mask(scores, block, keys, IS_NEGATIVE, IS_GIVEN)
    own_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    buffers.max_even.store(own_peak)
    mbarrier.arrive(arrivals.max_even, count=1)
    decay = gl.exp2(peak - own_peak)
    weights = gl.exp2(scores * scale - gl.expand_dims(own_peak, 1))
    acc = acc * gl.expand_dims(gl.convert_layout(decay, SUMS), 1)
    own_weights = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
    if IS_LAST:
        zero_rows(buffers.left, 0, keys.end - block * 64)
    token = warpgroup_mma(own_weights, buffers.left.index(zero), acc, is_async=True)
    # to the other warpgroup the weights go as of the peak of both blocks
    mbarrier.wait(arrivals.max_odd, phase)
    peak = buffers.max_odd.load(gl.SliceLayout(1, SCORES))
    adjust = gl.exp2(own_peak - peak)
    buffers.p_even.store((weights * gl.expand_dims(adjust, 1)).to(DTYPE))
    fence_async_shared()
    mbarrier.arrive(arrivals.p_even, count=1)
    total = total * decay + gl.sum(weights, 1)
    acc, own_weights = warpgroup_mma_wait(0, deps=(token, own_weights))
    if not IS_LAST:
        load_box(inputs.kv, row_even, 0, arrivals.left_even, buffers.left.index(0), HALF_BYTES)
    total = total * adjust
    acc = acc * gl.expand_dims(gl.convert_layout(adjust, SUMS), 1)
    mbarrier.wait(arrivals.p_odd, phase)
    if IS_LAST:
        zero_rows(buffers.left, 1, keys.end - block * 64 - 64)
    token = warpgroup_mma(buffers.p_odd, buffers.left.index(zero + 1), acc, is_async=True)
    if not IS_LAST:
        nothing = gl.zeros([64, 64], gl.float32, SCORES)
        mbarrier.wait(arrivals.rope_even, phase ^ 1)
        rotated = buffers.rope.index(zero).permute((1, 0))
        dots = warpgroup_mma(q_rope, rotated, nothing, use_acc=False, is_async=True)
        # the rope part keeps the tensor cores busy while the left half is reloaded
        acc = warpgroup_mma_wait(1, deps=(token,))
        load_box(inputs.kv, row_odd, 0, arrivals.left_odd, buffers.left.index(1), HALF_BYTES)
        dots = add_scores(
            buffers.q_left, buffers.left, 0, arrivals.left_even, phase ^ 1, zero, dots
        )
        dots = add_scores(
            buffers.q_right, buffers.right, 0, arrivals.right_even, phase ^ 1, zero, dots
        )
        scores = warpgroup_mma_wait(0, deps=(dots,))
    else:
        acc = warpgroup_mma_wait(0, deps=(token,))
    return acc, peak, total, scores, next_even, next_odd


@gluon.jit
def _odd_pair(
    pair, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak, total, scores,
    next_even, next_odd, scale, IS_LAST: gl.constexpr, IS_NEGATIVE: gl.constexpr,
    IS_GIVEN: gl.constexpr,
):  # fmt: skip
    """The odd warpgroup's part of the same pair."""
    SCORES: gl.constexpr = scores.type.layout
    SUMS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    DTYPE: gl.constexpr = buffers.left.dtype
    phase = (pairs_before + pair) & 1
    zero = opaque_zero()
    block = keys.first_block + 2 * pair
    row_even = next_even
    row_odd = next_odd
    if not IS_LAST:
        load_box(inputs.kv_rope, row_odd, 512, arrivals.rope_odd, buffers.rope.index(1), ROPE_BYTES)
        next_even = _row_of(inputs, keys, block + 4)
        next_odd = _row_of(inputs, keys, block + 5)
    scores = _mask(scores, block + 1, keys, IS_NEGATIVE, IS_GIVEN)
    largest = gl.max(scores, 1) * scale
    mbarrier.wait(arrivals.max_even, phase)
    new_peak = gl.maximum(buffers.max_even.load(gl.SliceLayout(1, SCORES)), largest)
    buffers.max_odd.store(new_peak)
    mbarrier.arrive(arrivals.max_odd, count=1)
    weights = gl.exp2(scores * scale - gl.expand_dims(new_peak, 1))
    rounded = weights.to(DTYPE)
    decay = gl.exp2(peak - new_peak)
    acc = acc * gl.expand_dims(gl.convert_layout(decay, SUMS), 1)
    own_weights = gl.convert_layout(rounded, WEIGHTS)
    if IS_LAST:
        zero_rows(buffers.right, 1, keys.end - block * 64 - 64)
    token = warpgroup_mma(own_weights, buffers.right.index(zero + 1), acc, is_async=True)
    buffers.p_odd.store(rounded)
    fence_async_shared()
    mbarrier.arrive(arrivals.p_odd, count=1)
    mbarrier.wait(arrivals.p_even, phase)
    if IS_LAST:
        zero_rows(buffers.right, 0, keys.end - block * 64)
    token = warpgroup_mma(buffers.p_even, buffers.right.index(zero), token, is_async=True)
    total = total * decay + gl.sum(weights, 1)
    if not IS_LAST:
        nothing = gl.zeros([64, 64], gl.float32, SCORES)
        token, own_weights = warpgroup_mma_wait(1, deps=(token, own_weights))
        load_box(inputs.kv, row_odd, 256, arrivals.right_odd, buffers.right.index(1), HALF_BYTES)
        acc = warpgroup_mma_wait(0, deps=(token,))
        load_box(inputs.kv, row_even, 256, arrivals.right_even, buffers.right.index(0), HALF_BYTES)
        mbarrier.wait(arrivals.rope_odd, phase ^ 1)
        rotated = buffers.rope.index(zero + 1).permute((1, 0))
        dots = warpgroup_mma(q_rope, rotated, nothing, use_acc=False, is_async=True)
        dots = add_scores(
            buffers.q_right, buffers.right, 1, arrivals.right_odd, phase ^ 1, zero, dots
        )
        dots = add_scores(buffers.q_left, buffers.left, 1, arrivals.left_odd, phase ^ 1, zero, dots)
        scores = warpgroup_mma_wait(0, deps=(dots,))
    else:
        acc, own_weights = warpgroup_mma_wait(0, deps=(token, own_weights))
    return acc, new_peak, total, scores, next_even, next_odd


@gluon.jit
def _first_scores(buffers, arrivals, q_rope, phase, IS_EVEN: gl.constexpr, LAYOUT: gl.constexpr):
    """The scores of a unit's first block, or of its second."""
    nothing = gl.zeros([64, 64], gl.float32, LAYOUT)
    zero = opaque_zero()
    if IS_EVEN:
        mbarrier.wait(arrivals.rope_even, phase)
        keys = buffers.rope.index(zero).permute((1, 0))
        dots = warpgroup_mma(q_rope, keys, nothing, use_acc=False, is_async=True)
        dots = add_scores(buffers.q_left, buffers.left, 0, arrivals.left_even, phase, zero, dots)
        dots = add_scores(buffers.q_right, buffers.right, 0, arrivals.right_even, phase, zero, dots)
    else:
        mbarrier.wait(arrivals.rope_odd, phase)
        keys = buffers.rope.index(zero + 1).permute((1, 0))
        dots = warpgroup_mma(q_rope, keys, nothing, use_acc=False, is_async=True)
        dots = add_scores(buffers.q_right, buffers.right, 1, arrivals.right_odd, phase, zero, dots)
        dots = add_scores(buffers.q_left, buffers.left, 1, arrivals.left_odd, phase, zero, dots)
    return warpgroup_mma_wait(0, deps=(dots,))


@gluon.jit
def _store(
    place, results, heads, buffer, acc, peak, total, IS_EVEN: gl.constexpr, SCORES: gl.constexpr
):
    """Write a warpgroup's half of a unit's result (by way of `buffer`) or of its partial."""
    SUMS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    FIRST: gl.constexpr = 0 if IS_EVEN else 256
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    head = place.first_head + row
    is_empty = total == 0.0
    lse = (peak + gl.log2(gl.where(is_empty, 1.0, total))) * LN2
    lse = gl.where(is_empty, NOTHING, lse)
    # an infinite score: the weights are NaN, the sum of the exponentials is not
    lse = gl.where(peak == float("inf"), peak, lse)
    denominator = total
    if results.sink is not None:
        sink = gl.load(results.sink + head * results.stride_sink, mask=head < heads, other=0.0)
        with_sink = denominator + gl.exp2(sink * LOG2_E - peak)
        denominator = gl.where(place.slot < 0, with_sink, denominator)  # a merge adds it once
    scale = gl.where(is_empty, 0.0, 1.0 / denominator)
    acc = acc * gl.expand_dims(gl.convert_layout(scale, SUMS), 1)
    if place.slot < 0:
        _store_final(place, results, heads, buffer, acc, FIRST)
        if IS_EVEN:
            lse_row = results.lse + place.token.to(gl.int64) * results.stride_lse_token
            gl.store(lse_row + head * results.stride_lse_head, lse, mask=head < heads)
    else:
        _store_partial(place, results, heads, acc, FIRST)
        if IS_EVEN:
            gl.store(results.partial_lse + place.slot_row + row, lse, mask=head < heads)


@gluon.jit
def _store_final(place, results, heads, buffer, acc, FIRST: gl.constexpr):
    """By way of shared memory: sixteen bytes a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    buffer.store(acc.to(results.out.dtype.element_ty))
    head = place.first_head + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    row = results.out + place.token.to(gl.int64) * results.stride_out_token
    at = gl.expand_dims(head * results.stride_out_head, 1) + gl.expand_dims(column, 0)
    gl.store(row + at, buffer.load(LAYOUT), mask=gl.expand_dims(head < heads, 1))
    fence_async_shared()


@gluon.jit
def _store_partial(place, results, heads, acc, FIRST: gl.constexpr):
    """In float32; four threads write a sector of 32 bytes."""
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    slot = results.partial_out + place.slot_row * 512
    at = gl.expand_dims(row * 512, 1) + gl.expand_dims(column, 0)
    gl.store(slot + at, acc, mask=gl.expand_dims(place.first_head + row < heads, 1))


@gluon.jit
def _warpgroup(
    IS_EVEN: gl.constexpr, item, index, inputs, work, results, buffers, arrivals, scale,
    IS_NEGATIVE: gl.constexpr, IS_GIVEN: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    SUMS: gl.constexpr = gl.SliceLayout(1, SCORES)
    token, first_head, row, next_row = _find_start(inputs, work, item, index)
    if IS_EVEN:
        _load_even(inputs, token, first_head, row, buffers, arrivals)
        _load_odd_left(inputs, next_row, buffers, arrivals)
    else:
        _load_odd_right(inputs, next_row, buffers, arrivals)
    pairs_before = item * 0  # its parity is the phase of the barriers
    units_before = item * 0
    while item < work.last_item:
        keys = _find_keys(inputs, work, item, index)
        num_pairs = gl.maximum((keys.end_block - keys.first_block + 1) // 2, 1)
        next_even = _row_of(inputs, keys, keys.first_block + 2)
        next_odd = _row_of(inputs, keys, keys.first_block + 3)
        mbarrier.wait(arrivals.q, units_before & 1)
        q_rope = buffers.p_even.load(gl.DotOperandLayout(0, SCORES, 2))
        acc = gl.zeros([64, 256], gl.float32, VALUES)
        peak = gl.full([64], FIRST_PEAK, gl.float32, SUMS)
        total = gl.zeros([64], gl.float32, SUMS)
        scores = _first_scores(buffers, arrivals, q_rope, pairs_before & 1, IS_EVEN, SCORES)
        for pair in range(num_pairs - 1):
            if IS_EVEN:
                acc, peak, total, scores, next_even, next_odd = _even_pair(
                    pair, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak, total,
                    scores, next_even, next_odd, scale, False, IS_NEGATIVE, IS_GIVEN,
                )  # fmt: skip
            else:
                acc, peak, total, scores, next_even, next_odd = _odd_pair(
                    pair, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak, total,
                    scores, next_even, next_odd, scale, False, IS_NEGATIVE, IS_GIVEN,
                )  # fmt: skip
        # looked up now: the loads that follow this unit then wait for no other load
        next_item, next_index = _next_unit(work, item, index + gl.num_programs(0))
        token, first_head, row, next_row = _find_start(inputs, work, next_item, next_index)
        if IS_EVEN:
            acc, peak, total, scores, next_even, next_odd = _even_pair(
                num_pairs - 1, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak,
                total, scores, next_even, next_odd, scale, True, IS_NEGATIVE, IS_GIVEN,
            )  # fmt: skip
            buffers.sum_even.store(total)
            mbarrier.arrive(arrivals.sum_even, count=1)
            mbarrier.wait(arrivals.sum_odd, units_before & 1)
            total = total + buffers.sum_odd.load(SUMS)
            # queries, keys and weights have all been read: the next loads go on meanwhile
            if next_item < work.last_item:
                _load_even(inputs, token, first_head, row, buffers, arrivals)
            # found again: kept through the loop, it would take registers that that needs
            place = _find_place(work, item, index)
            _store(
                place, results, work.heads, buffers.left.index(1), acc, peak, total, True, SCORES
            )
            if next_item < work.last_item:
                _load_odd_left(inputs, next_row, buffers, arrivals)
        else:
            acc, peak, total, scores, next_even, next_odd = _odd_pair(
                num_pairs - 1, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak,
                total, scores, next_even, next_odd, scale, True, IS_NEGATIVE, IS_GIVEN,
            )  # fmt: skip
            buffers.sum_odd.store(total)
            mbarrier.arrive(arrivals.sum_odd, count=1)
            mbarrier.wait(arrivals.sum_even, units_before & 1)
            total = total + buffers.sum_even.load(SUMS)
            place = _find_place(work, item, index)
            _store(
                place, results, work.heads, buffers.right.index(1), acc, peak, total, False, SCORES
            )
            if next_item < work.last_item:
                _load_odd_right(inputs, next_row, buffers, arrivals)
        pairs_before += num_pairs
        units_before += 1
        item = next_item
        index = next_index


@gluon.jit
def _even_warpgroup(
    item, index, inputs, work, results, buffers, arrivals, scale, IS_NEGATIVE: gl.constexpr,
    IS_GIVEN: gl.constexpr,
):  # fmt: skip
    _warpgroup(
        True, item, index, inputs, work, results, buffers, arrivals, scale, IS_NEGATIVE, IS_GIVEN
    )


@gluon.jit
def _odd_warpgroup(
    item, index, inputs, work, results, buffers, arrivals, scale, IS_NEGATIVE: gl.constexpr,
    IS_GIVEN: gl.constexpr,
):  # fmt: skip
    _warpgroup(
        False, item, index, inputs, work, results, buffers, arrivals, scale, IS_NEGATIVE, IS_GIVEN
    )


@gluon.jit(
    # other strides are 1 nearly always, and take no registers then
    do_not_specialize=[
        "stride_table_request",
        "stride_lse_token",
        "q_token_rows",
        "q_rope_token_rows",
        "heads",
        "slot_rows",
    ]
)
def _mla_decode_kernel(
    q,  # descriptors: boxes of 64 x 256, of 64 x 64 where rotated
    q_rope,
    kv,
    kv_rope,
    table,
    q_starts,
    kv_lens,
    sink,
    out,
    lse,
    partial_out,  # [slots, slot_rows, 512] float32
    partial_lse,  # [slots, slot_rows] float32
    items,
    worker_starts,
    partial_starts,
    scale_log2,
    stride_table_request,
    stride_table_entry,
    stride_q_starts,
    stride_kv_lens,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_sink,
    q_token_rows,
    q_rope_token_rows,
    heads,
    slot_rows,
    HEAD_BLOCKS: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    PAGE_BLOCKS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_NEGATIVE: gl.constexpr,
    IS_GIVEN: gl.constexpr,  # the plan is not of this kernel: see `_has_room`, `_mask`
    ITEM_COLUMNS: gl.constexpr,
):
    """grid: (units of a request that are worked on at once, workers of the plan)"""
    DTYPE: gl.constexpr = kv.dtype
    BOX_LAYOUT: gl.constexpr = kv.layout
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    inputs = Inputs(
        q, q_rope, kv, kv_rope, q_token_rows, q_rope_token_rows, table, stride_table_request,
        stride_table_entry, PAGE_ROWS, PAGE_BLOCKS,
    )  # fmt: skip
    work = Work(
        items, partial_starts, q_starts, kv_lens, stride_q_starts, stride_kv_lens, heads,
        HEAD_BLOCKS, slot_rows, gl.load(worker_starts + gl.program_id(1) + 1), IS_CAUSAL,
        IS_GIVEN, ITEM_COLUMNS,
    )  # fmt: skip
    results = Results(
        out, lse, partial_out, partial_lse, sink, stride_out_token, stride_out_head,
        stride_lse_token, stride_lse_head, stride_sink,
    )  # fmt: skip
    buffers = Buffers(
        gl.allocate_shared_memory(DTYPE, [1, 64, 256], BOX_LAYOUT),
        gl.allocate_shared_memory(DTYPE, [1, 64, 256], BOX_LAYOUT),
        gl.allocate_shared_memory(DTYPE, [2, 64, 256], BOX_LAYOUT),
        gl.allocate_shared_memory(DTYPE, [2, 64, 256], BOX_LAYOUT),
        gl.allocate_shared_memory(DTYPE, [2, 64, 64], BOX_LAYOUT),
        gl.allocate_shared_memory(DTYPE, [64, 64], BOX_LAYOUT),
        gl.allocate_shared_memory(DTYPE, [64, 64], BOX_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
    )
    arrivals = Arrivals(
        new_barrier(), new_barrier(), new_barrier(), new_barrier(), new_barrier(), new_barrier(),
        new_barrier(), new_barrier(), new_barrier(), new_barrier(), new_barrier(), new_barrier(),
        new_barrier(),
    )  # fmt: skip
    item, index = _next_unit(work, gl.load(worker_starts + gl.program_id(1)), gl.program_id(0))
    if item < work.last_item:
        args = (
            item, index, inputs, work, results, buffers, arrivals, scale_log2, IS_NEGATIVE, IS_GIVEN
        )  # fmt: skip
        gl.warp_specialize(
            [(_even_warpgroup, args), (_odd_warpgroup, args)], [4], [WORKER_REGISTERS]
        )
