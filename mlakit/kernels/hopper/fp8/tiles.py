"""The work tiles of a product, and the order in which persistent CTAs take them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.compat import record


@record
class Sizes:
    """Numbers of work tiles, and of steps of K in each of them."""

    left_tiles: object  # of a matrix
    right_tiles: object
    num_tiles: object  # of all matrices
    steps: object
    LEFT_ROWS: object
    COLUMNS: object
    BAND: object


@record
class Tile:
    """A work tile: rows of the left operand by rows of the right one."""

    batch: object
    left: object  # first row
    right: object


@gluon.jit
def make_sizes(batch, left_rows, right_rows, depth, STEP: gl.constexpr, CONFIG: gl.constexpr):
    LEFT_ROWS: gl.constexpr = CONFIG.LEFT_ROWS
    left_tiles = (left_rows + LEFT_ROWS - 1) // LEFT_ROWS
    right_tiles = (right_rows + CONFIG.COLUMNS - 1) // CONFIG.COLUMNS
    return Sizes(
        left_tiles=left_tiles,
        right_tiles=right_tiles,
        num_tiles=batch * left_tiles * right_tiles,
        steps=(depth + STEP - 1) // STEP,
        LEFT_ROWS=LEFT_ROWS,
        COLUMNS=CONFIG.COLUMNS,
        BAND=CONFIG.BAND,
    )


@gluon.jit
def locate_tile(sizes, index):
    """Locate a work tile. CTAs that run together have BAND left tiles and few right ones: so both
    stay in L2."""
    per_matrix = sizes.left_tiles * sizes.right_tiles
    batch = index // per_matrix
    within = index - batch * per_matrix
    band = sizes.BAND * sizes.right_tiles
    first = within // band * sizes.BAND
    height = gl.minimum(sizes.left_tiles - first, sizes.BAND)
    within = within % band
    return Tile(
        batch=batch,
        left=(first + within % height) * sizes.LEFT_ROWS,
        right=within // height * sizes.COLUMNS,
    )
