"""The consumer warpgroups: scores of key tiles, and −inf where a token sees no key.

A warpgroup has WG_TOKENS tokens of the token block and WG_PIECES pieces of each key tile. Keys are
the M side of wgmma, (token, head) the N side. Weights stay in registers for a token block. Only
visible keys are stored by score tiles; fill tiles write the rest, each element once.
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

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.primitives import acc_layout, lane_layout
from mlakit.kernels.hopper.indexer.head_sum import logits_layout, sum_heads
from mlakit.kernels.hopper.indexer.loads import PIECE, next_stage
from mlakit.kernels.hopper.indexer.scheduler import locate_block, locate_single, next_block

FILL_STEP = gl.constexpr(512)  # columns that a warpgroup fills at once


@record
class Tiling:
    """Tile sizes of `IndexerConfig` that the consumers read."""

    TOKENS: object
    HEADS: object
    WG_TOKENS: object
    WG_PIECES: object
    KEYS: object
    STAGES: object
    IS_CHAINED: object
    ADDS_ODD_RELU: object


@record
class Outputs:
    """Weights and logits."""

    weights: object
    out: object
    stride_weights_token: object
    stride_weights_head: object
    stride_out: object
    HEADS: object  # that there are


@record
class Lane:
    """Values that a thread keeps for a token block."""

    weights: object  # [WG_TOKENS · HEADS]
    out: object  # pointers [64, WG_TOKENS] to the logits of the first piece of key tile 0
    limit: object  # [64, WG_TOKENS]: keys from there on that the token sees


@gluon.jit
def _multiply(stages, stage, q, ROW: gl.constexpr):
    """Start the products of a piece."""
    N: gl.constexpr = q.shape[0]
    acc = gl.zeros([PIECE, N], gl.float32, acc_layout(N, 32))
    keys = stages.keys.index(stage).slice(ROW, PIECE, 0)
    return warpgroup_mma(keys, q.permute((1, 0)), acc, use_acc=False, is_async=True)


@gluon.jit
def times_scale(logits, scale):
    """logits · max(scale, 0); a NaN stays one."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 s; max.NaN.f32 s, $2, 0f00000000; mul.f32 $0, $1, s; }",
        "=f,f,f",
        [logits, scale],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _store(lane, acc, scale, key, TOKENS: gl.constexpr, ADDS_ODD: gl.constexpr):
    """Store the logits of a piece, `key` keys after the first one."""
    logits = sum_heads(acc, lane.weights, TOKENS, ADDS_ODD)
    logits = times_scale(logits, gl.expand_dims(scale, 1).broadcast_to(logits.shape))
    gl.store(lane.out + key, logits, mask=lane.limit > key)


