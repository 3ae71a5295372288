"""Absorbed MLA attention over listed FP8 cache rows, few heads per CTA.

Formats    fp8_block128, fp8_token: 512 latent columns, with or without 64 rotated ones
Queries    bf16
Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
           over the rows that a token's list names
Work       a work tile is 8, 16 or 32 heads of one token over a split of its lists, 64 entries per
           block; a persistent CTA computes one tile after the other
Bound      by latency: per block each role takes 2000 to 2550 cycles, memory about 2200. Rows stay
           FP8 in shared memory, so that four blocks fit, and both wgmma convert them in registers

             gather, four warps        QK-softmax warpgroup            PV warpgroup
  a tile     count its blocks  count -> ----------------------------->
  a block    wait for empty stages
             copy the rows    full ->  Sᵀ = K·Qᵀ, tile by tile    ->  read a tile of V
                                       row_max
                                       Pᵀ = exp2(Sᵀ − row_max) probs -> acc = acc·rescale + Vᵀ·Pᵀ
                             <- empty: each stage, when both have read it
  a tile                               write lse        out_scale ->  write acc · out_scale

Schedule   that of `decode.small_m_fp8_kv`, whose consumers these are: two QK-softmax warpgroups
           take alternate blocks. The gather warpgroup copies listed rows with cp.async
Pipelines  those of `decode.small_m_fp8_kv`, and `fp8_dequant.BlockCounts` of eight tiles
Deadlock   none, as there. A tile's count is written before its first block, and every tile has one
Memory     all of shared memory. Splits write float32 partials (`sparse_merge`)
Limits     rows at multiples of 16 bytes, 2**31 rows in a cache
Numbers    rows and queries are converted exactly; scales multiply scores and probabilities; P,
           times the row's scale, is rounded to float16. Rows of invalid entries are
           zeros: they are not read, and 0 · NaN is NaN
Lineage    own design; ideas: swapped operands for few heads, FP8 converted in registers
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.decode.small_m_fp8_kv import pv_block
from mlakit.kernels.hopper.decode.small_m_fp8_kv_softmax import (
    SoftmaxWarpgroup,
    alloc_block_max,
    alloc_exchange,
    alloc_probs,
    alloc_scaled_query,
    load_row_scales,
    qk_block,
    scale_queries,
    softmax_block,
    store_out_scale,
    sum_pairs,
    sum_tile,
)
from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.epilogue import finish_rows, store_acc
from mlakit.kernels.hopper.device.fp8_convert import FP16_TARGET, acc_columns
from mlakit.kernels.hopper.device.pipeline import (
    D_TILE,
    D_TILES,
    KVPipelines,
    Pipeline,
    Query,
    advance,
)
from mlakit.kernels.hopper.device.primitives import (
    SMEM_16BIT,
    acc_layout,
    alloc_barrier,
    alloc_stage_barriers,
    alloc_vector,
    allow_dependents,
    opaque_zero,
)
from mlakit.kernels.hopper.device.row_scales import alloc_scale_stages, store_scalar
from mlakit.kernels.hopper.device.softmax import NEG_INF, apply_sign
from mlakit.kernels.hopper.sparse.arguments import VARYING
from mlakit.kernels.hopper.sparse.epilogue import Outputs, store_statistics
from mlakit.kernels.hopper.sparse.fp8_rows import (
    SCALE_KEYS,
    RowScales,
    columns_of,
    load_scale_table,
    load_scales,
)
from mlakit.kernels.hopper.sparse.lists import (
    block_range,
    load_ids,
    make_work,
    row_pointers,
    valid_slots,
)
from mlakit.kernels.hopper.sparse.m64_fp8_kv_dequant import (
    Position,
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


@record
class Operands:
    """What the QK-softmax warpgroups read and write."""

    q: object  # QueryTiles
    work: object
    tokens: object
    heads: object
    outputs: object
    gathered: object
    query: object
    probs: object
    pipelines: object
    block_counts: object
    scale_log2: object
    SIGN: object
    FORMAT: object


@gluon.jit
def _store_scales(scale_stages, stage, scales, FORMAT: gl.constexpr):
    """Store the scales of a block; −1 for invalid entries."""
    values, is_valid = scales
    values += values * 0.0  # inf becomes NaN
    values = gl.where(values < 0, 0.0, values)
    largest = values
    if FORMAT.SCALES_AT >= 0:
        largest = gl.max(values, 1)
        groups = columns_of(values)
    else:
        groups = (values,)
    store_scalar(scale_stages.amax.index(stage), gl.max(largest, 0), 4)
    for group in gl.static_range(scale_stages.COUNT):
        scale = groups[group]
        valid = gl.convert_layout(is_valid, scale.type.layout, assert_trivial=True)
        scale = gl.where(valid, scale, -1.0)
        scale_stages.values.index(stage * scale_stages.COUNT + group).store(scale)


@gluon.jit
def _gather_warpgroup(work, row_scales, pipelines, block_counts, FORMAT: gl.constexpr):
    """Load row ids a block ahead, and scales before the wait for an empty stage."""
    latent, rope = pipelines.latent, pipelines.rope
    TILES: gl.constexpr = latent.TILES_PER_STAGE
    ROPE_WORD: gl.constexpr = FORMAT.ROPE_AT // 4
    step = gl.num_programs(0)
    tiles_done = step * 0
    stage, phase, rope_stage, rope_phase = step * 0, step * 0, step * 0, step * 0
    for tile in range(gl.program_id(0), work.num_tiles, step):
        blocks = block_range(work, tile)
        ids = load_ids(work, blocks, blocks.first, LISTED_KEYS)
        scale_ids = load_ids(work, blocks, blocks.first, SCALE_KEYS)
        write_count(block_counts, tiles_done, gl.maximum(blocks.end - blocks.first, 1))
        for block in range(blocks.first, gl.maximum(blocks.end, blocks.first + 1)):
            slot = valid_slots(work, blocks, block, ids)
            position = Position(blocks, block, slot, scale_ids)
            if FORMAT.SCALES_AT >= 0:
                scales = load_scale_table(work, position, FORMAT)
            else:
                scales = load_scales(work, row_scales, position, FORMAT)
            start = row_pointers(work, blocks, block, slot, 4)
            is_valid = slot >= 0
            ids = load_ids(work, blocks, block + 1, LISTED_KEYS)
            scale_ids = load_ids(work, blocks, block + 1, SCALE_KEYS)
            mbarrier.wait(rope.empty.index(rope_stage), rope_phase ^ 1)
            if rope.tiles is not None:
                copy_rows(start, is_valid, ROPE_WORD, rope.tiles.index(rope_stage))
                async_copy.mbarrier_arrive(rope.full.index(rope_stage), increment_count=False)
            for fill in gl.static_range(D_TILES // TILES):
                mbarrier.wait(latent.empty.index(stage), phase ^ 1)
                for i in gl.static_range(TILES):
                    smem = latent.tiles.index(stage * TILES + i)
                    copy_rows(start, is_valid, 32 * (fill * TILES + i), smem)
                async_copy.mbarrier_arrive(latent.full.index(stage), increment_count=False)
                stage, phase = advance(latent, stage, phase)
            _store_scales(pipelines.scales, rope_stage, scales, FORMAT)
            mbarrier.arrive(rope.full.index(rope_stage), count=1)
            rope_stage, rope_phase = advance(rope, rope_stage, rope_phase)
        tiles_done += 1
    if work.num_splits > 1:
        allow_dependents()  # the merge kernel


@gluon.jit
def _qk_softmax_warpgroup(warpgroup, operands):
    """Run one of the two QK-softmax warpgroups; `warpgroup` says which."""
    work, tokens, outputs = operands.work, operands.tokens, operands.outputs
    query, probs, pipelines = operands.query, operands.probs, operands.pipelines
    FORMAT: gl.constexpr = operands.FORMAT
    HEADS: gl.constexpr = query.latent.shape[1]
    LAYOUT: gl.constexpr = acc_layout(HEADS)
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    INDEX: gl.constexpr = warpgroup.INDEX
    scaled = warpgroup.scaled
    tile = gl.program_id(0)
    zero = tile * 0
    FILLS: gl.constexpr = D_TILES // pipelines.latent.TILES_PER_STAGE
    stage, phase = advance(pipelines.latent, zero, zero, INDEX * FILLS)
    rope_stage, rope_phase = advance(pipelines.rope, zero, zero, INDEX)
    tiles_done = tile * 0
    blocks_done = tile * 0
    step = gl.num_programs(0)
    if INDEX == 0:
        load_query(operands.q, work, tokens, tile, query)
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for _ in tl.range(0, (work.num_tiles - tile + step - 1) // step, disable_licm=True):
        row_sum = sum_pairs(gl.zeros([64, HEADS], gl.float32, LAYOUT))
        if INDEX == 0:
            mbarrier.wait(query.full, tiles_done & 1)
            scale_queries(query, scaled.scale, FORMAT)
            mbarrier.arrive(scaled.full, count=1)
        else:
            mbarrier.wait(scaled.full, tiles_done & 1)
        count = read_count(operands.block_counts, tiles_done)
        first_block = (blocks_done + INDEX) & 1
        for own_block in range(first_block, count, 2):
            # opaque: the compiler would count blocks, keys and stages in registers of their own
            block = own_block + opaque_zero()
            fill = blocks_done + block
            scores, stage, phase = qk_block(
                operands.gathered,
                query,
                pipelines,
                stage,
                phase,
                rope_stage,
                rope_phase,
                scaled.scale,
                LAYOUT,
                FORMAT,
                False,
            )
            stage, phase = advance(pipelines.latent, stage, phase, FILLS)
            is_invalid = load_row_scales(pipelines, rope_stage, 0, LAYOUT) < 0  # no NaN is
            scores = gl.where(is_invalid, NEG_INF, apply_sign(scores, operands.SIGN))
            row_sum = softmax_block(
                warpgroup,
                scores,
                fill,
                block == 0,
                row_sum,
                probs,
                pipelines,
                rope_stage,
                operands.scale_log2,
            )
            rope_stage, rope_phase = advance(pipelines.rope, rope_stage, rope_phase, 2)
        row_max, row_sum, prob_scale = sum_tile(
            warpgroup, first_block >= count, row_sum, tiles_done, pipelines, LAYOUT
        )
        next_tile = tile + step
        if INDEX == 0:
            if next_tile < work.num_tiles:
                load_query(operands.q, work, tokens, next_tile, query)
            at, _ = locate_tile(work, tokens, tile, HEADS)
            head = at.first_head + gl.arange(0, HEADS, ROW)
            lse, out_scale = finish_rows(at, outputs, operands.heads, head, row_max, row_sum)
            max_logit = gl.where(row_sum == 0.0, NEG_INF, row_max)
            store_statistics(at, outputs, operands.heads, head, lse, row_sum, max_logit)
            store_out_scale(probs, tiles_done, out_scale * (1.0 / FP16_TARGET) * prob_scale)
        tiles_done += 1
        blocks_done += count
        tile = next_tile


@gluon.jit
def _pv_warpgroup(work, tokens, heads, outputs, probs, pipelines, block_counts):
    HEADS: gl.constexpr = probs.rescale.shape[1]
    LAYOUT: gl.constexpr = acc_layout(HEADS)
    latent = pipelines.latent
    tile = gl.program_id(0)
    step = gl.num_programs(0)
    stage, phase = tile * 0, tile * 0
    blocks_done, tiles_done = tile * 0, tile * 0
    for _ in tl.range(0, (work.num_tiles - tile + step - 1) // step, disable_licm=True):
        acc = ()
        for _ in gl.static_range(D_TILES):
            acc += (gl.zeros([D_TILE, HEADS], gl.float32, LAYOUT),)
        for _ in range(read_count(block_counts, tiles_done)):
            acc, stage, phase = pv_block(
                probs, blocks_done, latent, stage, phase, acc, 64, 0, LAYOUT
            )
            blocks_done += 1
        mbarrier.wait(probs.out_scale_full, tiles_done & 1)
        out_scale = probs.out_scale.load(gl.SliceLayout(0, LAYOUT))
        mbarrier.arrive(probs.out_scale_empty, count=1)
        tiles_done += 1
        _, at = locate_tile(work, tokens, tile, HEADS)
        store_acc(at, outputs, heads, acc, 0, 1, acc_columns(LAYOUT), out_scale)
        tile += step


@gluon.jit(do_not_specialize=VARYING)
def sparse_mla_small_m_fp8_kv_kernel(
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
    CONFIG: gl.constexpr,  # `configs.SmallMFp8KvConfig`
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
    row_scales = (RowScales(*scales.main),)
    if TRAITS.HAS_EXTRA:
        row_scales += (RowScales(*scales.extra),)
    COUNT: gl.constexpr = 4 if FORMAT.SCALES_AT >= 0 else 1
    NONE: gl.constexpr = None
    full, empty = alloc_stage_barriers(CONFIG.STAGES, 128, 2)
    ARRIVALS: gl.constexpr = 129 if TRAITS.HAS_ROPE else 1
    rope_full, rope_empty = alloc_stage_barriers(CONFIG.ROPE_STAGES, ARRIVALS, 1)
    rope_tiles, rotated = NONE, NONE
    if TRAITS.HAS_ROPE:
        rope_tiles = gl.allocate_shared_memory(
            gl.bfloat16, [CONFIG.ROPE_STAGES, 64, 64], SMEM_16BIT
        )
        rotated = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, 64], SMEM_16BIT)
    pipelines = KVPipelines(
        Pipeline(
            gl.allocate_shared_memory(
                gl.int32, [CONFIG.STAGES * CONFIG.TILES_PER_STAGE, 64, 32], WORD_TILE
            ),
            full,
            empty,
            CONFIG.TILES_PER_STAGE,
        ),
        Pipeline(
            rope_tiles,
            rope_full,
            rope_empty,
            1,
        ),
        alloc_scale_stages(CONFIG.ROPE_STAGES, COUNT),
        NONE,
    )
    query = Query(
        gl.allocate_shared_memory(gl.bfloat16, [D_TILES, HEADS, D_TILE], QUERY_TILE),
        rotated,
        alloc_barrier(),
    )
    probs = alloc_probs(HEADS, COUNT, 1)
    block_counts = alloc_block_counts(8)
    scaled = alloc_scaled_query(HEADS)
    to_second, to_first = alloc_exchange(HEADS), alloc_exchange(HEADS)
    end, end_sum = alloc_exchange(HEADS), alloc_vector(HEADS)
    first = SoftmaxWarpgroup(
        INDEX=0,
        block_max=alloc_block_max(HEADS),
        incoming=to_first,
        outgoing=to_second,
        end=end,
        end_sum=end_sum,
        scaled=scaled,
    )
    second = SoftmaxWarpgroup(
        INDEX=1,
        block_max=alloc_block_max(HEADS),
        incoming=to_second,
        outgoing=to_first,
        end=end,
        end_sum=end_sum,
        scaled=scaled,
    )
    operands = Operands(
        q=QueryTiles(q, q_rope),
        work=work,
        tokens=tokens,
        heads=heads,
        outputs=outputs,
        gathered=Gathered(main.payload),
        query=query,
        probs=probs,
        pipelines=pipelines,
        block_counts=block_counts,
        scale_log2=scales.scale_log2,
        SIGN=TRAITS.SIGN,
        FORMAT=FORMAT,
    )
    gl.warp_specialize(
        [
            (_pv_warpgroup, (work, tokens, heads, outputs, probs, pipelines, block_counts)),
            (_qk_softmax_warpgroup, (first, operands)),
            (_qk_softmax_warpgroup, (second, operands)),
            (_gather_warpgroup, (work, row_scales, pipelines, block_counts, FORMAT)),
        ],
        [4, 4, 4],
        [CONFIG.SOFTMAX_REGISTERS, CONFIG.SOFTMAX_REGISTERS, CONFIG.GATHER_REGISTERS],
    )
