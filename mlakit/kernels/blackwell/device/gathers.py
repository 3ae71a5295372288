"""Gathers of cache rows by TMA: four rows per instruction, a swizzle atom of each.

A gather reads row −1 as zeros.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tma

from mlakit.kernels.hopper.device.compat import record, reinterpret

GATHERED = gl.constexpr(64)  # rows
# 16 rows per warp of a producer of four, all of them in each of its threads: what a gather wants
ENTRIES = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0])))


@record
class Rows:
    """64 rows, as a gather finds them."""

    kv: object  # TMA descriptors: of the cache
    extra_kv: object  # of a second cache, or None
    is_extra: object  # whether they are in the second cache
    row: object  # [64] rows of the descriptor, −1 for zeros


@gluon.jit
def _gather_atoms(descriptor, row, column, barrier, tile, PART: gl.constexpr):
    PARTS: gl.constexpr = tile.shape[0] // GATHERED
    ATOMS: gl.constexpr = tile.shape[1] // 64
    atoms = reinterpret(tile, tile.dtype, [ATOMS * PARTS, GATHERED, 64], tile.layout)
    for atom in gl.static_range(ATOMS):
        to = atoms.index(atom * PARTS + PART)
        tma.async_gather(descriptor, row, column + atom * 64, barrier, to)


@gluon.jit
def gather(rows, column, barrier, tile, PART: gl.constexpr = 0):
    """Start to gather some columns of 64 rows into rows 64 · PART to 64 · PART + 63 of a tile."""
    if rows.extra_kv is None:
        _gather_atoms(rows.kv, rows.row, column, barrier, tile, PART)
    else:
        if rows.is_extra:
            _gather_atoms(rows.extra_kv, rows.row, column, barrier, tile, PART)
        else:
            _gather_atoms(rows.kv, rows.row, column, barrier, tile, PART)
