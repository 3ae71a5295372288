"""The consumers of `m64_fp8_kv` for rows with a scale per 128 columns (fp8_block128).

Values have the powers of two of their scales (`m64_fp8_kv_dequant`), which float16 holds exactly.
The rest of a scale does not fit it: it multiplies what its columns add to the scores, and the
probabilities that its columns are multiplied by.

Scores     two accumulators, a and b, with two groups of columns each. Between its groups an
           accumulator is multiplied by a ratio of scales, while wgmma adds to the other one

             b    group 3          · ratio, group 1           · scale, rotated columns
             a            group 2          · ratio, group 0            · scale

           The right half comes first: it is the first to be released and converted
PV         of a group takes probabilities times its scale. The QK-softmax warpgroup writes those of
           groups 0 and 1, the second in the tile of the block's rotated columns, which QK has read.
           The PV warpgroup loads both and multiplies them by the ratios: groups 2 and 3

             QK-softmax                                       PV
  a block    P of groups 0 and 1                    probs ->  load P; <- empty; P of groups 2 and 3
             S of the next block                              acc = acc·a + P·V, two groups
             meanwhile PV of groups 0 and 1

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
from mlakit.kernels.hopper.decode import configs
from mlakit.kernels.hopper.decode.epilogue import finish_rows, store_acc, store_lse
from mlakit.kernels.hopper.decode.fp8_convert import FP16_TARGET, pow2_scale
from mlakit.kernels.hopper.decode.m64_fp8_kv_dequant import (
    FIRST_SCALE,
    FOURTH_RATIO,
    NUM_SCALES,
    SECOND_SCALE,
    THIRD_RATIO,
    num_blocks,
)
from mlakit.kernels.hopper.decode.m64_fp8_kv_query import (
    Softmax,
    convert_queries,
    load_query,
)
from mlakit.kernels.hopper.decode.paged_loads import wait_block
from mlakit.kernels.hopper.decode.pipeline import two_stages
from mlakit.kernels.hopper.decode.query_scale import SCORES, scale_to_fp16
from mlakit.kernels.hopper.decode.scheduler import (
    count_tiles,
    key_range,
    locate_tile,
    next_tile,
)
from mlakit.kernels.hopper.decode.softmax import (
    INITIAL_ROW_MAX,
    SMALLEST_SCALE,
    mask_scores,
    next_row_max,
)
from mlakit.kernels.hopper.primitives import SMEM_16BIT, acc_layout, opaque_zero, rescale_acc

ACC = gl.constexpr(acc_layout(128))
PROBS = gl.constexpr(gl.DotOperandLayout(0, ACC, k_width=2))
THRESHOLD = gl.constexpr(configs.RESCALE_THRESHOLD_ROW_SCALES)


@gluon.jit
def _scales(blocks, stage, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """float32 [1, 64 keys]"""
    vector = blocks.scales.index(NUM_SCALES * stage + WHICH)
    return gl.expand_dims(vector.load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def _qk(queries, tiles, stage, FIRST: gl.constexpr, acc, USE_ACC: gl.constexpr = True):
    """Issue QK of 128 columns of a half."""
    q = queries.index(opaque_zero()).slice(FIRST, 128, dim=1)
    keys = tiles.index(stage).slice(FIRST, 128, dim=1).permute((1, 0))
    return warpgroup_mma(q, keys, acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _issue_qk(inputs, query, blocks, number):
    """(a, b) of a block, [64 heads, 64 keys]: scores are a + b, of which b is pending."""
    stage, phase = two_stages(number)
    zeros = gl.zeros([64, 64], gl.float32, SCORES)
    mbarrier.wait(blocks.right_full.index(stage), phase)
    b = _qk(query.right, blocks.right, stage, 128, zeros, False)
    a = _qk(query.right, blocks.right, stage, 0, zeros, False)
    factor = _scales(blocks, stage, FOURTH_RATIO, SCORES)
    b = warpgroup_mma_wait(1, deps=(b,)) * factor
    mbarrier.wait(blocks.left_full.index(stage), phase)
    b = _qk(query.left, blocks.left, stage, 128, b)
    factor = _scales(blocks, stage, THIRD_RATIO, SCORES)
    a = warpgroup_mma_wait(1, deps=(a,)) * factor
    a = _qk(query.left, blocks.left, stage, 0, a)
    factor = _scales(blocks, stage, SECOND_SCALE, SCORES)
    b = warpgroup_mma_wait(1, deps=(b,)) * factor
    wait_block(inputs, blocks.rope_full.index(stage), phase)
    keys = blocks.rope.index(stage).permute((1, 0))
    b = warpgroup_mma(query.rope.index(opaque_zero()), keys, b, is_async=True)
    factor = _scales(blocks, stage, FIRST_SCALE, SCORES)
    a = warpgroup_mma_wait(1, deps=(a,)) * factor
    return a, b


@gluon.jit
def _second_probs(blocks):
    """The tiles of rotated columns, as probabilities."""
    return reinterpret(blocks.rope, gl.float16, [2, 64, 64], SMEM_16BIT)


@gluon.jit
def _softmax_block(
    scores, block, number, keys, softmax, row_scale, pending, blocks, prob_stage, traits
):  # fmt: skip
    """Softmax of a block, whose probabilities go to PV: (acc of the blocks before, rescaled;
    softmax after this block).

    pending  acc of both groups that PV of the block before is accumulated to
    """
    stage, _ = two_stages(number)
    first = _scales(blocks, stage, FIRST_SCALE, SCORES)
    largest = gl.max(gl.abs(first.reshape([64])), 0)
    prob_scale, factor = pow2_scale(gl.maximum(softmax.prob_scale, largest))
    scores = mask_scores(scores, block, keys, 1, traits.scores)
    row_max = next_row_max(softmax.row_max, gl.max(scores, 1) * row_scale, THRESHOLD)
    exponentials = gl.exp2(scores * gl.expand_dims(row_scale, 1) - gl.expand_dims(row_max, 1))
    rescale = gl.exp2(softmax.row_max - row_max)
    row_sum = softmax.row_sum * rescale + gl.sum(exponentials, 1)
    rescale *= softmax.prob_scale * factor * (1.0 / FP16_TARGET)
    probs = (exponentials * (first * factor)).to(gl.float16)
    second = (
        exponentials * (_scales(blocks, stage, SECOND_SCALE, SCORES) * factor)
    ).to(gl.float16)  # fmt: skip
    # in this order: the softmax overlaps with PV, and only the spin wait on a barrier keeps the
    # assembler from waiting for PV before it
    mbarrier.wait(prob_stage.empty, (number & 1) ^ 1)
    acc0, acc1, probs, second = warpgroup_mma_wait(0, deps=(pending[0], pending[1], probs, second))
    if block > keys.first_block:
        mbarrier.arrive(blocks.left_empty.index((number & 1) ^ 1), count=1)
    prob_stage.probs.store(probs)
    _second_probs(blocks).index(stage).store(second)
    prob_stage.rescale.store(rescale)
    fence_async_shared()
    mbarrier.arrive(prob_stage.full, count=1)
    softmax = Softmax(row_max, row_sum, prob_scale)
    return (rescale_acc(acc0, rescale), rescale_acc(acc1, rescale)), softmax


@gluon.jit
def _issue_pv(acc, blocks, number, prob_stage):
    """PV of groups 0 and 1."""
    stage = number & 1
    values = blocks.left.index(stage)
    probs = _second_probs(blocks).index(stage)
    return (
        warpgroup_mma(prob_stage.probs, values.slice(0, 128, dim=1), acc[0], is_async=True),
        warpgroup_mma(probs, values.slice(128, 128, dim=1), acc[1], is_async=True),
    )


@gluon.jit
def _zeros():
    return gl.zeros([64, 128], gl.float32, ACC)


@gluon.jit
def grouped_qk_warpgroup(
    item, index, inputs, scheduler, outputs, query, prob_stage, blocks, scale_log2, tensor_scale,
    traits, q_scales,
):  # fmt: skip
    """Also PV of the left column half."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    number = item * 0
    tiles_done = item * 0
    load_query(inputs, scheduler, item, index, query)
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        mbarrier.wait(query.full, tiles_done & 1)
        if inputs.q.dtype == gl.int32:
            row_scale = convert_queries(inputs, scheduler, q_scales, item, index, query)
        else:
            row_scale = scale_to_fp16(query, inputs.q.dtype)
        row_scale = gl.maximum(row_scale * scale_log2, SMALLEST_SCALE)
        softmax = Softmax(
            gl.full([64], INITIAL_ROW_MAX, gl.float32, ROW),
            gl.zeros([64], gl.float32, ROW),
            gl.to_tensor(0.0),  # `pow2_scale` has a minimum
        )
        pending = (warpgroup_mma_init(_zeros()), warpgroup_mma_init(_zeros()))
        a, b = _issue_qk(inputs, query, blocks, number)
        scores = a + warpgroup_mma_wait(0, deps=(b,))
        last_block = keys.first_block + num_blocks(keys) - 1
        for block in range(keys.first_block, last_block):
            acc, softmax = _softmax_block(
                scores, block, number, keys, softmax, row_scale, pending, blocks, prob_stage,
                traits,
            )  # fmt: skip
            a, b = _issue_qk(inputs, query, blocks, number + 1)
            pending = _issue_pv(acc, blocks, number, prob_stage)
            scores = a + warpgroup_mma_wait(2, deps=(b,))
            number += 1
        next_item, next_index = next_tile(scheduler, item, index + gl.num_programs(0))
        if next_item < scheduler.last_item:
            load_query(inputs, scheduler, next_item, next_index, query)
        acc, softmax = _softmax_block(
            scores, last_block, number, keys, softmax, row_scale, pending, blocks, prob_stage,
            traits,
        )  # fmt: skip
        pending = _issue_pv(acc, blocks, number, prob_stage)
        acc0, acc1 = warpgroup_mma_wait(0, deps=pending)
        # the PV warpgroup has read the probabilities in the tile of rotated columns
        mbarrier.wait(prob_stage.empty, number & 1)
        mbarrier.arrive(blocks.left_empty.index(number & 1), count=1)
        # located again: kept through the loop, it would take registers
        tile = locate_tile(scheduler, item, index)
        row = gl.arange(0, 64, ROW)
        lse, out_scale = finish_rows(
            tile, outputs, scheduler.heads, tile.first_head + row, softmax.row_max, softmax.row_sum
        )
        store_lse(tile, outputs, scheduler.heads, row, lse)
        out_scale *= tensor_scale * (1.0 / FP16_TARGET) * softmax.prob_scale
        prob_stage.out_scale.store(out_scale)
        mbarrier.arrive(prob_stage.out_scale_full, count=1)
        acc0, acc1 = rescale_acc(acc0, out_scale), rescale_acc(acc1, out_scale)
        store_acc(tile, outputs, scheduler.heads, (acc0, acc1), 0, 0)
        number += 1
        tiles_done += 1
        item = next_item
        index = next_index


