"""The QK-softmax warpgroups of `small_m_fp8_kv`.

Two of them alternate: of all blocks of a CTA, tile after tile, block n goes to warpgroup n % 2.
Probabilities and acc are relative to a row_max that never falls from a block to the next. So the
warpgroups exchange it, and the power-of-two scale of the probabilities, before they compute
exponentials. Each sums its own exponentials. At the end of a work tile the second passes its
row_sum to the first, which combines both; the first also converts the queries for both.

Barriers   a warpgroup writes its exchange memory once per block of its own. It may overwrite it
           after the other has written for the block between, which reads it first. The end of the
           second warpgroup's blocks and the converted queries are written once per work tile: the
           end when the warpgroup no longer needs the queries, the queries when that end is read
Lineage    own design; ideas: FlashAttention-3's two warpgroups that take turns. Ours alternate over
           blocks of one work tile and exchange row_max
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

from mlakit.kernels.hopper.decode.scheduler import (
    count_tiles,
    key_range,
    locate_tile,
    next_tile,
)
from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.epilogue import finish_rows, store_lse
from mlakit.kernels.hopper.device.fp8_convert import (
    FP16_TARGET,
    as_fp16,
    convert_fp8_query,
    load_keys,
    permute_fp8_query,
    permute_query,
    pow2_scale,
    row_amax,
)
from mlakit.kernels.hopper.device.paged_loads import wait_block
from mlakit.kernels.hopper.device.pipeline import (
    D_TILES,
    advance,
    load_query,
    release,
    release_read,
    two_stages,
)
from mlakit.kernels.hopper.device.primitives import (
    SMEM_16BIT,
    SMEM_VECTOR,
    acc_layout,
    alloc_barrier,
    alloc_barriers,
    alloc_vector,
    lane_layout,
    opaque_zero,
)
from mlakit.kernels.hopper.device.row_scales import load_q_scale, store_scalar
from mlakit.kernels.hopper.device.softmax import INITIAL_ROW_MAX, mask_scores


@record
class ProbStages:
    """Hand-over from QK-softmax to PV: block n in stage n % 2, and the end of a work tile."""

    probs: object  # float16 [2, heads, 64 keys], one per scale of a row
    rescale: object  # [2, heads] float32, of acc
    full: object
    empty: object
    out_scale: object  # [heads] float32, of a work tile's acc
    out_scale_full: object
    out_scale_empty: object
    COPIES: object


@record
class SoftmaxState:
    """State that both QK-softmax warpgroups use."""

    loaded: object  # queries as they arrive
    query: object  # the same as float16, in the same memory if they are 16-bit
    q_scale: object  # float32 per token, of FP8 queries, or None
    stride_q_scale: object
    probs: object
    pipelines: object
    logits: object
    tensor_scale: object
    FORMAT: object


@record
class Exchange:
    """row_max after some blocks, from one warpgroup to the other."""

    row_max: object  # [heads] float32
    prob_scale: object  # [1] float32, the power of two of the probabilities
    full: object  # a barrier


@record
class ScaledQuery:
    """Signalled by the first warpgroup when the queries are converted; the second waits for it."""

    scale: object  # [heads] float32, of scores
    full: object  # a barrier


@record
class SoftmaxWarpgroup:
    """The blocks of one QK-softmax warpgroup, and its exchange with the other one."""

    INDEX: object
    block_max: object
    incoming: object  # Exchange, written by the other one
    outgoing: object
    end: object  # Exchange, of the second warpgroup's blocks of a work tile
    end_sum: object  # [heads] float32, likewise
    scaled: object


@gluon.jit
def alloc_probs(ROWS: gl.constexpr, COPIES: gl.constexpr, CONSUMERS: gl.constexpr):
    probs = ()
    # an allocation each: the compiler then needs no CTA-wide barrier between two of them
    for _ in gl.static_range(COPIES):
        probs += (gl.allocate_shared_memory(gl.float16, [2, ROWS, 64], SMEM_16BIT),)
    return ProbStages(
        probs=probs,
        rescale=gl.allocate_shared_memory(gl.float32, [2, ROWS], SMEM_VECTOR),
        full=alloc_barriers(2, 1),
        empty=alloc_barriers(2, CONSUMERS),
        out_scale=alloc_vector(ROWS),
        out_scale_full=alloc_barrier(),
        out_scale_empty=alloc_barrier(CONSUMERS),
        COPIES=COPIES,
    )


@gluon.jit
def alloc_exchange(ROWS: gl.constexpr):
    prob_scale = alloc_vector(1)
    return Exchange(alloc_vector(ROWS), prob_scale, alloc_barrier())


@gluon.jit
def alloc_block_max(ROWS: gl.constexpr):
    """The maxima that the four warps of a warpgroup exchange."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [4, ROWS], LAYOUT)


