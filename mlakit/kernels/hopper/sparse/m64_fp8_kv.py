"""Absorbed MLA attention over listed FP8 cache rows with 16-bit queries, 64 heads per CTA.

Formats    fp8_block128, fp8_token, fp8: 512 latent columns, with or without 64 rotated ones
           fp8_block64: 448 latent and 64 rotated columns, all of them values
Queries    bf16; fp16 where no columns of keys are bf16 (fp8), or all are values (fp8_block64)
Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
           over the rows that a token's list names
Work       a work tile is 64 heads of one token over a split of its lists, 64 entries per block; a
           persistent CTA computes one tile after the other
Bound      by tensor cores, if rows are converted once for all 64 heads: so a dequant warpgroup
           writes them to shared memory as float16 (`fp8_dequant`). With few blocks per tile by the
           fetch of instructions: about 10 cycles for each that runs once

             dequant                    QK-softmax (columns 0 to 255) PV (columns 256 to 511)
  a tile     count its blocks  count -> ----------------------------->
  a block    right half of n   full ->  S = Q·Kᵀ of n
             left half of n    full ->  m' = next_row_max(m, S)
             load bytes of n + 1        P = exp2(S − m')     probs ->  acc = acc·a + P·V right
                                        acc = acc·a + P·V left         prefetch rows of n + 3
                       <- left empty    and meanwhile S of n + 1  <-  empty
                       <- right empty ----------------------------
  a tile                                write acc, lse  out_scale ->  write acc

Schedule   that of `decode.m64_fp8_kv`, but that PV prefetches rows to L2, which are not contiguous
Pipelines  `BlockStages`, two stages; one stage of probabilities with the rescale a of acc, which
           also passes on out_scale; `BlockCounts`. Blocks and tiles are counted by each warpgroup
Deadlock   none: all walk the same tiles and blocks. The dequant warpgroup waits for both others to
           release block n − 2; QK-softmax for block n + 1 while it holds n, and for PV; PV waits
           for probabilities only. A tile's count is written before its first block
Memory     227 KB of shared memory, all registers. Splits write float32 partials (`sparse_merge`)
Limits     rows at multiples of 16 bytes, 2**31 rows in a cache
Numbers    queries are scaled by a power of two per head. Values of fp8_block128 times their scales
           are rounded to float16 once, an eighth of bf16's rounding; other rows are converted
           exactly, times powers of two (`fp8_rows`). P, times the scale of a row if it has one, is
           rounded to float16. Rows of invalid entries are zeros: they are not read, and
           0 · NaN is NaN
Lineage    own design; ideas: FlashMLA's split of the accumulator's columns over two warpgroups, and
           dequantisation by a warpgroup of its own as in its FP8 sparse decode
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

from mlakit.kernels.hopper.device.pipeline import two_stages
from mlakit.kernels.hopper.device.primitives import (
    acc_layout,
    named_arrive,
    named_wait,
    opaque_zero,
    rescale_acc,
)
from mlakit.kernels.hopper.device.query_scale import SCORES, scale_to_fp16
from mlakit.kernels.hopper.device.softmax import (
    NEG_INF,
    PROB_SCALE,
    SMALLEST_SCALE,
    apply_sign,
    next_row_max,
)
from mlakit.kernels.hopper.sparse.arguments import VARYING
from mlakit.kernels.hopper.sparse.epilogue import Outputs, store_values
from mlakit.kernels.hopper.sparse.fp8_rows import PREFETCHED, RowScales, prefetch_rows
from mlakit.kernels.hopper.sparse.lists import (
    block_range,
    load_ids,
    locate_tile,
    make_work,
)
from mlakit.kernels.hopper.sparse.m64_fp8_kv_dequant import (
    LEFT_EMPTY,
    LEFT_FULL,
    RIGHT_EMPTY,
    RIGHT_FULL,
    alloc_block_counts,
    alloc_stages,
    dequant_warpgroup,
    read_count,
)
from mlakit.kernels.hopper.sparse.m64_fp8_kv_query import QueryTiles, alloc_query, load_query
from mlakit.kernels.hopper.sparse.m64_fp8_kv_softmax import (
    PROBS_FULL,
    Softmax,
    alloc_prob_stage,
    finish_tile,
    initial_softmax,
    inverse_power,
    load_block_scale,
    receive_out_scale,
    store_tile_statistics,
)

ACC = gl.constexpr(acc_layout(256))
COLUMN = gl.constexpr(gl.SliceLayout(0, SCORES))
AHEAD = gl.constexpr(3)  # blocks from PV to the one whose rows are prefetched


@gluon.jit
def _issue_qk(query, stages, blocks_done):
    """Scores of a block, [64 heads, 64 entries], issued as soon as its halves have arrived."""
    stage, phase = two_stages(blocks_done)
    zero = opaque_zero()
    zeros = gl.zeros([64, 64], gl.float32, SCORES)
    named_wait(RIGHT_FULL + stage, 256)
    fence_async_shared()  # of the dequant warpgroup's stores
    keys = stages.right.index(stage).permute((1, 0))
    qk = warpgroup_mma(query.right.index(zero), keys, zeros, use_acc=False, is_async=True)
    named_wait(LEFT_FULL + stage, 256)
    if stages.rope_full is not None:
        mbarrier.wait(stages.rope_full.index(stage), phase)
    fence_async_shared()
    keys = stages.left.index(stage).permute((1, 0))
    qk = warpgroup_mma(query.left.index(zero), keys, qk, is_async=True)
    if stages.rope is not None:
        keys = stages.rope.index(stage).permute((1, 0))
        qk = warpgroup_mma(query.rope.index(zero), keys, qk, is_async=True)
    return qk


@gluon.jit
def _masked_scores(scores, blocks_done, row_scale, stages, SIGN: gl.constexpr):
    """(scores, row_scale with that of the block, factor of probabilities without acc_scale)"""
    stage, _ = two_stages(blocks_done)
    if stages.key_factor is not None:
        factor = gl.expand_dims(stages.key_factor.index(stage).load(COLUMN), 0)
        scores = apply_sign(scores * factor, SIGN)
        is_invalid = (factor < 0).broadcast_to(scores.shape)  # no NaN is
    else:
        factor = load_block_scale(stages, stage)
        row_scale *= factor
        scores = apply_sign(scores, SIGN)
        bias = gl.expand_dims(stages.bias.index(stage).load(COLUMN), 0)
        is_invalid = (bias < 0).broadcast_to(scores.shape)
    # not added: a score of a row of zeros may be NaN
    scores = gl.where(is_invalid, NEG_INF, scores)
    return scores, gl.maximum(row_scale, SMALLEST_SCALE), factor


@gluon.jit
def _probabilities(scores, row_scale, factor, block_max, blocks_done, softmax, stages):
    """Return (probabilities as float16, rescale of acc, softmax after this block)"""
    stage, _ = two_stages(blocks_done)
    acc_scale = gl.maximum(softmax.acc_scale, load_block_scale(stages, stage))
    inverse = inverse_power(acc_scale)
    row_max = next_row_max(softmax.row_max, block_max)
    exponentials = gl.exp2(scores * gl.expand_dims(row_scale, 1) - gl.expand_dims(row_max, 1))
    rescale = gl.exp2(softmax.row_max - row_max)
    row_sum = softmax.row_sum * rescale + gl.sum(exponentials, 1)
    exponentials *= factor * (PROB_SCALE * inverse)
    rescale *= softmax.acc_scale * inverse
    max_logit = gl.maximum(softmax.max_logit, block_max)
    return exponentials.to(gl.float16), rescale, Softmax(row_max, row_sum, max_logit, acc_scale)


@gluon.jit
def _softmax_block(
    scores,
    is_first,
    blocks_done,
    tiles_done,
    softmax,
    row_scale,
    pending,
    stages,
    prob_stage,
    SIGN: gl.constexpr,
):
    """Softmax of a block, whose probabilities go to PV: (acc of the blocks before, rescaled;
    softmax after this block).

    pending  acc that PV of the block before is accumulated to
    """
    scores, row_scale, factor = _masked_scores(scores, blocks_done, row_scale, stages, SIGN)
    block_max = gl.max(scores, 1) * row_scale
    probs, rescale, softmax = _probabilities(
        scores, row_scale, factor, block_max, blocks_done, softmax, stages
    )
    # in this order: the softmax overlaps with PV, and only the spin wait on a barrier keeps the
    # assembler from waiting for PV before it
    mbarrier.wait(prob_stage.empty, ((blocks_done + tiles_done) & 1) ^ 1)
    acc, probs = warpgroup_mma_wait(0, deps=(pending, probs))
    if not is_first:
        named_arrive(LEFT_EMPTY + ((blocks_done & 1) ^ 1), 256)
    # both wgmma have read the probabilities of the block before
    prob_stage.probs.store(probs)
    prob_stage.rescale.store(rescale)
    fence_async_shared()
    named_arrive(PROBS_FULL, 256)
    return rescale_acc(acc, rescale), softmax


@gluon.jit
def _qk_softmax_warpgroup(
    q,
    work,
    tokens,
    heads,
    outputs,
    query,
    prob_stage,
    stages,
    block_counts,
    scale_log2,
    SIGN: gl.constexpr,
):
    """Run the QK-softmax warpgroup, which also computes PV of the left column half."""
    tile = gl.program_id(0)
    blocks_done = tile * 0
    tiles_done = tile * 0
    step = gl.num_programs(0)
    load_query(q, work, tokens, tile, query)
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for _ in tl.range(0, (work.num_tiles - tile + step - 1) // step, disable_licm=True):
        mbarrier.wait(query.full, tiles_done & 1)
        row_scale = scale_to_fp16(query, q.values.dtype) * scale_log2
        softmax = initial_softmax()
        pending = warpgroup_mma_init(gl.zeros([64, 256], gl.float32, ACC))
        count = read_count(block_counts, tiles_done)
        qk = _issue_qk(query, stages, blocks_done)
        scores = warpgroup_mma_wait(0, deps=(qk,))
        # the last block is no copy after the loop: code that runs once waits to be fetched
        for block in range(count):
            acc, softmax = _softmax_block(
                scores,
                block == 0,
                blocks_done,
                tiles_done,
                softmax,
                row_scale,
                pending,
                stages,
                prob_stage,
                SIGN,
            )
            values = stages.left.index(blocks_done & 1)
            if block + 1 < count:
                qk = _issue_qk(query, stages, blocks_done + 1)
                pending = warpgroup_mma(prob_stage.probs, values, acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=(qk,))
            else:
                pending = warpgroup_mma(prob_stage.probs, values, acc, is_async=True)
                scores = gl.zeros([64, 64], gl.float32, SCORES)  # frees those of this block
            blocks_done += 1
        next_tile = tile + step
        if next_tile < work.num_tiles:
            load_query(q, work, tokens, next_tile, query)
        acc = warpgroup_mma_wait(0, deps=(pending,))
        named_arrive(LEFT_EMPTY + ((blocks_done & 1) ^ 1), 256)
        at = locate_tile(work, tokens, tile)
        fill = blocks_done + tiles_done
        lse, out_scale = finish_tile(at, outputs, heads, softmax, prob_stage, fill)
        acc = rescale_acc(acc, out_scale)
        store_values(at, outputs, heads, acc, 0)
        store_tile_statistics(at, outputs, heads, softmax, lse)
        tiles_done += 1
        tile = next_tile


@gluon.jit
def _pv_warpgroup(
    work, tokens, heads, outputs, prob_stage, stages, block_counts, FORMAT: gl.constexpr
):
    """Run the PV warpgroup, which computes PV of the right column half.

    It waits most of the time, so it also prefetches rows of fp8_block128 to L2, ahead of the
    dequant warpgroup, which has most to do with them.
    """
    PREFETCHES: gl.constexpr = FORMAT.SCALES_AT >= 0
    ROW_BYTES: gl.constexpr = FORMAT.ROPE_AT + (0 if stages.rope is None else 128)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    tile = gl.program_id(0)
    blocks_done = tile * 0
    tiles_done = tile * 0
    step = gl.num_programs(0)
    for _ in tl.range(0, (work.num_tiles - tile + step - 1) // step, disable_licm=True):
        acc = gl.zeros([64, 256], gl.float32, ACC)
        if PREFETCHES:
            blocks = block_range(work, tile)
            ahead = blocks.first + AHEAD
            for block in range(blocks.first + 1, ahead):
                prefetch_rows(
                    work, blocks, block, load_ids(work, blocks, block, PREFETCHED), ROW_BYTES
                )
            ids = load_ids(work, blocks, ahead, PREFETCHED)
        for block in range(read_count(block_counts, tiles_done)):
            stage = blocks_done & 1
            named_wait(PROBS_FULL, 256)
            fence_async_shared()  # of the dequant warpgroup's stores
            acc = rescale_acc(acc, prob_stage.rescale.load(ROW))
            # the QK-softmax warpgroup has waited for these values
            values = stages.right.index(stage)
            pending = warpgroup_mma(prob_stage.probs, values, acc, is_async=True)
            if PREFETCHES:
                prefetch_rows(work, blocks, ahead + block, ids, ROW_BYTES)
                ids = load_ids(work, blocks, ahead + block + 1, PREFETCHED)
            acc = warpgroup_mma_wait(0, deps=(pending,))
            mbarrier.arrive(prob_stage.empty, count=1)
            named_arrive(RIGHT_EMPTY + stage, 256)
            blocks_done += 1
        acc = rescale_acc(acc, receive_out_scale(prob_stage, ROW))
        store_values(locate_tile(work, tokens, tile), outputs, heads, acc, 256)
        tiles_done += 1
        tile += step


@gluon.jit(do_not_specialize=VARYING)
def sparse_mla_m64_fp8_kv_kernel(
    q,  # TMA descriptors: tiles of 1 x 64 x 256
    q_rope,  # of 1 x 64 x 64 rotated columns, or None
    tokens,
    heads,
    num_splits,
    lens,  # [tokens], or None
    topk,
    stride_token,  # from a list to the next
    stride_lens,
    extra_lens,  # of a second cache, as all that is extra
    extra_topk,
    extra_stride_token,
    extra_stride_lens,
    main,  # `arguments.ListArguments`
    extra,  # likewise, or None
    outputs,  # `arguments.OutputArguments`
    scales,  # `arguments.ScaleArguments`
    TRAITS: gl.constexpr,  # `configs.Traits`
    CONFIG: gl.constexpr,  # `configs.M64Fp8KvConfig`
):
    """Run persistent CTAs over the work tiles of all tokens."""
    FORMAT: gl.constexpr = TRAITS.FORMAT
    head_tiles = (heads + 63) // 64
    work = make_work(
        (main, lens, topk, stride_token, stride_lens),
        (extra, extra_lens, extra_topk, extra_stride_token, extra_stride_lens),
        num_splits,
        head_tiles,
        tokens * num_splits * head_tiles,
        TRAITS,
    )
    outputs = Outputs(*outputs)
    row_scales = (RowScales(*scales.main),)
    if TRAITS.HAS_EXTRA:
        row_scales += (RowScales(*scales.extra),)
    stages = alloc_stages(FORMAT, TRAITS.HAS_ROPE)
    query = alloc_query(stages.rope)
    prob_stage = alloc_prob_stage()
    block_counts = alloc_block_counts(4)
    SIGN: gl.constexpr = TRAITS.SIGN
    gl.warp_specialize(
        [
            (
                _qk_softmax_warpgroup,
                (
                    QueryTiles(q, q_rope),
                    work,
                    tokens,
                    heads,
                    outputs,
                    query,
                    prob_stage,
                    stages,
                    block_counts,
                    scales.scale_log2,
                    SIGN,
                ),
            ),
            (
                _pv_warpgroup,
                (work, tokens, heads, outputs, prob_stage, stages, block_counts, FORMAT),
            ),
            (dequant_warpgroup, (work, row_scales, stages, block_counts, FORMAT)),
        ],
        [4, 4],
        [CONFIG.PV_REGISTERS, CONFIG.DEQUANT_REGISTERS],
    )
