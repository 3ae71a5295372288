"""A summing warpgroup: logits of key tiles, and −inf where a token sees no key.

A thread has a key, and adds up weight · relu(score) of all heads of a token: no exchange between
threads is needed. Its weights stay in registers for a token block. Scores are loaded 32 columns at
a time, and a logit is eight sums, each of every eighth head, until all heads are added.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from mlakit.kernels.blackwell.indexer.products import PART, WARPGROUPS
from mlakit.kernels.hopper.device.compat import record, reinterpret
from mlakit.kernels.hopper.device.pipeline import two_stages
from mlakit.kernels.hopper.indexer.consumer import fill, times_scale
from mlakit.kernels.hopper.indexer.loads import next_stage
from mlakit.kernels.hopper.indexer.scheduler import locate_block, locate_single, next_block

CHUNK = gl.constexpr(32)  # columns of scores at a time
ANY_NAN = gl.constexpr(tl.PropagateNan.ALL)


@record
class Tiling:
    """Tile sizes of `configs.IndexerConfig` that the summing warpgroups read."""

    WG_TOKENS: object
    HEADS: object
    KEYS: object


@record
class Share:
    """What a warpgroup has of each token block and key tile."""

    TOKEN: object  # of the block, the first one
    TOKENS: object
    HEADS: object
    PART: object  # of a key tile
    KEYS: object  # of a key tile


@gluon.jit
def _halves(x):
    """Split columns [128, n] in two, which is no instruction."""
    return gl.split(gl.permute(gl.reshape(x, [PART, 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _quarters(x):
    low, high = _halves(x)
    a, b = _halves(low)
    c, d = _halves(high)
    return a, b, c, d


@gluon.jit
def _load_chunk(outputs, work, TOKEN: gl.constexpr, HEAD: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the weights of CHUNK heads of a token for each key: four quarters."""
    head = HEAD + gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))
    at = (work.token + TOKEN).to(gl.int64) * outputs.stride_weights_token
    at += head * outputs.stride_weights_head
    is_there = (head < outputs.HEADS) & (work.count > TOKEN)
    weights = gl.load(outputs.weights + at, mask=is_there, other=0.0)
    return _quarters(gl.expand_dims(weights, 0).broadcast_to([PART, CHUNK]))


@gluon.jit
def _load_weights(outputs, work, share, LAYOUT: gl.constexpr):
    """Load the weights of the share's columns: a tuple of quarters."""
    weights = ()
    for i in gl.static_range(share.TOKENS):
        for head in gl.static_range(0, share.HEADS, CHUNK):
            weights += _load_chunk(outputs, work, share.TOKEN + i, head, LAYOUT)
    return weights


@gluon.jit
def _sum_heads(scores, weights, CHUNKS: gl.constexpr, TOKEN: gl.constexpr, COLUMN: gl.constexpr):
    """Return [128]: Σ_h weight · relu(score) of a token of the share.

    COLUMN  the token's first column
    """
    sums = gl.zeros([PART, CHUNK // 4], gl.float32, weights[0].type.layout)
    for i in gl.static_range(CHUNKS):
        chunk = scores.slice(COLUMN + i * CHUNK, CHUNK).load()
        terms = _quarters(gl.maximum(chunk, 0.0, propagate_nan=ANY_NAN))  # a NaN stays one
        for j in gl.static_range(4):
            sums = blackwell.fma2(terms[j], weights[4 * (TOKEN * CHUNKS + i) + j], sums)
    return gl.sum(sums, 1)


@gluon.jit
def _store(requests, outputs, work, key, row, logits, TOKEN: gl.constexpr):
    """Store the logits [128] of a token, those of keys that it sees."""
    end = work.first_end
    if requests.IS_CAUSAL:
        end += TOKEN
    end = gl.where(work.count > TOKEN, end, 0)
    start = (work.token + TOKEN).to(gl.int64) * outputs.stride_out + key
    gl.store(outputs.out + start + row, logits, mask=row < end - key)


@gluon.jit
def _sum_tile(
    requests, outputs, stages, scores, work, stage, phase, tiles_done, key, weights, share
):
    """Store the visible logits of a part of a key tile, whose first key is `key`."""
    LAYOUT: gl.constexpr = scores.tiles.index(0).slice(0, CHUNK).get_reg_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    CHUNKS: gl.constexpr = share.HEADS // CHUNK
    STAGES: gl.constexpr = stages.full.shape[0]
    mbarrier.wait(stages.full.index(stage), phase)
    scales = reinterpret(
        stages.scales, gl.float32, [STAGES * scores.PARTS, PART], stages.scales.layout
    )
    scale = scales.index(stage * scores.PARTS + share.PART).load(ROW)
    fence_async_shared()  # threads have read scales, which TMA writes again
    mbarrier.arrive(stages.empty.index(stage), count=1)

    buffer, buffer_phase = two_stages(tiles_done)
    at = buffer * scores.PARTS + share.PART
    mbarrier.wait(scores.full.index(at), buffer_phase)
    logits = ()
    for i in gl.static_range(share.TOKENS):
        total = _sum_heads(
            scores.tiles.index(at), weights, CHUNKS, i, (share.TOKEN + i) * share.HEADS
        )
        logits += (times_scale(gl.convert_layout(total, ROW, assert_trivial=True), scale),)
    mbarrier.arrive(scores.empty.index(at), count=1)
    row = gl.arange(0, PART, ROW)
    for i in gl.static_range(share.TOKENS):
        _store(requests, outputs, work, key, row, logits[i], share.TOKEN + i)


@gluon.jit
def _sum_block(requests, outputs, stages, scores, work, stage, phase, tiles_done, share):
    """Sum up the key tiles of a token block; return the next stage, its phase, and the key
    tiles."""
    LAYOUT: gl.constexpr = scores.tiles.index(0).slice(0, CHUNK).get_reg_layout()
    STAGES: gl.constexpr = stages.full.shape[0]
    weights = _load_weights(outputs, work, share, LAYOUT)
    for key_tile in range(work.first_tile, work.end_tile, work.step):
        key = key_tile * share.KEYS + share.PART * PART
        _sum_tile(
            *(requests, outputs, stages, scores, work, stage, phase, tiles_done),
            *(key, weights, share),
        )
        stage, phase = next_stage(stage, phase, STAGES)
        tiles_done += 1
    return stage, phase, tiles_done


@gluon.jit
def sum_warps(WG: gl.constexpr, start, requests, outputs, stages, scores, tiling):
    """Run summing warpgroup WG. start  (request, block, tile, left), of `scheduler`"""
    request, block, tile, left = start
    share = Share(
        TOKEN=WG // scores.PARTS * tiling.WG_TOKENS,
        TOKENS=tiling.WG_TOKENS,
        HEADS=tiling.HEADS,
        PART=WG % scores.PARTS,
        KEYS=tiling.KEYS,
    )
    stage, phase, tiles_done = tile * 0, tile * 0, tile * 0
    if requests.IS_SINGLE:
        work = locate_single(requests)
        _sum_block(requests, outputs, stages, scores, work, stage, phase, tiles_done, share)
        fill(requests, outputs, work, WG, WARPGROUPS)
    else:
        while left > 0:
            work = locate_block(requests, request, block, tile, left)
            if work.first_tile < work.end_tile:
                stage, phase, tiles_done = _sum_block(
                    requests, outputs, stages, scores, work, stage, phase, tiles_done, share
                )
            fill(requests, outputs, work, WG, WARPGROUPS)
            request, block, tile, left = next_block(work, request, block, left)
