"""Absorbed MLA decode over FP8 cache rows, 512 values and 64 rotated columns, few heads per CTA.

Formats    fp8           one scale for the tensor: part of the softmax's scale, and of the result's
           fp8_token     a scale per row: multiplies scores and probabilities
           fp8_block128  a scale per 128 columns, inside the row; likewise
Queries    bf16, fp16 or FP8. FP8 queries arrive as words, are converted to shared memory of their
           own, and have a scale per token, which multiplies scores. Their rotated columns may be
           bf16, as those of the rows
Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
Work       a work tile is 8, 16 or 32 heads (ROWS) of one query over a split of its request's keys,
           64 keys per iteration; a persistent CTA computes one tile after the other
Bound      by bytes in flight, if shared memory has the bandwidth: dequantised rows do not go back
           to it. Both wgmma read FP8 from shared memory and convert it in registers (`fp8_convert`)

             producer, one warp        QK-softmax warpgroup            PV warpgroup
  a block    wait for empty stages
             load a block     full ->  Sᵀ = K·Qᵀ, tile by tile    ->  read a tile of V
                                       row_max
                                       Pᵀ = exp2(Sᵀ − row_max) probs -> acc = acc·rescale + Vᵀ·Pᵀ
                             <- empty: each stage, when both have read it
  a tile                               write lse        out_scale ->  write acc · out_scale

Softmax    two QK-softmax warpgroups take alternate blocks (`small_m_fp8_kv_softmax`): one computes
           while the other waits for its wgmma and for the other warps of its row_max
PV         one warpgroup, or two with half of the columns each (`configs.small_m_fp8_kv_config`)
Scales     the producer loads the rows' scales (`row_scales`) into stages that go with those of the
           rotated columns; they are released when the probabilities are written
Pipelines  latent stages have two consumers: the PV warpgroup of their columns and the QK-softmax
           warpgroup of their block. Probabilities have two stages, block n in stage n % 2, with the
           rescale of acc; out_scale has one, written by the first QK-softmax warpgroup. Blocks are
           counted across work tiles
Phases     a warpgroup that waits for a phase must know that the one before is over. For a stage of
           probabilities it is: one warpgroup writes all of them. For a latent stage it is, as the
           pipeline has room for two blocks: the fill before in that stage is of the warpgroup's own
           last block, or of one whose row_max or probabilities it has received
Deadlock   none: all walk the same work tiles and blocks. The QK-softmax warpgroup of block n waits
           for its stages; for the row_max of block n − 1, which is written before any
           probabilities; and for PV of block n − 2. A PV warpgroup waits for stages and for the
           probabilities of the block that they hold; the producer for both to release an earlier
           stage. At the end of a work tile the first QK-softmax warpgroup waits for the second,
           which then waits for the next queries. So the earliest unfinished block can always go on
Memory     all of shared memory, with 16 heads some 180 KB of stages, all in flight but for those
           being read
Limits     D_C = 512, D_R = 64; any page size, by TMA or by a gather producer (`paged_loads`)
Numbers    rows and queries are converted exactly; P, times the row's scale, is rounded to float16.
           acc is float32, scaled by powers of two that keep float16 in range. Rows past a query's
           last key and their scales are zeros, for 0 · NaN is NaN
Lineage    own design; ideas: swapped operands for few heads, FP8 converted in registers
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.decode.arguments import VARYING
from mlakit.kernels.hopper.decode.scheduler import (
    count_tiles,
    first_tile,
    key_range,
    launch_dependents,
    locate_tile,
    make_work,
    next_tile,
)
from mlakit.kernels.hopper.decode.small_m_fp8_kv_softmax import (
    SoftmaxState,
    SoftmaxWarpgroup,
    alloc_block_max,
    alloc_exchange,
    alloc_probs,
    alloc_scaled_query,
    qk_softmax_warpgroup,
)
from mlakit.kernels.hopper.device.epilogue import store_acc
from mlakit.kernels.hopper.device.fp8_convert import acc_columns, load_values
from mlakit.kernels.hopper.device.paged_loads import producer_arrivals, producer_warps
from mlakit.kernels.hopper.device.pipeline import (
    D_TILE,
    D_TILES,
    KVPipelines,
    Query,
    advance,
    alloc_pipeline,
    producer,
    release_read,
    two_stages,
)
from mlakit.kernels.hopper.device.primitives import (
    SMEM_16BIT,
    acc_layout,
    alloc_barrier,
    alloc_vector,
)
from mlakit.kernels.hopper.device.row_scales import (
    RowScales,
    alloc_scale_stages,
    apply_tensor_scale,
)
from mlakit.kernels.hopper.device.softmax import Logits


@gluon.jit
def _read_values(latent, d: gl.constexpr, stage, phase, num_valid, LAYOUT: gl.constexpr):
    """Tile `d` of the latent columns of a block, in this stage."""
    if d % latent.TILES_PER_STAGE == 0:
        mbarrier.wait(latent.full.index(stage), phase)
    smem = latent.tiles.index(stage * latent.TILES_PER_STAGE + d % latent.TILES_PER_STAGE)
    return load_values(smem, num_valid, LAYOUT)


@gluon.jit
def pv_block(
    probs, fill, latent, stage, phase, acc, num_valid, FIRST: gl.constexpr, LAYOUT: gl.constexpr
):
    """acc · rescale + Vᵀ·Pᵀ of a block whose first `num_valid` keys exist; releases its stages.

    acc  of each tile of columns from FIRST on, [D_TILE, heads]
    """
    OWN_TILES: gl.constexpr = len(acc)
    values = _read_values(latent, 0, stage, phase, num_valid, LAYOUT)
    prob_stage, prob_phase = two_stages(fill)
    mbarrier.wait(probs.full.index(prob_stage), prob_phase)
    rescale = probs.rescale.index(prob_stage).load(gl.SliceLayout(0, LAYOUT))
    rescale = gl.expand_dims(rescale, 0)
    done = ()
    for d in gl.static_range(OWN_TILES):
        copy = probs.probs[FIRST + d if probs.COPIES > 1 else 0]
        p = copy.index(prob_stage).permute((1, 0))
        pending = warpgroup_mma(values, p, acc[d] * rescale, is_async=True)
        if d % latent.TILES_PER_STAGE == latent.TILES_PER_STAGE - 1:
            release_read(latent, stage)
            stage, phase = advance(latent, stage, phase)
        next_values = values
        if d + 1 < OWN_TILES:
            next_values = _read_values(latent, d + 1, stage, phase, num_valid, LAYOUT)
        pending, values = warpgroup_mma_wait(0, deps=(pending, values))
        done += (pending,)
        values = next_values
    mbarrier.arrive(probs.empty.index(prob_stage), count=1)
    stage, phase = advance(latent, stage, phase, (D_TILES - OWN_TILES) // latent.TILES_PER_STAGE)
    return done, stage, phase


@gluon.jit
def _pv_warpgroup(
    NUMBER: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    item,
    index,
    inputs,
    scheduler,
    outputs,
    probs,
    pipelines,
):
    HEADS: gl.constexpr = scheduler.ROWS
    LAYOUT: gl.constexpr = acc_layout(HEADS)
    OWN_TILES: gl.constexpr = D_TILES // WARPGROUPS
    # a stage has one PV warpgroup that reads it
    gl.static_assert(OWN_TILES % pipelines.latent.TILES_PER_STAGE == 0)
    FIRST: gl.constexpr = NUMBER * OWN_TILES
    latent = pipelines.latent
    stage, phase = advance(latent, item * 0, item * 0, FIRST // latent.TILES_PER_STAGE)
    blocks_done, tiles_done = item * 0, item * 0
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        acc = ()
        for _ in gl.static_range(OWN_TILES):
            acc += (gl.zeros([D_TILE, HEADS], gl.float32, LAYOUT),)
        for block in range(keys.first_block, keys.end_block):
            acc, stage, phase = pv_block(
                probs, blocks_done, latent, stage, phase, acc, keys.end - block * 64, FIRST, LAYOUT
            )
            blocks_done += 1
        mbarrier.wait(probs.out_scale_full, tiles_done & 1)
        out_scale = probs.out_scale.load(gl.SliceLayout(0, LAYOUT))
        mbarrier.arrive(probs.out_scale_empty, count=1)
        tiles_done += 1
        tile = locate_tile(scheduler, item, index)
        store_acc(
            tile, outputs, scheduler.heads, acc, FIRST * D_TILE, 1, acc_columns(LAYOUT), out_scale
        )
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit(do_not_specialize=VARYING)
def mla_decode_small_m_fp8_kv_kernel(
    q,  # TMA descriptors: tiles of ROWS x 128; FP8: words
    q_rope,  # of ROWS x 64
    kv,  # words, 64 x 32; tiles have PAGE rows where pages are smaller
    kv_rope,  # 64 x 64 bfloat16, or 64 x 16 words (fp8)
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
    CONFIG: gl.constexpr,  # `configs.SmallMFp8KvConfig`
):
    """Run the plan on a grid (work tiles of a request that run at once, CTAs of the plan)."""
    scale_log2, tensor_scale = apply_tensor_scale(kv_scales, scale_log2)
    inputs, scheduler, outputs = make_work(
        (q, q_rope, kv, kv_rope),
        (stride_table_request, q_token_rows, q_rope_token_rows, heads, slot_rows, stride_lse_token),
        (batch, schedule, outputs, gather),
        TRAITS,
        schedule.head_tiles,
    )
    FORMAT: gl.constexpr = TRAITS.FORMAT
    ROWS: gl.constexpr = TRAITS.ROWS
    COPIES: gl.constexpr = D_TILES if FORMAT.SCALED_BY == "group" else 1
    WARPS: gl.constexpr = producer_warps(gather.words)
    row_scales = RowScales(
        first=kv_scales.row_scales,
        stride_page=kv_scales.stride_page,
        stride_row=kv_scales.stride_row,
        COUNT=COPIES,
        WARPS=WARPS,
    )
    NONE: gl.constexpr = None
    scale_stages: gl.constexpr = None
    LOADS: gl.constexpr = producer_arrivals(gather.words)
    ARRIVALS: gl.constexpr = LOADS + (0 if kv_scales.row_scales is None else 1)
    if kv_scales.row_scales is not None:
        scale_stages = alloc_scale_stages(CONFIG.ROPE_STAGES, COPIES)
    pipelines = KVPipelines(
        alloc_pipeline(
            CONFIG.STAGES,
            D_TILE // 4,
            kv,
            CONSUMERS=2,
            TILES_PER_STAGE=CONFIG.TILES_PER_STAGE,
            ARRIVALS=LOADS,
        ),
        alloc_pipeline(
            CONFIG.ROPE_STAGES, kv_rope.block_shape[1], kv_rope, CONSUMERS=1, ARRIVALS=ARRIVALS
        ),
        scale_stages,
        NONE,
    )
    loaded = Query(
        gl.allocate_shared_memory(q.dtype, [D_TILES, ROWS, q.block_shape[1]], q.layout),
        gl.allocate_shared_memory(q_rope.dtype, [1, ROWS, q_rope.block_shape[1]], q_rope.layout),
        alloc_barrier(),
    )
    query = loaded
    if q.dtype == gl.int32:
        rope = loaded.rope
        if q_rope.dtype == gl.int32:
            ROPE_TYPE: gl.constexpr = gl.bfloat16 if FORMAT.IS_BF16_ROPE else gl.float16
            rope = gl.allocate_shared_memory(ROPE_TYPE, [1, ROWS, 64], SMEM_16BIT)
        latent = gl.allocate_shared_memory(gl.float16, [D_TILES, ROWS, D_TILE], SMEM_16BIT)
        query = Query(latent, rope, loaded.full)
    probs = alloc_probs(ROWS, COPIES, CONFIG.PV_WARPGROUPS)
    state = SoftmaxState(
        loaded=loaded,
        query=query,
        q_scale=q_scales.q_scale,
        stride_q_scale=q_scales.stride_q_scale,
        probs=probs,
        pipelines=pipelines,
        logits=Logits(scale_log2, TRAITS.SCORES),
        tensor_scale=tensor_scale,
        FORMAT=FORMAT,
    )
    scaled = alloc_scaled_query(ROWS)
    item, index = first_tile(scheduler, schedule)
    if item < scheduler.last_item:
        launch_dependents(scheduler, item)
        to_second, to_first = alloc_exchange(ROWS), alloc_exchange(ROWS)
        end, end_sum = alloc_exchange(ROWS), alloc_vector(ROWS)
        first = SoftmaxWarpgroup(
            INDEX=0,
            block_max=alloc_block_max(ROWS),
            incoming=to_first,
            outgoing=to_second,
            end=end,
            end_sum=end_sum,
            scaled=scaled,
        )
        second = SoftmaxWarpgroup(
            INDEX=1,
            block_max=alloc_block_max(ROWS),
            incoming=to_second,
            outgoing=to_first,
            end=end,
            end_sum=end_sum,
            scaled=scaled,
        )
        ROPE_COLUMN: gl.constexpr = TRAITS.ROPE_COLUMN
        if CONFIG.PV_WARPGROUPS == 1:
            gl.warp_specialize(
                [
                    (
                        _pv_warpgroup,
                        (0, 1, item, index, inputs, scheduler, outputs, probs, pipelines),
                    ),
                    (
                        qk_softmax_warpgroup,
                        (first, item, index, inputs, scheduler, outputs, state),
                    ),
                    (
                        qk_softmax_warpgroup,
                        (second, item, index, inputs, scheduler, outputs, state),
                    ),
                    (
                        producer,
                        (item, index, inputs, scheduler, pipelines, row_scales, ROPE_COLUMN),
                    ),
                ],
                [4, 4, WARPS],
                [CONFIG.SOFTMAX_REGISTERS, CONFIG.SOFTMAX_REGISTERS, CONFIG.PRODUCER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (
                        _pv_warpgroup,
                        (0, 2, item, index, inputs, scheduler, outputs, probs, pipelines),
                    ),
                    (
                        qk_softmax_warpgroup,
                        (first, item, index, inputs, scheduler, outputs, state),
                    ),
                    (
                        qk_softmax_warpgroup,
                        (second, item, index, inputs, scheduler, outputs, state),
                    ),
                    (
                        _pv_warpgroup,
                        (1, 2, item, index, inputs, scheduler, outputs, probs, pipelines),
                    ),
                    (
                        producer,
                        (item, index, inputs, scheduler, pipelines, row_scales, ROPE_COLUMN),
                    ),
                ],
                [4, 4, 4, WARPS],
                [
                    CONFIG.SOFTMAX_REGISTERS,
                    CONFIG.SOFTMAX_REGISTERS,
                    CONFIG.PV_REGISTERS,
                    CONFIG.PRODUCER_REGISTERS,
                ],
            )
