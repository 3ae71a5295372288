"""Absorbed MLA decode of FP8 queries over FP8 cache rows, 64 heads per CTA, QK in FP8.

Formats    fp8           one scale for the tensor: part of the softmax's scale, and of the result's
           fp8_token     a scale per row: multiplies scores and probabilities
           fp8_block128  a scale per tile of 128 columns of a row: a power of two of the row, which
                         multiplies scores and probabilities, and factors. Before the products of a
                         tile are added to scores, these are divided by its factor and multiplied
                         by that of the tile before; values are multiplied by theirs
           Queries have a scale per token, which multiplies scores; with rows of fp8_token their
           rotated columns may be bf16
Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
Work       a work tile is 64 heads of one query over a split of its request's keys, 64 keys per
           block; a persistent CTA computes one tile after the other
Bound      by tensor cores and those who wait for them. QK is FP8, at twice the rate of 16-bit
           types; values are converted to float16 in registers (`fp8_convert`), as the A operand:
           columns, not heads, are the M side of PV

             producer, one warp       QK-softmax                  two PV, 256 columns each
  a block    wait for an empty stage
             load a block    full ->  S = Q·Kᵀ of n + 1
                                      P = exp2(S − m)    probs -> acc = acc·rescale + Vᵀ·Pᵀ
                            <- empty: when QK-softmax and both PV have read it
  a tile                              write lse      out_scale -> write acc · out_scale

Pipelines  a stage is a whole block, and the scales of its rows (`row_scales`); two stages of
           probabilities, each read by both PV warpgroups; one out_scale. Blocks are counted across
           work tiles
Deadlock   none: all walk the same work tiles and blocks. QK-softmax waits for the block after the
           one it holds, and for PV of block n − 2; PV for blocks and probabilities; the producer
           for the three consumers of an earlier block, none of which waits for more than the next
Memory     all of shared memory, four blocks of it in flight; all registers
Limits     D_C = 512, D_R = 64; any page size, by TMA or by a gather producer (`paged_loads`)
Numbers    scores are accumulated as tensor cores accumulate FP8 products
           (`reference.hopper_fp8_mma`). P, times the row's scale, is rounded to float16, values are
           exact, but for fp8_block128: factors, and values times factors, are rounded to float16,
           and in scores a factor counts as 2**-30 of its row's largest at least. Rows past a
           query's last key and their scales are zeros, for 0 · NaN is NaN
Lineage    own design; ideas: swapped operands for PV, FP8 converted in registers
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
from mlakit.kernels.hopper.decode.m64_fp8_qk_softmax import (
    KEY_CHUNK,
    KEY_CHUNKS,
    PV_WARPGROUPS,
    SoftmaxInputs,
    alloc_probs,
    qk_softmax_warpgroup,
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
from mlakit.kernels.hopper.device.epilogue import store_acc
from mlakit.kernels.hopper.device.fp8_convert import acc_columns, load_values
from mlakit.kernels.hopper.device.paged_loads import producer_arrivals, producer_warps
from mlakit.kernels.hopper.device.pipeline import (
    D_TILE,
    D_TILES,
    KVPipelines,
    Pipeline,
    Query,
    next_stage,
    producer,
    release_read,
    two_stages,
)
from mlakit.kernels.hopper.device.primitives import (
    IN_EACH_THREAD,
    SMEM_16BIT,
    SMEM_VECTOR,
    acc_layout,
    alloc_barrier,
    alloc_barriers,
)
from mlakit.kernels.hopper.device.row_scales import (
    GROUPS,
    RowScales,
    alloc_scale_stages,
    apply_tensor_scale,
)
from mlakit.kernels.hopper.device.softmax import Logits

ACC = gl.constexpr(acc_layout(64))
OWN_TILES = gl.constexpr(2)  # of latent columns, of a PV warpgroup


@gluon.jit
def _alloc_pipelines(
    STAGES: gl.constexpr, inputs, HAS_ROW_SCALES: gl.constexpr, IS_GROUPED: gl.constexpr
):
    """Allocate tiles with the type and layout of the cache's descriptors."""
    kv, kv_rope = inputs.kv, inputs.kv_rope
    latent = gl.allocate_shared_memory(
        kv.dtype, [STAGES * D_TILES, 64, kv.block_shape[1]], kv.layout
    )
    rope = gl.allocate_shared_memory(
        kv_rope.dtype, [STAGES, 64, kv_rope.block_shape[1]], kv_rope.layout
    )
    scales = alloc_scale_stages(STAGES, 1, IS_GROUPED)
    min_scale = gl.allocate_shared_memory(gl.float32, [STAGES, 1], SMEM_VECTOR)
    ARRIVALS: gl.constexpr = producer_arrivals(inputs.words) + (1 if HAS_ROW_SCALES else 0)
    full = alloc_barriers(STAGES, ARRIVALS)
    empty = alloc_barriers(STAGES, 1 + PV_WARPGROUPS)
    return KVPipelines(
        Pipeline(latent, full, empty, D_TILES), Pipeline(rope, full, empty, 1), scales, min_scale
    )