@gluon.jit
def alloc_scaled_query(ROWS: gl.constexpr):
    return ScaledQuery(alloc_vector(ROWS), alloc_barrier())


@gluon.jit
def scale_queries(query, score_scale, FORMAT: gl.constexpr):
    """Scale queries to float16's range, permuted as `load_keys`; writes the scale of scores."""
    amax = row_amax(query.latent.index(0))
    for d in gl.static_range(1, D_TILES):
        amax = gl.maximum(amax, row_amax(query.latent.index(d)))
    HAS_E4M3_ROPE: gl.constexpr = query.rope is not None and not FORMAT.IS_BF16_ROPE
    if HAS_E4M3_ROPE:
        amax = gl.maximum(amax, row_amax(query.rope.index(0)))
    scale, factor = pow2_scale(amax)
    for d in gl.static_range(D_TILES):
        permute_query(query.latent.index(d), as_fp16(query.latent).index(d), factor)
    if HAS_E4M3_ROPE:
        permute_query(query.rope.index(0), as_fp16(query.rope).index(0), factor)
    score_scale.store(scale * (1.0 / FP16_TARGET))
    fence_async_shared()


@gluon.jit
def _convert_query(loaded, query, q_scale, score_scale, FORMAT: gl.constexpr):
    """Convert FP8 queries exactly, permuted as by `scale_queries`; scores get the token's scale."""
    for d in gl.static_range(D_TILES):
        permute_fp8_query(loaded.latent.index(d), query.latent.index(d))
    if not FORMAT.IS_BF16_ROPE:
        permute_fp8_query(loaded.rope.index(0), query.rope.index(0))
    elif loaded.rope.dtype == gl.int32:
        convert_fp8_query(loaded.rope.index(0), query.rope.index(0))
    score_scale.store(gl.full([score_scale.shape[0]], q_scale, gl.float32, lane_layout(4)))
    fence_async_shared()


@gluon.jit
def _apply_q_scale(scores, score_scale):
    return scores * gl.expand_dims(score_scale.load(gl.SliceLayout(0, scores.type.layout)), 0)


