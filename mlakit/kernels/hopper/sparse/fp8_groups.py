"""The consumers of `fp8_m64` for rows with a scale per 128 columns (fp8_block128).

Products of values and scales do not fit float16: so each scale multiplies what its columns add to
the scores, and the probabilities that its columns are multiplied by.

Scores     the accumulator of QK is multiplied by a ratio of scales between two groups of columns
           (`GroupScales`), each time once the wgmma before is done. From right to left: the PV
           warpgroup releases the right half of a block first
PV         of the left half takes probabilities from registers, one accumulator per group. Those of
           the right half go through shared memory: of one group in the tile of the block's rotated
           columns, which QK has read

             QK-softmax                                       PV
  a block    P of four groups, meanwhile PV of
             columns 0 to 127 of the block before
                                                    probs ->  acc = acc·a + P·V, two groups
             S of the next block, five wgmma;             <-  empty
             meanwhile PV of columns 128 to 255

Lineage    own design
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.compat import reinterpret
from mlakit.kernels.hopper.decode.pipeline import two_stages
from mlakit.kernels.hopper.decode.softmax import (
    NEG_INF,
    PROB_SCALE,
    SMALLEST_SCALE,
    apply_sign,
    next_row_max,
)
from mlakit.kernels.hopper.primitives import SMEM_16BIT, acc_layout, opaque_zero, rescale_acc
from mlakit.kernels.hopper.sparse.epilogue import store_values
from mlakit.kernels.hopper.sparse.fp8_dequant import read_count
from mlakit.kernels.hopper.sparse.fp8_query import SCORES, load_query, scale_query
from mlakit.kernels.hopper.sparse.fp8_softmax import (
    Softmax,
    finish_tile,
    initial_softmax,
    inverse_power,
    load_block_scale,
    receive_out_scale,
)
from mlakit.kernels.hopper.sparse.lists import locate_tile

ACC = gl.constexpr(acc_layout(128))
COLUMN = gl.constexpr(gl.SliceLayout(0, SCORES))
PROBS = gl.constexpr(gl.DotOperandLayout(0, ACC, k_width=2))


@gluon.jit
def _factor(vectors, stage):
    """float32 [1, 64 entries]"""
    return gl.expand_dims(vectors.index(stage).load(COLUMN), 0)


@gluon.jit
def _group(query_half, tiles, stage, FIRST: gl.constexpr):
    """The operands of QK of 128 columns."""
    queries = query_half.index(opaque_zero()).slice(FIRST, 128, dim=1)
    return queries, tiles.index(stage).slice(FIRST, 128, dim=1).permute((1, 0))


@gluon.jit
def _first_qk(query, stages, number):
    """Issue QK of columns 384 to 511."""
    stage, phase = two_stages(number)
    mbarrier.wait(stages.right_full.index(stage), phase)
    fence_async_shared()  # of the dequant warpgroup's stores
    zeros = gl.zeros([64, 64], gl.float32, SCORES)
    queries, keys = _group(query.right, stages.right, stage, 128)
    return warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _second_qk(scores, query, stages, number):
    """Issue QK of columns 256 to 383, and wait for the columns left of them."""
    stage, phase = two_stages(number)
    queries, keys = _group(query.right, stages.right, stage, 0)
    scores *= _factor(stages.groups.first, stage)
    qk = warpgroup_mma(queries, keys, scores, is_async=True)
    mbarrier.wait(stages.left_full.index(stage), phase)
    mbarrier.wait(stages.rope_full.index(stage), phase)
    fence_async_shared()
    return qk


@gluon.jit
def _other_qk(scores, query, stages, number):
    """Scores of a block, of which QK of rotated columns is pending."""
    stage, _ = two_stages(number)
    groups = stages.groups
    scores *= _factor(groups.second, stage)
    queries, keys = _group(query.left, stages.left, stage, 128)
    qk = warpgroup_mma(queries, keys, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(qk,)) * _factor(groups.third, stage)
    queries, keys = _group(query.left, stages.left, stage, 0)
    qk = warpgroup_mma(queries, keys, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(qk,)) * _factor(groups.last, stage)
    keys = stages.rope.index(stage).permute((1, 0))
    return warpgroup_mma(query.rope.index(opaque_zero()), keys, scores, is_async=True)


@gluon.jit
def _softmax_step(scores, number, softmax, row_scale, stages, SIGN: gl.constexpr):
    """(exponentials, rescale of acc, softmax after this block)"""
    stage, _ = two_stages(number)
    is_invalid = (_factor(stages.groups.last, stage) < 0).broadcast_to(scores.shape)  # no NaN is
    scores = gl.where(is_invalid, NEG_INF, apply_sign(scores, SIGN))
    block_max = gl.max(scores, 1) * row_scale
    row_max = next_row_max(softmax.row_max, block_max)
    exponentials = gl.exp2(scores * gl.expand_dims(row_scale, 1) - gl.expand_dims(row_max, 1))
    rescale = gl.exp2(softmax.row_max - row_max)
    row_sum = softmax.row_sum * rescale + gl.sum(exponentials, 1)
    acc_scale = gl.maximum(softmax.acc_scale, load_block_scale(stages, stage))
    rescale *= softmax.acc_scale * inverse_power(acc_scale)
    largest = gl.maximum(softmax.largest, block_max)
    return exponentials, rescale, Softmax(row_max, row_sum, largest, acc_scale)


@gluon.jit
def _operand(exponentials):
    # not pure: the compiler would convert just before wgmma, and keep float32 until then
    probs = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [exponentials], dtype=gl.float16,
        is_pure=False, pack=2,
    )  # fmt: skip
    return gl.convert_layout(probs, PROBS, assert_trivial=True)


@gluon.jit
def _rope_probs(stages):
    """The tiles of rotated columns, as probabilities."""
    return reinterpret(stages.rope, gl.float16, [2, 64, 64], SMEM_16BIT)


@gluon.jit
def _softmax_block(
    scores, is_first, number, fill, softmax, row_scale, pending, acc1, stages,
    prob_stage, SIGN: gl.constexpr,
):  # fmt: skip
    """Softmax of a block: (acc of the blocks before, rescaled; probabilities of the left half;
    softmax after this block).

    fill     of `prob_stage`
    pending  acc of columns 0 to 127 that PV of the block before is accumulated to, and its
             probabilities
    acc1     acc of columns 128 to 255
    """
    exponentials, rescale, softmax = _softmax_step(scores, number, softmax, row_scale, stages, SIGN)
    stage, _ = two_stages(number)
    groups = stages.groups
    # in this order: the softmax overlaps with PV, and only the spin wait on a barrier keeps the
    # assembler from waiting for PV before it
    mbarrier.wait(prob_stage.empty, (fill & 1) ^ 1)
    acc0, _ = warpgroup_mma_wait(0, deps=pending)
    if not is_first:
        mbarrier.arrive(stages.left_empty.index(stage ^ 1), count=1)
    factor = PROB_SCALE * inverse_power(softmax.acc_scale)
    exponentials *= _factor(groups.last, stage) * factor
    first = _operand(exponentials)
    exponentials *= _factor(groups.third, stage)
    second = _operand(exponentials)
    exponentials *= _factor(groups.second, stage)
    _rope_probs(stages).index(stage).store(exponentials.to(gl.float16))
    exponentials *= _factor(groups.first, stage)
    prob_stage.probs.store(exponentials.to(gl.float16))
    prob_stage.rescale.store(rescale)
    fence_async_shared()
    mbarrier.arrive(prob_stage.full, count=1)
    mbarrier.arrive(stages.right_empty.index(stage), count=1)  # of the scales
    return (rescale_acc(acc0, rescale), rescale_acc(acc1, rescale)), (first, second), softmax


@gluon.jit
def _issue_pv(probs, acc, stages, number, FIRST: gl.constexpr):
    values = stages.left.index(number & 1).slice(FIRST, 128, dim=1)
    return warpgroup_mma(probs, values, acc, is_async=True)


@gluon.jit
def _zeros():
    return gl.zeros([64, 128], gl.float32, ACC)


@gluon.jit
def grouped_qk_warpgroup(
    q, work, tokens, heads, outputs, query, prob_stage, stages, counts, scale_log2,
    SIGN: gl.constexpr,
):  # fmt: skip
    """Also PV of the left column half."""
    tile = gl.program_id(0)
    number = tile * 0
    tiles_done = tile * 0
    step = gl.num_programs(0)
    load_query(q, work, tokens, tile, query)
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for _ in tl.range(0, (work.num_tiles - tile + step - 1) // step, disable_licm=True):
        mbarrier.wait(query.full, tiles_done & 1)
        row_scale = gl.maximum(scale_query(q, query) * scale_log2, SMALLEST_SCALE)
        softmax = initial_softmax()
        pending = (warpgroup_mma_init(_zeros()), gl.zeros([64, 64], gl.float16, PROBS))
        acc1 = _zeros()
        count = read_count(counts, tiles_done)
        scores = warpgroup_mma_wait(0, deps=(_first_qk(query, stages, number),))
        scores = warpgroup_mma_wait(0, deps=(_second_qk(scores, query, stages, number),))
        scores = warpgroup_mma_wait(0, deps=(_other_qk(scores, query, stages, number),))
        for block in range(count - 1):
            acc, probs, softmax = _softmax_block(
                scores,
                block == 0,
                number,
                number + tiles_done,
                softmax,
                row_scale,
                pending,
                acc1,
                stages,
                prob_stage,
                SIGN,
            )
            # PV of columns 128 to 255 overlaps with the rescale of scores, that of columns 0 to 127
            # with the softmax of the next block
            qk = _first_qk(query, stages, number + 1)
            pv = _issue_pv(probs[1], acc[1], stages, number, 128)
            scores = warpgroup_mma_wait(1, deps=(qk,))
            qk = _second_qk(scores, query, stages, number + 1)
            scores, acc1, _probs = warpgroup_mma_wait(0, deps=(qk, pv, probs[1]))
            qk = _other_qk(scores, query, stages, number + 1)
            pending = (_issue_pv(probs[0], acc[0], stages, number, 0), probs[0])
            scores = warpgroup_mma_wait(1, deps=(qk,))
            number += 1
        next_tile = tile + step
        if next_tile < work.num_tiles:
            load_query(q, work, tokens, next_tile, query)
        acc, probs, softmax = _softmax_block(
            scores,
            count == 1,
            number,
            number + tiles_done,
            softmax,
            row_scale,
            pending,
            acc1,
            stages,
            prob_stage,
            SIGN,
        )
        acc0 = _issue_pv(probs[0], acc[0], stages, number, 0)
        acc1 = _issue_pv(probs[1], acc[1], stages, number, 128)
        done = warpgroup_mma_wait(0, deps=(acc0, acc1, probs[0], probs[1]))
        mbarrier.arrive(stages.left_empty.index(number & 1), count=1)
        at = locate_tile(work, tokens, tile)
        fill = number + 1 + tiles_done
        out_scale = finish_tile(at, outputs, heads, softmax, prob_stage, fill)
        store_values(at, outputs, heads, rescale_acc(done[0], out_scale), 0)
        store_values(at, outputs, heads, rescale_acc(done[1], out_scale), 128)
        number += 1
        tiles_done += 1
        tile = next_tile


@gluon.jit
def grouped_pv_warpgroup(work, tokens, heads, outputs, prob_stage, stages, counts):
    """PV of the right column half."""
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    tile = gl.program_id(0)
    number = tile * 0
    tiles_done = tile * 0
    step = gl.num_programs(0)
    for _ in tl.range(0, (work.num_tiles - tile + step - 1) // step, disable_licm=True):
        acc0, acc1 = _zeros(), _zeros()
        for _ in range(read_count(counts, tiles_done)):
            stage = number & 1
            mbarrier.wait(prob_stage.full, (number + tiles_done) & 1)
            fence_async_shared()  # of the dequant warpgroup's stores
            rescale = prob_stage.rescale.load(ROW)
            values = stages.right.index(stage)
            probs = _rope_probs(stages).index(stage)
            acc0 = rescale_acc(acc0, rescale)
            acc0 = warpgroup_mma(probs, values.slice(0, 128, dim=1), acc0, is_async=True)
            acc1 = rescale_acc(acc1, rescale)
            values = values.slice(128, 128, dim=1)
            acc1 = warpgroup_mma(prob_stage.probs, values, acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
            mbarrier.arrive(prob_stage.empty, count=1)
            mbarrier.arrive(stages.right_empty.index(stage), count=1)
            number += 1
        out_scale = receive_out_scale(prob_stage, number + tiles_done, ROW)
        at = locate_tile(work, tokens, tile)
        store_values(at, outputs, heads, rescale_acc(acc0, out_scale), 256)
        store_values(at, outputs, heads, rescale_acc(acc1, out_scale), 384)
        tiles_done += 1
        tile += step
