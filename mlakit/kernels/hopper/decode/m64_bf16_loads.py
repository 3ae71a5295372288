"""Shared memory and barriers of `m64_bf16`, its TMA loads, and its gather producer.

The gather producer is a third warpgroup, where no TMA tile fits a page. A part of a block is empty
when the warpgroup that would reload it by TMA says so. Parts are released in the order in which
they are loaded here, and no consumer waits ahead of a part that it holds: no deadlock. A gather of
scattered rows takes longer than the wgmma of a pair of blocks: so each pair is prefetched to L2
while the one before is loaded. No more than that: all CTAs together take a good part of L2.

Lineage    own design; ideas: FlashMLA's seesaw schedule, whose warpgroups reload column halves
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.decode.scheduler import (
    key_range,
    locate_tile,
    next_tile,
    query_at,
)
from mlakit.kernels.hopper.device.compat import record, tma_load
from mlakit.kernels.hopper.device.paged_loads import (
    NO_ROW,
    arrive_on_loads,
    load_block,
    lookup_block,
    lookup_prefetch,
    prefetch_rows,
    producer_arrivals,
    rows_of_block,
    tma_rows,
)
from mlakit.kernels.hopper.device.primitives import (
    alloc_barrier,
    alloc_vector,
    lane_layout,
    prefetch_l2,
    tma_load_page_slices,
    tma_load_tile,
)

HALF_BYTES = gl.constexpr(64 * 256 * 2)  # of a column half of a block
ROPE_BYTES = gl.constexpr(64 * 64 * 2)
ROW_BYTES = gl.constexpr(576 * 2)


@record
class Smem:
    """Shared memory. `left` and `right` are column halves of the 512 latent columns, two blocks."""

    q_left: object
    q_right: object
    left: object
    right: object
    rope: object
    p_even: object  # rotated queries until P0 replaces them
    p_odd: object  # rotated queries until P1 replaces them
    max_even: object
    max_odd: object
    sum_even: object
    sum_odd: object


@record
class PartBarriers:
    """Barriers of one part of a block of keys."""

    full: object
    empty: object  # of the gather producer; None: the warpgroup that releases it reloads it


@record
class Barriers:
    """Barriers of the loads, and of the data that one warpgroup hands to the other."""

    q: object
    left_even: object  # PartBarriers, as all of blocks
    left_odd: object
    right_even: object
    right_odd: object
    rope_even: object
    rope_odd: object
    scores_even: object  # QK is all issued: the other warpgroup may use the tensor cores
    scores_odd: object
    p_even: object  # P and row_max
    p_odd: object
    sum_even: object
    sum_odd: object


@gluon.jit
def alloc_smem(kv):
    """Allocate tiles with the type and layout of the cache's descriptor."""
    DTYPE: gl.constexpr = kv.dtype
    LAYOUT: gl.constexpr = kv.layout
    return Smem(
        q_left=gl.allocate_shared_memory(DTYPE, [1, 64, 256], LAYOUT),
        q_right=gl.allocate_shared_memory(DTYPE, [1, 64, 256], LAYOUT),
        left=gl.allocate_shared_memory(DTYPE, [2, 64, 256], LAYOUT),
        right=gl.allocate_shared_memory(DTYPE, [2, 64, 256], LAYOUT),
        rope=gl.allocate_shared_memory(DTYPE, [2, 64, 64], LAYOUT),
        p_even=gl.allocate_shared_memory(DTYPE, [64, 64], LAYOUT),
        p_odd=gl.allocate_shared_memory(DTYPE, [64, 64], LAYOUT),
        max_even=alloc_vector(64),
        max_odd=alloc_vector(64),
        sum_even=alloc_vector(64),
        sum_odd=alloc_vector(64),
    )


@gluon.jit
def alloc_all_barriers(words):
    """Allocate all barriers; `words` is not None where a gather producer loads rows."""
    return Barriers(
        q=alloc_barrier(),
        left_even=_alloc_part(words),
        left_odd=_alloc_part(words),
        right_even=_alloc_part(words),
        right_odd=_alloc_part(words),
        rope_even=_alloc_part(words),
        rope_odd=_alloc_part(words),
        scores_even=alloc_barrier(),
        scores_odd=alloc_barrier(),
        p_even=alloc_barrier(),
        p_odd=alloc_barrier(),
        sum_even=alloc_barrier(),
        sum_odd=alloc_barrier(),
    )


@gluon.jit
def _alloc_part(words):
    if words is None:
        NONE: gl.constexpr = None
        return PartBarriers(alloc_barrier(), NONE)
    else:
        # one arrival is that of the warpgroup that releases the part (`load_part`)
        return PartBarriers(alloc_barrier(producer_arrivals(words) + 1), alloc_barrier())


@gluon.jit
def load_part(descriptor, rows, column, part, tiles, BLOCK: gl.constexpr, BYTES: gl.constexpr):
    """Start to load some columns of the first or second block of a pair (BLOCK 0 or 1), or release
    them to the gather producer.

    part  PartBarriers
    """
    tile = tiles.index(BLOCK)
    if part.empty is not None:
        mbarrier.arrive(part.empty, count=1)
        # The arrivals of cp.async order the copies alone, not what the producer waited for before
        # them. This one orders the releasing warpgroup's wgmma before what the other warpgroup
        # writes after it has waited for the part.
        mbarrier.arrive(part.full, count=1)
    elif descriptor.block_shape[0] < 64:
        PAGES: gl.constexpr = 64 // descriptor.block_shape[0]
        tma_load_page_slices(descriptor, rows, BLOCK * PAGES, column, part.full, tile, BYTES)
    else:
        tma_load_tile(descriptor, rows, column, part.full, tile, BYTES)


