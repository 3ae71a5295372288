"""Absorbed attention over paged rows of 576 columns, 512 of them values: the seesaw.

Work       a program: 64 heads of one query over a range of its request's keys, 64 keys a block;
           one such unit after the other, as the plan's items say
Two warpgroups of four warps, no producer, but where rows come one by one (`decode_copier`). Each
owns half of the value columns of the sum:

             even (columns 0 to 255)                  odd (columns 256 to 511)
  a pair     S0 = Q·K0ᵀ, begun in the pair before     S1 = Q·K1ᵀ, likewise
  of blocks  reload K0 rope                           reload K1 rope
             m0 = next_peak(m, S0)
             P0 = exp2(S0 − m0)    ---- m0, P0 ---->
             O = O·a + P0·V0 left                     O = O·a + P0·V0 right
             reload K0 left                           m1 = next_peak(m0, S1)
                                   <--- m1, P1 -----  P1 = exp2(S1 − m1)
             O = O·b + P1·V1 left                     O = O·b + P1·V1 right
                                                      reload K0 right
             reload K1 left                           reload K1 right
             S0 = Q·K0ᵀ of the next pair              S1 = Q·K1ᵀ of the next pair

Order      S0, S1, P0·V0, P1·V1: one after the other they have the tensor cores, which are then busy
           while weights are found. The odd scores wait until the last of the even ones are being
           multiplied, the even values likewise for the odd scores
Barriers   one per half of a block and per rope part, counted in pairs. None says that a buffer is
           free: a warpgroup reloads only what it was the last to read, the exchange of P orders
           the rest. `scripts/seesaw_orders.py` is a model of it all, in random orders
Memory     231 KB of shared memory, 255 registers; partials of units that do not see all keys of
           their query go to scratch in float32, `merge_partials` joins them
Numbers    P is rounded to the cache's dtype, sums are float32; rows past a query's last key are
           zeroed before they are multiplied, for 0 · NaN is NaN
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.decode_channels import (
    HALF_BYTES,
    ROPE_BYTES,
    ask_for_block,
    load_even,
    load_odd_left,
    load_odd_right,
    load_part,
    new_arrivals,
    new_buffers,
)
from mlakit.kernels.hopper.decode_copier import copy_pairs
from mlakit.kernels.hopper.decode_copies import await_rows
from mlakit.kernels.hopper.decode_results import store_half
from mlakit.kernels.hopper.decode_softmax import FIRST_PEAK, mask_scores, next_peak, with_sign
from mlakit.kernels.hopper.decode_work import (
    NO_ROW,
    Inputs,
    Results,
    Work,
    count_units,
    find_keys,
    find_place,
    find_start,
    first_unit,
    let_merge_start,
    next_unit,
    rows_of_pair,
)
from mlakit.kernels.hopper.primitives import opaque_zero, scale_rows, zero_rows

WORKER_REGISTERS = gl.constexpr(248)
COPYING_REGISTERS = gl.constexpr([240, 32])  # of a worker beside a copier, and of that


@gluon.jit
def _add_scores(inputs, q, k, BLOCK: gl.constexpr, load, phase, zero, scores):
    """scores + q·kᵀ, begun as soon as the keys have arrived."""
    await_rows(inputs, load.full, phase)
    keys = k.index(zero + BLOCK).permute((1, 0))
    return warpgroup_mma(q.index(zero), keys, scores, is_async=True)


@gluon.jit
def _mask(scores, block, keys, IS_LAST: gl.constexpr, SIGN: gl.constexpr, IS_GIVEN: gl.constexpr):
    """Hide what is not to be seen: there is nothing before the last pair, if the plan is ours."""
    # besides, some compilers would keep the mask's columns in registers through the loop
    if IS_LAST or IS_GIVEN:
        return mask_scores(scores, block, keys, 1, SIGN, IS_GIVEN)
    else:  # noqa: RET505
        return with_sign(scores, SIGN)


@gluon.jit
def _even_pair(
    pair, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak, total, scores,
    next_even, next_odd, scale, IS_LAST: gl.constexpr, SIGN: gl.constexpr,
    IS_GIVEN: gl.constexpr,
):  # fmt: skip
    """The even warpgroup's part of a pair of blocks; `next_*` are the rows of the next pair."""
    SCORES: gl.constexpr = scores.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    DTYPE: gl.constexpr = buffers.left.dtype
    phase = (pairs_before + pair) & 1
    zero = opaque_zero()
    block = keys.first_block + 2 * pair
    rows_even = next_even
    rows_odd = next_odd
    if not IS_LAST:
        load_part(inputs.kv_rope, rows_even, 512, arrivals.rope_even, buffers.rope, 0, ROPE_BYTES)
        next_even, next_odd = rows_of_pair(inputs, keys, block + 4)
    scores = _mask(scores, block, keys, IS_LAST, SIGN, IS_GIVEN)
    own_peak = next_peak(peak, gl.max(scores, 1) * scale)
    decay = gl.exp2(peak - own_peak)
    weights = gl.exp2(scores * scale - gl.expand_dims(own_peak, 1))
    rounded = weights.to(DTYPE)
    buffers.max_even.store(own_peak)
    buffers.p_even.store(rounded)
    fence_async_shared()
    mbarrier.arrive(arrivals.p_even, count=1)
    acc = scale_rows(acc, decay)
    own_weights = gl.convert_layout(rounded, WEIGHTS)
    if IS_LAST:
        zero_rows(buffers.left, (0,), keys.end - block * 64)
    mbarrier.wait(arrivals.scores_odd, phase)
    pending = warpgroup_mma(own_weights, buffers.left.index(zero), acc, is_async=True)
    total = total * decay + gl.sum(weights, 1)
    acc, own_weights = warpgroup_mma_wait(0, deps=(pending, own_weights))
    if not IS_LAST:
        load_part(inputs.kv, rows_even, 0, arrivals.left_even, buffers.left, 0, HALF_BYTES)
    mbarrier.wait(arrivals.p_odd, phase)
    peak = buffers.max_odd.load(gl.SliceLayout(1, SCORES))
    adjust = gl.exp2(own_peak - peak)
    total = total * adjust
    acc = scale_rows(acc, adjust)
    if IS_LAST:
        zero_rows(buffers.left, (1,), keys.end - block * 64 - 64)
    pending = warpgroup_mma(buffers.p_odd, buffers.left.index(zero + 1), acc, is_async=True)
    if not IS_LAST:
        nothing = gl.zeros([64, 64], gl.float32, SCORES)
        await_rows(inputs, arrivals.rope_even.full, phase ^ 1)
        rotated = buffers.rope.index(zero).permute((1, 0))
        dots = warpgroup_mma(q_rope, rotated, nothing, use_acc=False, is_async=True)
        # the rope part keeps the tensor cores busy while the left half is reloaded
        acc = warpgroup_mma_wait(1, deps=(pending,))
        load_part(inputs.kv, rows_odd, 0, arrivals.left_odd, buffers.left, 1, HALF_BYTES)
        dots = _add_scores(
            inputs, buffers.q_left, buffers.left, 0, arrivals.left_even, phase ^ 1, zero, dots
        )
        dots = _add_scores(
            inputs, buffers.q_right, buffers.right, 0, arrivals.right_even, phase ^ 1, zero, dots
        )
        mbarrier.arrive(arrivals.scores_even, count=1)
        scores = warpgroup_mma_wait(0, deps=(dots,))
    else:
        acc = warpgroup_mma_wait(0, deps=(pending,))
    return acc, peak, total, scores, next_even, next_odd


