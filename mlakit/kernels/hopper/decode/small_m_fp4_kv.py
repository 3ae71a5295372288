"""Absorbed MLA decode over four-bit cache rows, 512 values and 64 rotated columns, few heads.

Format     mxfp4_block32: e2m1 with a power of two per 32 columns, rotated columns in bf16
Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
Work       a work tile is 8, 16 or 32 heads (ROWS) of one query over a split of its request's keys,
           64 keys per iteration; a persistent CTA computes one tile after the other
Bound      by shared memory: a block's 512 bfloat16 per key are written once and read by both wgmma

             producer, one warp        two dequantising warpgroups     consumer warpgroup
  a block    wait for empty stages
             load a block     raw ->   256 columns each: convert       (`small_m_bf16`)
                             <- empty  wait for an empty stage
                                       write bf16          full ->     Sᵀ = K·Qᵀ, softmax
                                                         <- empty      acc = acc·rescale + Vᵀ·Pᵀ

Pipelines  raw stages have the codes and scales of a block, and two consumers; stages of latent
           columns have half of a block as bf16, from one of the two warpgroups; rotated columns go
           from the producer to the consumer as they are
Deadlock   none: all walk the same work tiles and blocks. A dequantising warpgroup waits for the
           release of its stage by an earlier half block, for which the consumer needs no later one
Memory     all of shared memory: with 16 heads 128 KB of bf16 stages and 75 KB of raw ones
Limits     D_C = 512, D_R = 64; bf16 queries; pages that TMA can load
Numbers    values are exact as bf16; then as `small_m_bf16`
Lineage    own design; ideas: dequantising producers of FlashMLA's FP8 kernel
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.decode.arguments import VARYING
from mlakit.kernels.hopper.decode.scheduler import (
    first_tile,
    key_range,
    launch_dependents,
    make_work,
    next_tile,
)
from mlakit.kernels.hopper.decode.small_m_bf16 import consumer
from mlakit.kernels.hopper.device.fp4_rows import CODE_WORDS, SCALE_WORDS
from mlakit.kernels.hopper.device.fp4_stages import (
    HALVES,
    alloc_latent_stages,
    alloc_raw_stages,
    dequantise_block,
    first_target,
)
from mlakit.kernels.hopper.device.paged_loads import load_block, lookup_block, rows_of_block
from mlakit.kernels.hopper.device.pipeline import (
    D_TILE,
    D_TILES,
    KVPipelines,
    Query,
    alloc_pipeline,
    next_stage,
)
from mlakit.kernels.hopper.device.primitives import SMEM_16BIT, alloc_barrier
from mlakit.kernels.hopper.device.softmax import Logits


@gluon.jit
def _producer(item, index, inputs, scheduler, kv_scales, raw, rope, ROPE_COLUMN: gl.constexpr):
    """Run the producer warp: rotated columns, codes and scales of every block."""
    SCALE_COLUMN: gl.constexpr = HALVES * CODE_WORDS
    stage, phase, rope_stage, rope_phase = item * 0, item * 0, item * 0, item * 0
    while item < scheduler.last_item:
        keys = key_range(inputs, scheduler, item, index)
        lookup = lookup_block(inputs, keys, keys.first_block)
        for block in range(keys.first_block, keys.end_block):
            rows = rows_of_block(inputs, keys, lookup, block)
            lookup = lookup_block(inputs, keys, block + 1)
            mbarrier.wait(raw.empty.index(stage), phase ^ 1)
            full = raw.full.index(stage)
            mbarrier.expect(full, 64 * 4 * (HALVES * CODE_WORDS + SCALE_WORDS))
            load_block(inputs, kv_scales, rows, SCALE_COLUMN, full, raw.scales.index(stage))
            for half in gl.static_range(HALVES):
                codes = raw.codes.index(stage * HALVES + half)
                load_block(inputs, inputs.kv, rows, half * CODE_WORDS, full, codes)
            stage, phase = next_stage(raw, stage, phase)
            mbarrier.wait(rope.empty.index(rope_stage), rope_phase ^ 1)
            full = rope.full.index(rope_stage)
            mbarrier.expect(full, 64 * 64 * 2)
            tile = rope.tiles.index(rope_stage)
            load_block(inputs, inputs.kv_rope, rows, ROPE_COLUMN, full, tile)
            rope_stage, rope_phase = next_stage(rope, rope_stage, rope_phase)
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit
def _dequantiser(item, index, inputs, scheduler, raw, latent, HALF: gl.constexpr):
    """Run a warpgroup that converts half of the columns of every block."""
    stage, phase = item * 0, item * 0
    target, target_phase = first_target(latent, item * 0, HALF)
    while item < scheduler.last_item:
        keys = key_range(inputs, scheduler, item, index)
        for _ in range(keys.first_block, keys.end_block):
            stage, phase, target, target_phase = dequantise_block(
                raw, latent, stage, phase, target, target_phase, HALF
            )
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit(do_not_specialize=VARYING)
def mla_decode_small_m_fp4_kv_kernel(
    q,  # TMA descriptors: tiles of ROWS x 128
    q_rope,  # of ROWS x 64
    kv,  # words, 64 x 32; tiles have PAGE rows where pages are smaller
    kv_rope,  # 64 x 64 bfloat16
    kv_scales,  # words, 64 x 4
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
    CONFIG: gl.constexpr,  # `configs.SmallMFp4KvConfig`
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
    ROPE_COLUMN: gl.constexpr = TRAITS.ROPE_COLUMN
    CODES: gl.constexpr = kv.layout
    SCALES: gl.constexpr = kv_scales.layout
    raw = alloc_raw_stages(CONFIG.RAW_STAGES, CODES, SCALES, 1)
    latent = alloc_latent_stages(CONFIG.STAGES)
    rope = alloc_pipeline(CONFIG.RAW_STAGES, 64, kv_rope, CONSUMERS=1)
    pipelines = KVPipelines(latent, rope, NONE, NONE)
    query = Query(
        gl.allocate_shared_memory(q.dtype, [D_TILES, ROWS, D_TILE], q.layout),
        gl.allocate_shared_memory(q.dtype, [1, ROWS, 64], q.layout),
        alloc_barrier(),
    )
    probs = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, 64], SMEM_16BIT)
    logits = Logits(scale_log2, TRAITS.SCORES)
    item, index = first_tile(scheduler, schedule)
    if item < scheduler.last_item:
        launch_dependents(scheduler, item)
        gl.warp_specialize(
            [
                (
                    consumer,
                    (item, index, inputs, scheduler, outputs, query, probs, pipelines, logits),
                ),
                (_dequantiser, (item, index, inputs, scheduler, raw, latent, 0)),
                (_dequantiser, (item, index, inputs, scheduler, raw, latent, 1)),
                (
                    _producer,
                    (item, index, inputs, scheduler, kv_scales, raw, rope, ROPE_COLUMN),
                ),
            ],
            [4, 4, 1],
            [CONFIG.DEQUANT_REGISTERS, CONFIG.DEQUANT_REGISTERS, CONFIG.PRODUCER_REGISTERS],
        )
