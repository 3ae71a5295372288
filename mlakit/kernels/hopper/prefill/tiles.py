"""Work tiles of prefill: queries, a head, and the blocks of keys that the queries see.

A work tile is BLOCK_Q queries of one request and one head. Blocks of keys are counted down from the
last key that any of its queries sees: with a causal mask the top block is the diagonal, whatever
the number of cached keys. So at most the blocks at either end are masked.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.primitives import lane_layout
from mlakit.kernels.hopper.prefill.schedule import ROW_COLUMNS
from mlakit.kernels.triton import primitives

COLUMNS = gl.constexpr(ROW_COLUMNS)
mask_interval = gluon.jit(primitives.mask_interval.fn)


@record
class Schedule:
    """The schedule of all work tiles; see `schedule`."""

    rows: object
    counters: object
    num_tiles: object
    heads: object
    window: object
    MASK: object
    BLOCK_Q: object
    BLOCK_K: object


@record
class Tile:
    """A work tile. Keys are counted from the first of the request, like positions."""

    head: object
    q_row: object  # of the first query, among the rows of all requests
    num_rows: object  # queries, and those past the tile
    kv_row: object  # of the request's first key
    position: object  # of the first query
    kv_len: object
    first: object  # the keys [first, end) are seen by a query of the tile
    end: object
    all_first: object  # the keys [all_first, all_end) are seen by all of them
    all_end: object
    num_blocks: object  # at least one; 0: no work tile
    request: object


@gluon.jit
def seen_keys(schedule, position, kv_len):
    """The keys [first, end) that queries at `position` see."""
    return mask_interval(position, kv_len, schedule.window, schedule.MASK)


@gluon.jit
def locate_tile(schedule, tile_index):
    row = schedule.rows + tile_index // schedule.heads * COLUMNS
    q_start = gl.load(row)
    q_len = gl.load(row + 1)
    kv_start = gl.load(row + 2)
    kv_len = gl.load(row + 3)
    within = tile_index - gl.load(row + 4) * schedule.heads
    num_tiles = gl.load(row + 5)
    group = gl.load(row + 6)
    request = gl.load(row + 7)
    first_head = within // (num_tiles * group) * group
    within -= first_head * num_tiles
    in_group = gl.minimum(schedule.heads - first_head, group)
    from_last = within // in_group
    head = first_head + within - from_last * in_group
    query = (num_tiles - 1 - from_last) * schedule.BLOCK_Q
    position = kv_len - q_len + query
    last_position = gl.minimum(position + schedule.BLOCK_Q, kv_len) - 1
    first, all_end = seen_keys(schedule, position, kv_len)
    all_first, end = seen_keys(schedule, last_position, kv_len)
    num_blocks = gl.maximum((end - first + schedule.BLOCK_K - 1) // schedule.BLOCK_K, 1)
    return Tile(
        head=head,
        q_row=q_start + query,
        num_rows=q_len - query,
        kv_row=kv_start,
        position=position,
        kv_len=kv_len,
        first=first,
        end=end,
        all_first=all_first,
        all_end=all_end,
        num_blocks=num_blocks,
        request=request,
    )


@gluon.jit
def align_tile(schedule, tile):
    """`tile` with blocks that begin at multiples of BLOCK_K."""
    BLOCK_K: gl.constexpr = schedule.BLOCK_K
    first = tile.first // BLOCK_K * BLOCK_K
    end = gl.maximum((tile.end + BLOCK_K - 1) // BLOCK_K * BLOCK_K, first + BLOCK_K)
    return Tile(
        head=tile.head,
        q_row=tile.q_row,
        num_rows=tile.num_rows,
        kv_row=tile.kv_row,
        position=tile.position,
        kv_len=tile.kv_len,
        first=first,
        end=end,
        all_first=tile.all_first,
        all_end=tile.all_end,
        num_blocks=(end - first) // BLOCK_K,
        request=tile.request,
    )


@gluon.jit
def draw_tile(schedule):
    """Start to draw the next work tile, by one warp; `drawn_number` waits for it."""
    LANES: gl.constexpr = lane_layout(1)
    lane = gl.arange(0, 32, LANES)
    ones = gl.full([32], 1, gl.int32, LANES)
    return gl.atomic_add(schedule.counters + lane * 0, ones, mask=lane == 0, sem="relaxed")


@gluon.jit
def drawn_number(drawn):
    """The number of the work tile; the first of each CTA are not drawn."""
    lane = gl.arange(0, 32, drawn.type.layout)
    return gl.sum(gl.where(lane == 0, drawn, 0), 0) + gl.num_programs(0)


@gluon.jit
def no_tile():
    """Return the tile without blocks that follows the last work tile."""
    zero = gl.to_tensor(0)
    return Tile(
        head=zero,
        q_row=zero,
        num_rows=zero,
        kv_row=zero,
        position=zero,
        kv_len=zero,
        first=zero,
        end=zero,
        all_first=zero,
        all_end=zero,
        num_blocks=zero,
        request=zero,
    )


@gluon.jit
def block_start(schedule, tile, block):
    """The first key of a block, 0 being the top one; below 0 for a block that sticks out."""
    return tile.end - (block + 1) * schedule.BLOCK_K


@gluon.jit
def is_masked(schedule, tile, start):
    """Return whether a key of the block is hidden from a query of the tile."""
    return (start < tile.all_first) | (start + schedule.BLOCK_K > tile.all_end)
