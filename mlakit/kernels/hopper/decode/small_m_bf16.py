"""Absorbed MLA decode over 16-bit cache rows of 576 or 320 columns, 8, 16 or 32 heads per CTA.

Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
Work       a work tile is ROWS heads of one query over a split of its request's keys, 64 keys per
           iteration; a persistent CTA computes one tile after the other
Bound      by bytes in flight, not by arithmetic. A producer warp keeps the pipelines full, also
           between work tiles. Keys are the M side of both wgmma, 64 rows wide in any case, so few
           heads waste nothing: Sᵀ = K·Qᵀ and Oᵀ = Vᵀ·Pᵀ

             producer, one warp                       consumer warpgroup
  a block    look up the pages of the next block      Sᵀ = K·Qᵀ, tile by tile as they arrive
             five times: wait for an empty stage      <- empty: rotated columns
               and load a tile into it        full -> row_max, Pᵀ = exp2(Sᵀ − row_max)
                                                      acc = acc·rescale + Vᵀ·Pᵀ, tile by tile
                                                      <- empty: each tile of latent columns

Pipelines  a block is five smem tiles: rotated columns and four tiles of 128 latent columns (two in
           rows of 320 columns), each kind with a pipeline of its own (`pipeline`). The consumer
           loads the queries of the next work tile once its last wgmma is done
Deadlock   none: fill n waits for the release of fill n − STAGES, for which the consumer needs no
           later fill than those of that block, and a pipeline has room for a block
Memory     all of shared memory, with 16 heads 200 KB of stages: a block in use takes 72 KB, the
           rest is in flight; 255 registers. Splits write float32 partials (`merge_partials`)
Limits     D_C = 512 or 256, D_R = 64; any page size, by TMA or by a gather producer (`paged_loads`)
Numbers    P is rounded to the cache's dtype, acc is float32; rows past a query's last key are
           zeroed before they are multiplied, for 0 · NaN is NaN
Lineage    own design; ideas: swapped operands for few heads, split-KV flash decoding
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
from mlakit.kernels.hopper.device.paged_loads import (
    producer_arrivals,
    producer_warps,
    wait_block,
)
from mlakit.kernels.hopper.device.pipeline import (
    D_TILE,
    KVPipelines,
    Query,
    advance,
    alloc_pipeline,
    load_query,
    producer,
)
from mlakit.kernels.hopper.device.primitives import (
    acc_layout,
    alloc_barrier,
    opaque_zero,
    zero_rows,
)
from mlakit.kernels.hopper.device.row_scales import RowScales
from mlakit.kernels.hopper.device.softmax import INITIAL_ROW_MAX, Logits, mask_scores


@gluon.jit
def qk_block(inputs, query, pipelines, stage, phase, rope_stage, LAYOUT: gl.constexpr):
    """Scores of a block, [64 keys, heads], whose rotated columns are there; releases these."""
    latent, rope = pipelines.latent, pipelines.rope
    TILES: gl.constexpr = latent.TILES_PER_STAGE
    HEADS: gl.constexpr = query.rope.shape[1]
    zero = opaque_zero()
    COUNT: gl.constexpr = query.latent.shape[0]
    zeros = gl.zeros([64, HEADS], gl.float32, LAYOUT)
    q = query.rope.index(zero).permute((1, 0))
    pending = warpgroup_mma(rope.tiles.index(rope_stage), q, zeros, use_acc=False, is_async=True)
    for d in gl.static_range(COUNT):
        if d % TILES == 0:
            wait_block(inputs, latent.full.index(stage), phase)
        q = query.latent.index(zero + d).permute((1, 0))
        keys = latent.tiles.index(stage * TILES + d % TILES)
        pending = warpgroup_mma(keys, q, pending, is_async=True)
        if d % TILES == TILES - 1:
            stage, phase = advance(latent, stage, phase)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    mbarrier.arrive(rope.empty.index(rope_stage), count=1)
    return scores


@gluon.jit
def pv_block(probs, latent, stage, phase, acc, rescale, num_valid):
    """acc · rescale + Vᵀ·Pᵀ of a block whose first `num_valid` keys exist; releases its stages.

    probs  P in shared memory, [1, heads, 64 keys]
    acc    of each tile of columns, [D_TILE, heads]
    """
    TILES: gl.constexpr = latent.TILES_PER_STAGE
    COUNT: gl.constexpr = len(acc)
    stages = ()
    tiles = ()
    for d in gl.static_range(COUNT):
        stages += (stage,)
        tiles += (stage * TILES + d % TILES,)
        if d % TILES == TILES - 1:
            stage, phase = advance(latent, stage, phase)
    zero_rows(latent.tiles, tiles, num_valid)
    probs = probs.index(opaque_zero()).permute((1, 0))
    pending = ()
    for d in gl.static_range(COUNT):
        values = latent.tiles.index(tiles[d]).permute((1, 0))
        pending += (warpgroup_mma(values, probs, acc[d] * rescale, is_async=True),)
    done = ()
    for d in gl.static_range(COUNT):
        done += (warpgroup_mma_wait(COUNT - 1 - d, deps=(pending[d],)),)
        if d % TILES == TILES - 1:
            mbarrier.arrive(latent.empty.index(stages[d]), count=1)
    return done, stage, phase


@gluon.jit
def softmax_block(scores, scale, row_max, row_sum, probs):
    """Store the probabilities of a block; return (row_max, row_sum, rescale) with its scores.

    row_sum  [64, heads] of every 64th key, until the end of the work tile
    """
    new_max = gl.maximum(row_max, gl.max(scores, 0) * scale)
    rescale = gl.expand_dims(gl.exp2(row_max - new_max), 0)
    exponentials = gl.exp2(scores * scale - gl.expand_dims(new_max, 0))
    probs.index(0).permute((1, 0)).store(exponentials.to(probs.dtype))
    fence_async_shared()
    return new_max, row_sum * rescale + exponentials, rescale


@gluon.jit
def consumer(item, index, inputs, scheduler, outputs, query, probs, pipelines, logits):
    HEADS: gl.constexpr = scheduler.ROWS
    LAYOUT: gl.constexpr = acc_layout(HEADS)
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    TILES: gl.constexpr = query.latent.shape[0]
    WIDTH: gl.constexpr = TILES * D_TILE
    latent, rope = pipelines.latent, pipelines.rope
    stage, phase, rope_stage, rope_phase = item * 0, item * 0, item * 0, item * 0
    tiles_done = item * 0  # its parity is the phase of the queries' barrier
    load_query(inputs, scheduler, item, index, query)
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        zeros = gl.zeros([D_TILE, HEADS], gl.float32, LAYOUT)
        acc = ()
        for _ in gl.static_range(TILES):
            acc += (zeros,)
        row_max = gl.full([HEADS], INITIAL_ROW_MAX, gl.float32, ROW)
        row_sum = gl.zeros([64, HEADS], gl.float32, LAYOUT)  # of every 64th key, until the end
        mbarrier.wait(query.full, tiles_done & 1)
        for block in range(keys.first_block, keys.end_block):
            wait_block(inputs, rope.full.index(rope_stage), rope_phase)
            scores = qk_block(inputs, query, pipelines, stage, phase, rope_stage, LAYOUT)
            rope_stage, rope_phase = advance(rope, rope_stage, rope_phase)
            scores = mask_scores(scores, block, keys, 0, logits)
            row_max, row_sum, rescale = softmax_block(scores, logits.scale, row_max, row_sum, probs)
            acc, stage, phase = pv_block(
                probs, latent, stage, phase, acc, rescale, keys.end - block * 64
            )
        next_item, next_index = next_tile(scheduler, item, index + gl.num_programs(0))
        if next_item < scheduler.last_item:
            load_query(inputs, scheduler, next_item, next_index, query)
        tile = locate_tile(scheduler, item, index)
        row = gl.arange(0, HEADS, ROW)
        lse, out_scale = finish_rows(
            tile, outputs, scheduler.heads, tile.first_head + row, row_max, gl.sum(row_sum, 0)
        )
        store_lse(tile, outputs, scheduler.heads, row, lse)
        # eight threads write neighbouring columns
        store_acc(tile, outputs, scheduler.heads, acc, 0, 1, scale=out_scale, WIDTH=WIDTH)
        tiles_done += 1
        item = next_item
        index = next_index


@gluon.jit(do_not_specialize=VARYING)
def mla_decode_small_m_bf16_kernel(
    q,  # TMA descriptors: tiles of ROWS x 128
    q_rope,  # of ROWS x 64
    kv,  # of 64 x 128; where pages are smaller of PAGE x 64
    kv_rope,  # of 64 x 64; where pages are smaller of PAGE x 64
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
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `configs.SmallMBf16Config`
):
    """Run the plan on a grid (work tiles of a request that run at once, CTAs of the plan)."""
    inputs, scheduler, outputs = make_work(
        (q, q_rope, kv, kv_rope),
        (stride_table_request, q_token_rows, q_rope_token_rows, heads, slot_rows, stride_lse_token),
        (batch, schedule, outputs, gather),
        TRAITS,
        schedule.head_tiles,
    )
    NONE: gl.constexpr = None
    ROWS: gl.constexpr = TRAITS.ROWS
    WARPS: gl.constexpr = producer_warps(gather.words)
    ROPE_COLUMN: gl.constexpr = TRAITS.ROPE_COLUMN
    ARRIVALS: gl.constexpr = producer_arrivals(gather.words)
    no_scales = RowScales(first=NONE, stride_page=0, stride_row=0, COUNT=0, WARPS=WARPS)
    pipelines = KVPipelines(
        alloc_pipeline(CONFIG.STAGES, D_TILE, kv, CONSUMERS=1, ARRIVALS=ARRIVALS),
        alloc_pipeline(CONFIG.ROPE_STAGES, 64, kv_rope, CONSUMERS=1, ARRIVALS=ARRIVALS),
        NONE,
        NONE,
    )
    TILES: gl.constexpr = CONFIG.TILES
    query = Query(
        gl.allocate_shared_memory(q.dtype, [TILES, ROWS, D_TILE], q.layout),
        gl.allocate_shared_memory(q.dtype, [1, ROWS, 64], q.layout),
        alloc_barrier(),
    )
    probs = gl.allocate_shared_memory(kv.dtype, [1, ROWS, 64], kv.layout)
    logits = Logits(scale_log2, TRAITS.SCORES)
    item, index = first_tile(scheduler, schedule)
    if item < scheduler.last_item:
        launch_dependents(scheduler, item)
        gl.warp_specialize(
            [
                (
                    consumer,
                    (
                        item,
                        index,
                        inputs,
                        scheduler,
                        outputs,
                        query,
                        probs,
                        pipelines,
                        logits,
                    ),
                ),
                (
                    producer,
                    (
                        item,
                        index,
                        inputs,
                        scheduler,
                        pipelines,
                        no_scales,
                        ROPE_COLUMN,
                        TILES,
                    ),
                ),
            ],
            [WARPS],
            [CONFIG.PRODUCER_REGISTERS],
        )
