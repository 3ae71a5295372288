"""The QK-softmax warpgroup of `m64_fp8_qk`.

A warp that issues a wgmma waits while the one before the last is computed. So the wgmma of the next
block are issued one at a time, with steps of this block's softmax between them.

Lineage    own design; ideas: FlashAttention-3's overlap of softmax and wgmma in one warpgroup
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

from mlakit.kernels.hopper.decode import configs
from mlakit.kernels.hopper.decode.scheduler import (
    count_tiles,
    key_range,
    locate_tile,
    next_tile,
)
from mlakit.kernels.hopper.device.compat import record, reinterpret
from mlakit.kernels.hopper.device.epilogue import finish_rows, store_lse
from mlakit.kernels.hopper.device.fp8_convert import FP16_TARGET, convert_fp8_query, pow2_scale
from mlakit.kernels.hopper.device.paged_loads import wait_block
from mlakit.kernels.hopper.device.pipeline import (
    D_TILES,
    load_query,
    next_stage,
    release,
    two_stages,
)
from mlakit.kernels.hopper.device.primitives import (
    SMEM_VECTOR,
    acc_layout,
    alloc_barrier,
    alloc_barriers,
    alloc_vector,
    lane_layout,
    opaque_zero,
    smem_layout,
)
from mlakit.kernels.hopper.device.row_scales import GROUPS, load_q_scale
from mlakit.kernels.hopper.device.softmax import (
    INITIAL_ROW_MAX,
    PROB_SCALE,
    RESCALE_THRESHOLD,
    SMALLEST_SCALE,
    Logits,
    mask_scores,
    next_row_max,
)

KEY_CHUNK = gl.constexpr(32)  # keys that a PV warpgroup takes at a time
KEY_CHUNKS = gl.constexpr(2)
PV_WARPGROUPS = gl.constexpr(2)
SCORES = gl.constexpr(acc_layout(64, 32))
SCORES_16BIT = gl.constexpr(acc_layout(64))
CHUNK_SCORES = gl.constexpr(acc_layout(32, 32))
MAX_SCALE_RATIO = gl.constexpr(configs.MAX_SCALE_RATIO)


@record
class ProbStages:
    """Hand-over from QK-softmax to PV: block n in stage n % 2, and the end of a work tile."""

    probs: object  # float16 [2 · KEY_CHUNKS, 64 heads, KEY_CHUNK keys]
    rescale: object  # [2, 64] float32, of acc
    has_rescale: object  # [2, 4] float32: 1 where a warp has a rescale other than 1, or 0
    full: object
    empty: object
    out_scale: object  # [64] float32, of a work tile's acc
    out_scale_full: object
    out_scale_empty: object


@record
class SoftmaxInputs:
    """Inputs of the QK-softmax warpgroup, and its constants."""

    query: object
    q_rope: object  # rotated queries, of the type of the rows' rotated columns
    q_scale: object  # float32 per token, or None
    stride_q_scale: object
    logits: object
    tensor_scale: object
    HAS_ROW_SCALES: object


@record
class Softmax:
    row_max: object  # [64]
    row_sum: object
    prob_scale: object  # the power of two of the largest row scale
    min_scale: object  # the smallest row scale
    inverse: object  # of what probabilities are multiplied by besides their row's scale


@gluon.jit
def alloc_probs():
    return ProbStages(
        probs=gl.allocate_shared_memory(
            gl.float16, [2 * KEY_CHUNKS, 64, KEY_CHUNK], smem_layout(KEY_CHUNK, 16)
        ),
        rescale=gl.allocate_shared_memory(gl.float32, [2, 64], SMEM_VECTOR),
        has_rescale=gl.allocate_shared_memory(gl.float32, [2, 4], SMEM_VECTOR),
        full=alloc_barriers(2, 1),
        empty=alloc_barriers(2, PV_WARPGROUPS),
        out_scale=alloc_vector(64),
        out_scale_full=alloc_barrier(),
        out_scale_empty=alloc_barrier(PV_WARPGROUPS),
    )


@gluon.jit
def _as_fp8(tile):
    """Words of an smem tile as the FP8 values they are."""
    WIDTH: gl.constexpr = tile.shape[1] * 4
    return reinterpret(tile, gl.float8e4nv, [tile.shape[0], WIDTH], smem_layout(WIDTH, 8))


@gluon.jit
def _issue_rope(operands, pipelines, stage):
    """QK of the rotated columns of a block, [64 heads, 64 keys]."""
    zero = opaque_zero()
    tile = pipelines.rope.tiles.index(stage)
    if tile.dtype == gl.int32:
        q = _as_fp8(operands.q_rope.index(zero))
        zeros = gl.zeros([64, 64], gl.float32, SCORES)
        keys = _as_fp8(tile).permute((1, 0))
        return warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    else:
        q = operands.q_rope.index(zero)
        zeros = gl.zeros([64, 64], gl.float32, SCORES_16BIT)
        qk = warpgroup_mma(q, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        # not waited for: the next wgmma accumulates to the same registers
        qk = warpgroup_mma_wait(1, deps=(qk,))
        return gl.convert_layout(qk, SCORES, assert_trivial=True)


@gluon.jit
def _issue_tile(operands, pipelines, stage, d: gl.constexpr, qk):
    """Accumulate QK of tile `d` of the latent columns.

    Where a row has a scale per tile, what is summed so far is divided by this tile's scale first.
    """
    groups = pipelines.scales.groups
    if groups is not None:
        qk = warpgroup_mma_wait(0, deps=(qk,))
        step = groups.steps.index(stage * (GROUPS + 1) + d).load(gl.SliceLayout(0, SCORES))
        qk *= gl.expand_dims(step, 0)
    keys = _as_fp8(pipelines.latent.tiles.index(stage * D_TILES + d)).permute((1, 0))
    q = _as_fp8(operands.query.latent.index(opaque_zero() + d))
    return warpgroup_mma(q, keys, qk, is_async=True)


@gluon.jit
def _first_scores(inputs, operands, pipelines, stage, phase):
    """Return QK of a work tile's first block."""
    wait_block(inputs, pipelines.latent.full.index(stage), phase)
    qk = _issue_rope(operands, pipelines, stage)
    for d in gl.static_range(D_TILES):
        qk = _issue_tile(operands, pipelines, stage, d, qk)
    return warpgroup_mma_wait(0, deps=(qk,))


