"""The epilogues of a work tile: results are rounded once, and written where they exist."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.epilogue import store_layout
from mlakit.kernels.hopper.device.primitives import opaque_zero

PIECE = gl.constexpr(64)


@record
class Results:
    """The tensor that results are written to."""

    out: object  # [batch, M, N], N contiguous
    stride_batch: object
    stride_row: object
    M: object
    N: object


@record
class Sums:
    """The sums of both warpgroups, over half of K each."""

    tiles: object  # [2, 64, COLUMNS] float32
    full: object
    empty: object


@gluon.jit
def store_rows(results, tile, FIRST: gl.constexpr, acc):
    """Store a piece [64 rows of a, columns], whose rows begin at FIRST of the tile's."""
    LAYOUT: gl.constexpr = store_layout(acc.shape[1])
    values = gl.convert_layout(acc.to(results.out.dtype.element_ty), LAYOUT)
    # opaque: offsets would be kept in registers from tile to tile
    row = tile.left + FIRST + gl.arange(0, PIECE, gl.SliceLayout(1, LAYOUT)) + opaque_zero()
    column = tile.right + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    _store(results, tile, values, row, column, 1)


@gluon.constexpr_function
def _across_layout(columns):
    """Return [64, columns] of four warps: neighbouring rows per thread, all 64 in its warp."""
    per_thread = 8 if columns >= 16 else 4
    lanes = 64 // per_thread
    return gl.BlockedLayout([per_thread, 1], [lanes, 32 // lanes], [1, 4], [0, 1])


@gluon.jit
def store_swapped(results, sums, tile, tiles_done, acc, WG: gl.constexpr):
    """Add up the sums [64 rows of b, rows of a] of both warpgroups; each stores half of them."""
    HALF: gl.constexpr = acc.shape[1] // 2
    LAYOUT: gl.constexpr = _across_layout(HALF)
    phase = tiles_done & 1
    mbarrier.wait(sums.empty, phase ^ 1)
    sums.tiles.index(WG).store(acc)
    mbarrier.arrive(sums.full, count=1)
    mbarrier.wait(sums.full, phase)
    first = sums.tiles.index(0).slice(WG * HALF, HALF, 1).load(LAYOUT)
    values = first + sums.tiles.index(1).slice(WG * HALF, HALF, 1).load(LAYOUT)
    mbarrier.arrive(sums.empty, count=1)
    column = tile.left + gl.arange(0, PIECE, gl.SliceLayout(1, LAYOUT))
    row = tile.right + WG * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    _store(results, tile, values.to(results.out.dtype.element_ty), row, column, 0)


@gluon.jit
def _store(results, tile, values, row, column, COLUMN_AXIS: gl.constexpr):
    """Store values whose columns of the result lie along COLUMN_AXIS."""
    matrix = results.out + tile.batch.to(gl.int64) * results.stride_batch
    starts = gl.expand_dims(row.to(gl.int64) * results.stride_row, COLUMN_AXIS)
    at = matrix + (starts + gl.expand_dims(column, 1 - COLUMN_AXIS))
    is_row = gl.expand_dims(row < results.M, COLUMN_AXIS)
    is_column = gl.expand_dims(column < results.N, 1 - COLUMN_AXIS)
    gl.store(at, values, mask=is_row & is_column)