@gluon.jit
def load_row_scales(pipelines, stage, d: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales of a block's rows, for tile `d` of their columns: [64 keys, 1].

    Loaded where they are needed: they would take registers.
    """
    scales = pipelines.scales.values.index(stage * pipelines.scales.COUNT + d)
    return gl.expand_dims(scales.load(gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def qk_block(
    inputs,
    query,
    pipelines,
    stage,
    phase,
    rope_stage,
    rope_phase,
    score_scale,
    LAYOUT: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALES_ROPE: gl.constexpr,
):
    """Scores of a block, [64 keys, heads], times the scales of its rows.

    Releases its stages, but for the rotated columns of rows with scales: probabilities need those.

    score_scale  [heads] float32 in shared memory, the scale of converted queries
    SCALES_ROPE  that rotated queries have it too
    """
    latent, rope = pipelines.latent, pipelines.rope
    HEADS: gl.constexpr = query.latent.shape[1]
    HAS_ROPE: gl.constexpr = query.rope is not None
    HAS_E4M3_ROPE: gl.constexpr = HAS_ROPE and not FORMAT.IS_BF16_ROPE
    zero = opaque_zero()
    zeros = gl.zeros([64, HEADS], gl.float32, LAYOUT)
    if HAS_ROPE:
        rope_keys = rope.tiles.index(rope_stage)
    scores, pending = zeros, zeros
    # the scale of a row comes last
    if FORMAT.SCALED_BY == "group" or HAS_E4M3_ROPE:
        wait_block(inputs, rope.full.index(rope_stage), rope_phase)
    if HAS_E4M3_ROPE:
        keys = load_keys(rope_keys, LAYOUT)
        q = as_fp16(query.rope).index(zero).permute((1, 0))
        pending = warpgroup_mma(keys, q, zeros, use_acc=False, is_async=True)
        release_read(rope, rope_stage)
    for d in gl.static_range(D_TILES):
        if d % latent.TILES_PER_STAGE == 0:
            mbarrier.wait(latent.full.index(stage), phase)
        tile = latent.tiles.index(stage * latent.TILES_PER_STAGE + d % latent.TILES_PER_STAGE)
        next_keys = load_keys(tile, LAYOUT)
        # the wgmma before has had the time of a conversion
        if HAS_E4M3_ROPE or d > 0:
            pending, keys = warpgroup_mma_wait(0, deps=(pending, keys))
        if FORMAT.SCALED_BY == "group" and d > 0:
            scores += pending * load_row_scales(pipelines, rope_stage, d - 1, LAYOUT)
        keys = next_keys
        q = as_fp16(query.latent).index(zero + d).permute((1, 0))
        if HAS_E4M3_ROPE or (FORMAT.SCALED_BY != "group" and d > 0):
            pending = warpgroup_mma(keys, q, pending, is_async=True)
        else:
            pending = warpgroup_mma(keys, q, zeros, use_acc=False, is_async=True)
        if d % latent.TILES_PER_STAGE == latent.TILES_PER_STAGE - 1:
            # no fence: the PV warpgroup releases the stage after it has waited for this block's
            # probabilities, and its fence covers what has happened before them
            release(latent, stage)
            stage, phase = advance(latent, stage, phase)
    pending, keys = warpgroup_mma_wait(0, deps=(pending, keys))
    if FORMAT.SCALED_BY == "group":
        pending = scores + pending * load_row_scales(pipelines, rope_stage, D_TILES - 1, LAYOUT)
    scores = pending
    if not SCALES_ROPE:
        scores = _apply_q_scale(scores, score_scale)
    if FORMAT.SCALED_BY == "row":
        wait_block(inputs, rope.full.index(rope_stage), rope_phase)
    if HAS_ROPE and FORMAT.IS_BF16_ROPE:
        # last: it accumulates into scores, which costs no further registers
        q = query.rope.index(zero).permute((1, 0))
        scores = warpgroup_mma(rope_keys, q, scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
    if FORMAT.SCALED_BY == "row":
        scores *= load_row_scales(pipelines, rope_stage, 0, LAYOUT)
    if SCALES_ROPE:
        scores = _apply_q_scale(scores, score_scale)
    return scores, stage, phase


@gluon.jit
def _reduce_max(block_max, scores):
    """The maximum of each head over the keys of a block.

    Through shared memory, written and read once: `gl.max` would do that twice.
    """
    HEADS: gl.constexpr = scores.shape[1]
    # heads as a thread has them of the scores, warps as its own elements
    HEAD_BASES: gl.constexpr = (
        [[0, 1]] if HEADS == 8 else [[0, 1], [0, 8]] if HEADS == 16 else [[0, 1], [0, 8], [0, 16]]
    )
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=HEAD_BASES + [[1, 0], [2, 0]],  # noqa: RUF005
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[4, HEADS],
    )
    block_max.store(gl.max(scores.reshape([4, 16, HEADS]), 1))
    largest = gl.max(block_max.load(ALL), 0)
    return gl.convert_layout(largest, gl.SliceLayout(0, scores.type.layout), assert_trivial=True)


@gluon.jit
def _next_prob_scale(before, pipelines, stage):
    """(s, FP16_TARGET / s) for probabilities times the row scales of a block and those before."""
    if pipelines.scales is None:
        return before, FP16_TARGET
    else:
        amax = gl.max(pipelines.scales.amax.index(stage).load(lane_layout(4)), 0)
        return pow2_scale(gl.maximum(before, amax))


@gluon.jit
def _prob_factor(pipelines, rope_stage, d: gl.constexpr, factor, LAYOUT: gl.constexpr):
    """`factor`, times the scales of rows if they have any."""
    if pipelines.scales is not None:
        factor = load_row_scales(pipelines, rope_stage, d, LAYOUT) * factor
    return factor


@gluon.jit
def _store_probs(probs, fill, exponentials, rescale, factor, pipelines, rope_stage):
    """Store exponentials · row scales · factor as float16, and the rescale of acc."""
    LAYOUT: gl.constexpr = exponentials.type.layout
    stage, phase = two_stages(fill)
    factors = _prob_factor(pipelines, rope_stage, 0, factor, LAYOUT)
    mbarrier.wait(probs.empty.index(stage), phase ^ 1)
    for copy in gl.static_range(probs.COPIES):
        p = (exponentials * factors).to(gl.float16)
        if copy + 1 < probs.COPIES:
            factors = _prob_factor(pipelines, rope_stage, copy + 1, factor, LAYOUT)
        probs.probs[copy].index(stage).permute((1, 0)).store(p)
    probs.rescale.index(stage).store(rescale)
    fence_async_shared()
    mbarrier.arrive(probs.full.index(stage), count=1)
    if pipelines.scales is not None:
        release(pipelines.rope, rope_stage)


@gluon.jit
def sum_pairs(exponentials):
    """Sums of the two keys that a thread has, [32, heads]; the whole row_sum can wait."""
    HEADS: gl.constexpr = exponentials.shape[1]
    return gl.sum(exponentials.reshape([4, 2, 8, HEADS]), 1).reshape([32, HEADS])


@gluon.jit
def _write_exchange(exchange, row_max, prob_scale, HAS_ROW_SCALES: gl.constexpr):
    exchange.row_max.store(row_max)
    if HAS_ROW_SCALES:
        store_scalar(exchange.prob_scale, prob_scale, 4)
    mbarrier.arrive(exchange.full, count=1)


@gluon.jit
def _wait_exchange(exchange, phase, ROW: gl.constexpr, HAS_ROW_SCALES: gl.constexpr):
    mbarrier.wait(exchange.full, phase)
    return _read_exchange(exchange, ROW, HAS_ROW_SCALES)


@gluon.jit
def _read_exchange(exchange, ROW: gl.constexpr, HAS_ROW_SCALES: gl.constexpr):
    """Return (row_max, prob_scale)"""
    prob_scale = gl.to_tensor(1.0)
    if HAS_ROW_SCALES:
        prob_scale = gl.max(exchange.prob_scale.load(lane_layout(4)), 0)
    return exchange.row_max.load(ROW), prob_scale


@gluon.jit
def softmax_block(
    warpgroup, scores, fill, is_first, row_sum, probs, pipelines, rope_stage, scale_log2
):
    """Hand the probabilities of a block to PV; return row_sum after this block.

    scores   [64 keys, heads], −inf for hidden keys
    fill     of `probs`: the index of the block in the CTA; `is_first` in its work tile
    row_sum  of the warpgroup's own blocks (`sum_pairs`)
    """
    ROW: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    HAS_ROW_SCALES: gl.constexpr = pipelines.scales is not None
    # not kept in registers; read here, because warps wait for each other before it is overwritten
    own_max = warpgroup.outgoing.row_max.load(ROW)
    block_max = _reduce_max(warpgroup.block_max, scores) * scale_log2
    max_before, scale_before = _wait_exchange(
        warpgroup.incoming, ((fill - 1) >> 1) & 1, ROW, HAS_ROW_SCALES
    )
    max_before = gl.where(is_first, INITIAL_ROW_MAX, max_before)
    scale_before = gl.where(is_first, 0.0 if HAS_ROW_SCALES else 1.0, scale_before)
    row_max = gl.maximum(max_before, block_max)
    prob_scale, prob_factor = _next_prob_scale(scale_before, pipelines, rope_stage)
    _write_exchange(warpgroup.outgoing, row_max, prob_scale, HAS_ROW_SCALES)
    exponentials = gl.exp2(scores * scale_log2 - gl.expand_dims(row_max, 0))
    rescale = gl.exp2(max_before - row_max)
    rescale *= scale_before * prob_factor * (1.0 / FP16_TARGET)
    _store_probs(probs, fill, exponentials, rescale, prob_factor, pipelines, rope_stage)
    # at most 1: before the first block own_max is stale, and row_sum 0, but 0 · inf is NaN
    own_rescale = gl.exp2(gl.minimum(own_max - row_max, 0.0))
    own_rescale = gl.convert_layout(
        own_rescale, gl.SliceLayout(0, row_sum.type.layout), assert_trivial=True
    )
    return row_sum * gl.expand_dims(own_rescale, 0) + sum_pairs(exponentials)


@gluon.jit
def sum_tile(warpgroup, has_none, row_sum, tiles_done, pipelines, LAYOUT: gl.constexpr):
    """Return (row_max, row_sum, prob_scale) of a work tile, in the first warpgroup; the second one
    has passed its own to the first.

    has_none  no block of the tile is the warpgroup's own
    """
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    HAS_ROW_SCALES: gl.constexpr = pipelines.scales is not None
    row_sum = gl.convert_layout(gl.sum(row_sum, 0), ROW)
    row_max, prob_scale = _read_exchange(warpgroup.outgoing, ROW, HAS_ROW_SCALES)
    row_max = gl.where(has_none, INITIAL_ROW_MAX, row_max)
    # `pow2_scale` has a minimum
    prob_scale = gl.where(has_none, 0.0 if HAS_ROW_SCALES else 1.0, prob_scale)
    if warpgroup.INDEX == 0:
        other_max, other_scale = _wait_exchange(warpgroup.end, tiles_done & 1, ROW, HAS_ROW_SCALES)
        last_max = gl.maximum(row_max, other_max)
        row_sum = row_sum * gl.exp2(row_max - last_max)
        row_sum += warpgroup.end_sum.load(ROW) * gl.exp2(other_max - last_max)
        row_max = last_max
        prob_scale = gl.maximum(prob_scale, other_scale)
    else:
        warpgroup.end_sum.store(row_sum)
        _write_exchange(warpgroup.end, row_max, prob_scale, HAS_ROW_SCALES)
    return row_max, row_sum, prob_scale


@gluon.jit
def store_out_scale(probs, tiles_done, out_scale):
    mbarrier.wait(probs.out_scale_empty, (tiles_done & 1) ^ 1)
    probs.out_scale.store(out_scale)
    mbarrier.arrive(probs.out_scale_full, count=1)


@gluon.jit
def qk_softmax_warpgroup(warpgroup, item, index, inputs, scheduler, outputs, state):
    """Run one of the two QK-softmax warpgroups; `warpgroup` says which."""
    loaded, query = state.loaded, state.query
    probs, pipelines, scale_log2 = state.probs, state.pipelines, state.logits.scale
    HEADS: gl.constexpr = scheduler.ROWS
    LAYOUT: gl.constexpr = acc_layout(HEADS)
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    INDEX: gl.constexpr = warpgroup.INDEX
    scaled = warpgroup.scaled
    IS_FP8_QUERY: gl.constexpr = loaded.latent.dtype == gl.int32
    FORMAT: gl.constexpr = state.FORMAT
    SCALES_ROPE: gl.constexpr = IS_FP8_QUERY or not FORMAT.IS_BF16_ROPE
    zero = item * 0
    FILLS: gl.constexpr = D_TILES // pipelines.latent.TILES_PER_STAGE
    stage, phase = advance(pipelines.latent, zero, zero, INDEX * FILLS)
    rope_stage, rope_phase = advance(pipelines.rope, zero, zero, INDEX)
    tiles_done = item * 0  # its parity is the phase of what happens once per work tile
    blocks_done = item * 0
    if INDEX == 0:
        load_query(inputs, scheduler, item, index, loaded)
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        first_block = keys.first_block + ((blocks_done + INDEX) & 1)
        row_sum = sum_pairs(gl.zeros([64, HEADS], gl.float32, LAYOUT))
        if INDEX == 0:
            if IS_FP8_QUERY:
                q_scale = load_q_scale(state, scheduler, item, index)
                mbarrier.wait(loaded.full, tiles_done & 1)
                _convert_query(loaded, query, q_scale, scaled.scale, FORMAT)
            else:
                mbarrier.wait(loaded.full, tiles_done & 1)
                scale_queries(query, scaled.scale, FORMAT)
            mbarrier.arrive(scaled.full, count=1)
        else:
            mbarrier.wait(scaled.full, tiles_done & 1)
        for own_block in range(first_block, keys.end_block, 2):
            # opaque: the compiler would count blocks, keys and stages in registers of their own
            block = own_block + opaque_zero()
            fill = blocks_done + block - keys.first_block
            scores, stage, phase = qk_block(
                inputs,
                query,
                pipelines,
                stage,
                phase,
                rope_stage,
                rope_phase,
                scaled.scale,
                LAYOUT,
                FORMAT,
                SCALES_ROPE,
            )
            stage, phase = advance(pipelines.latent, stage, phase, FILLS)
            scores = mask_scores(scores, block, keys, 0, state.logits)
            row_sum = softmax_block(
                warpgroup,
                scores,
                fill,
                block == keys.first_block,
                row_sum,
                probs,
                pipelines,
                rope_stage,
                scale_log2,
            )
            rope_stage, rope_phase = advance(pipelines.rope, rope_stage, rope_phase, 2)
        row_max, row_sum, prob_scale = sum_tile(
            warpgroup, first_block >= keys.end_block, row_sum, tiles_done, pipelines, LAYOUT
        )
        next_item, next_index = next_tile(scheduler, item, index + gl.num_programs(0))
        if INDEX == 0:
            if next_item < scheduler.last_item:
                load_query(inputs, scheduler, next_item, next_index, loaded)
            tile = locate_tile(scheduler, item, index)
            row = gl.arange(0, HEADS, ROW)
            lse, out_scale = finish_rows(
                tile, outputs, scheduler.heads, tile.first_head + row, row_max, row_sum
            )
            store_lse(tile, outputs, scheduler.heads, row, lse)
            out_scale *= state.tensor_scale * (1.0 / FP16_TARGET)
            store_out_scale(probs, tiles_done, out_scale * prob_scale)
        tiles_done += 1
        blocks_done += gl.maximum(keys.end_block - keys.first_block, 0)
        item = next_item
        index = next_index
