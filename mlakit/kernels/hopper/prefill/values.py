"""Values that are not finite: they reach exactly the queries that see them.

0 · NaN is NaN, so a hidden key's probability of 0 does not hide its value. In the blocks where some
query of a work tile does not see some key, the masking warps replace what is not finite by 0 before
the consumers multiply; what lies outside of the request is among it. If a query may see such a
value, they flag the tile, and the epilogue adds the value to the results of the queries
that do. Both are rare; checking a block costs the consumers nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.device.compat import reinterpret
from mlakit.kernels.hopper.device.pipeline import two_stages
from mlakit.kernels.hopper.device.primitives import lane_layout, smem_layout
from mlakit.kernels.hopper.prefill.pipeline import read_tile, release_tile, wait_tile
from mlakit.kernels.hopper.prefill.tiles import block_start, is_masked, seen_keys

MASKING_WARPS = gl.constexpr(2)
CHUNK_ROWS = gl.constexpr(16)


@gluon.jit
def masking_warps(schedule, tiles, values, flags):
    """Run the masking warps: pass every block of values on, without non-finite values."""
    tiles_done = gl.to_tensor(0)
    fill = gl.to_tensor(0)
    wait_tile(tiles, tiles_done)
    tile = read_tile(tiles, schedule, tiles_done, MASKING_WARPS)
    while tile.num_blocks > 0:
        for block in range(tile.num_blocks):
            stage, phase = two_stages(fill)
            start = block_start(schedule, tile, block)
            mbarrier.wait(values.full.index(stage), phase)
            if is_masked(schedule, tile, start):
                is_flagged = zero_non_finite(
                    values.tiles.index(stage), tile.first - start, tile.end - start
                )
                if is_flagged > 0:
                    LANES: gl.constexpr = lane_layout(MASKING_WARPS)
                    flags.index(tiles_done & 1).store(
                        gl.full([32], 0, gl.int32, LANES) + tiles_done
                    )
            mbarrier.arrive(values.clean.index(stage), count=1)
            fill += 1
        release_tile(tiles, tiles_done)
        tiles_done += 1
        wait_tile(tiles, tiles_done)
        tile = read_tile(tiles, schedule, tiles_done, MASKING_WARPS)


@gluon.jit
def zero_non_finite(values, first, end):
    """Zero what is not finite; return 1 if it was in one of the rows [first, end), else 0.

    values  [rows, columns] of 16 bits, or of e4m3
    """
    IS_E4M3: gl.constexpr = values.dtype.primitive_bitwidth == 8
    EXPONENT: gl.constexpr = 0x7F80 if values.dtype == gl.bfloat16 else 0x7C00
    UNIT: gl.constexpr = EXPONENT & -EXPONENT  # the lowest bit of the exponent
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [MASKING_WARPS, 1], [1, 0])
    ROWS: gl.constexpr = values.shape[0]
    ATOMS: gl.constexpr = values.shape[1] * values.dtype.primitive_bitwidth // 1024
    CHUNKS: gl.constexpr = ATOMS * ROWS // CHUNK_ROWS
    # view the tile as words, one swizzle atom of 128 bytes after the other
    chunks = reinterpret(values, gl.int32, [CHUNKS, CHUNK_ROWS, 32], smem_layout(32, 32))
    carries = gl.zeros([CHUNK_ROWS, 32], gl.int32, LAYOUT)
    # program_id(2) is 0, which no compiler knows: unrolled, the loops would exceed the registers
    for chunk in range(gl.program_id(2), CHUNKS):
        words = chunks.index(chunk).load(LAYOUT)
        # an exponent of ones alone carries into the sign
        if IS_E4M3:
            carries |= _nan_bytes(words)
        else:
            carries |= (words & (EXPONENT * 0x10001)) + UNIT * 0x10001
    is_flagged = gl.to_tensor(0)
    if not IS_E4M3:
        carries = (carries & 0x8000) | ((carries >> 16) & 0x8000)
    if _any(carries) > 0:
        hits = gl.zeros([CHUNK_ROWS, 32], gl.int32, LAYOUT)
        for chunk in range(gl.program_id(2), CHUNKS):
            words = chunks.index(chunk).load(LAYOUT)
            if IS_E4M3:
                bad = _nan_bytes(words)
                is_bad = bad != 0
                chunks.index(chunk).store(words & ~(bad * 255))
            else:
                low = (words & EXPONENT) == EXPONENT
                high = ((words >> 16) & EXPONENT) == EXPONENT
                is_bad = low | high
                kept = gl.where(low, words & -0x10000, words)
                chunks.index(chunk).store(gl.where(high, kept & 0xFFFF, kept))
            row = chunk * CHUNK_ROWS % ROWS + gl.arange(0, CHUNK_ROWS, gl.SliceLayout(1, LAYOUT))
            is_seen = gl.expand_dims((row >= first) & (row < end), 1)
            hits |= gl.where(is_bad & is_seen, 1, 0)
        is_flagged = _any(hits)
    # order the writes before wgmma reads them, and the reads before TMA writes the stage again
    fence_async_shared()
    return is_flagged


@gluon.jit
def _nan_bytes(words):
    """Return 1 in each byte that is NaN in e4m3: 0x7f carries into the highest bit."""
    return (((words & 0x7F7F7F7F) + 0x01010101) >> 7) & 0x01010101


@gluon.jit
def _any(flags):
    """Return the maximum of [rows, columns]."""
    return gl.max(gl.max(flags, 1), 0)


@gluon.jit
def add_non_finite(acc, schedule, tile, ROW0: gl.constexpr, v, stride_token, stride_head):
    """Add the values of masked blocks that are not finite to the queries that see them.

    Whatever their weights: NaN and infinity times a positive number are what they were.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    position = tile.position + ROW0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    first, end = seen_keys(schedule, position, tile.kv_len)
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    rows = v + tile.kv_row.to(gl.int64) * stride_token + tile.head.to(gl.int64) * stride_head
    for key in range(tile.first, tile.end):
        value = gl.load(rows + key.to(gl.int64) * stride_token + column).to(gl.float32)
        is_finite = gl.abs(value) < float("inf")
        special = gl.expand_dims(gl.where(is_finite, 0.0, value), 0)
        is_seen = gl.expand_dims((key >= first) & (key < end), 1)
        acc += gl.where(is_seen, special, 0.0)
    return acc