@gluon.jit
def prefetch_block(inputs, packed_rows, row):
    """Prefetch a block to L2 that will be loaded soon, if it is contiguous."""
    if packed_rows is not None and inputs.PAGE % 64 == 0:
        address = packed_rows.to(gl.int64) + row.to(gl.int64) * ROW_BYTES
        prefetch_l2(address, gl.where(row < NO_ROW, 64 * ROW_BYTES, 0))


@gluon.jit
def rows_of_pair(inputs, keys, block):
    """`tma_rows` of a block and of the next one; pages smaller than a block are in either.

    Unused where a gather producer loads rows.
    """
    if inputs.words is not None:
        return block, block
    elif inputs.PAGE < 64:
        rows = tma_rows(inputs, keys, block, WARPS=4)
        return rows, rows
    else:
        rows = tma_rows(inputs, keys, block, WARPS=4)
        return rows, tma_rows(inputs, keys, block + 1, WARPS=4)


@gluon.jit
def lookup_start(inputs, scheduler, item, index):
    """Return (token, first head, rows of the first block, of the second) of a work tile."""
    token, first_head, rows = item * 0, item * 0, item * 0
    if inputs.words is None and inputs.PAGE < 64:
        rows = gl.zeros([32], gl.int32, lane_layout(4))
    next_rows = rows
    if item < scheduler.last_item:
        keys = key_range(inputs, scheduler, item, index)
        tile = locate_tile(scheduler, item, index)
        token, first_head = tile.token, tile.first_head
        rows, next_rows = rows_of_pair(inputs, keys, keys.first_block)
    return token, first_head, rows, next_rows


@gluon.jit
def load_even(inputs, token, first_head, rows, smem, barriers):
    """Start to load the queries of a work tile and its first block."""
    q_row, column = query_at(token, first_head, inputs.q_token_rows, inputs.Q_BY_HEAD)
    rope_row, rope_column = query_at(
        token, first_head, inputs.q_rope_token_rows, inputs.Q_ROPE_BY_HEAD
    )
    load_part(
        inputs.kv_rope, rows, inputs.ROPE_COLUMN, barriers.rope_even, smem.rope, 0, ROPE_BYTES
    )
    load_part(inputs.kv, rows, 0, barriers.left_even, smem.left, 0, HALF_BYTES)
    mbarrier.expect(barriers.q, 2 * ROPE_BYTES + 2 * HALF_BYTES)
    tma_load(inputs.q_rope, [rope_row, rope_column], barriers.q, smem.p_even)
    tma_load(inputs.q_rope, [rope_row, rope_column], barriers.q, smem.p_odd)
    tma_load(inputs.q, [q_row, column], barriers.q, smem.q_left.index(0))
    tma_load(inputs.q, [q_row, column + 256], barriers.q, smem.q_right.index(0))
    load_part(inputs.kv, rows, 256, barriers.right_even, smem.right, 0, HALF_BYTES)


@gluon.jit
def load_odd_left(inputs, rows, smem, barriers):
    """The left half of the second block: it replaces the staged result of the even warpgroup."""
    load_part(inputs.kv, rows, 0, barriers.left_odd, smem.left, 1, HALF_BYTES)


@gluon.jit
def load_odd_right(inputs, rows, smem, barriers):
    """The rest of the second block."""
    load_part(inputs.kv_rope, rows, inputs.ROPE_COLUMN, barriers.rope_odd, smem.rope, 1, ROPE_BYTES)
    load_part(inputs.kv, rows, 256, barriers.right_odd, smem.right, 1, HALF_BYTES)


@gluon.jit
def _gather_part(inputs, descriptor, rows, column, part, phase, tile):
    mbarrier.wait(part.empty, phase)
    load_block(inputs, descriptor, rows, column, part.full, tile)
    arrive_on_loads(inputs, part.full)


@gluon.jit
def gather_producer(item, index, inputs, scheduler, smem, barriers):
    """Load pairs of blocks: the rotated columns, left half and right half of each."""
    rope = (barriers.rope_even, barriers.rope_odd)
    left = (barriers.left_even, barriers.left_odd)
    right = (barriers.right_even, barriers.right_odd)
    phase = item * 0
    while item < scheduler.last_item:
        keys = key_range(inputs, scheduler, item, index)
        block = keys.first_block
        num_pairs = gl.maximum((keys.end_block - block + 1) // 2, 1)
        lookup = lookup_block(inputs, keys, block)
        next_pages = lookup_prefetch(inputs, keys, block + 2)
        for _ in range(num_pairs):
            for i in gl.static_range(2):
                rows = rows_of_block(inputs, keys, lookup, block)
                lookup = lookup_block(inputs, keys, block + 1)
                tile = smem.rope.index(i)
                _gather_part(inputs, inputs.kv_rope, rows, inputs.ROPE_COLUMN, rope[i], phase, tile)
                _gather_part(inputs, inputs.kv, rows, 0, left[i], phase, smem.left.index(i))
                _gather_part(inputs, inputs.kv, rows, 256, right[i], phase, smem.right.index(i))
                block += 1
            # after the loads: issuing the prefetch takes a warp about 600 cycles
            prefetch_rows(inputs, keys, next_pages, block, ROW_BYTES)
            next_pages = lookup_prefetch(inputs, keys, block + 2)
            phase ^= 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))