@gluon.jit
def _split_keys(scores):
    """The first and the second chunk of a block's keys."""
    first, second = gl.split(scores.reshape([64, KEY_CHUNKS, KEY_CHUNK]).permute(0, 2, 1))
    first = gl.convert_layout(first, CHUNK_SCORES, assert_trivial=True)
    return first, gl.convert_layout(second, CHUNK_SCORES, assert_trivial=True)


@gluon.jit
def _exponentials(scores, scale_log2, row_max):
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, CHUNK_SCORES), assert_trivial=True)
    return gl.exp2(scores * scale_log2 - gl.expand_dims(row_max, 1))


@gluon.jit
def _to_probs(exponentials, scales, factor, chunk: gl.constexpr, HAS_ROW_SCALES: gl.constexpr):
    """exponentials · factor, and times the rows' scales if they have any, as float16."""
    if HAS_ROW_SCALES:
        row_scales = scales.slice(chunk * KEY_CHUNK, KEY_CHUNK, 0).load(
            gl.SliceLayout(0, CHUNK_SCORES)
        )
        exponentials *= gl.expand_dims(row_scales * factor, 0)
    else:
        exponentials *= factor
    return exponentials.to(gl.float16)


@gluon.jit
def _scale_and_mask(scores, block, keys, q_scale, scales, logits, HAS_ROW_SCALES: gl.constexpr):
    if HAS_ROW_SCALES:
        scores *= gl.expand_dims(scales.load(gl.SliceLayout(0, SCORES)) * q_scale, 0)
    else:
        scores *= q_scale
    return mask_scores(scores, block, keys, 1, logits)


