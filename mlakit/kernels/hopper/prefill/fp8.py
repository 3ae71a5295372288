"""Expanded MLA prefill of FP8 queries, keys and values, ragged, on Hopper.

Maths      scores = (q_n·k_n + q_r·k_r) · q_scale · k_scale · softmax_scale
           out = softmax(scores) @ (v · v_scale)
Work       as `kernel`: persistent CTAs, work tiles of queries of a head, and a producer warp. Three
           consumer warpgroups of 64 queries each; a warpgroup does QK, softmax, PV and promotion of
           a block one after the other, and tensor cores work for the other two meanwhile
Memory     keys as they are; values rewritten by a kernel before this one, so that P stays in
           registers (`fp8_values`). Blocks of keys begin at multiples of BLOCK_K of a request
Numbers    tensor cores accumulate FP8 products with 14 bits (`reference.hopper_fp8_mma`): scores,
           and PV of one block, which is then added to acc in float32. P is rounded to e4m3, row_sum
           is not
Limits     e4m3, the widths of `configs.FP8_BLOCK_K`
Lineage    own design; ideas: FlashAttention-3 (warp roles), DeepGEMM (float32 sums of FP8 products)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from mlakit.kernels.hopper.device.compat import record, tma_load
from mlakit.kernels.hopper.device.primitives import acc_layout, alloc_barriers
from mlakit.kernels.hopper.prefill import configs, fp8_values
from mlakit.kernels.hopper.prefill.epilogue import Outputs, finish_rows, store_lse, store_out
from mlakit.kernels.hopper.prefill.fp8_non_finite import (
    finish_values,
    first_value_tile,
    has_flags,
)
from mlakit.kernels.hopper.prefill.fp8_softmax import (
    SHIFT,
    as_a_operand,
    column_of,
    load_block_scales,
    mask_scores,
    row_scales,
    scale_scores,
    softmax_step,
    spread_sum,
)
from mlakit.kernels.hopper.prefill.parts import issue_qk, load_keys, load_queries, make_part
from mlakit.kernels.hopper.prefill.pipeline import (
    Stages,
    alloc_tile_stages,
    publish_tile,
    read_tile,
    release_tile,
    wait_tile,
)
from mlakit.kernels.hopper.prefill.tiles import (
    Schedule,
    align_tile,
    block_start,
    draw_tile,
    drawn_number,
    locate_tile,
    no_tile,
    seen_keys,
)

LOG2_SHIFT = gl.constexpr(fp8_values.LOG2_SHIFT)
INITIAL_ROW_MAX = gl.constexpr(configs.INITIAL_ROW_MAX)
STAGES = gl.constexpr(configs.FP8_STAGES)
MMA_K = gl.constexpr(32)


@record
class Values:
    """The results of `fp8_values`, their smem tiles, and v itself."""

    tma: object  # rows of D_V per tile
    tiles: object  # [STAGES, D_V, BLOCK_K]
    flags: object
    count: object  # tiles per head
    v: object
    stride_token: object
    stride_head: object
    stride_column: object


@record
class Scales:
    """Pointers to the scales, float32 or None."""

    q: object
    k: object
    v: object
    HAS_KEYS: object  # each key has a scale of its own
    HAS_VALUES: object  # and each value
    HAS_BLOCKS: object  # or each block of keys, and of values
    tma: object  # of `fp8_values`, or None
    tiles: object  # [STAGES, 16, 32], [STAGES, 8, 8] of blocks
    stride_q_token: object
    stride_q_head: object
    stride_k: object
    stride_v_token: object
    stride_v_head: object


@record
class Strides:
    """Columns of a TMA descriptor from a head to the next."""

    q: object
    k: object


@record
class Inputs:
    """Inputs that all warp roles read."""

    schedule: object
    tiles: object
    parts: object
    values: object
    q_ready: object
    kv_ready: object
    scales: object
    strides: object
    scale_log2: object


@gluon.jit
def _stage(fill):
    """Return (stage, phase) of a fill of keys and values."""
    return fill & (STAGES - 1), (fill // STAGES) & 1


@gluon.constexpr_function
def _tile_bytes(tma):
    return 0 if tma is None else 4 * tma.block_shape[0] * tma.block_shape[1]


@gluon.jit
def _load_block(inputs, tile, row, v_tile, fill, ROW_BYTES: gl.constexpr):
    """Load keys and values of a block, and their scales."""
    values = inputs.values
    D_V: gl.constexpr = values.tiles.shape[1]
    BLOCK_K: gl.constexpr = inputs.schedule.BLOCK_K
    SCALE_BYTES: gl.constexpr = _tile_bytes(inputs.scales.tma)
    stage, phase = _stage(fill)
    full = inputs.kv_ready.full.index(stage)
    mbarrier.wait(inputs.kv_ready.empty.index(stage), phase ^ 1)
    mbarrier.expect(full, BLOCK_K * (ROW_BYTES + D_V) + SCALE_BYTES)
    load_keys(inputs.parts, stage, full, tile, row, inputs.strides.k)
    if inputs.scales.tma is not None:
        # threads have read scales, and TMA writes them through the other proxy. Here rather than
        # before the consumers' arrivals: the producer has the time
        fence_async_shared()
        ROWS: gl.constexpr = inputs.scales.tma.block_shape[0]
        tma_load(inputs.scales.tma, [v_tile * ROWS, 0], full, inputs.scales.tiles.index(stage))
    tma_load(values.tma, [v_tile * D_V, 0], full, values.tiles.index(stage))


@gluon.jit
def _producer(inputs, ROW_BYTES: gl.constexpr):
    """The producer warp: loads, in the order in which stages are released and needed."""
    schedule = inputs.schedule
    BLOCK_K: gl.constexpr = schedule.BLOCK_K
    tile_index = gl.program_id(0)
    tiles_done = gl.to_tensor(0)
    fill = gl.to_tensor(0)
    while tile_index < schedule.num_tiles:
        tile = align_tile(schedule, locate_tile(schedule, tile_index))
        publish_tile(inputs.tiles, tiles_done, tile)
        row = tile.kv_row + block_start(schedule, tile, 0)
        v_tile = first_value_tile(inputs.values, tile, BLOCK_K)
        v_tile += block_start(schedule, tile, 0) // BLOCK_K
        # queries come when all warpgroups are done with the tile before: first the blocks whose
        # stages are free then
        for _ in range(gl.minimum(tile.num_blocks, STAGES - 1)):
            _load_block(inputs, tile, row, v_tile, fill, ROW_BYTES)
            row -= BLOCK_K
            v_tile -= 1
            fill += 1
        load_queries(inputs.parts, inputs.q_ready, tile, tiles_done, inputs.strides.q, ROW_BYTES)
        for _ in range(STAGES - 1, tile.num_blocks):
            _load_block(inputs, tile, row, v_tile, fill, ROW_BYTES)
            row -= BLOCK_K
            v_tile -= 1
            fill += 1
        tile_index = drawn_number(draw_tile(schedule))
        tiles_done += 1
    publish_tile(inputs.tiles, tiles_done, no_tile())


@gluon.jit
def _issue_pv(probs, values, stage):
    """Issue PV of one block."""
    D_V: gl.constexpr = values.tiles.shape[1]
    ACC: gl.constexpr = acc_layout(D_V, MMA_K)
    probs = as_a_operand(probs, gl.DotOperandLayout(0, ACC, 4))
    pv = gl.zeros([64, D_V], gl.float32, ACC)
    tile = values.tiles.index(stage).permute((1, 0))
    return warpgroup_mma(probs, tile, pv, use_acc=False, is_async=True)


@record
class Seen:
    """The keys and blocks that the queries of a warpgroup see."""

    all_first: object  # the keys [all_first, all_end) are seen by all of them
    all_end: object
    top: object  # the blocks [top, end) are seen by one of them
    end: object


@gluon.jit
def _seen_blocks(schedule, tile, ROW0: gl.constexpr):
    BLOCK_K: gl.constexpr = schedule.BLOCK_K
    position = tile.position + ROW0
    last_position = gl.minimum(position + 64, tile.kv_len) - 1
    first, all_end = seen_keys(schedule, position, tile.kv_len)
    all_first, end = seen_keys(schedule, last_position, tile.kv_len)
    top = gl.minimum(gl.maximum(tile.end - end, 0) // BLOCK_K, tile.num_blocks)
    top = gl.where(tile.num_rows > ROW0, top, tile.num_blocks)
    last = gl.minimum((tile.end - first + BLOCK_K - 1) // BLOCK_K, tile.num_blocks)
    return Seen(all_first, all_end, top, gl.maximum(last, top))


@gluon.jit
def _skip_blocks(inputs, fill, count):
    """Release blocks that only other warpgroups need."""
    for _ in range(count):
        stage, phase = _stage(fill)
        # an arrival before the stage is full would count for what was in it before
        mbarrier.wait(inputs.kv_ready.full.index(stage), phase)
        mbarrier.arrive(inputs.kv_ready.empty.index(stage), count=1)
        fill += 1
    return fill


@gluon.jit
def _consumer(ROW0: gl.constexpr, inputs, outputs, SIGN: gl.constexpr, CONFIG: gl.constexpr):
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    schedule, tiles, parts = inputs.schedule, inputs.tiles, inputs.parts
    queries, blocks = inputs.q_ready, inputs.kv_ready
    D_V: gl.constexpr = inputs.values.tiles.shape[1]
    SCORES: gl.constexpr = acc_layout(BLOCK_K, MMA_K)
    ACC: gl.constexpr = acc_layout(D_V, MMA_K)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    tiles_done = gl.to_tensor(0)
    fill = gl.to_tensor(0)
    wait_tile(tiles, tiles_done)
    tile = read_tile(tiles, schedule, tiles_done, 4)
    while tile.num_blocks > 0:
        acc = gl.zeros([64, D_V], gl.float32, ACC)
        row_max = gl.full([64], INITIAL_ROW_MAX, gl.float32, ROW)
        row_sum = spread_sum(gl.zeros([64, BLOCK_K], gl.float32, SCORES))
        row_scale, is_negated = row_scales(inputs.scales, inputs.scale_log2, tile, ROW0, ROW)
        seen = _seen_blocks(schedule, tile, ROW0)
        fill = _skip_blocks(inputs, fill, seen.top)
        start = block_start(schedule, tile, seen.top)
        all_end = gl.where(is_negated, 0, seen.all_end)
        mbarrier.wait(queries.full.index(ROW0 // 64), tiles_done & 1)
        stage, phase = _stage(fill)
        mbarrier.wait(blocks.full.index(stage), phase, pred=seen.top < seen.end)
        for block in range(seen.top, seen.end):
            stage, _ = _stage(fill)
            # before QK: their sign is tested between its wgmma, which would wait for the load
            of_block = (None,)
            if inputs.scales.HAS_BLOCKS:
                of_block = load_block_scales(inputs.scales, stage)
            qk = issue_qk(parts, stage, ROW0, MMA_K)
            scores = warpgroup_mma_wait(0, deps=(qk,))
            scores = scale_scores(scores, inputs.scales, stage, row_scale, SIGN)
            scores = mask_scores(
                scores, inputs, of_block[0], tiles_done, start, seen.all_first, all_end, ROW0
            )
            probs, row_max, row_sum, rescale = softmax_step(
                scores, inputs.scales, of_block, stage, row_max, row_sum, row_scale
            )
            pv = _issue_pv(probs, inputs.values, stage)
            # the next block's: the latency of a barrier that is complete already is hidden by PV
            next_stage, next_phase = _stage(fill + 1)
            mbarrier.wait(blocks.full.index(next_stage), next_phase, pred=block + 1 < seen.end)
            pv = warpgroup_mma_wait(0, deps=(pv,))
            mbarrier.arrive(blocks.empty.index(stage), count=1)
            acc = acc * column_of(rescale, acc) + pv
            start -= BLOCK_K
            fill += 1
        mbarrier.arrive(queries.empty.index(ROW0 // 64), count=1)
        # read again: kept through the loop, it would take registers
        tile = read_tile(tiles, schedule, tiles_done, 4)
        fill = _skip_blocks(inputs, fill, tile.num_blocks - _seen_blocks(schedule, tile, ROW0).end)
        release_tile(tiles, tiles_done)
        is_flagged = has_flags(inputs.values, tile, BLOCK_K)
        acc = finish_values(acc, schedule, tile, ROW0, inputs.values, inputs.scales, is_flagged)
        tiles_done += 1
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
        ALL_SHIFT: gl.constexpr = SHIFT + (LOG2_SHIFT if inputs.scales.HAS_VALUES else 0.0)
        lse, out_scale = finish_rows(outputs, tile, row_max - ALL_SHIFT, row_sum)
        store_lse(outputs, tile, ROW0, lse)
        store_out(outputs, tile, ROW0, acc * column_of(out_scale, acc))
        wait_tile(tiles, tiles_done)
        tile = read_tile(tiles, schedule, tiles_done, 4)


# integers that differ from call to call, or by layout
VARYING = [
    "heads",
    "window",
    "value_tiles",
    "stride_q_head",
    "stride_k_head",
    "stride_lse_token",
    "stride_lse_head",
    "stride_sink",
    "stride_v_token",
    "stride_v_head",
    "stride_v_column",
    "stride_qs_token",
    "stride_qs_head",
    "stride_ks",
    "stride_vs_token",
    "stride_vs_head",
]


@gluon.jit(do_not_specialize=VARYING)
def mla_prefill_fp8_kernel(
    q,  # TMA descriptors, tiles of 64 queries
    q_rope,  # the rotated columns, or None
    k,  # of k_nope, tiles of BLOCK_K keys
    k_rope,
    v,  # of the tiles of `fp8_values`
    scale_tiles,  # likewise, or None
    values,  # `arguments.Fp8ValueTensors`
    schedule,  # `arguments.ScheduleTensors`
    outputs,  # `arguments.OutputTensors`
    scales,  # `arguments.ScaleTensors`
    scale_log2,
    heads,
    window,
    value_tiles,  # per head
    stride_q_head,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_v_column,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_sink,
    stride_qs_token,
    stride_qs_head,
    stride_ks,
    stride_vs_token,
    stride_vs_head,
    KINDS: gl.constexpr,  # `fp8_values.ScaleKinds`
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `configs.Fp8PrefillConfig`
):
    """Run persistent CTAs, at most one per SM, over the work tiles that they draw.

    Numbers are single and behind the pointers: in tuples, where strides are specialised, or in
    another order, Triton 3.6 spills 1.2 to 1.8 times as much (408 instructions instead of 246
    without scales, and 458 instead of 256 with those of blocks).
    """
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    D_V: gl.constexpr = v.block_shape[0]
    WARPGROUPS: gl.constexpr = CONFIG.BLOCK_Q // 64
    outputs = Outputs(
        *outputs,
        stride_out_token=stride_out_token,
        stride_out_head=stride_out_head,
        stride_sink=stride_sink,
        stride_lse_token=stride_lse_token,
        stride_lse_head=stride_lse_head,
    )
    smem_scales = None
    if scale_tiles is not None:
        SHAPE: gl.constexpr = [STAGES, scale_tiles.block_shape[0], scale_tiles.block_shape[1]]
        smem_scales = gl.allocate_shared_memory(gl.float32, SHAPE, scale_tiles.layout)
    scales = Scales(
        *scales,
        HAS_KEYS=KINDS.has_keys,
        HAS_VALUES=KINDS.has_values,
        HAS_BLOCKS=KINDS.has_blocks,
        tma=scale_tiles,
        tiles=smem_scales,
        stride_q_token=stride_qs_token,
        stride_q_head=stride_qs_head,
        stride_k=stride_ks,
        stride_v_token=stride_vs_token,
        stride_v_head=stride_vs_head,
    )
    parts = (make_part(q, k, WARPGROUPS, STAGES, 0, False),)
    if q_rope is not None:
        parts = parts + (make_part(q_rope, k_rope, WARPGROUPS, STAGES, TRAITS.D_N, True),)  # noqa: RUF005
    values = Values(
        tma=v,
        tiles=gl.allocate_shared_memory(v.dtype, [STAGES, D_V, BLOCK_K], v.layout),
        flags=values.flags,
        count=value_tiles,
        v=values.v,
        stride_token=stride_v_token,
        stride_head=stride_v_head,
        stride_column=stride_v_column,
    )
    q_ready = Stages(alloc_barriers(WARPGROUPS, 1), alloc_barriers(WARPGROUPS, 1))
    kv_ready = Stages(alloc_barriers(STAGES, 1), alloc_barriers(STAGES, WARPGROUPS))
    tiles = alloc_tile_stages(WARPGROUPS)
    gdc_wait()  # for the schedule and the values
    schedule = Schedule(
        rows=schedule.rows,
        counters=schedule.counters,
        num_tiles=gl.load(schedule.counters + 1),
        heads=heads,
        window=window,
        MASK=TRAITS.MASK,
        BLOCK_Q=CONFIG.BLOCK_Q,
        BLOCK_K=BLOCK_K,
    )
    SIGN: gl.constexpr = TRAITS.SIGN
    ROW_BYTES: gl.constexpr = TRAITS.D_N + TRAITS.D_R  # of a query or key
    inputs = Inputs(
        schedule=schedule,
        tiles=tiles,
        parts=parts,
        values=values,
        q_ready=q_ready,
        kv_ready=kv_ready,
        scales=scales,
        strides=Strides(stride_q_head, stride_k_head),
        scale_log2=scale_log2,
    )
    gl.warp_specialize(
        [
            (_consumer, (0, inputs, outputs, SIGN, CONFIG)),
            (_consumer, (64, inputs, outputs, SIGN, CONFIG)),
            (_consumer, (128, inputs, outputs, SIGN, CONFIG)),
            (_producer, (inputs, ROW_BYTES)),
        ],
        [4, 4, 1],
        [CONFIG.CONSUMER_REGISTERS, CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS],
    )
