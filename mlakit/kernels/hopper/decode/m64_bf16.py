"""Absorbed MLA decode over 16-bit cache rows of 576 columns, 64 heads per CTA: the seesaw.

Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
Work       a work tile is 64 heads of one query over a split of its request's keys, 64 keys per
           block; a persistent CTA computes one tile after the other

Two warpgroups; no producer, except a gather producer where no TMA tile fits a page
(`m64_bf16_loads`). Each is the QK-softmax warpgroup of every second block and the PV warpgroup of
one column half of the accumulator:

             even (columns 0 to 255)                  odd (columns 256 to 511)
  a pair     S0 = Q·K0ᵀ, issued in the pair before    S1 = Q·K1ᵀ, likewise
  of blocks  reload K0 rope                           reload K1 rope
             m0 = next_row_max(m, S0)
             P0 = exp2(S0 − m0)    ---- m0, P0 ---->
             acc = acc·a + P0·V0 left                 acc = acc·a + P0·V0 right
             reload K0 left                           m1 = next_row_max(m0, S1)
                                   <--- m1, P1 -----  P1 = exp2(S1 − m1)
             acc = acc·b + P1·V1 left                 acc = acc·b + P1·V1 right
                                                      reload K0 right
             reload K1 left                           reload K1 right
             S0 = Q·K0ᵀ of the next pair              S1 = Q·K1ᵀ of the next pair

Order      S0, S1, P0·V0, P1·V1 use the tensor cores one after the other, so they are busy while a
           softmax is computed. The odd QK waits until the last wgmma of the even one is issued, the
           even PV likewise for the odd QK
Barriers   one per column half of a block and per rotated part, counted in pairs. There are no
           `empty` barriers: a warpgroup reloads only what it was the last to read, and the exchange
           of P orders the rest. `mlakit emulate decode-h128-bf16` runs it in random orders
Memory     231 KB of shared memory, 255 registers. Splits write float32 partials (`merge_partials`)
Limits     D_C = 512, D_R = 64; any page size, by TMA or by a gather producer
Numbers    P is rounded to the cache's dtype, acc is float32; rows past a query's last key are
           zeroed before they are multiplied, for 0 · NaN is NaN
Lineage    the seesaw schedule is FlashMLA's, and so is its name; this code is written from that
           idea. Differences: warpgroups exchange row_max only, and each computes the rescale of the
           other's block itself; rescaling is lazy; TMA tiles are column halves of 256, reloaded by
           the warpgroup that read them last; persistent CTAs load the next tile's queries and first
           pair during the epilogue; any page size
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

from mlakit.kernels.hopper.decode.arguments import VARYING
from mlakit.kernels.hopper.decode.m64_bf16_loads import (
    HALF_BYTES,
    ROPE_BYTES,
    alloc_all_barriers,
    alloc_smem,
    gather_producer,
    load_even,
    load_odd_left,
    load_odd_right,
    load_part,
    lookup_start,
    prefetch_block,
    rows_of_pair,
)
from mlakit.kernels.hopper.decode.scheduler import (
    count_tiles,
    first_tile_or_warm_up,
    key_range,
    launch_dependents,
    locate_tile,
    make_work,
    next_tile,
)
from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.epilogue import finish_rows, store_lse, store_staged
from mlakit.kernels.hopper.device.paged_loads import NO_ROW, wait_block
from mlakit.kernels.hopper.device.primitives import acc_layout, opaque_zero, rescale_acc, zero_rows
from mlakit.kernels.hopper.device.softmax import (
    INITIAL_ROW_MAX,
    Logits,
    mask_scores,
    next_row_max,
    visible_scores,
)


@record
class Operands:
    """What both warpgroups read and write."""

    inputs: object
    packed_rows: object
    scheduler: object
    outputs: object
    smem: object
    barriers: object
    logits: object


@record
class Softmax:
    """The online softmax of a work tile."""

    row_max: object  # [64], kept until a score exceeds it by far
    row_sum: object


@gluon.jit
def _add_qk(inputs, q, k, BLOCK: gl.constexpr, part, phase, zero, scores):
    """scores + q·kᵀ, issued as soon as the keys have arrived."""
    wait_block(inputs, part.full, phase)
    keys = k.index(zero + BLOCK).permute((1, 0))
    return warpgroup_mma(q.index(zero), keys, scores, is_async=True)


@gluon.jit
def _mask(scores, block, keys, IS_LAST: gl.constexpr, logits):
    """Mask the last pair; those before have nothing to hide, unless the plan is external."""
    # besides, some compilers would keep the mask's columns in registers through the loop
    if IS_LAST or logits.TRAITS.IS_EXTERNAL_PLAN:
        return mask_scores(scores, block, keys, 1, logits)
    else:
        return visible_scores(scores, logits)


@gluon.jit
def _even_pair(
    pair, pairs_done, keys, operands, q_rope, acc, softmax, scores, pair_rows, IS_LAST: gl.constexpr
):
    """The even warpgroup's side of a pair of blocks; `pair_rows` are those of the next pair."""
    SCORES: gl.constexpr = scores.type.layout
    PROBS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    inputs, smem, barriers = operands.inputs, operands.smem, operands.barriers
    logits = operands.logits
    DTYPE: gl.constexpr = smem.left.dtype
    phase = (pairs_done + pair) & 1
    zero = opaque_zero()
    block = keys.first_block + 2 * pair
    rows_even, rows_odd = pair_rows
    if not IS_LAST:
        load_part(
            inputs.kv_rope,
            rows_even,
            inputs.ROPE_COLUMN,
            barriers.rope_even,
            smem.rope,
            0,
            ROPE_BYTES,
        )
        pair_rows = rows_of_pair(inputs, keys, block + 4)
    scores = _mask(scores, block, keys, IS_LAST, logits)
    even_max = next_row_max(softmax.row_max, gl.max(scores, 1) * logits.scale)
    rescale = gl.exp2(softmax.row_max - even_max)
    exponentials = gl.exp2(scores * logits.scale - gl.expand_dims(even_max, 1))
    probs = exponentials.to(DTYPE)
    smem.max_even.store(even_max)
    smem.p_even.store(probs)
    fence_async_shared()
    mbarrier.arrive(barriers.p_even, count=1)
    acc = rescale_acc(acc, rescale)
    own_probs = gl.convert_layout(probs, PROBS)
    if IS_LAST:
        zero_rows(smem.left, (0,), keys.end - block * 64)
    mbarrier.wait(barriers.scores_odd, phase)
    pending = warpgroup_mma(own_probs, smem.left.index(zero), acc, is_async=True)
    row_sum = softmax.row_sum * rescale + gl.sum(exponentials, 1)
    acc, own_probs = warpgroup_mma_wait(0, deps=(pending, own_probs))
    if not IS_LAST:
        load_part(inputs.kv, rows_even, 0, barriers.left_even, smem.left, 0, HALF_BYTES)
    mbarrier.wait(barriers.p_odd, phase)
    row_max = smem.max_odd.load(gl.SliceLayout(1, SCORES))
    odd_rescale = gl.exp2(even_max - row_max)
    row_sum = row_sum * odd_rescale
    acc = rescale_acc(acc, odd_rescale)
    if IS_LAST:
        zero_rows(smem.left, (1,), keys.end - block * 64 - 64)
    pending = warpgroup_mma(smem.p_odd, smem.left.index(zero + 1), acc, is_async=True)
    if not IS_LAST:
        zeros = gl.zeros([64, 64], gl.float32, SCORES)
        wait_block(inputs, barriers.rope_even.full, phase ^ 1)
        rope_keys = smem.rope.index(zero).permute((1, 0))
        qk = warpgroup_mma(q_rope, rope_keys, zeros, use_acc=False, is_async=True)
        # the rotated columns keep the tensor cores busy while the left half is reloaded
        acc = warpgroup_mma_wait(1, deps=(pending,))
        load_part(inputs.kv, rows_odd, 0, barriers.left_odd, smem.left, 1, HALF_BYTES)
        qk = _add_qk(inputs, smem.q_left, smem.left, 0, barriers.left_even, phase ^ 1, zero, qk)
        qk = _add_qk(inputs, smem.q_right, smem.right, 0, barriers.right_even, phase ^ 1, zero, qk)
        mbarrier.arrive(barriers.scores_even, count=1)
        scores = warpgroup_mma_wait(0, deps=(qk,))
    else:
        acc = warpgroup_mma_wait(0, deps=(pending,))
    return acc, Softmax(row_max, row_sum), scores, pair_rows