@gluon.jit
def _odd_pair(
    pair, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak, total, scores,
    next_even, next_odd, scale, IS_LAST: gl.constexpr, SIGN: gl.constexpr,
    IS_GIVEN: gl.constexpr,
):  # fmt: skip
    """The odd warpgroup's part of the same pair."""
    SCORES: gl.constexpr = scores.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    DTYPE: gl.constexpr = buffers.left.dtype
    phase = (pairs_before + pair) & 1
    zero = opaque_zero()
    block = keys.first_block + 2 * pair
    rows_even = next_even
    rows_odd = next_odd
    if not IS_LAST:
        load_part(inputs.kv_rope, rows_odd, 512, arrivals.rope_odd, buffers.rope, 1, ROPE_BYTES)
        next_even, next_odd = rows_of_pair(inputs, keys, block + 4)
    scores = _mask(scores, block + 1, keys, IS_LAST, SIGN, IS_GIVEN)
    mbarrier.wait(arrivals.p_even, phase)
    even_peak = buffers.max_even.load(gl.SliceLayout(1, SCORES))
    acc = scale_rows(acc, gl.exp2(peak - even_peak))
    if IS_LAST:
        zero_rows(buffers.right, (0,), keys.end - block * 64)
    pending = warpgroup_mma(buffers.p_even, buffers.right.index(zero), acc, is_async=True)
    new_peak = next_peak(even_peak, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - gl.expand_dims(new_peak, 1))
    rounded = weights.to(DTYPE)
    buffers.max_odd.store(new_peak)
    buffers.p_odd.store(rounded)
    fence_async_shared()
    mbarrier.arrive(arrivals.p_odd, count=1)
    total = total * gl.exp2(peak - new_peak) + gl.sum(weights, 1)
    acc = warpgroup_mma_wait(0, deps=(pending,))
    acc = scale_rows(acc, gl.exp2(even_peak - new_peak))
    own_weights = gl.convert_layout(rounded, WEIGHTS)
    if IS_LAST:
        zero_rows(buffers.right, (1,), keys.end - block * 64 - 64)
    pending = warpgroup_mma(own_weights, buffers.right.index(zero + 1), acc, is_async=True)
    if not IS_LAST:
        load_part(inputs.kv, rows_even, 256, arrivals.right_even, buffers.right, 0, HALF_BYTES)
    acc, own_weights = warpgroup_mma_wait(0, deps=(pending, own_weights))
    if not IS_LAST:
        load_part(inputs.kv, rows_odd, 256, arrivals.right_odd, buffers.right, 1, HALF_BYTES)
        nothing = gl.zeros([64, 64], gl.float32, SCORES)
        mbarrier.wait(arrivals.scores_even, phase ^ 1)
        await_rows(inputs, arrivals.rope_odd.full, phase ^ 1)
        rotated = buffers.rope.index(zero + 1).permute((1, 0))
        dots = warpgroup_mma(q_rope, rotated, nothing, use_acc=False, is_async=True)
        dots = _add_scores(
            inputs, buffers.q_right, buffers.right, 1, arrivals.right_odd, phase ^ 1, zero, dots
        )
        dots = _add_scores(
            inputs, buffers.q_left, buffers.left, 1, arrivals.left_odd, phase ^ 1, zero, dots
        )
        mbarrier.arrive(arrivals.scores_odd, count=1)
        scores = warpgroup_mma_wait(0, deps=(dots,))
    return acc, new_peak, total, scores, next_even, next_odd