@gluon.jit
def _score_tile(stages, stage, phase, q, lane, key, tiling, ROW: gl.constexpr):
    """Score the warpgroup's pieces of a key tile; no wgmma is in flight before or after.

    ROW  of the key tile that its pieces begin with
    """
    TOKENS: gl.constexpr = tiling.WG_TOKENS
    PIECES: gl.constexpr = tiling.WG_PIECES
    LAYOUT: gl.constexpr = gl.SliceLayout(1, logits_layout(TOKENS))
    scales = stage * (tiling.KEYS // PIECE) + ROW // PIECE
    mbarrier.wait(stages.full.index(stage), phase)
    if tiling.IS_CHAINED:
        running = _multiply(stages, stage, q, ROW)
    for piece in gl.static_range(PIECES):
        if not tiling.IS_CHAINED:
            running = _multiply(stages, stage, q, ROW + piece * PIECE)
        scale = stages.scales.index(scales + piece).load(LAYOUT)
        if tiling.IS_CHAINED and piece + 1 < PIECES:
            following = _multiply(stages, stage, q, ROW + (piece + 1) * PIECE)
            acc = warpgroup_mma_wait(1, deps=(running,))
            running = following
        else:
            acc = warpgroup_mma_wait(0, deps=(running,))
            if piece == PIECES - 1:
                fence_async_shared()  # threads have read scales, which TMA writes again
                mbarrier.arrive(stages.empty.index(stage), count=1)
        _store(lane, acc, scale, key + piece * PIECE, TOKENS, tiling.ADDS_ODD_RELU)


@gluon.jit
def _load_lane(requests, outputs, work, tiling, TOKEN: gl.constexpr, ROW: gl.constexpr):
    TOKENS: gl.constexpr = tiling.WG_TOKENS
    HEADS: gl.constexpr = tiling.HEADS
    N: gl.constexpr = TOKENS * HEADS
    LAYOUT: gl.constexpr = logits_layout(TOKENS)
    column = gl.arange(0, N, gl.SliceLayout(0, acc_layout(N, 32)))
    in_block, head = TOKEN + column // HEADS, column % HEADS
    token = (work.token + in_block).to(gl.int64)
    at = token * outputs.stride_weights_token + head * outputs.stride_weights_head
    is_there = (in_block < work.count) & (head < outputs.HEADS)
    weights = gl.load(outputs.weights + at, mask=is_there, other=0.0)
    if tiling.ADDS_ODD_RELU:
        weights = gl.where(column % 2 == 1, weights * 0.5, weights)

    in_block = TOKEN + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    row = gl.expand_dims(ROW + gl.arange(0, PIECE, gl.SliceLayout(1, LAYOUT)), 1)
    end = work.first_end
    if requests.IS_CAUSAL:
        end += in_block
    else:
        end += in_block * 0
    end = gl.where(in_block < work.count, end, 0)
    start = (work.token + in_block).to(gl.int64) * outputs.stride_out
    out = outputs.out + (gl.expand_dims(start, 0) + row)
    return Lane(weights, out, gl.expand_dims(end, 0) - row)


@gluon.jit
def fill(requests, outputs, work, WG: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Store −inf for the hidden keys among the columns of fill tiles."""
    offset = gl.arange(0, FILL_STEP, lane_layout(4))
    hidden = gl.full([FILL_STEP], -float("inf"), gl.float32, lane_layout(4))
    for in_block in range(gl.where(work.fill_first < work.fill_end, work.count, 0)):
        end = work.first_end
        if requests.IS_CAUSAL:
            end += in_block
        row = outputs.out + (work.token + in_block).to(gl.int64) * outputs.stride_out
        first = work.fill_first + WG * FILL_STEP
        for start in range(first, work.fill_end, WARPGROUPS * FILL_STEP):
            column = start + offset
            gl.store(row + column, hidden, mask=(column >= end) & (column < work.fill_end))


@gluon.constexpr_function
def _warpgroups(tiling):
    return tiling.TOKENS // tiling.WG_TOKENS * (tiling.KEYS // (tiling.WG_PIECES * 64))


@gluon.jit
def _score_block(
    requests, outputs, stages, work, q_stage, q_phase, stage, phase, tiling, WG: gl.constexpr
):
    """Score the key tiles of a token block; return the next stage and its phase."""
    TOKEN_GROUPS: gl.constexpr = tiling.TOKENS // tiling.WG_TOKENS
    TOKEN: gl.constexpr = WG % TOKEN_GROUPS * tiling.WG_TOKENS
    ROW: gl.constexpr = WG // TOKEN_GROUPS * tiling.WG_PIECES * PIECE
    N: gl.constexpr = tiling.WG_TOKENS * tiling.HEADS
    lane = _load_lane(requests, outputs, work, tiling, TOKEN, ROW)
    mbarrier.wait(stages.q_full.index(q_stage), q_phase)
    q = stages.q.index(q_stage).slice(TOKEN * tiling.HEADS, N, 0)
    # one loop: after a first wgmma loop ptxas 12.8 takes descriptors of q in the second from
    # registers that only the entry of the first sets
    for key_tile in range(work.first_tile, work.end_tile, work.step):
        _score_tile(stages, stage, phase, q, lane, key_tile * tiling.KEYS, tiling, ROW)
        stage, phase = next_stage(stage, phase, tiling.STAGES)
    return stage, phase


@gluon.jit
def consumer(request, block, tile, left, requests, outputs, stages, tiling, WG: gl.constexpr):
    """Run consumer warpgroup WG."""
    WARPGROUPS: gl.constexpr = _warpgroups(tiling)
    stage, phase, uses = tile * 0, tile * 0, tile * 0
    if requests.IS_SINGLE:
        work = locate_single(requests)
        # also without a key tile: the CTA may not exit before its queries are loaded
        _score_block(requests, outputs, stages, work, uses, uses, stage, phase, tiling, WG)
        fill(requests, outputs, work, WG, WARPGROUPS)
    else:
        while left > 0:
            work = locate_block(requests, request, block, tile, left)
            if work.first_tile < work.end_tile:
                q_stage = uses & 1
                stage, phase = _score_block(
                    requests,
                    outputs,
                    stages,
                    work,
                    q_stage,
                    (uses >> 1) & 1,
                    stage,
                    phase,
                    tiling,
                    WG,
                )
                mbarrier.arrive(stages.q_empty.index(q_stage), count=1)
                uses += 1
            fill(requests, outputs, work, WG, WARPGROUPS)
            request, block, tile, left = next_block(work, request, block, left)