@gluon.jit
def _odd_pair(
    pair, pairs_done, keys, operands, q_rope, acc, softmax, scores, pair_rows, IS_LAST: gl.constexpr
):
    """The odd warpgroup's side of the same pair."""
    SCORES: gl.constexpr = scores.type.layout
    PROBS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    inputs, smem, barriers = operands.inputs, operands.smem, operands.barriers
    logits = operands.logits
    DTYPE: gl.constexpr = smem.left.dtype
    phase = (pairs_done + pair) & 1
    zero = opaque_zero()
    block = keys.first_block + 2 * pair
    rows_even, rows_odd = pair_rows
    if not IS_LAST:
        load_part(
            inputs.kv_rope,
            rows_odd,
            inputs.ROPE_COLUMN,
            barriers.rope_odd,
            smem.rope,
            1,
            ROPE_BYTES,
        )
        pair_rows = rows_of_pair(inputs, keys, block + 4)
    scores = _mask(scores, block + 1, keys, IS_LAST, logits)
    mbarrier.wait(barriers.p_even, phase)
    even_max = smem.max_even.load(gl.SliceLayout(1, SCORES))
    acc = rescale_acc(acc, gl.exp2(softmax.row_max - even_max))
    if IS_LAST:
        zero_rows(smem.right, (0,), keys.end - block * 64)
    pending = warpgroup_mma(smem.p_even, smem.right.index(zero), acc, is_async=True)
    odd_max = next_row_max(even_max, gl.max(scores, 1) * logits.scale)
    exponentials = gl.exp2(scores * logits.scale - gl.expand_dims(odd_max, 1))
    probs = exponentials.to(DTYPE)
    smem.max_odd.store(odd_max)
    smem.p_odd.store(probs)
    fence_async_shared()
    mbarrier.arrive(barriers.p_odd, count=1)
    row_sum = softmax.row_sum * gl.exp2(softmax.row_max - odd_max) + gl.sum(exponentials, 1)
    acc = warpgroup_mma_wait(0, deps=(pending,))
    acc = rescale_acc(acc, gl.exp2(even_max - odd_max))
    own_probs = gl.convert_layout(probs, PROBS)
    if IS_LAST:
        zero_rows(smem.right, (1,), keys.end - block * 64 - 64)
    pending = warpgroup_mma(own_probs, smem.right.index(zero + 1), acc, is_async=True)
    if not IS_LAST:
        load_part(inputs.kv, rows_even, 256, barriers.right_even, smem.right, 0, HALF_BYTES)
    acc, own_probs = warpgroup_mma_wait(0, deps=(pending, own_probs))
    if not IS_LAST:
        load_part(inputs.kv, rows_odd, 256, barriers.right_odd, smem.right, 1, HALF_BYTES)
        zeros = gl.zeros([64, 64], gl.float32, SCORES)
        mbarrier.wait(barriers.scores_even, phase ^ 1)
        wait_block(inputs, barriers.rope_odd.full, phase ^ 1)
        rope_keys = smem.rope.index(zero + 1).permute((1, 0))
        qk = warpgroup_mma(q_rope, rope_keys, zeros, use_acc=False, is_async=True)
        qk = _add_qk(inputs, smem.q_right, smem.right, 1, barriers.right_odd, phase ^ 1, zero, qk)
        qk = _add_qk(inputs, smem.q_left, smem.left, 1, barriers.left_odd, phase ^ 1, zero, qk)
        mbarrier.arrive(barriers.scores_odd, count=1)
        scores = warpgroup_mma_wait(0, deps=(qk,))
    return acc, Softmax(odd_max, row_sum), scores, pair_rows