@gluon.jit
def _read_values(pipelines, stage, d, chunk: gl.constexpr, num_valid):
    """Return float16 [D_TILE, KEY_CHUNK] of a tile of a block's values."""
    tile = pipelines.latent.tiles.index(stage * D_TILES + d)
    tile = tile.slice(chunk * KEY_CHUNK, KEY_CHUNK, 0)
    values = load_values(tile, num_valid - chunk * KEY_CHUNK, ACC)
    groups = pipelines.scales.groups
    if groups is not None:
        factors = groups.factors.index(stage * GROUPS + d).slice(chunk * KEY_CHUNK, KEY_CHUNK, 0)
        values *= gl.expand_dims(factors.load(gl.SliceLayout(0, values.type.layout)), 0)
    return values


@gluon.jit
def _pv(prob_stages, fill, pipelines, stage, phase, acc, num_valid, FIRST: gl.constexpr):
    """acc · rescale + Vᵀ·Pᵀ of a block whose first `num_valid` keys exist; releases its stage."""
    latent = pipelines.latent
    prob_stage, prob_phase = two_stages(fill)
    mbarrier.wait(prob_stages.full.index(prob_stage), prob_phase)
    first, second = acc
    # before values are read: together they would take more registers than there are
    if gl.max(prob_stages.has_rescale.index(prob_stage).load(IN_EACH_THREAD), 0) > 0.0:
        rescale = prob_stages.rescale.index(prob_stage).load(gl.SliceLayout(0, ACC))
        rescale = gl.expand_dims(rescale, 0)
        first *= rescale
        second *= rescale
    acc = first, second
    mbarrier.wait(latent.full.index(stage), phase)
    values = _read_values(pipelines, stage, FIRST, 0, num_valid)
    done = ()
    for d in gl.static_range(OWN_TILES):
        tile_acc = acc[d]
        for chunk in gl.static_range(KEY_CHUNKS):
            probs = prob_stages.probs.index(prob_stage * KEY_CHUNKS + chunk).permute((1, 0))
            pending = warpgroup_mma(values, probs, tile_acc, is_async=True)
            next_values = values
            if chunk + 1 < KEY_CHUNKS:
                next_values = _read_values(pipelines, stage, FIRST + d, chunk + 1, num_valid)
            elif d + 1 < OWN_TILES:
                next_values = _read_values(pipelines, stage, FIRST + d + 1, 0, num_valid)
            tile_acc, values = warpgroup_mma_wait(0, deps=(pending, values))
            values = next_values
        done += (tile_acc,)
    release_read(latent, stage)
    mbarrier.arrive(prob_stages.empty.index(prob_stage), count=1)
    return done


