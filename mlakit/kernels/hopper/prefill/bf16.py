"""Expanded MLA prefill, ragged, on Hopper.

Maths      scores = (q_n·k_n + q_r·k_r) · softmax_scale ; out = softmax(scores) @ v
Work       persistent CTAs; a work tile is 128 queries of a head: two consumer warpgroups of 64, a
           producer warp (TMA), two masking warps (`values`). QK of block i + 1 is issued before PV
           of block i: softmax runs under PV and under the wgmma of the other warpgroup
Memory     keys as they are: k_nope of the head and k_rope of all heads are TMA tiles of their own
           and chained wgmma; P stays in registers
Limits     bf16 and fp16, the widths of `configs.BLOCK_K`, rows that TMA can address
Lineage    own design; ideas: FlashAttention-3 (warp roles, QK ahead of PV), FlashAttention-4 (lazy
           rescaling)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from mlakit.kernels.hopper.device.compat import record, tma_load
from mlakit.kernels.hopper.device.pipeline import two_stages
from mlakit.kernels.hopper.device.primitives import (
    SMEM_VECTOR,
    acc_layout,
    alloc_barriers,
    lane_layout,
    rescale_acc,
)
from mlakit.kernels.hopper.prefill import configs
from mlakit.kernels.hopper.prefill.epilogue import Outputs, finish_rows, store_lse, store_out
from mlakit.kernels.hopper.prefill.masks import mask_scores
from mlakit.kernels.hopper.prefill.parts import issue_qk, load_keys, load_queries, make_part
from mlakit.kernels.hopper.prefill.pipeline import (
    Stages,
    ValueStages,
    alloc_tile_stages,
    publish_tile,
    read_tile,
    release_tile,
    wait_tile,
)
from mlakit.kernels.hopper.prefill.softmax import softmax_of_top, softmax_step
from mlakit.kernels.hopper.prefill.tiles import (
    Schedule,
    block_start,
    draw_tile,
    drawn_number,
    locate_tile,
    no_tile,
)
from mlakit.kernels.hopper.prefill.values import MASKING_WARPS, add_non_finite, masking_warps

BLOCK_Q = gl.constexpr(configs.BLOCK_Q)


@record
class Strides:
    """Columns of a TMA descriptor from a head to the next, and elements of v between tokens."""

    q: object
    k: object
    v: object
    v_token: object


@record
class Operands:
    """What the consumer warpgroups read and write."""

    schedule: object
    tiles: object
    parts: object
    queries: object
    keys: object
    values: object
    flags: object
    outputs: object
    v: object  # itself
    strides: object
    scale_log2: object
    SIGN: object
    RESCALE_THRESHOLD: object


@gluon.jit
def _load_keys(parts, stages, strides, tile, row, fill, ROW_BYTES: gl.constexpr):
    stage, phase = two_stages(fill)
    full = stages.full.index(stage)
    mbarrier.wait(stages.empty.index(stage), phase ^ 1)
    BLOCK_K: gl.constexpr = parts[0].k_tiles.shape[1]
    mbarrier.expect(full, BLOCK_K * ROW_BYTES)
    load_keys(parts, stage, full, tile, row, strides.k)


@gluon.jit
def _load_values(v, stages, strides, tile, row, fill):
    stage, phase = two_stages(fill)
    full = stages.full.index(stage)
    mbarrier.wait(stages.empty.index(stage), phase ^ 1)
    mbarrier.expect(full, stages.tiles.shape[1] * stages.tiles.shape[2] * 2)
    tma_load(v, [row, tile.head * strides.v], full, stages.tiles.index(stage))


@gluon.jit
def _producer(schedule, tiles, parts, v, strides, queries, keys, values, ROW_BYTES: gl.constexpr):
    """The producer warp: loads, in the order in which stages are released and needed."""
    tile_index = gl.program_id(0)
    tiles_done = gl.to_tensor(0)
    fill = gl.to_tensor(0)
    while tile_index < schedule.num_tiles:
        tile = locate_tile(schedule, tile_index)
        publish_tile(tiles, tiles_done, tile)
        row = tile.kv_row + block_start(schedule, tile, 0)
        _load_keys(parts, keys, strides, tile, row, fill, ROW_BYTES)
        load_queries(parts, queries, tile, tiles_done, strides.q, ROW_BYTES)
        for _ in range(1, tile.num_blocks):
            _load_keys(parts, keys, strides, tile, row - schedule.BLOCK_K, fill + 1, ROW_BYTES)
            _load_values(v, values, strides, tile, row, fill)
            row -= schedule.BLOCK_K
            fill += 1
        # under the last blocks: a CTA with a long tile would keep an earlier one waiting
        drawn = draw_tile(schedule)
        _load_values(v, values, strides, tile, row, fill)
        fill += 1
        tile_index = drawn_number(drawn)
        tiles_done += 1
    publish_tile(tiles, tiles_done, no_tile())


@gluon.jit
def _pin(x):
    """x float32, computed here: the compiler does not move this across barriers and wgmma."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _step(block, fill, operands, tile, acc, probs, row_max, row_sum, rescale, ROW0: gl.constexpr):
    """Issue QK of `block` and PV of the block before it, then compute softmax of `block`."""
    schedule, keys, values = operands.schedule, operands.keys, operands.values
    k_stage, _ = two_stages(fill)
    v_stage, v_phase = two_stages(fill - 1)
    _, next_phase = two_stages(fill + 1)
    qk = issue_qk(operands.parts, k_stage, ROW0)
    mbarrier.wait(values.clean.index(v_stage), v_phase)
    # only now: nothing but a barrier is then between the end of one PV and the next QK
    acc = rescale_acc(acc, _pin(rescale))
    pv = warpgroup_mma(probs, values.tiles.index(v_stage), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(qk,))
    mbarrier.arrive(keys.empty.index(k_stage), count=1)
    start = block_start(schedule, tile, block)
    scores = mask_scores(scores, schedule, tile, start, ROW0, operands.SIGN, False)
    exponentials, row_max, row_sum, rescale = softmax_step(
        scores, row_max, row_sum, operands.scale_log2, operands.RESCALE_THRESHOLD
    )
    new_probs = exponentials.to(values.tiles.dtype)
    # The spin loop of this wait ends a basic block, and new_probs passes through the wait for PV:
    # otherwise ptxas moves that wait in front of the exponentials, or their rounding behind it.
    mbarrier.wait(keys.full.index(v_stage), next_phase, pred=block + 1 < tile.num_blocks)
    acc, probs, new_probs = warpgroup_mma_wait(0, deps=(pv, probs, new_probs))
    mbarrier.arrive(values.empty.index(v_stage), count=1)
    probs = gl.convert_layout(new_probs, gl.DotOperandLayout(0, acc.type.layout, 2))
    return acc, probs, row_max, row_sum, rescale


