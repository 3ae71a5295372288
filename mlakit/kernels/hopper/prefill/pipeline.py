"""Pipelines of smem tiles, and of work tiles, from the producer to its consumers.

Stages     two of each: fill n goes to stage n % 2, its phase is the parity of n // 2. A consumer
           waits for a `full` barrier with this phase, the producer for `empty` with the other one,
           which on a fresh barrier counts as complete
Arrivals   are counted per warp role, not per thread
Deadlock   none: all roles walk the same work tiles and blocks, and fill, wait for and release
           stages in the same order
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.pipeline import two_stages
from mlakit.kernels.hopper.device.primitives import SMEM_VECTOR, alloc_barriers, lane_layout
from mlakit.kernels.hopper.prefill.tiles import Tile


@record
class Stages:
    """Barriers of queries, a stage per consumer warpgroup; or of blocks of keys."""

    full: object
    empty: object


@record
class ValueStages:
    """Stages of blocks of values; from `full` to `clean` they belong to the masking warps."""

    tiles: object  # [2, BLOCK_K, D_V]
    full: object
    clean: object
    empty: object


@record
class TileStages:
    """Work tiles, which the producer draws and locates for all roles."""

    fields: object  # int32 [2, 32]
    full: object
    empty: object


@gluon.constexpr_function
def _fields_layout(warps):
    """Return [32], all of them in each thread of so many warps."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4], [8], [16]],
        lane_bases=[[0]] * 5,
        warp_bases=[[0]] * (warps.bit_length() - 1),
        block_bases=[],
        shape=[32],
    )


@gluon.jit
def alloc_tile_stages(READERS: gl.constexpr):
    fields = gl.allocate_shared_memory(gl.int32, [2, 32], SMEM_VECTOR)
    return TileStages(fields, alloc_barriers(2, 1), alloc_barriers(2, READERS))


@gluon.jit
def publish_tile(tiles, tiles_done, tile):
    """Publish a work tile to all roles; called by the producer, one warp."""
    stage, phase = two_stages(tiles_done)
    mbarrier.wait(tiles.empty.index(stage), phase ^ 1)
    lane = gl.arange(0, 32, lane_layout(1))
    fields = gl.where(lane == 0, tile.num_blocks, tile.head)
    fields = gl.where(lane == 2, tile.q_row, fields)
    fields = gl.where(lane == 3, tile.num_rows, fields)
    fields = gl.where(lane == 4, tile.kv_row, fields)
    fields = gl.where(lane == 5, tile.position, fields)
    fields = gl.where(lane == 6, tile.kv_len, fields)
    fields = gl.where(lane == 7, tile.first, fields)
    fields = gl.where(lane == 8, tile.end, fields)
    fields = gl.where(lane == 9, tile.all_first, fields)
    fields = gl.where(lane == 10, tile.all_end, fields)
    fields = gl.where(lane == 11, tile.request, fields)
    tiles.fields.index(stage).store(fields)
    mbarrier.arrive(tiles.full.index(stage), count=1)


@gluon.jit
def wait_tile(tiles, tiles_done):
    """Wait for a work tile; it may be read until `release_tile`."""
    stage, phase = two_stages(tiles_done)
    mbarrier.wait(tiles.full.index(stage), phase)


@gluon.jit
def read_tile(tiles, schedule, tiles_done, WARPS: gl.constexpr):
    """Read a work tile with WARPS warps. A tile without blocks is the end."""
    LAYOUT: gl.constexpr = _fields_layout(WARPS)
    fields = tiles.fields.index(tiles_done & 1).load(LAYOUT)
    index = gl.arange(0, 32, LAYOUT)
    first = gl.to_tensor(0)
    all_first = gl.to_tensor(0)
    if schedule.MASK.IS_SLIDING or schedule.MASK.IS_CHUNKED:
        first = _field(fields, index, 7)
        all_first = _field(fields, index, 9)
    return Tile(
        head=_field(fields, index, 1),
        q_row=_field(fields, index, 2),
        num_rows=_field(fields, index, 3),
        kv_row=_field(fields, index, 4),
        position=_field(fields, index, 5),
        kv_len=_field(fields, index, 6),
        first=first,
        end=_field(fields, index, 8),
        all_first=all_first,
        all_end=_field(fields, index, 10),
        num_blocks=_field(fields, index, 0),
        request=_field(fields, index, 11),
    )


@gluon.jit
def _field(fields, index, NUMBER: gl.constexpr):
    # the layout leaves no exchange between threads to do
    return gl.sum(gl.where(index == NUMBER, fields, 0), 0)


@gluon.jit
def release_tile(tiles, tiles_done):
    mbarrier.arrive(tiles.empty.index(tiles_done & 1), count=1)