@gluon.jit
def _pv_warpgroup(
    NUMBER: gl.constexpr, item, index, inputs, scheduler, outputs, prob_stages, pipelines
):
    FIRST: gl.constexpr = NUMBER * OWN_TILES
    latent = pipelines.latent
    stage, phase = item * 0, item * 0
    blocks_done, tiles_done = item * 0, item * 0
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        zeros = gl.zeros([D_TILE, 64], gl.float32, ACC)
        acc = (zeros, zeros)
        for block in range(keys.first_block, keys.end_block):
            num_valid = keys.end - block * 64
            acc = _pv(prob_stages, blocks_done, pipelines, stage, phase, acc, num_valid, FIRST)
            stage, phase = next_stage(latent, stage, phase)
            blocks_done += 1
        mbarrier.wait(prob_stages.out_scale_full, tiles_done & 1)
        out_scale = prob_stages.out_scale.load(gl.SliceLayout(0, ACC))
        mbarrier.arrive(prob_stages.out_scale_empty, count=1)
        tiles_done += 1
        tile = locate_tile(scheduler, item, index)
        store_acc(
            tile, outputs, scheduler.heads, acc, FIRST * D_TILE, 1, acc_columns(ACC), out_scale
        )
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit(do_not_specialize=VARYING)
def mla_decode_m64_fp8_qk_kernel(
    q,  # TMA descriptors: words, tiles of 64 x 32
    q_rope,  # 64 x 16, or 64 x 64 bfloat16
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
    CONFIG: gl.constexpr,  # `configs.M64Fp8QkConfig`
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
    HAS_ROW_SCALES: gl.constexpr = kv_scales.row_scales is not None
    IS_GROUPED: gl.constexpr = TRAITS.FORMAT.SCALED_BY == "group"
    pipelines = _alloc_pipelines(CONFIG.STAGES, inputs, HAS_ROW_SCALES, IS_GROUPED)
    query = Query(
        gl.allocate_shared_memory(q.dtype, [D_TILES, 64, q.block_shape[1]], q.layout),
        gl.allocate_shared_memory(q_rope.dtype, [1, 64, q_rope.block_shape[1]], q_rope.layout),
        alloc_barrier(),
    )
    rotated = query.rope
    if kv_rope.dtype != gl.int32 and q_rope.dtype == gl.int32:
        rotated = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SMEM_16BIT)
    prob_stages = alloc_probs()
    operands = SoftmaxInputs(
        query=query,
        q_rope=rotated,
        q_scale=q_scales.q_scale,
        stride_q_scale=q_scales.stride_q_scale,
        logits=Logits(scale_log2, TRAITS.SCORES),
        tensor_scale=tensor_scale,
        HAS_ROW_SCALES=HAS_ROW_SCALES,
    )
    WARPS: gl.constexpr = producer_warps(gather.words)
    ROPE_COLUMN: gl.constexpr = TRAITS.ROPE_COLUMN
    row_scales = RowScales(
        first=kv_scales.row_scales,
        stride_page=kv_scales.stride_page,
        stride_row=kv_scales.stride_row,
        COUNT=GROUPS if IS_GROUPED else 1,
        WARPS=WARPS,
    )
    item, index = first_tile(scheduler, schedule)
    if item < scheduler.last_item:
        launch_dependents(scheduler, item)
        gl.warp_specialize(
            [
                (
                    _pv_warpgroup,
                    (0, item, index, inputs, scheduler, outputs, prob_stages, pipelines),
                ),
                (
                    _pv_warpgroup,
                    (1, item, index, inputs, scheduler, outputs, prob_stages, pipelines),
                ),
                (
                    qk_softmax_warpgroup,
                    (item, index, inputs, scheduler, outputs, prob_stages, pipelines, operands),
                ),
                (
                    producer,
                    (item, index, inputs, scheduler, pipelines, row_scales, ROPE_COLUMN),
                ),
            ],
            [4, 4, WARPS],
            [CONFIG.PV_REGISTERS, CONFIG.SOFTMAX_REGISTERS, CONFIG.PRODUCER_REGISTERS],
        )