@gluon.jit
def _next_prob_scale(softmax, pipelines, stage, HAS_ROW_SCALES: gl.constexpr):
    """Return (power of two, smallest scale, factor of probabilities, rescale threshold) once the
    row scales of a block are included.

    Where row scales are far apart, probabilities of rows with small ones are small too: they need
    all of float16's range, and the threshold is 0.
    """
    if HAS_ROW_SCALES:
        amax = gl.max(pipelines.scales.amax.index(stage).load(lane_layout(4)), 0)
        min_scale = gl.min(pipelines.min_scale.index(stage).load(lane_layout(4)), 0)
        min_scale = gl.minimum(softmax.min_scale, min_scale)
        prob_scale, factor = pow2_scale(gl.maximum(softmax.prob_scale, amax))
        are_close = prob_scale < min_scale * MAX_SCALE_RATIO
        factor *= gl.where(are_close, PROB_SCALE / FP16_TARGET, 1.0)
        return prob_scale, min_scale, factor, gl.where(are_close, RESCALE_THRESHOLD, 0.0)
    else:
        return softmax.prob_scale, softmax.min_scale, PROB_SCALE, RESCALE_THRESHOLD


@gluon.jit
def _softmax_block(
    inputs,
    scores,
    block,
    keys,
    softmax,
    q_scale,
    operands,
    pipelines,
    stage,
    phase,
    IS_LAST: gl.constexpr,
):
    """Return (probabilities as two chunks of float16, rescale of acc, softmax after this block, QK
    of the block in the next stage, which the last one has not)"""
    scale_log2 = gl.maximum(operands.logits.scale, SMALLEST_SCALE)
    logits = Logits(scale_log2, operands.logits.TRAITS)
    scales = pipelines.scales.values.index(stage)
    score_scales = scales
    if pipelines.scales.groups is not None:
        score_scales = pipelines.scales.groups.steps.index(stage * (GROUPS + 1) + GROUPS)
    prob_scale, min_scale, factor, threshold = _next_prob_scale(
        softmax, pipelines, stage, operands.HAS_ROW_SCALES
    )
    stage, phase = next_stage(pipelines.latent, stage, phase)
    qk = scores
    if not IS_LAST:
        wait_block(inputs, pipelines.latent.full.index(stage), phase)
        qk = _issue_rope(operands, pipelines, stage)
    seen = _scale_and_mask(
        scores, block, keys, q_scale, score_scales, logits, operands.HAS_ROW_SCALES
    )
    if not IS_LAST:
        qk = _issue_tile(operands, pipelines, stage, 0, qk)
    block_max = gl.max(seen, 1) * scale_log2
    row_max = next_row_max(softmax.row_max, block_max, threshold)
    rescale = gl.exp2(softmax.row_max - row_max)
    first, second = _split_keys(seen)
    if not IS_LAST:
        qk = _issue_tile(operands, pipelines, stage, 1, qk)
    first = _exponentials(first, scale_log2, row_max)
    if not IS_LAST:
        qk = _issue_tile(operands, pipelines, stage, 2, qk)
    second = _exponentials(second, scale_log2, row_max)
    if not IS_LAST:
        qk = _issue_tile(operands, pipelines, stage, 3, qk)
    block_sum = gl.sum(first + second, 1)
    block_sum = gl.convert_layout(block_sum, row_max.type.layout, assert_trivial=True)
    row_sum = softmax.row_sum * rescale + block_sum
    inverse = softmax.inverse
    if operands.HAS_ROW_SCALES:
        rescale *= softmax.inverse * factor
        inverse = 1.0 / factor  # a power of two
    first = _to_probs(first, scales, factor, 0, operands.HAS_ROW_SCALES)
    second = _to_probs(second, scales, factor, 1, operands.HAS_ROW_SCALES)
    softmax = Softmax(
        row_max=row_max,
        row_sum=row_sum,
        prob_scale=prob_scale,
        min_scale=min_scale,
        inverse=inverse,
    )
    return (first, second), rescale, softmax, qk


