"""Absorbed MLA decode over FP8 cache rows with 16-bit queries, 64 heads per CTA.

Formats    fp8           one scale for the tensor: part of the softmax's scale, and of the result's
           fp8_token     a scale per row: multiplies scores and probabilities
           fp8_block128  a scale per 128 columns: multiplies values; a power of two per row, scores
                         and probabilities (`fp8_rows`)
Queries    bf16 or fp16; FP8 queries have `m64_fp8_qk`, but for those over fp8_block128, which are
           converted
Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
Work       a work tile is 64 heads of one query over a split of its request's keys, 64 keys per
           block; a persistent CTA computes one tile after the other
Bound      by tensor cores, if rows are dequantised once for all 64 heads: so a dequant warpgroup
           writes them to shared memory as float16

             dequant                    QK-softmax (columns 0 to 255) PV (columns 256 to 511)
  a block    load bytes of block n + 1
             right half of n   full ->  S = Q·Kᵀ of n
             left half of n    full ->  m' = next_row_max(m, S)
                                        P = exp2(S − m')     probs ->  acc = acc·a + P·V right
                                        acc = acc·a + P·V left    <-  empty
                       <- left empty    and meanwhile S of n + 1
                       <- right empty ----------------------------
  a tile                                write lse, acc  out_scale ->  write acc

Pipelines  `BlockStages` of float16, two stages; one stage of probabilities P with the rescale a of
           acc. Blocks are counted across work tiles
Phases     out_scale is written when PV of the tile's last block is done: the PV warpgroup has then
           read the one before
Deadlock   none: all walk the same work tiles and blocks. The dequant warpgroup waits for PV of
           block n − 2; QK-softmax for block n + 1 while it holds n, so for what waits for n − 1 at
           most, and for PV; PV waits for probabilities only
Memory     228 KB of shared memory, all registers. Splits write float32 partials (`merge_partials`)
Limits     D_C = 512, D_R = 64; any page size
Numbers    queries and rows of fp8 and fp8_token are converted exactly; values of fp8_block128 times
           their scales are rounded to float16 once, an eighth of bf16's rounding. P, times the
           row's scale, is rounded to float16
Lineage    own design; ideas: FlashMLA's split of the accumulator's columns over two warpgroups, and
           dequantisation by a warpgroup of its own as in its FP8 sparse decode
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.decode import configs
from mlakit.kernels.hopper.decode.arguments import VARYING
from mlakit.kernels.hopper.decode.m64_fp8_kv_dequant import (
    LEFT_EMPTY,
    LEFT_FULL,
    RIGHT_EMPTY,
    RIGHT_FULL,
    CacheRows,
    alloc_stages,
    dequant_scaled_warpgroup,
    dequant_warpgroup,
    num_blocks,
    release,
    wait_full,
)
from mlakit.kernels.hopper.decode.m64_fp8_kv_query import (
    Query,
    Softmax,
    SoftmaxTraits,
    alloc_prob_stage,
    convert_queries,
    load_query,
    store_probs,
    wait_probs,
)
from mlakit.kernels.hopper.decode.scheduler import (
    count_tiles,
    first_tile,
    key_range,
    launch_dependents,
    locate_tile,
    make_work,
    next_tile,
)
from mlakit.kernels.hopper.device.epilogue import finish_rows, store_acc, store_lse
from mlakit.kernels.hopper.device.fp8_convert import FP16_TARGET, pow2_scale
from mlakit.kernels.hopper.device.paged_loads import wait_block
from mlakit.kernels.hopper.device.pipeline import two_stages
from mlakit.kernels.hopper.device.primitives import (
    SMEM_16BIT,
    acc_layout,
    alloc_barrier,
    opaque_zero,
    rescale_acc,
)
from mlakit.kernels.hopper.device.query_scale import SCORES, scale_to_fp16
from mlakit.kernels.hopper.device.row_scales import apply_tensor_scale
from mlakit.kernels.hopper.device.softmax import (
    INITIAL_ROW_MAX,
    PROB_SCALE,
    RESCALE_THRESHOLD,
    SMALLEST_SCALE,
    Logits,
    mask_scores,
    next_row_max,
)

ACC = gl.constexpr(acc_layout(256))
RESCALE_THRESHOLD_ROW_SCALES = gl.constexpr(configs.RESCALE_THRESHOLD_ROW_SCALES)


@gluon.jit
def _issue_qk(inputs, query, blocks, fill):
    """Scores of a block, [64 heads, 64 keys], issued as soon as its halves have arrived."""
    stage, phase = two_stages(fill)
    zero = opaque_zero()
    zeros = gl.zeros([64, 64], gl.float32, SCORES)
    wait_full(blocks.right_full, RIGHT_FULL, stage, phase)
    keys = blocks.right.index(stage).permute((1, 0))
    qk = warpgroup_mma(query.right.index(zero), keys, zeros, use_acc=False, is_async=True)
    wait_full(blocks.left_full, LEFT_FULL, stage, phase)
    keys = blocks.left.index(stage).permute((1, 0))
    qk = warpgroup_mma(query.left.index(zero), keys, qk, is_async=True)
    if blocks.rope_full is not None:
        wait_block(inputs, blocks.rope_full.index(stage), phase)
    keys = blocks.rope.index(stage).permute((1, 0))
    return warpgroup_mma(query.rope.index(zero), keys, qk, is_async=True)


@gluon.jit
def _softmax_step(scores, block, fill, keys, softmax, logits, scales, traits):
    """Return (probabilities as float16, rescale of acc, softmax after this block)"""
    prob_scale, factor = softmax.prob_scale, PROB_SCALE
    THRESHOLD: gl.constexpr = (
        RESCALE_THRESHOLD_ROW_SCALES if traits.HAS_ROW_SCALES else RESCALE_THRESHOLD
    )
    if traits.HAS_ROW_SCALES:
        stage, _ = two_stages(fill)
        key_scale = scales.index(stage).load(gl.SliceLayout(0, SCORES))
        scores *= gl.expand_dims(key_scale, 0)
        prob_scale, factor = pow2_scale(gl.maximum(softmax.prob_scale, gl.max(key_scale, 0)))
    scores = mask_scores(scores, block, keys, 1, logits)
    row_max = next_row_max(softmax.row_max, gl.max(scores, 1) * logits.scale, THRESHOLD)
    exponentials = gl.exp2(scores * gl.expand_dims(logits.scale, 1) - gl.expand_dims(row_max, 1))
    rescale = gl.exp2(softmax.row_max - row_max)
    row_sum = softmax.row_sum * rescale + gl.sum(exponentials, 1)
    if traits.HAS_ROW_SCALES:
        exponentials *= gl.expand_dims(key_scale * factor, 0)
        rescale *= softmax.prob_scale * factor * (1.0 / FP16_TARGET)
    else:
        exponentials *= factor
    return exponentials.to(gl.float16), rescale, Softmax(row_max, row_sum, prob_scale)


@gluon.jit
def _softmax_block(scores, block, fill, keys, softmax, logits, pending, blocks, prob_stage, traits):
    """Softmax of a block, whose probabilities go to PV: (acc of the blocks before, rescaled;
    softmax after this block).

    pending  acc that PV of the block before is accumulated to
    """
    probs, rescale, softmax = _softmax_step(
        scores, block, fill, keys, softmax, logits, blocks.scales, traits
    )
    # in this order: the softmax overlaps with PV, and only the spin wait on a barrier keeps the
    # assembler from waiting for PV before it
    mbarrier.wait(prob_stage.empty, (fill & 1) ^ 1)
    acc, probs = warpgroup_mma_wait(0, deps=(pending, probs))
    if block > keys.first_block:
        release(blocks.left_empty, LEFT_EMPTY, (fill & 1) ^ 1)
    store_probs(prob_stage, probs, rescale)  # both wgmma have read those of the block before
    return rescale_acc(acc, rescale), softmax


@gluon.jit
def _qk_softmax_warpgroup(
    item,
    index,
    inputs,
    scheduler,
    outputs,
    query,
    prob_stage,
    blocks,
    scale_log2,
    tensor_scale,
    traits,
    q_scales,
):
    """Run the QK-softmax warpgroup, which also computes PV of the left column half."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    fill = item * 0
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
        logits = Logits(gl.maximum(row_scale * scale_log2, SMALLEST_SCALE), traits.SCORES)
        softmax = Softmax(
            gl.full([64], INITIAL_ROW_MAX, gl.float32, ROW),
            gl.zeros([64], gl.float32, ROW),
            # `pow2_scale` has a minimum; without row scales the power of two is constant
            gl.to_tensor(0.0 if traits.HAS_ROW_SCALES else FP16_TARGET / PROB_SCALE),
        )
        pending = warpgroup_mma_init(gl.zeros([64, 256], gl.float32, ACC))
        qk = _issue_qk(inputs, query, blocks, fill)
        scores = warpgroup_mma_wait(0, deps=(qk,))
        last_block = keys.first_block + num_blocks(keys) - 1
        for block in range(keys.first_block, last_block):
            acc, softmax = _softmax_block(
                scores, block, fill, keys, softmax, logits, pending, blocks, prob_stage, traits
            )
            qk = _issue_qk(inputs, query, blocks, fill + 1)
            values = blocks.left.index(fill & 1)
            pending = warpgroup_mma(prob_stage.probs, values, acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(qk,))
            fill += 1
        next_item, next_index = next_tile(scheduler, item, index + gl.num_programs(0))
        if next_item < scheduler.last_item:
            load_query(inputs, scheduler, next_item, next_index, query)
        acc, softmax = _softmax_block(
            scores, last_block, fill, keys, softmax, logits, pending, blocks, prob_stage, traits
        )
        values = blocks.left.index(fill & 1)
        pending = warpgroup_mma(prob_stage.probs, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(pending,))
        release(blocks.left_empty, LEFT_EMPTY, fill & 1)
        # located again: kept through the loop, it would take registers
        tile = locate_tile(scheduler, item, index)
        row = gl.arange(0, 64, ROW)
        lse, out_scale = finish_rows(
            tile, outputs, scheduler.heads, tile.first_head + row, softmax.row_max, softmax.row_sum
        )
        store_lse(tile, outputs, scheduler.heads, row, lse)
        out_scale *= tensor_scale * (1.0 / FP16_TARGET) * softmax.prob_scale
        mbarrier.wait(prob_stage.empty, fill & 1)
        prob_stage.out_scale.store(out_scale)
        mbarrier.arrive(prob_stage.out_scale_full, count=1)
        acc = rescale_acc(acc, out_scale)
        store_acc(tile, outputs, scheduler.heads, (acc,), 0, 0)
        fill += 1
        tiles_done += 1
        item = next_item
        index = next_index