@gluon.jit
def _first_scores(
    inputs, buffers, arrivals, q_rope, phase, IS_EVEN: gl.constexpr, LAYOUT: gl.constexpr
):
    """The scores of a unit's first block, or of its second."""
    nothing = gl.zeros([64, 64], gl.float32, LAYOUT)
    zero = opaque_zero()
    if IS_EVEN:
        # without order: either block may be the first to arrive
        mbarrier.arrive(arrivals.scores_even, count=1)
        await_rows(inputs, arrivals.rope_even.full, phase)
        keys = buffers.rope.index(zero).permute((1, 0))
        dots = warpgroup_mma(q_rope, keys, nothing, use_acc=False, is_async=True)
        dots = _add_scores(
            inputs, buffers.q_left, buffers.left, 0, arrivals.left_even, phase, zero, dots
        )
        dots = _add_scores(
            inputs, buffers.q_right, buffers.right, 0, arrivals.right_even, phase, zero, dots
        )
    else:
        mbarrier.wait(arrivals.scores_even, phase)
        await_rows(inputs, arrivals.rope_odd.full, phase)
        keys = buffers.rope.index(zero + 1).permute((1, 0))
        dots = warpgroup_mma(q_rope, keys, nothing, use_acc=False, is_async=True)
        dots = _add_scores(
            inputs, buffers.q_right, buffers.right, 1, arrivals.right_odd, phase, zero, dots
        )
        dots = _add_scores(
            inputs, buffers.q_left, buffers.left, 1, arrivals.left_odd, phase, zero, dots
        )
        mbarrier.arrive(arrivals.scores_odd, count=1)
    return warpgroup_mma_wait(0, deps=(dots,))