@gluon.jit
def _store_probs(stages, fill, probs, rescale):
    stage, phase = two_stages(fill)
    mbarrier.wait(stages.empty.index(stage), phase ^ 1)
    for chunk in gl.static_range(KEY_CHUNKS):
        stages.probs.index(stage * KEY_CHUNKS + chunk).store(probs[chunk])
    stages.rescale.index(stage).store(rescale)
    is_other = gl.where(rescale == 1.0, 0.0, 1.0)
    stages.has_rescale.index(stage).store(gl.max(is_other.reshape([4, 16]), 1))
    fence_async_shared()
    mbarrier.arrive(stages.full.index(stage), count=1)


@gluon.jit
def qk_softmax_warpgroup(item, index, inputs, scheduler, outputs, prob_stages, pipelines, operands):
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    query = operands.query
    stage, phase = item * 0, item * 0
    fill = item * 0
    tiles_done = item * 0
    load_query(inputs, scheduler, item, index, query)
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        q_scale = load_q_scale(operands, scheduler, item, index)
        mbarrier.wait(query.full, tiles_done & 1)
        if operands.q_rope.dtype != gl.int32 and query.rope.dtype == gl.int32:
            convert_fp8_query(query.rope.index(0), operands.q_rope.index(0))
            fence_async_shared()
        softmax = Softmax(
            row_max=gl.full([64], INITIAL_ROW_MAX, gl.float32, ROW),
            row_sum=gl.zeros([64], gl.float32, ROW),
            prob_scale=gl.to_tensor(0.0),  # `pow2_scale` has a minimum
            min_scale=gl.to_tensor(float("inf")),
            inverse=gl.to_tensor(1.0 / PROB_SCALE),
        )
        last_block = keys.end_block - 1
        if keys.first_block < keys.end_block:
            scores = _first_scores(inputs, operands, pipelines, stage, phase)
            for block in range(keys.first_block, last_block):
                probs, rescale, softmax, qk = _softmax_block(
                    inputs,
                    scores,
                    block,
                    keys,
                    softmax,
                    q_scale,
                    operands,
                    pipelines,
                    stage,
                    phase,
                    False,
                )
                _store_probs(prob_stages, fill, probs, rescale)
                # only now: the row scales have been read
                release(pipelines.latent, stage)
                stage, phase = next_stage(pipelines.latent, stage, phase)
                fill += 1
                # here, not where they are needed: a wgmma in flight across the loop's back edge
                # would have its registers copied, and the assembler would wait for it each time
                scores = warpgroup_mma_wait(0, deps=(qk,))
            probs, rescale, softmax, scores = _softmax_block(
                inputs,
                scores,
                last_block,
                keys,
                softmax,
                q_scale,
                operands,
                pipelines,
                stage,
                phase,
                True,
            )
            _store_probs(prob_stages, fill, probs, rescale)
            release(pipelines.latent, stage)
            stage, phase = next_stage(pipelines.latent, stage, phase)
            fill += 1
        next_item, next_index = next_tile(scheduler, item, index + gl.num_programs(0))
        if next_item < scheduler.last_item:
            load_query(inputs, scheduler, next_item, next_index, query)
        # located again: kept through the loop, it would take registers
        tile = locate_tile(scheduler, item, index)
        row = gl.arange(0, 64, ROW)
        lse, out_scale = finish_rows(
            tile, outputs, scheduler.heads, tile.first_head + row, softmax.row_max, softmax.row_sum
        )
        store_lse(tile, outputs, scheduler.heads, row, lse)
        out_scale *= operands.tensor_scale * softmax.inverse
        mbarrier.wait(prob_stages.out_scale_empty, (tiles_done & 1) ^ 1)
        prob_stages.out_scale.store(out_scale)
        mbarrier.arrive(prob_stages.out_scale_full, count=1)
        tiles_done += 1
        item = next_item
        index = next_index
