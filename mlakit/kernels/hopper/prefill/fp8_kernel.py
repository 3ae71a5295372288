"""Expanded MLA prefill of FP8 queries, keys and values, ragged, on Hopper.

Maths      scores = (q_n·k_n + q_r·k_r) · q_scale · k_scale · softmax_scale
           out = softmax(scores) @ (v · v_scale)
Work       as `kernel`: persistent CTAs, work tiles of 128 queries of a head, two consumer
           warpgroups and a producer warp. Softmax of block i runs under PV of block i − 1 and under
           the wgmma of the other warpgroup, QK of block i + 1 under the promotion of that PV
Memory     keys as they are; values rewritten by a kernel before this one, so that P stays in
           registers (`fp8_values`). Blocks of keys begin at multiples of BLOCK_K of a request
Numbers    tensor cores accumulate FP8 products with 14 bits (`reference.hopper_fp8_mma`): scores,
           and PV of one block, which is then added to acc in float32. P is rounded to e4m3, row_sum
           is not
Limits     e4m3, the widths of `configs.FP8_BLOCK_K`
Lineage    own design; ideas: FlashAttention-3 (warp roles, QK ahead of PV), DeepGEMM (float32 sums
           of FP8 products)
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

from mlakit.kernels.hopper.compat import record, tma_load
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
    mask_scores,
    row_scales,
    scale_keys,
    softmax_step,
    spread_sum,
)
from mlakit.kernels.hopper.prefill.pipeline import (
    Stages,
    alloc_tile_stages,
    publish_tile,
    read_tile,
    release_tile,
    wait_tile,
)
from mlakit.kernels.hopper.prefill.tiles import Schedule, Tile, block_start, locate_tile, no_tile
from mlakit.kernels.hopper.primitives import acc_layout, alloc_barriers, lane_layout

LOG2_SHIFT = gl.constexpr(fp8_values.LOG2_SHIFT)
INITIAL_ROW_MAX = gl.constexpr(configs.INITIAL_ROW_MAX)
STAGES = gl.constexpr(configs.FP8_STAGES)
MMA_K = gl.constexpr(32)


@record
class Part:
    """Some columns of queries and keys: TMA descriptors and smem tiles."""

    q: object
    k: object
    q_tiles: object  # [2, 64, columns], one per consumer warpgroup
    k_tiles: object  # [STAGES, BLOCK_K, columns]
    COLUMN: object  # of q
    IS_ROPE: object  # the keys are those of all heads


@record
class Values:
    """What `fp8_values` wrote, its smem tiles, and v itself."""

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
    """Where scales are, float32 or None."""

    q: object
    k: object
    v: object
    HAS_KEYS: object  # each key has a scale of its own
    HAS_VALUES: object  # and each value
    tma: object  # of `fp8_values`, or None
    tiles: object  # [STAGES, 16, 32]
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
    """What all warp roles read."""

    schedule: object
    tiles: object
    parts: object
    values: object
    q_ready: object
    k_ready: object
    v_full: object
    scales: object
    strides: object
    scale_log2: object


@gluon.jit
def _stage(fill):
    """(stage, phase) of a fill of keys or values."""
    return fill & (STAGES - 1), (fill // STAGES) & 1


@gluon.jit
def _make_part(q, k, COLUMN: gl.constexpr, IS_ROPE: gl.constexpr):
    columns: gl.constexpr = q.block_shape[1]
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 64, columns], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, k.block_shape[0], columns], k.layout)
    return Part(q, k, q_tiles, k_tiles, COLUMN, IS_ROPE)


@gluon.jit
def _align_tile(schedule, tile):
    """`tile` with blocks that begin at multiples of BLOCK_K."""
    BLOCK_K: gl.constexpr = schedule.BLOCK_K
    first = tile.first // BLOCK_K * BLOCK_K
    end = gl.maximum((tile.end + BLOCK_K - 1) // BLOCK_K * BLOCK_K, first + BLOCK_K)
    return Tile(
        tile.head, tile.q_row, tile.num_rows, tile.kv_row, tile.position, tile.kv_len, first, end,
        tile.all_first, tile.all_end, (end - first) // BLOCK_K, tile.request,
    )  # fmt: skip


@gluon.jit
def _load_queries(inputs, tile, tiles_done, QK_WIDTH: gl.constexpr):
    for i in gl.static_range(2):
        full = inputs.q_ready.full.index(i)
        mbarrier.wait(inputs.q_ready.empty.index(i), (tiles_done & 1) ^ 1)
        mbarrier.expect(full, 64 * QK_WIDTH)
        for j in gl.static_range(len(inputs.parts)):
            part = inputs.parts[j]
            column = tile.head * inputs.strides.q + part.COLUMN
            tma_load(part.q, [tile.q_row + 64 * i, column], full, part.q_tiles.index(i))


@gluon.jit
def _wait_empty(inputs, fill):
    """Consumers release keys `fill` and the values before them together."""
    stage, phase = _stage(fill)
    mbarrier.wait(inputs.k_ready.empty.index(stage), phase ^ 1)


@gluon.jit
def _load_keys(inputs, tile, row, v_tile, fill, QK_WIDTH: gl.constexpr):
    _wait_empty(inputs, fill)
    stage, _ = _stage(fill)
    full = inputs.k_ready.full.index(stage)
    SCALE_BYTES: gl.constexpr = 0 if inputs.scales.tma is None else 16 * 32 * 4
    mbarrier.expect(full, inputs.schedule.BLOCK_K * QK_WIDTH + SCALE_BYTES)
    if inputs.scales.tma is not None:
        tma_load(inputs.scales.tma, [v_tile * 16, 0], full, inputs.scales.tiles.index(stage))
    for i in gl.static_range(len(inputs.parts)):
        part = inputs.parts[i]
        if part.IS_ROPE:
            tma_load(part.k, [row, 0], full, part.k_tiles.index(stage))
        else:
            column = tile.head * inputs.strides.k + part.COLUMN
            tma_load(part.k, [row, column], full, part.k_tiles.index(stage))


@gluon.jit
def _load_values(inputs, number, fill):
    values = inputs.values
    D_V: gl.constexpr = values.tiles.shape[1]
    _wait_empty(inputs, fill + 1)
    stage, _ = _stage(fill)
    full = inputs.v_full.index(stage)
    mbarrier.expect(full, D_V * values.tiles.shape[2])
    tma_load(values.tma, [number * D_V, 0], full, values.tiles.index(stage))


@gluon.jit
def _producer(inputs, QK_WIDTH: gl.constexpr):
    """The producer warp: loads, in the order in which stages are released and needed."""
    schedule = inputs.schedule
    BLOCK_K: gl.constexpr = schedule.BLOCK_K
    LANES: gl.constexpr = lane_layout(1)
    lane = gl.arange(0, 32, LANES)
    number = gl.program_id(0)
    tiles_done = gl.to_tensor(0)
    fill = gl.to_tensor(0)
    while number < schedule.num_tiles:
        tile = _align_tile(schedule, locate_tile(schedule, number))
        publish_tile(inputs.tiles, tiles_done, tile)
        row = tile.kv_row + block_start(schedule, tile, 0)
        v_tile = first_value_tile(inputs.values, tile, BLOCK_K)
        v_tile += block_start(schedule, tile, 0) // BLOCK_K
        _load_keys(inputs, tile, row, v_tile, fill, QK_WIDTH)
        _load_queries(inputs, tile, tiles_done, QK_WIDTH)
        for _ in range(1, tile.num_blocks):
            _load_keys(inputs, tile, row - BLOCK_K, v_tile - 1, fill + 1, QK_WIDTH)
            _load_values(inputs, v_tile, fill)
            row -= BLOCK_K
            v_tile -= 1
            fill += 1
        # Taken under the last blocks: a CTA with a long tile would keep an earlier one waiting.
        taken = gl.atomic_add(
            schedule.counters + lane * 0, gl.full([32], 1, gl.int32, LANES), mask=lane == 0,
            sem="relaxed",
        )  # fmt: skip
        _load_values(inputs, v_tile, fill)
        fill += 1
        number = gl.sum(gl.where(lane == 0, taken, 0), 0) + gl.num_programs(0)
        tiles_done += 1
    publish_tile(inputs.tiles, tiles_done, no_tile())


@gluon.jit
def _issue_qk(parts, stage, ROW0: gl.constexpr):
    """S = Q Kᵀ of a stage, in flight."""
    BLOCK_K: gl.constexpr = parts[0].k_tiles.shape[1]
    scores = gl.zeros([64, BLOCK_K], gl.float32, acc_layout(BLOCK_K, MMA_K))
    for i in gl.static_range(len(parts)):
        part = parts[i]
        block = part.k_tiles.index(stage).permute((1, 0))
        query = part.q_tiles.index(ROW0 // 64)
        scores = warpgroup_mma(query, block, scores, use_acc=i > 0, is_async=True)
    return scores


@gluon.jit
def _issue_pv(probs, values, stage):
    """PV of one block, in flight."""
    D_V: gl.constexpr = values.tiles.shape[1]
    ACC: gl.constexpr = acc_layout(D_V, MMA_K)
    probs = as_a_operand(probs, gl.DotOperandLayout(0, ACC, 4))
    pv = gl.zeros([64, D_V], gl.float32, ACC)
    tile = values.tiles.index(stage).permute((1, 0))
    return warpgroup_mma(probs, tile, pv, use_acc=False, is_async=True)


@gluon.jit
def _softmax_block(
    block, stage, inputs, tile, scores, row_scale, is_negated, row_max, row_sum,
    ROW0: gl.constexpr, SIGN: gl.constexpr,
):  # fmt: skip
    start = block_start(inputs.schedule, tile, block)
    scores = scale_keys(scores, inputs.scales, stage, is_negated)
    scores = mask_scores(scores, inputs.schedule, tile, start, ROW0, SIGN)
    return softmax_step(scores, inputs.scales, stage, row_max, row_sum, row_scale)


@gluon.jit
def _step(
    block, fill, inputs, tile, qk, acc, probs, row_scale, is_negated, row_max, row_sum, rescale,
    ROW0: gl.constexpr, SIGN: gl.constexpr,
):  # fmt: skip
    """PV of the block before `block`, softmax of `block`, then QK of the block after it.

    qk  of `block`, in flight
    """
    keys = inputs.k_ready
    k_stage, _ = _stage(fill)
    v_stage, v_phase = _stage(fill - 1)
    next_stage, next_phase = _stage(fill + 1)
    mbarrier.wait(inputs.v_full.index(v_stage), v_phase)
    # 0: ptxas serialises wgmma if scores are read in a loop while another is in flight
    scores = warpgroup_mma_wait(0, deps=(qk,))
    pv = _issue_pv(probs, inputs.values, v_stage)
    new_probs, row_max, row_sum, new_rescale = _softmax_block(
        block, k_stage, inputs, tile, scores, row_scale, is_negated, row_max, row_sum, ROW0, SIGN
    )
    # The spin loop of this wait ends a basic block, and new_probs passes through the wait for
    # PV: otherwise ptxas moves that wait in front of the exponentials.
    mbarrier.wait(keys.full.index(next_stage), next_phase, pred=block + 1 < tile.num_blocks)
    pv, new_probs = warpgroup_mma_wait(0, deps=(pv, new_probs))
    # after the lowest block of keys that are not there: nothing uses these scores
    qk = _issue_qk(inputs.parts, next_stage, ROW0)
    mbarrier.arrive(keys.empty.index(k_stage), count=1)
    acc = acc * column_of(rescale, acc) + pv
    return qk, acc, new_probs, row_max, row_sum, new_rescale


@gluon.jit
def _consumer(ROW0: gl.constexpr, inputs, outputs, SIGN: gl.constexpr, CONFIG: gl.constexpr):
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    schedule, tiles, parts = inputs.schedule, inputs.tiles, inputs.parts
    queries, keys = inputs.q_ready, inputs.k_ready
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
        # the top block
        stage, phase = _stage(fill)
        mbarrier.wait(queries.full.index(ROW0 // 64), tiles_done & 1)
        mbarrier.wait(keys.full.index(stage), phase)
        qk = _issue_qk(parts, stage, ROW0)
        scores = warpgroup_mma_wait(0, deps=(qk,))
        probs, row_max, row_sum, rescale = _softmax_block(
            0, stage, inputs, tile, scores, row_scale, is_negated, row_max, row_sum, ROW0, SIGN
        )
        mbarrier.arrive(keys.empty.index(stage), count=1)
        fill += 1
        stage, phase = _stage(fill)
        mbarrier.wait(keys.full.index(stage), phase, pred=tile.num_blocks > 1)
        qk = _issue_qk(parts, stage, ROW0)
        for block in range(1, tile.num_blocks):
            qk, acc, probs, row_max, row_sum, rescale = _step(
                block, fill, inputs, tile, qk, acc, probs, row_scale, is_negated, row_max, row_sum,
                rescale, ROW0, SIGN,
            )  # fmt: skip
            fill += 1
        qk = warpgroup_mma_wait(0, deps=(qk,))
        mbarrier.arrive(queries.empty.index(ROW0 // 64), count=1)
        # PV of the lowest block; what comes next is read under it
        stage, phase = _stage(fill - 1)
        mbarrier.wait(inputs.v_full.index(stage), phase)
        pv = _issue_pv(probs, inputs.values, stage)
        # read again: kept through the loop, it would take registers
        tile = read_tile(tiles, schedule, tiles_done, 4)
        release_tile(tiles, tiles_done)
        is_flagged = has_flags(inputs.values, tile, BLOCK_K)
        pv = warpgroup_mma_wait(0, deps=(pv,))
        acc = acc * column_of(rescale, acc) + pv
        acc = finish_values(acc, schedule, tile, ROW0, inputs.values, inputs.scales, is_flagged)
        tiles_done += 1
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
        ALL_SHIFT: gl.constexpr = SHIFT + (LOG2_SHIFT if inputs.scales.HAS_VALUES else 0.0)
        lse, out_scale = finish_rows(outputs, tile, row_max - ALL_SHIFT, row_sum)
        store_lse(outputs, tile, ROW0, lse)
        store_out(outputs, tile, ROW0, acc * column_of(out_scale, acc))
        wait_tile(tiles, tiles_done)
        tile = read_tile(tiles, schedule, tiles_done, 4)


@gluon.jit
def _consumer_0(inputs, outputs, SIGN: gl.constexpr, CONFIG: gl.constexpr):
    _consumer(0, inputs, outputs, SIGN, CONFIG)


@gluon.jit
def _consumer_1(inputs, outputs, SIGN: gl.constexpr, CONFIG: gl.constexpr):
    _consumer(64, inputs, outputs, SIGN, CONFIG)


VARYING = [
    "heads", "window", "value_tiles", "stride_q_head", "stride_k_head", "stride_lse_token",
    "stride_lse_head", "stride_sink", "stride_v_token", "stride_v_head", "stride_v_column",
    "stride_qs_token", "stride_qs_head", "stride_ks",
    "stride_vs_token", "stride_vs_head",
]  # fmt: skip


@gluon.jit(do_not_specialize=VARYING)
def mla_prefill_fp8_kernel(
    q,  # TMA descriptors, tiles of 64 queries
    q_rope,  # the rotated columns, or None
    k,  # of k_nope, tiles of BLOCK_K keys
    k_rope,
    v,  # of the tiles of `fp8_values`
    scales,  # likewise, or None
    v_rows,  # v itself
    flags,  # of `fp8_values`
    rows,  # `schedule`
    counters,
    out,
    lse,
    sink,  # or None
    q_scale,  # float32 or None each
    k_scale,
    v_scale,
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
    HAS_KEY_SCALES: gl.constexpr,  # one of each key, of each value
    HAS_VALUE_SCALES: gl.constexpr,
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `configs.Fp8PrefillConfig`
):
    """grid: persistent CTAs, at most one per SM"""
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    D_V: gl.constexpr = v.block_shape[0]
    outputs = Outputs(
        out, lse, sink, stride_out_token, stride_out_head, stride_lse_token, stride_lse_head,
        stride_sink,
    )  # fmt: skip
    scale_tiles = None
    if scales is not None:
        scale_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 16, 32], scales.layout)
    scales = Scales(
        q_scale, k_scale, v_scale, HAS_KEY_SCALES, HAS_VALUE_SCALES, scales, scale_tiles,
        stride_qs_token, stride_qs_head, stride_ks, stride_vs_token, stride_vs_head,
    )  # fmt: skip
    parts = (_make_part(q, k, 0, False),)
    if q_rope is not None:
        parts = parts + (_make_part(q_rope, k_rope, TRAITS.D_N, True),)  # noqa: RUF005
    values = Values(
        v, gl.allocate_shared_memory(v.dtype, [STAGES, D_V, BLOCK_K], v.layout), flags,
        value_tiles, v_rows, stride_v_token, stride_v_head, stride_v_column,
    )  # fmt: skip
    q_ready = Stages(alloc_barriers(2, 1), alloc_barriers(2, 1))
    k_ready = Stages(alloc_barriers(STAGES, 1), alloc_barriers(STAGES, 2))
    v_full = alloc_barriers(STAGES, 1)
    tiles = alloc_tile_stages(2)
    gdc_wait()  # for the schedule and the values
    schedule = Schedule(
        rows, counters, gl.load(counters + 1), heads, window, TRAITS.IS_CAUSAL, TRAITS.IS_SLIDING,
        TRAITS.IS_CHUNKED, BLOCK_K,
    )  # fmt: skip
    SIGN: gl.constexpr = TRAITS.SIGN
    QK_WIDTH: gl.constexpr = TRAITS.D_N + TRAITS.D_R
    inputs = Inputs(
        schedule, tiles, parts, values, q_ready, k_ready, v_full, scales,
        Strides(stride_q_head, stride_k_head), scale_log2,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer_0, (inputs, outputs, SIGN, CONFIG)),
            (_consumer_1, (inputs, outputs, SIGN, CONFIG)),
            (_producer, (inputs, QK_WIDTH)),
        ],
        [4, 1],
        [CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS],
    )