@gluon.jit
def _warpgroup(
    IS_EVEN: gl.constexpr, item, index, inputs, packed_rows, work, results, buffers, arrivals,
    scale, SIGN: gl.constexpr, IS_GIVEN: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    SUMS: gl.constexpr = gl.SliceLayout(1, SCORES)
    token, first_head, rows, next_rows = find_start(inputs, work, item, index)
    if IS_EVEN:
        load_even(inputs, token, first_head, rows, buffers, arrivals)
        load_odd_left(inputs, next_rows, buffers, arrivals)
    else:
        load_odd_right(inputs, next_rows, buffers, arrivals)
    pairs_before = item * 0  # its parity is the phase of the barriers
    units_before = item * 0
    # addresses of a thread's elements are found in each turn: kept, they would be spilled
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        num_pairs = gl.maximum((keys.end_block - keys.first_block + 1) // 2, 1)
        next_even, next_odd = rows_of_pair(inputs, keys, keys.first_block + 2)
        # while the first rows are on their way; later units find the copies busy enough
        own_rows = next_even if IS_EVEN else next_odd
        ask_for_block(inputs, packed_rows, gl.where(units_before == 0, own_rows, NO_ROW))
        mbarrier.wait(arrivals.q, units_before & 1)
        own_weights = buffers.p_even if IS_EVEN else buffers.p_odd
        q_rope = own_weights.load(gl.DotOperandLayout(0, SCORES, 2))
        acc = gl.zeros([64, 256], gl.float32, VALUES)
        peak = gl.full([64], FIRST_PEAK, gl.float32, SUMS)
        total = gl.zeros([64], gl.float32, SUMS)
        scores = _first_scores(inputs, buffers, arrivals, q_rope, pairs_before & 1, IS_EVEN, SCORES)
        for pair in range(num_pairs - 1):
            if IS_EVEN:
                acc, peak, total, scores, next_even, next_odd = _even_pair(
                    pair, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak, total,
                    scores, next_even, next_odd, scale, False, SIGN, IS_GIVEN,
                )  # fmt: skip
            else:
                acc, peak, total, scores, next_even, next_odd = _odd_pair(
                    pair, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak, total,
                    scores, next_even, next_odd, scale, False, SIGN, IS_GIVEN,
                )  # fmt: skip
        # looked up now: the loads that follow this unit then wait for no other load
        next_item, next_index = next_unit(work, item, index + gl.num_programs(0))
        token, first_head, rows, next_rows = find_start(inputs, work, next_item, next_index)
        if IS_EVEN:
            acc, peak, total, scores, next_even, next_odd = _even_pair(
                num_pairs - 1, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak,
                total, scores, next_even, next_odd, scale, True, SIGN, IS_GIVEN,
            )  # fmt: skip
            buffers.sum_even.store(total)
            mbarrier.arrive(arrivals.sum_even, count=1)
            mbarrier.wait(arrivals.sum_odd, units_before & 1)
            total = total + buffers.sum_odd.load(SUMS)
            # queries, keys and weights have all been read: the next loads go on meanwhile
            if next_item < work.last_item:
                load_even(inputs, token, first_head, rows, buffers, arrivals)
            # found again: kept through the loop, it would take registers that that needs
            place = find_place(work, item, index)
            store_half(
                place, results, work.heads, buffers.left.index(1), acc, peak, total, True, SCORES
            )
            if next_item < work.last_item:
                load_odd_left(inputs, next_rows, buffers, arrivals)
        else:
            acc, peak, total, scores, next_even, next_odd = _odd_pair(
                num_pairs - 1, pairs_before, keys, inputs, buffers, arrivals, q_rope, acc, peak,
                total, scores, next_even, next_odd, scale, True, SIGN, IS_GIVEN,
            )  # fmt: skip
            buffers.sum_odd.store(total)
            mbarrier.arrive(arrivals.sum_odd, count=1)
            mbarrier.wait(arrivals.sum_even, units_before & 1)
            total = total + buffers.sum_even.load(SUMS)
            place = find_place(work, item, index)
            store_half(
                place, results, work.heads, buffers.right.index(1), acc, peak, total, False, SCORES
            )
            if next_item < work.last_item:
                load_odd_right(inputs, next_rows, buffers, arrivals)
        pairs_before += num_pairs
        units_before += 1
        item = next_item
        index = next_index


@gluon.jit
def _even_warpgroup(
    item, index, inputs, packed_rows, work, results, buffers, arrivals, scale, SIGN: gl.constexpr,
    IS_GIVEN: gl.constexpr,
):  # fmt: skip
    _warpgroup(
        True, item, index, inputs, packed_rows, work, results, buffers, arrivals, scale, SIGN,
        IS_GIVEN,
    )  # fmt: skip


@gluon.jit
def _odd_warpgroup(
    item, index, inputs, packed_rows, work, results, buffers, arrivals, scale, SIGN: gl.constexpr,
    IS_GIVEN: gl.constexpr,
):  # fmt: skip
    _warpgroup(
        False, item, index, inputs, packed_rows, work, results, buffers, arrivals, scale, SIGN,
        IS_GIVEN,
    )  # fmt: skip


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
def mla_decode_kernel(
    q,  # descriptors: boxes of 64 x 256, of 64 x 64 where rotated
    q_rope,
    kv,  # likewise; of PAGE rows where that are fewer
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
    words,  # the cache's first, if rows are copied one by one, or None
    row_quads,  # four words each, from a row of it to the next; or None
    packed_rows,  # the cache's first row, if there is nothing between rows, or None
    head_blocks: gl.constexpr,  # elsewhere a number, for which there are no registers here
    ROWS: gl.constexpr,  # 64
    PAGE_ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    IS_GIVEN: gl.constexpr,  # the plan is not of this kernel: see `_has_room`, `mask_scores`
    ITEM_COLUMNS: gl.constexpr,
):
    """grid: (units of a request that are worked on at once, workers of the plan)"""
    inputs = Inputs(
        q, q_rope, kv, kv_rope, q_token_rows, q_rope_token_rows, table, stride_table_request,
        stride_table_entry, PAGE_ROWS, PAGE, words, row_quads,
    )  # fmt: skip
    work = Work(
        items, partial_starts, q_starts, kv_lens, stride_q_starts, stride_kv_lens, heads,
        head_blocks, ROWS, slot_rows, gl.load(worker_starts + gl.program_id(1) + 1), IS_CAUSAL,
        IS_GIVEN, ITEM_COLUMNS, True,  # MAY_REHEARSE
    )  # fmt: skip
    results = Results(
        out, lse, partial_out, partial_lse, sink, stride_out_token, stride_out_head,
        stride_lse_token, stride_lse_head, stride_sink,
    )  # fmt: skip
    buffers = new_buffers(kv)
    arrivals = new_arrivals(words)
    work, item, index = first_unit(work, gl.load(worker_starts + gl.program_id(1)))
    if item < work.last_item:
        let_merge_start(work, item)
        args = (
            item, index, inputs, packed_rows, work, results, buffers, arrivals, scale_log2, SIGN,
            IS_GIVEN,
        )  # fmt: skip
        if words is None:
            gl.warp_specialize(
                [(_even_warpgroup, args), (_odd_warpgroup, args)], [4], [WORKER_REGISTERS]
            )
        else:
            gl.warp_specialize(
                [
                    (_even_warpgroup, args),
                    (_odd_warpgroup, args),
                    (copy_pairs, (item, index, inputs, work, buffers, arrivals)),
                ],
                [4, 4],
                COPYING_REGISTERS,
            )
