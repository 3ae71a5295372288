"""Absorbed MLA attention over listed four-bit cache rows, few heads per CTA.

Format     mxfp4_block32: e2m1 with a power of two per 32 columns, 64 rotated columns in bf16
Queries    bf16
Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
           over the rows that a token's list names
Work       a work tile is 8, 16 or 32 heads of one token over a split of its lists, 64 entries per
           block; a persistent CTA computes one tile after the other
Bound      as `decode.small_m_fp4_kv` by shared memory

             gather, four warps        two dequantising warpgroups     consumer warpgroup
  a tile     count its blocks  count -> --------------------------------->
  a block    wait for empty stages
             copy the rows     raw ->  256 columns each: convert
             and what is valid rope -> ----------------------------->  (`decode.small_m_bf16`)
                             <- empty  wait for an empty stage
                                       write bf16          full ->     Sᵀ = K·Qᵀ, softmax
                                                         <- empty      acc = acc·rescale + Vᵀ·Pᵀ
  a tile                                                               write the results

Schedule   the dequantising warpgroups and the parts of the consumer are those of
           `decode.small_m_fp4_kv`; work tiles and gathered rows those of `small_m_fp8_kv`
Pipelines  as in decode: raw stages, stages of latent columns, stages of rotated columns. The last
           also tell the consumer which entries are valid. `BlockCounts` of eight tiles
Deadlock   none: all walk the same work tiles and blocks. A dequantising warpgroup waits for the
           release of its stage by an earlier half block, for which the consumer needs no later
           one. The gather warpgroup is at most RAW_STAGES blocks ahead of both kinds of reader of
           the counts, and every tile has a block
Memory     all of shared memory. Splits write float32 partials (`sparse_merge`)
Limits     D_C = 512, D_R = 64; rows at multiples of 16 bytes, 2**31 rows in a cache
Numbers    values are exact as bf16; P is rounded to bf16, acc is float32. Rows of invalid entries
           are zeros: they are not read, and 0 · NaN is NaN
Lineage    own design; ideas: dequantising producers of FlashMLA's FP8 kernel
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.decode.small_m_bf16 import pv_block, qk_block, softmax_block
from mlakit.kernels.hopper.device.compat import copy_words, record
from mlakit.kernels.hopper.device.epilogue import finish_rows, store_acc
from mlakit.kernels.hopper.device.fp4_rows import CODE_WORDS, SCALE_WORDS
from mlakit.kernels.hopper.device.fp4_stages import (
    HALVES,
    alloc_latent_stages,
    alloc_raw_stages,
    dequantise_block,
    first_target,
)
from mlakit.kernels.hopper.device.paged_loads import gather_layout, wait_block
from mlakit.kernels.hopper.device.pipeline import (
    D_TILE,
    D_TILES,
    KVPipelines,
    Pipeline,
    Query,
    advance,
    next_stage,
)
from mlakit.kernels.hopper.device.primitives import (
    SMEM_16BIT,
    SMEM_VECTOR,
    acc_layout,
    alloc_barrier,
    alloc_stage_barriers,
    allow_dependents,
)
from mlakit.kernels.hopper.device.softmax import INITIAL_ROW_MAX, NEG_INF, apply_sign
from mlakit.kernels.hopper.sparse.arguments import VARYING
from mlakit.kernels.hopper.sparse.epilogue import Outputs, store_statistics
from mlakit.kernels.hopper.sparse.lists import (
    block_range,
    load_ids,
    make_work,
    row_pointers,
    valid_slots,
)
from mlakit.kernels.hopper.sparse.m64_fp8_kv_dequant import (
    alloc_block_counts,
    read_count,
    write_count,
)
from mlakit.kernels.hopper.sparse.m64_fp8_kv_query import QueryTiles
from mlakit.kernels.hopper.sparse.small_m import (
    LISTED_KEYS,
    QUERY_TILE,
    WORD_TILE,
    Gathered,
    copy_rows,
    load_query,
    locate_tile,
)

COUNTED_TILES = gl.constexpr(8)  # more than raw stages, and a power of two
SCALE_COPIES = gl.constexpr(gather_layout(4))
SCALE_TILE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))


@record
class Operands:
    """What the consumer warpgroup reads and writes."""

    q: object  # QueryTiles
    work: object
    tokens: object
    heads: object
    outputs: object
    gathered: object  # rotated columns, in place of `decode.scheduler.Inputs`
    dequantised: object  # likewise latent columns, after whose stores there is a fence
    query: object
    probs: object
    pipelines: object
    bias: object  # [stages, 64] float32, with the stages of rotated columns: −inf if invalid
    block_counts: object
    scale_log2: object
    SIGN: object


@gluon.jit
def _copy_scales(start, is_valid, WORD: gl.constexpr, smem):
    """Start to copy the 16 scales of each row of a block; zeros for invalid entries."""
    KEYS: gl.constexpr = gl.SliceLayout(1, SCALE_COPIES)
    start = gl.convert_layout(start, KEYS, assert_trivial=True)
    is_valid = gl.convert_layout(is_valid, KEYS, assert_trivial=True)
    at = gl.expand_dims(start, 1)
    at += gl.expand_dims(WORD + gl.arange(0, SCALE_WORDS, gl.SliceLayout(0, SCALE_COPIES)), 0)
    copy_words(smem, at, mask=gl.expand_dims(is_valid, 1))


@gluon.jit
def _gather_warpgroup(work, raw, rope, bias, block_counts, FORMAT: gl.constexpr):
    """Load row ids a block ahead, and copy codes, scales and rotated columns of every block."""
    SCALE_WORD: gl.constexpr = FORMAT.SCALES_AT // 4
    ROPE_WORD: gl.constexpr = FORMAT.ROPE_AT // 4
    step = gl.num_programs(0)
    tiles_done = step * 0
    stage, phase = step * 0, step * 0  # raw stages and those of rotated columns are as many
    for tile in range(gl.program_id(0), work.num_tiles, step):
        blocks = block_range(work, tile)
        ids = load_ids(work, blocks, blocks.first, LISTED_KEYS)
        write_count(block_counts, tiles_done, gl.maximum(blocks.end - blocks.first, 1))
        for block in range(blocks.first, gl.maximum(blocks.end, blocks.first + 1)):
            slot = valid_slots(work, blocks, block, ids)
            start = row_pointers(work, blocks, block, slot, 4)
            is_valid = slot >= 0
            ids = load_ids(work, blocks, block + 1, LISTED_KEYS)
            mbarrier.wait(raw.empty.index(stage), phase ^ 1)
            _copy_scales(start, is_valid, SCALE_WORD, raw.scales.index(stage))
            for half in gl.static_range(HALVES):
                codes = raw.codes.index(stage * HALVES + half)
                copy_rows(start, is_valid, half * CODE_WORDS, codes)
            async_copy.mbarrier_arrive(raw.full.index(stage), increment_count=False)
            mbarrier.wait(rope.empty.index(stage), phase ^ 1)
            copy_rows(start, is_valid, ROPE_WORD, rope.tiles.index(stage))
            async_copy.mbarrier_arrive(rope.full.index(stage), increment_count=False)
            bias.index(stage).store(gl.where(is_valid, 0.0, NEG_INF))
            mbarrier.arrive(rope.full.index(stage), count=1)
            stage, phase = next_stage(raw, stage, phase)
        tiles_done += 1
    if work.num_splits > 1:
        allow_dependents()  # the merge kernel


@gluon.jit
def _dequantiser(work, raw, latent, block_counts, HALF: gl.constexpr):
    """Run a warpgroup that converts half of the columns of every block."""
    step = gl.num_programs(0)
    tiles_done = step * 0
    stage, phase = step * 0, step * 0
    target, target_phase = first_target(latent, step * 0, HALF)
    for _ in range(gl.program_id(0), work.num_tiles, step):
        count = read_count(block_counts, tiles_done)  # in `range` it would be called twice
        for _ in range(count):
            stage, phase, target, target_phase = dequantise_block(
                raw, latent, stage, phase, target, target_phase, HALF, IS_GATHERED=True
            )
        tiles_done += 1


@gluon.jit
def _consumer(operands):
    work, tokens, outputs = operands.work, operands.tokens, operands.outputs
    query, probs, pipelines = operands.query, operands.probs, operands.pipelines
    latent, rope = pipelines.latent, pipelines.rope
    HEADS: gl.constexpr = query.latent.shape[1]
    LAYOUT: gl.constexpr = acc_layout(HEADS)
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    tile = gl.program_id(0)
    step = gl.num_programs(0)
    stage, phase, rope_stage, rope_phase = tile * 0, tile * 0, tile * 0, tile * 0
    tiles_done = tile * 0
    load_query(operands.q, work, tokens, tile, query)
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for _ in tl.range(0, (work.num_tiles - tile + step - 1) // step, disable_licm=True):
        acc = ()
        for _ in gl.static_range(D_TILES):
            acc += (gl.zeros([D_TILE, HEADS], gl.float32, LAYOUT),)
        row_max = gl.full([HEADS], INITIAL_ROW_MAX, gl.float32, ROW)
        row_sum = gl.zeros([64, HEADS], gl.float32, LAYOUT)
        count = read_count(operands.block_counts, tiles_done)
        mbarrier.wait(query.full, tiles_done & 1)
        for _ in range(count):
            wait_block(operands.gathered, rope.full.index(rope_stage), rope_phase)
            # before the scores, which release the stage
            bias = operands.bias.index(rope_stage).load(gl.SliceLayout(1, LAYOUT))
            scores = qk_block(
                operands.dequantised, query, pipelines, stage, phase, rope_stage, LAYOUT
            )
            rope_stage, rope_phase = advance(rope, rope_stage, rope_phase)
            is_invalid = gl.expand_dims(bias, 1) < 0
            scores = gl.where(is_invalid, NEG_INF, apply_sign(scores, operands.SIGN))
            row_max, row_sum, rescale = softmax_block(
                scores, operands.scale_log2, row_max, row_sum, probs
            )
            acc, stage, phase = pv_block(probs, latent, stage, phase, acc, rescale, 64)
        next_tile = tile + step
        if next_tile < work.num_tiles:
            load_query(operands.q, work, tokens, next_tile, query)
        at, result = locate_tile(work, tokens, tile, HEADS)
        head = at.first_head + gl.arange(0, HEADS, ROW)
        total = gl.sum(row_sum, 0)
        lse, out_scale = finish_rows(at, outputs, operands.heads, head, row_max, total)
        max_logit = gl.where(total == 0.0, NEG_INF, row_max)
        store_statistics(at, outputs, operands.heads, head, lse, total, max_logit)
        store_acc(result, outputs, operands.heads, acc, 0, 1, scale=out_scale)
        tiles_done += 1
        tile = next_tile


@gluon.jit(do_not_specialize=VARYING)
def sparse_mla_small_m_fp4_kv_kernel(
    q,  # TMA descriptors: tiles of 1 x HEADS x 128
    q_rope,  # of 1 x HEADS x 64 rotated columns
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
    CONFIG: gl.constexpr,  # `configs.SmallMFp4KvConfig`
):
    """Run persistent CTAs over the work tiles of all tokens."""
    FORMAT: gl.constexpr = TRAITS.FORMAT
    HEADS: gl.constexpr = CONFIG.HEADS
    head_tiles = (heads + HEADS - 1) // HEADS
    work = make_work(
        (main, lens, topk, stride_token, stride_lens),
        (extra, extra_lens, extra_topk, extra_stride_token, extra_stride_lens),
        num_splits,
        head_tiles,
        tokens * num_splits * head_tiles,
        TRAITS,
    )
    outputs = Outputs(*outputs)
    NONE: gl.constexpr = None
    raw = alloc_raw_stages(CONFIG.RAW_STAGES, WORD_TILE, SCALE_TILE, 128)
    latent = alloc_latent_stages(CONFIG.STAGES)
    rope_full, rope_empty = alloc_stage_barriers(CONFIG.RAW_STAGES, 129, 1)
    rope_tiles = gl.allocate_shared_memory(gl.bfloat16, [CONFIG.RAW_STAGES, 64, 64], SMEM_16BIT)
    rope = Pipeline(rope_tiles, rope_full, rope_empty, 1)
    bias = gl.allocate_shared_memory(gl.float32, [CONFIG.RAW_STAGES, 64], SMEM_VECTOR)
    query = Query(
        gl.allocate_shared_memory(gl.bfloat16, [D_TILES, HEADS, D_TILE], QUERY_TILE),
        gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, 64], SMEM_16BIT),
        alloc_barrier(),
    )
    block_counts = alloc_block_counts(COUNTED_TILES)
    operands = Operands(
        q=QueryTiles(q, q_rope),
        work=work,
        tokens=tokens,
        heads=heads,
        outputs=outputs,
        gathered=Gathered(main.payload),
        dequantised=Gathered(NONE),
        query=query,
        probs=gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, 64], SMEM_16BIT),
        pipelines=KVPipelines(latent, rope, NONE, NONE),
        bias=bias,
        block_counts=block_counts,
        scale_log2=scales.scale_log2,
        SIGN=TRAITS.SIGN,
    )
    gl.warp_specialize(
        [
            (_consumer, (operands,)),
            (_dequantiser, (work, raw, latent, block_counts, 0)),
            (_dequantiser, (work, raw, latent, block_counts, 1)),
            (_gather_warpgroup, (work, raw, rope, bias, block_counts, FORMAT)),
        ],
        [4, 4, 4],
        [CONFIG.DEQUANT_REGISTERS, CONFIG.DEQUANT_REGISTERS, CONFIG.GATHER_REGISTERS],
    )
