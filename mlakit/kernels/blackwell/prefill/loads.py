"""The producer warp, which loads work tiles, and the masking warps, which values pass through."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from mlakit.kernels.blackwell.prefill.pipeline import (
    KEYS,
    PART,
    QUERIES,
    TAIL,
    tail_of,
    turn,
)
from mlakit.kernels.hopper.device.compat import record, reinterpret, tma_load
from mlakit.kernels.hopper.device.primitives import lane_layout
from mlakit.kernels.hopper.prefill.pipeline import (
    publish_tile,
    read_tile,
    release_tile,
    wait_tile,
)
from mlakit.kernels.hopper.prefill.tiles import (
    align_tile,
    block_start,
    draw_tile,
    drawn_number,
    is_masked,
    locate_tile,
    no_tile,
)
from mlakit.kernels.hopper.prefill.values import MASKING_WARPS, zero_non_finite


@record
class Inputs:
    """TMA descriptors of tiles of 128 rows, and the columns from a head to the next."""

    q: object
    q_tail: object  # of 64 columns
    k: object  # the columns that are not rotated
    k_rope: object  # or None
    v: object
    stride_q: object
    stride_k: object
    stride_v: object


@gluon.jit
def _atoms(part, ATOM: gl.constexpr):
    """A part as its swizzle atoms, [1 or 2, 128, ATOM]."""
    return reinterpret(part, part.dtype, [PART // ATOM, part.shape[0], ATOM], part.layout)


@gluon.jit
def _load_part(tma, row, column, full, part):
    """Start to load 128 columns of 128 rows, a swizzle atom at a time."""
    ATOM: gl.constexpr = tma.block_shape[1]
    atoms = _atoms(part, ATOM)
    for i in gl.static_range(PART // ATOM):
        tma_load(tma, [row, column + i * ATOM], full, atoms.index(i))


@gluon.jit
def _load_columns(inputs, tile, row, full, COLUMN: gl.constexpr, SIZES, to):
    """Start to load the columns of a block of keys that a TMA tile has."""
    D_N: gl.constexpr = SIZES.D_N
    if COLUMN < D_N:
        tma_load(inputs.k, [row, tile.head * inputs.stride_k + COLUMN], full, to)
    else:
        tma_load(inputs.k_rope, [row, COLUMN - D_N], full, to)


@gluon.jit
def _key_barrier(block, part, SIZES, smem, barriers):
    index, _ = turn(smem, block * SIZES.KEY_PARTS + part)
    return barriers.keys_full.index(index)


@gluon.jit
def _wait_until_clean(block, smem, barriers):
    """Wait until the masking warps are done with the values of a block, whose stages are loaded
    next: a commit says nothing of what they did."""
    index, phase = turn(smem, gl.maximum(block, 0))
    mbarrier.wait(barriers.clean.index(index), phase, pred=block >= 0)


@gluon.jit
def _load_keys(inputs, tile, row, fill, block, SIZES, smem, barriers):
    """Start to load a block of keys.

    The tail needs no barrier of its own: the stage of part 0 is empty only when the products of
    block − AHEAD, which read the tail's stage, are complete.
    """
    _wait_until_clean(block - SIZES.AHEAD, smem, barriers)
    ATOM: gl.constexpr = inputs.k.block_shape[1]
    BYTES: gl.constexpr = smem.parts.dtype.primitive_bitwidth // 8
    D_TAIL: gl.constexpr = TAIL if SIZES.HAS_TAIL else 0
    for part in gl.static_range(SIZES.KEY_PARTS):
        stage, phase = turn(smem, fill + part)
        full = _key_barrier(block, part, SIZES, smem, barriers)
        mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
        mbarrier.expect(full, KEYS * (PART + (D_TAIL if part == 0 else 0)) * BYTES)
        atoms = _atoms(smem.parts.index(stage), ATOM)
        for i in gl.static_range(PART // ATOM):
            _load_columns(inputs, tile, row, full, part * PART + i * ATOM, SIZES, atoms.index(i))
    if SIZES.HAS_TAIL:
        full = _key_barrier(block, 0, SIZES, smem, barriers)
        tail = tail_of(SIZES, smem, block)
        _load_columns(inputs, tile, row, full, SIZES.KEY_PARTS * PART, SIZES, tail)


@gluon.jit
def _load_values(inputs, tile, row, fill, block, SIZES, smem, barriers):
    """Start to load a block of values."""
    BYTES: gl.constexpr = smem.parts.dtype.primitive_bitwidth // 8
    if SIZES.TILES == 1:
        _wait_until_clean(block - 1, smem, barriers)
    for part in gl.static_range(SIZES.VALUE_PARTS):
        stage, phase = turn(smem, fill + part)
        index, _ = turn(smem, block * SIZES.VALUE_PARTS + part)
        full = barriers.values_full.index(index)
        mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
        mbarrier.expect(full, KEYS * PART * BYTES)
        column = tile.head * inputs.stride_v + part * PART
        _load_part(inputs.v, row, column, full, smem.parts.index(stage))


@gluon.jit
def _load_queries(inputs, tile, tiles_done, SIZES, smem, barriers):
    """Start to load the queries of a work tile, when the products of the last one are complete."""
    BYTES: gl.constexpr = smem.parts.dtype.primitive_bitwidth // 8
    mbarrier.wait(barriers.q_empty, (tiles_done & 1) ^ 1)
    for i in gl.static_range(SIZES.TILES):
        full = barriers.q_full.index(i)
        row = tile.q_row + i * QUERIES
        column = tile.head * inputs.stride_q
        mbarrier.expect(full, QUERIES * (SIZES.D_N + SIZES.D_R) * BYTES)
        for part in gl.static_range(SIZES.KEY_PARTS):
            to = smem.q.index(i * SIZES.KEY_PARTS + part)
            _load_part(inputs.q, row, column + part * PART, full, to)
        if SIZES.HAS_TAIL:
            at = column + SIZES.KEY_PARTS * PART
            tma_load(inputs.q_tail, [row, at], full, smem.q_tails.index(i))


@gluon.jit
def producer(schedule, tiles, inputs, SIZES, smem, barriers):
    """Draw work tiles, and load them in the order of `pipeline`."""
    KEY_PARTS: gl.constexpr = SIZES.KEY_PARTS
    VALUE_PARTS: gl.constexpr = SIZES.VALUE_PARTS
    tile_index = gl.program_id(0)
    tiles_done = gl.to_tensor(0)
    fill = gl.to_tensor(0)
    block = gl.to_tensor(0)
    while tile_index < schedule.num_tiles:
        tile = locate_tile(schedule, tile_index)
        if SIZES.IS_ALIGNED:
            tile = align_tile(schedule, tile)
        publish_tile(tiles, tiles_done, tile)
        row = tile.kv_row + block_start(schedule, tile, 0)
        _load_keys(inputs, tile, row, fill, block, SIZES, smem, barriers)
        _load_queries(inputs, tile, tiles_done, SIZES, smem, barriers)
        fill += KEY_PARTS
        for _ in range(1, tile.num_blocks):
            below = row - KEYS
            if SIZES.TILES == 1:
                values = fill + KEY_PARTS
                _load_keys(inputs, tile, below, fill, block + 1, SIZES, smem, barriers)
                _load_values(inputs, tile, row, values, block, SIZES, smem, barriers)
            else:
                keys = fill + VALUE_PARTS
                _load_values(inputs, tile, row, fill, block, SIZES, smem, barriers)
                _load_keys(inputs, tile, below, keys, block + 1, SIZES, smem, barriers)
            row = below
            fill += KEY_PARTS + VALUE_PARTS
            block += 1
        # under the last blocks: a CTA with a long tile would keep an earlier one waiting
        drawn = draw_tile(schedule)
        _load_values(inputs, tile, row, fill, block, SIZES, smem, barriers)
        fill += VALUE_PARTS
        block += 1
        tile_index = drawn_number(drawn)
        tiles_done += 1
    publish_tile(tiles, tiles_done, no_tile())


@gluon.jit
def masking_warps(schedule, tiles, SIZES, smem, barriers):
    """Pass every block of values on, without what is not finite (`hopper.prefill.values`)."""
    KEY_PARTS: gl.constexpr = SIZES.KEY_PARTS
    VALUE_PARTS: gl.constexpr = SIZES.VALUE_PARTS
    tiles_done = gl.to_tensor(0)
    fill = gl.to_tensor(0)
    block = gl.to_tensor(0)
    wait_tile(tiles, tiles_done)
    tile = read_tile(tiles, schedule, tiles_done, MASKING_WARPS)
    while tile.num_blocks > 0:
        fill += KEY_PARTS
        for i in range(tile.num_blocks):
            first_part = fill
            if SIZES.TILES == 1:  # noqa: SIM102  # known when compiled
                if i + 1 < tile.num_blocks:
                    first_part += KEY_PARTS
            start = block_start(schedule, tile, i)
            is_flagged = gl.to_tensor(0)
            for part in gl.static_range(VALUE_PARTS):
                stage, _ = turn(smem, first_part + part)
                index, phase = turn(smem, block * VALUE_PARTS + part)
                mbarrier.wait(barriers.values_full.index(index), phase)
                if is_masked(schedule, tile, start):
                    # blocks that are aligned may have keys of the next request
                    end = gl.minimum(tile.end, tile.kv_len) - start
                    is_flagged |= zero_non_finite(smem.parts.index(stage), tile.first - start, end)
            if is_flagged > 0:
                LANES: gl.constexpr = lane_layout(MASKING_WARPS)
                flag = gl.full([32], 0, gl.int32, LANES) + tiles_done
                smem.flags.index(tiles_done & 1).store(flag)
            index, _ = turn(smem, block)
            mbarrier.arrive(barriers.clean.index(index), count=1)
            fill += KEY_PARTS + VALUE_PARTS
            block += 1
        fill -= KEY_PARTS  # of the block that does not follow
        release_tile(tiles, tiles_done)
        tiles_done += 1
        wait_tile(tiles, tiles_done)
        tile = read_tile(tiles, schedule, tiles_done, MASKING_WARPS)