@gluon.jit
def _first_scores(
    inputs, smem, barriers, q_rope, phase, IS_EVEN: gl.constexpr, LAYOUT: gl.constexpr
):
    """The scores of a work tile's first block, or of its second."""
    zeros = gl.zeros([64, 64], gl.float32, LAYOUT)
    zero = opaque_zero()
    if IS_EVEN:
        # without an order: either block may be the first to arrive
        mbarrier.arrive(barriers.scores_even, count=1)
        wait_block(inputs, barriers.rope_even.full, phase)
        keys = smem.rope.index(zero).permute((1, 0))
        qk = warpgroup_mma(q_rope, keys, zeros, use_acc=False, is_async=True)
        qk = _add_qk(inputs, smem.q_left, smem.left, 0, barriers.left_even, phase, zero, qk)
        qk = _add_qk(inputs, smem.q_right, smem.right, 0, barriers.right_even, phase, zero, qk)
    else:
        mbarrier.wait(barriers.scores_even, phase)
        wait_block(inputs, barriers.rope_odd.full, phase)
        keys = smem.rope.index(zero + 1).permute((1, 0))
        qk = warpgroup_mma(q_rope, keys, zeros, use_acc=False, is_async=True)
        qk = _add_qk(inputs, smem.q_right, smem.right, 1, barriers.right_odd, phase, zero, qk)
        qk = _add_qk(inputs, smem.q_left, smem.left, 1, barriers.left_odd, phase, zero, qk)
        mbarrier.arrive(barriers.scores_odd, count=1)
    return warpgroup_mma_wait(0, deps=(qk,))


