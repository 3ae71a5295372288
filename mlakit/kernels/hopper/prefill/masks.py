"""Masks of a consumer warpgroup's scores, [64, BLOCK_K] in the layout of an accumulator."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.primitives import opaque_zero
from mlakit.kernels.hopper.device.softmax import NEG_INF, apply_sign
from mlakit.kernels.hopper.prefill.tiles import seen_keys


@gluon.jit
def keys_left(scores, limit):
    """Return (key, limit) that broadcast to scores as [64, keys / 8, 4, 2]: column key of the block
    is before column `limit` [64] if key < limit. All that differs between threads is in limit: what
    it is compared with are constants, and take no registers."""
    LAYOUT: gl.constexpr = scores.type.layout
    ROW_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    GROUP_BIT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    limit = gl.convert_layout(limit, gl.SliceLayout(1, ROW_THREAD), assert_trivial=True)
    thread = gl.arange(0, 4, gl.SliceLayout(0, ROW_THREAD))
    limit = gl.expand_dims(limit, 1) - 2 * gl.expand_dims(thread, 0)
    group = gl.arange(0, scores.shape[1], gl.SliceLayout(1, GROUP_BIT))
    bit = gl.arange(0, 2, gl.SliceLayout(0, GROUP_BIT))
    key = 8 * gl.expand_dims(group, 1) + gl.expand_dims(bit, 0)
    key = gl.expand_dims(gl.expand_dims(key, 0), 2)
    return key, gl.expand_dims(gl.expand_dims(limit, 1), 3)


@gluon.jit
def mask_scores(
    scores, schedule, tile, start, ROW0: gl.constexpr, SIGN: gl.constexpr, IS_TOP: gl.constexpr
):
    """scores · SIGN, −inf where a query does not see a key.

    start  first key of the block
    ROW0   the warpgroup's first query in the work tile
    IS_TOP  it is the top block
    """
    LAYOUT: gl.constexpr = scores.type.layout
    BLOCK_K: gl.constexpr = scores.shape[1]
    scores = gl.reshape(apply_sign(scores, SIGN), [64, BLOCK_K // 8, 4, 2])
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    # with a causal mask the diagonal is in the top block, unless blocks are smaller than tiles
    HAS_END: gl.constexpr = (
        schedule.MASK.IS_CHUNKED
        if not schedule.MASK.IS_CAUSAL
        else (IS_TOP or BLOCK_K < schedule.BLOCK_Q)
    )
    if HAS_END:  # noqa: SIM102  # known when compiled
        if start + BLOCK_K > tile.all_end:
            # opaque: predicates of the diagonal would be kept in registers from tile to tile
            position = tile.position + (row + (ROW0 + opaque_zero()))
            _, end = seen_keys(schedule, position, tile.kv_len)
            key, limit = keys_left(scores, end - start)
            scores = gl.where(key < limit, scores, NEG_INF)
    if start < tile.all_first:
        position = tile.position + (row + (ROW0 + opaque_zero()))
        first, _ = seen_keys(schedule, position, tile.kv_len)
        key, limit = keys_left(scores, first - start)
        scores = gl.where(key >= limit, scores, NEG_INF)
    return gl.convert_layout(gl.reshape(scores, [64, BLOCK_K]), LAYOUT, assert_trivial=True)