@gluon.jit
def _consumer(ROW0: gl.constexpr, operands):
    """Run a consumer warpgroup, whose queries begin at ROW0 of each work tile."""
    schedule, tiles, parts = operands.schedule, operands.tiles, operands.parts
    queries, keys, values = operands.queries, operands.keys, operands.values
    outputs, strides = operands.outputs, operands.strides
    BLOCK_K: gl.constexpr = schedule.BLOCK_K
    SCORES: gl.constexpr = acc_layout(BLOCK_K)
    ACC: gl.constexpr = acc_layout(values.tiles.shape[2])
    D_V: gl.constexpr = values.tiles.shape[2]
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    tiles_done = gl.to_tensor(0)
    fill = gl.to_tensor(0)
    wait_tile(tiles, tiles_done)
    tile = read_tile(tiles, schedule, tiles_done, 4)
    while tile.num_blocks > 0:
        acc = gl.zeros([64, D_V], gl.float32, ACC)
        # the top block
        stage, phase = two_stages(fill)
        mbarrier.wait(queries.full.index(ROW0 // 64), tiles_done & 1)
        mbarrier.wait(keys.full.index(stage), phase)
        qk = issue_qk(parts, stage, ROW0)
        scores = warpgroup_mma_wait(0, deps=(qk,))
        mbarrier.arrive(keys.empty.index(stage), count=1)
        start = block_start(schedule, tile, 0)
        scores = mask_scores(scores, schedule, tile, start, ROW0, operands.SIGN, True)
        exponentials, row_max, row_sum = softmax_of_top(scores, operands.scale_log2)
        rescale = gl.full([64], 1.0, gl.float32, ROW)
        new_probs = exponentials.to(values.tiles.dtype)
        probs = gl.convert_layout(new_probs, gl.DotOperandLayout(0, ACC, 2))
        fill += 1
        stage, phase = two_stages(fill)
        mbarrier.wait(keys.full.index(stage), phase, pred=tile.num_blocks > 1)
        for block in range(1, tile.num_blocks):
            acc, probs, row_max, row_sum, rescale = _step(
                block, fill, operands, tile, acc, probs, row_max, row_sum, rescale, ROW0
            )
            fill += 1
        mbarrier.arrive(queries.empty.index(ROW0 // 64), count=1)
        # PV of the lowest block; what comes next is read under it
        stage, phase = two_stages(fill - 1)
        mbarrier.wait(values.clean.index(stage), phase)
        acc = rescale_acc(acc, _pin(rescale))
        pv = warpgroup_mma(probs, values.tiles.index(stage), acc, is_async=True)
        flagged_tile = gl.max(operands.flags.index(tiles_done & 1).load(lane_layout(4)), 0)
        # read again: kept through the loop, it would take registers
        tile = read_tile(tiles, schedule, tiles_done, 4)
        release_tile(tiles, tiles_done)
        acc, probs = warpgroup_mma_wait(0, deps=(pv, probs))
        mbarrier.arrive(values.empty.index(stage), count=1)
        if flagged_tile == tiles_done:
            acc = add_non_finite(acc, schedule, tile, ROW0, operands.v, strides.v_token, strides.v)
        tiles_done += 1
        # before the stores: the latency of both is hidden by what computes the results
        wait_tile(tiles, tiles_done)
        next_tile = read_tile(tiles, schedule, tiles_done, 4)
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
        lse, out_scale = finish_rows(outputs, tile, row_max, row_sum)
        store_lse(outputs, tile, ROW0, lse)
        out_scale = gl.expand_dims(gl.convert_layout(out_scale, gl.SliceLayout(1, ACC)), 1)
        store_out(outputs, tile, ROW0, acc * out_scale)
        tile = next_tile


# integers that differ from call to call, or by layout
VARYING = [
    "heads",
    "window",
    "stride_q_head",
    "stride_k_head",
    "stride_v_head",
    "stride_lse_token",
    "stride_lse_head",
]


@gluon.jit(do_not_specialize=VARYING)
def mla_prefill_kernel(
    q,  # TMA descriptors, tiles of 64 queries: the first columns, a power of two of them
    q_rest,  # the other columns before the rotated ones, or None
    q_rope,  # the rotated columns, or None
    k,  # likewise of k_nope, tiles of BLOCK_K keys
    k_rest,
    k_rope,  # of k_rope
    v,  # tiles of BLOCK_K keys
    scale_log2,
    heads,
    window,
    stride_q_head,
    stride_k_head,
    stride_v_head,
    stride_lse_token,
    stride_lse_head,
    schedule,  # `arguments.ScheduleTensors`
    values,  # `arguments.ValueArguments`
    outputs,  # `arguments.OutputArguments`
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `configs.PrefillConfig`
):
    """Run persistent CTAs, at most one per SM, over the work tiles that they draw."""
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    WIDTH: gl.constexpr = q.block_shape[1]
    strides = Strides(stride_q_head, stride_k_head, stride_v_head, values.stride_token)
    parts = (make_part(q, k, 2, 2, 0, False),)
    if q_rest is not None:
        parts = parts + (make_part(q_rest, k_rest, 2, 2, WIDTH, False),)  # noqa: RUF005
    if q_rope is not None:
        parts = parts + (make_part(q_rope, k_rope, 2, 2, TRAITS.D_N, True),)  # noqa: RUF005
    queries = Stages(alloc_barriers(2, 1), alloc_barriers(2, 1))
    keys = Stages(alloc_barriers(2, 1), alloc_barriers(2, 2))
    value_stages = ValueStages(
        tiles=gl.allocate_shared_memory(v.dtype, [2, BLOCK_K, v.block_shape[1]], v.layout),
        full=alloc_barriers(2, 1),
        clean=alloc_barriers(2, 1),
        empty=alloc_barriers(2, 2),
    )
    tiles = alloc_tile_stages(3)
    flags = gl.allocate_shared_memory(gl.int32, [2, 32], SMEM_VECTOR)
    for i in gl.static_range(2):
        flags.index(i).store(gl.full([32], -1, gl.int32, lane_layout(4)))
    gdc_wait()  # for the schedule
    schedule = Schedule(
        rows=schedule.rows,
        counters=schedule.counters,
        num_tiles=gl.load(schedule.counters + 1),
        heads=heads,
        window=window,
        MASK=TRAITS.MASK,
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
    )
    ROW_BYTES: gl.constexpr = (TRAITS.D_N + TRAITS.D_R) * 2  # of a query or key
    operands = Operands(
        schedule=schedule,
        tiles=tiles,
        parts=parts,
        queries=queries,
        keys=keys,
        values=value_stages,
        flags=flags,
        outputs=Outputs(
            *outputs, stride_lse_token=stride_lse_token, stride_lse_head=stride_lse_head
        ),
        v=values.v,
        strides=strides,
        scale_log2=scale_log2,
        SIGN=TRAITS.SIGN,
        RESCALE_THRESHOLD=CONFIG.RESCALE_THRESHOLD,
    )
    gl.warp_specialize(
        [
            (_consumer, (0, operands)),
            (_consumer, (64, operands)),
            (
                _producer,
                (schedule, tiles, parts, v, strides, queries, keys, value_stages, ROW_BYTES),
            ),
            (masking_warps, (schedule, tiles, value_stages, flags)),
        ],
        [4, 1, MASKING_WARPS],
        [CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS, CONFIG.PRODUCER_REGISTERS],
    )