@gluon.jit
def _pv_warpgroup(item, index, inputs, scheduler, outputs, prob_stage, blocks):
    """Run the PV warpgroup, which computes PV of the right column half."""
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    fill = item * 0
    tiles_done = item * 0
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        acc = gl.zeros([64, 256], gl.float32, ACC)
        for _ in range(num_blocks(keys)):
            stage = fill & 1
            wait_probs(prob_stage, fill)
            acc = rescale_acc(acc, prob_stage.rescale.load(ROW))
            # the QK-softmax warpgroup has waited for these values
            pending = warpgroup_mma(prob_stage.probs, blocks.right.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(pending,))
            mbarrier.arrive(prob_stage.empty, count=1)
            release(blocks.right_empty, RIGHT_EMPTY, stage)
            fill += 1
        mbarrier.wait(prob_stage.out_scale_full, tiles_done & 1)
        out_scale = prob_stage.out_scale.load(ROW)
        tile = locate_tile(scheduler, item, index)
        acc = rescale_acc(acc, out_scale)
        store_acc(tile, outputs, scheduler.heads, (acc,), 256, 0)
        tiles_done += 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit(do_not_specialize=VARYING)
def mla_decode_m64_fp8_kv_kernel(
    q,  # TMA descriptors: tiles of 64 x 256
    q_rope,  # of 64 x 64
    kv,  # the cache, int32
    kv_rope,  # TMA descriptor: tiles of 64 x 64 bfloat16, of PAGE rows where pages are smaller; for
    # fp8_token: in other formats the dequant warpgroup loads rotated columns itself. In a tensor of
    # their own they are int32, as the cache
    scale_log2,
    stride_table_request,
    q_token_rows,
    q_rope_token_rows,
    heads,
    slot_rows,
    stride_lse_token,
    batch,  # these six are of `arguments`
    schedule,
    outputs,
    gather,
    kv_scales,
    q_scales,
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `configs.M64Fp8KvConfig`
):
    """Run the plan on a grid (work tiles of a request that run at once, CTAs of the plan)."""
    NONE: gl.constexpr = None
    scale_log2, tensor_scale = apply_tensor_scale(kv_scales, scale_log2)
    inputs, scheduler, outputs = make_work(
        (q, q_rope, NONE, kv_rope),
        (stride_table_request, q_token_rows, q_rope_token_rows, heads, slot_rows, stride_lse_token),
        (batch, schedule, outputs, gather),
        TRAITS,
        schedule.head_tiles,
    )
    FORMAT: gl.constexpr = TRAITS.FORMAT
    IS_SPLIT: gl.constexpr = FORMAT.ROPE_AT < 0
    rows = CacheRows(
        words=kv,
        rope_words=kv_rope if IS_SPLIT else NONE,
        rope_row_chunks=gather.rope_row_chunks,
        ROPE_COLUMN=TRAITS.ROPE_COLUMN,
        IS_PACKED=CONFIG.IS_PACKED,
        scales=kv_scales.row_scales,
        stride_scales_page=kv_scales.stride_page,
        stride_scales_row=kv_scales.stride_row,
        FORMAT=FORMAT,
    )
    blocks = alloc_stages(FORMAT, gather.words)
    query = Query(
        gl.allocate_shared_memory(gl.float16, [1, 64, 256], SMEM_16BIT),
        gl.allocate_shared_memory(gl.float16, [1, 64, 256], SMEM_16BIT),
        gl.allocate_shared_memory(blocks.rope.dtype, [1, 64, 64], SMEM_16BIT),
        alloc_barrier(),
    )
    IS_SCALED: gl.constexpr = FORMAT.SCALED_BY == "group"
    prob_stage = alloc_prob_stage(IS_NAMED=IS_SCALED)
    traits = SoftmaxTraits(kv_scales.row_scales is not None, TRAITS.SCORES)
    item, index = first_tile(scheduler, schedule)
    if item < scheduler.last_item:
        launch_dependents(scheduler, item)
        gl.warp_specialize(
            [
                (
                    _qk_softmax_warpgroup,
                    (
                        item,
                        index,
                        inputs,
                        scheduler,
                        outputs,
                        query,
                        prob_stage,
                        blocks,
                        scale_log2,
                        tensor_scale,
                        traits,
                        q_scales,
                    ),
                ),
                (_pv_warpgroup, (item, index, inputs, scheduler, outputs, prob_stage, blocks)),
                (
                    dequant_scaled_warpgroup if IS_SCALED else dequant_warpgroup,
                    (item, index, inputs, scheduler, rows, blocks),
                ),
            ],
            [4, 4],
            [CONFIG.PV_REGISTERS, CONFIG.DEQUANT_REGISTERS],
        )