@gluon.jit
def _store_half(tile, outputs, heads, staging, acc, softmax, IS_EVEN: gl.constexpr):
    """Store a warpgroup's column half of the result; the even warpgroup also stores the lse."""
    row = gl.arange(0, 64, gl.SliceLayout(1, acc_layout(64)))
    lse, out_scale = finish_rows(
        tile, outputs, heads, tile.first_head + row, softmax.row_max, softmax.row_sum
    )
    out_scale = gl.convert_layout(out_scale, gl.SliceLayout(1, acc.type.layout))
    acc = acc * gl.expand_dims(out_scale, 1)
    store_staged(tile, outputs, heads, acc, 0 if IS_EVEN else 256, staging)
    if IS_EVEN:
        store_lse(tile, outputs, heads, row, lse)


@gluon.jit
def _warpgroup(IS_EVEN: gl.constexpr, item, index, operands):
    inputs, scheduler, outputs = operands.inputs, operands.scheduler, operands.outputs
    smem, barriers = operands.smem, operands.barriers
    SCORES: gl.constexpr = acc_layout(64)
    ACC: gl.constexpr = acc_layout(256)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    token, first_head, rows, next_rows = lookup_start(inputs, scheduler, item, index)
    if IS_EVEN:
        load_even(inputs, token, first_head, rows, smem, barriers)
        load_odd_left(inputs, next_rows, smem, barriers)
    else:
        load_odd_right(inputs, next_rows, smem, barriers)
    pairs_done = item * 0  # its parity is the phase of the barriers
    tiles_done = item * 0
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        num_pairs = gl.maximum((keys.end_block - keys.first_block + 1) // 2, 1)
        pair_rows = rows_of_pair(inputs, keys, keys.first_block + 2)
        # while the first loads are in flight; in later tiles there are enough of them
        own_rows = pair_rows[0] if IS_EVEN else pair_rows[1]
        prefetch_block(inputs, operands.packed_rows, gl.where(tiles_done == 0, own_rows, NO_ROW))
        mbarrier.wait(barriers.q, tiles_done & 1)
        own_probs = smem.p_even if IS_EVEN else smem.p_odd
        q_rope = own_probs.load(gl.DotOperandLayout(0, SCORES, 2))
        acc = gl.zeros([64, 256], gl.float32, ACC)
        softmax = Softmax(
            row_max=gl.full([64], INITIAL_ROW_MAX, gl.float32, ROW),
            row_sum=gl.zeros([64], gl.float32, ROW),
        )
        scores = _first_scores(inputs, smem, barriers, q_rope, pairs_done & 1, IS_EVEN, SCORES)
        last_pair = num_pairs - 1
        for pair in range(last_pair):
            if IS_EVEN:
                acc, softmax, scores, pair_rows = _even_pair(
                    pair, pairs_done, keys, operands, q_rope, acc, softmax, scores, pair_rows, False
                )
            else:
                acc, softmax, scores, pair_rows = _odd_pair(
                    pair, pairs_done, keys, operands, q_rope, acc, softmax, scores, pair_rows, False
                )
        # looked up now: the loads that follow this tile then wait for no other load
        next_item, next_index = next_tile(scheduler, item, index + gl.num_programs(0))
        token, first_head, rows, next_rows = lookup_start(inputs, scheduler, next_item, next_index)
        if IS_EVEN:
            acc, softmax, scores, pair_rows = _even_pair(
                last_pair, pairs_done, keys, operands, q_rope, acc, softmax, scores, pair_rows, True
            )
            smem.sum_even.store(softmax.row_sum)
            mbarrier.arrive(barriers.sum_even, count=1)
            mbarrier.wait(barriers.sum_odd, tiles_done & 1)
            row_sum = softmax.row_sum + smem.sum_odd.load(ROW)
            softmax = softmax.replace(row_sum=row_sum)
            # queries, keys and P have all been read: the next loads overlap with the epilogue
            if next_item < scheduler.last_item:
                load_even(inputs, token, first_head, rows, smem, barriers)
            # located again: kept through the loop, it would take registers
            tile = locate_tile(scheduler, item, index)
            _store_half(tile, outputs, scheduler.heads, smem.left.index(1), acc, softmax, True)
            if next_item < scheduler.last_item:
                load_odd_left(inputs, next_rows, smem, barriers)
        else:
            acc, softmax, scores, pair_rows = _odd_pair(
                last_pair, pairs_done, keys, operands, q_rope, acc, softmax, scores, pair_rows, True
            )
            smem.sum_odd.store(softmax.row_sum)
            mbarrier.arrive(barriers.sum_odd, count=1)
            mbarrier.wait(barriers.sum_even, tiles_done & 1)
            row_sum = softmax.row_sum + smem.sum_even.load(ROW)
            softmax = softmax.replace(row_sum=row_sum)
            tile = locate_tile(scheduler, item, index)
            _store_half(tile, outputs, scheduler.heads, smem.right.index(1), acc, softmax, False)
            if next_item < scheduler.last_item:
                load_odd_right(inputs, next_rows, smem, barriers)
        pairs_done += num_pairs
        tiles_done += 1
        item = next_item
        index = next_index


@gluon.jit
def _even_warpgroup(item, index, operands):
    _warpgroup(True, item, index, operands)


@gluon.jit
def _odd_warpgroup(item, index, operands):
    _warpgroup(False, item, index, operands)


@gluon.jit(do_not_specialize=VARYING)
def mla_decode_m64_bf16_kernel(
    q,  # TMA descriptors: tiles of 64 x 256
    q_rope,  # of 64 x 64
    kv,  # likewise; of PAGE rows where pages are smaller
    kv_rope,
    scale_log2,
    stride_table_request,
    q_token_rows,
    q_rope_token_rows,
    heads,
    slot_rows,
    stride_lse_token,
    batch,  # these four are of `arguments`
    schedule,
    outputs,
    gather,
    packed_rows,  # the cache, if nothing lies between its rows, or None
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `configs.M64Bf16Config`
):
    """Run the plan on a grid (work tiles of a request that run at once, CTAs of the plan)."""
    inputs, scheduler, outputs = make_work(
        (q, q_rope, kv, kv_rope),
        (stride_table_request, q_token_rows, q_rope_token_rows, heads, slot_rows, stride_lse_token),
        (batch, schedule, outputs, gather),
        TRAITS,
        CONFIG.HEAD_TILES,
        HAS_WARM_UP=True,
    )
    smem = alloc_smem(kv)
    barriers = alloc_all_barriers(gather.words)
    scheduler, item, index = first_tile_or_warm_up(scheduler, schedule)
    if item < scheduler.last_item:
        launch_dependents(scheduler, item)
        operands = Operands(
            inputs=inputs,
            packed_rows=packed_rows,
            scheduler=scheduler,
            outputs=outputs,
            smem=smem,
            barriers=barriers,
            logits=Logits(scale_log2, TRAITS.SCORES),
        )
        args = (item, index, operands)
        if gather.words is None:
            gl.warp_specialize(
                [(_even_warpgroup, args), (_odd_warpgroup, args)],
                [4],
                [CONFIG.WARPGROUP_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (_even_warpgroup, args),
                    (_odd_warpgroup, args),
                    (gather_producer, (item, index, inputs, scheduler, smem, barriers)),
                ],
                [4, 4],
                [CONFIG.WARPGROUP_REGISTERS, CONFIG.PRODUCER_REGISTERS],
            )
