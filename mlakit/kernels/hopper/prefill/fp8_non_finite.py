"""FP8 values that are not finite: they reach exactly the queries that see them; see `values`.

e4m3 has no infinity; a scale that is not finite counts as a value that is not. `fp8_values` puts 0
in the place of such values and flags their tiles; the epilogue adds them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.primitives import opaque_zero
from mlakit.kernels.hopper.prefill.tiles import seen_keys

ABSENT = gl.constexpr(0x7F0000)  # a tile that is beyond all tiles: TMA loads 0s
FLAGS = gl.constexpr(128)  # at a time
EACH_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def first_value_tile(values, tile, BLOCK_K: gl.constexpr):
    """Return the request's first tile of values, counted among the tiles of all heads."""
    first = tile.head * values.count + tile.kv_row // BLOCK_K + tile.request
    return gl.where(tile.kv_len > 0, first, ABSENT)


@gluon.jit
def has_flags(values, tile, BLOCK_K: gl.constexpr):
    """Return whether a tile that a query sees has a value that is not finite."""
    first = first_value_tile(values, tile, BLOCK_K) + tile.first // BLOCK_K
    block = gl.arange(0, FLAGS, EACH_WARP)
    flags = block * 0
    for start in range(0, tile.num_blocks, FLAGS):
        is_there = (start + block < tile.num_blocks) & (tile.kv_len > 0)
        flags |= gl.load(values.flags + first + start + block, mask=is_there, other=0)
    return gl.max(flags, 0)


@gluon.jit
def finish_values(acc, schedule, tile, ROW0: gl.constexpr, values, scales, is_flagged):
    """acc times the scale of all values, and the values that are not finite."""
    if scales.v is not None and not (scales.HAS_VALUES or scales.HAS_BLOCKS):
        scale = gl.load(scales.v + tile.head.to(gl.int64) * scales.stride_v_head)
        acc *= gl.where(gl.abs(scale) < float("inf"), scale, 0.0)
    if is_flagged > 0:
        acc = add_non_finite(acc, schedule, tile, ROW0, values, scales)
    return acc


@gluon.jit
def add_non_finite(acc, schedule, tile, ROW0: gl.constexpr, values, scales):
    """Add the values that are not finite, times their scales, to the queries that see them.

    values  of `fp8.Values`: v, stride_token, stride_head and stride_column
    scales  of `fp8.Scales`: v, its strides, HAS_BLOCKS
    """
    BLOCK_K: gl.constexpr = schedule.BLOCK_K
    LAYOUT: gl.constexpr = acc.type.layout
    position = tile.position + ROW0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    first, end = seen_keys(schedule, position, tile.kv_len)
    # opaque: offsets would be kept in registers from tile to tile
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT)) + opaque_zero()
    column = column.to(gl.int64)
    head = values.v + tile.head.to(gl.int64) * values.stride_head
    column *= values.stride_column
    for key in range(tile.first, gl.minimum(tile.end, tile.kv_len)):
        row = (tile.kv_row + key).to(gl.int64)
        value = gl.load(head + row * values.stride_token + column).to(gl.float32)
        if scales.v is not None:
            at = scales.v + tile.head.to(gl.int64) * scales.stride_v_head
            if scales.HAS_BLOCKS:
                block = tile.kv_row // BLOCK_K + tile.request + key // BLOCK_K
                value *= gl.load(at + block.to(gl.int64) * scales.stride_v_token)
            else:
                value *= gl.load(at + row * scales.stride_v_token)
        is_finite = gl.abs(value) < float("inf")
        special = gl.expand_dims(gl.where(is_finite, 0.0, value), 0)
        is_seen = gl.expand_dims((key >= first) & (key < end), 1)
        acc += gl.where(is_seen, special, 0.0)
    return acc