@gluon.jit
def _times(tile, blocks, stage, WHICH: gl.constexpr):
    """Probabilities [64 heads, 64 keys] of a tile, times a ratio of scales."""
    ratio = _scales(blocks, stage, WHICH, PROBS)
    # not pure: converted before probabilities are loaded, it takes fewer registers
    ratio = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [ratio], dtype=gl.float16, is_pure=False, pack=2
    )
    probs = tile.load(PROBS)
    return gl.inline_asm_elementwise(
        "mul.f16x2 $0, $1, $2;", "=r,r,r", [probs, ratio.broadcast_to(probs.shape)],
        dtype=gl.float16, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def grouped_pv_warpgroup(item, index, inputs, scheduler, outputs, prob_stage, blocks):
    """PV of the right column half."""
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    number = item * 0
    tiles_done = item * 0
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        acc0, acc1 = _zeros(), _zeros()
        for _ in range(num_blocks(keys)):
            stage = number & 1
            mbarrier.wait(prob_stage.full, number & 1)
            rescale = prob_stage.rescale.load(ROW)
            # both before the first wgmma: the assembler would wait for it
            acc0, acc1 = rescale_acc(acc0, rescale), rescale_acc(acc1, rescale)
            # the QK-softmax warpgroup has waited for these values
            values = blocks.right.index(stage)
            probs = _times(prob_stage.probs, blocks, stage, THIRD_RATIO)
            acc0 = warpgroup_mma(probs, values.slice(0, 128, dim=1), acc0, is_async=True)
            # one after the other: there are no registers for both
            acc0, _probs = warpgroup_mma_wait(0, deps=(acc0, probs))
            probs = _times(_second_probs(blocks).index(stage), blocks, stage, FOURTH_RATIO)
            mbarrier.arrive(prob_stage.empty, count=1)
            acc1 = warpgroup_mma(probs, values.slice(128, 128, dim=1), acc1, is_async=True)
            acc1, _probs = warpgroup_mma_wait(0, deps=(acc1, probs))
            mbarrier.arrive(blocks.right_empty.index(stage), count=1)
            number += 1
        mbarrier.wait(prob_stage.out_scale_full, tiles_done & 1)
        out_scale = prob_stage.out_scale.load(ROW)
        tile = locate_tile(scheduler, item, index)
        acc0, acc1 = rescale_acc(acc0, out_scale), rescale_acc(acc1, out_scale)
        store_acc(tile, outputs, scheduler.heads, (acc0, acc1), 256, 0)
        tiles_done += 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))
