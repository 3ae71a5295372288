"""The dequant warpgroup of `m64_fp8_kv`: listed FP8 rows as float16 in shared memory.

Bytes go from the cache to registers, one block of 64 list entries ahead: shared memory has no room
for them beside two blocks of float16. Invalid entries read nothing: their rows are zeros.
What scales do is in `fp8_rows`. Consumers issue the fence before wgmma: here it would wait for
every load in flight.

Lineage    own design; ideas: the dequantising warpgroup of FlashMLA's FP8 sparse decode
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.fp8_rows import KEYS
from mlakit.kernels.hopper.device.named_barriers import NAMED_FIRST
from mlakit.kernels.hopper.device.primitives import (
    SMEM_16BIT,
    SMEM_VECTOR,
    alloc_barriers,
    allow_dependents,
    lane_layout,
    named_arrive,
    named_wait,
)
from mlakit.kernels.hopper.sparse.fp8_rows import (
    SCALE_KEYS,
    convert_left,
    convert_rope,
    load_left,
    load_right,
    load_rope,
    load_scales,
    scale_factors,
    store_left,
    store_right,
    store_rope,
    store_scales,
)
from mlakit.kernels.hopper.sparse.lists import (
    block_range,
    load_ids,
    row_pointers,
    valid_slots,
)

# named barriers, one per stage
LEFT_FULL = gl.constexpr(NAMED_FIRST)
LEFT_EMPTY = gl.constexpr(NAMED_FIRST + 2)
RIGHT_FULL = gl.constexpr(NAMED_FIRST + 4)
RIGHT_EMPTY = gl.constexpr(NAMED_FIRST + 6)


@record
class BlockStages:
    """Two blocks of float16, from the dequant warpgroup to both others.

    Block n of a CTA is in stage n % 2. `right` is released by the PV warpgroup; all others together
    by the QK-softmax warpgroup, after PV of the left half.
    """

    left: object  # [2, 64, 256] float16
    right: object
    rope: object  # [2, 64, 64] bfloat16, or float16 (fp8); None where there are none past values
    bias: object  # [2, 64] float32: 0, or −inf for an invalid entry; None: key_factor
    key_factor: object  # [2, 64] float32: of scores and values of an entry, negative if invalid;
    # None: it is block_scale
    block_scale: object  # [2, 4] float32: the largest is a power of two at or above key_factor / 2
    rope_full: object  # None: rotated columns come with others


@record
class BlockCounts:
    """The blocks of a work tile, from the dequant warpgroup to both others.

    They need no release if there are two more than blocks that the dequant warpgroup is ahead of
    the others: every tile has a block.
    """

    values: object  # [slots, 1] int32, a power of two of them
    full: object


@record
class Position:
    """A block of a tile, with its list entries."""

    blocks: object  # BlockRange of the tile
    block: object
    slot: object  # int32 [64]; −1 where an entry is invalid
    scale_ids: object  # the same entries as the list has them, in `SCALE_KEYS`, or none of them


@gluon.jit
def _alloc_vectors():
    return gl.allocate_shared_memory(gl.float32, [2, 64], SMEM_VECTOR)


@gluon.jit
def alloc_stages(FORMAT: gl.constexpr, HAS_ROPE: gl.constexpr):
    rope: gl.constexpr = None
    rope_full: gl.constexpr = None
    if HAS_ROPE:
        ROPE_TYPE: gl.constexpr = gl.bfloat16 if FORMAT.IS_BF16_ROPE else gl.float16
        rope = gl.allocate_shared_memory(ROPE_TYPE, [2, 64, 64], SMEM_16BIT)
        if FORMAT.SCALED_BY == "row":
            rope_full = alloc_barriers(2, 128)
    bias: gl.constexpr = None
    factor: gl.constexpr = None
    if FORMAT.HAS_E8M0_SCALES:
        bias = _alloc_vectors()
    else:
        factor = _alloc_vectors()
    return BlockStages(
        left=gl.allocate_shared_memory(gl.float16, [2, 64, 256], SMEM_16BIT),
        right=gl.allocate_shared_memory(gl.float16, [2, 64, 256], SMEM_16BIT),
        rope=rope,
        bias=bias,
        key_factor=factor,
        block_scale=gl.allocate_shared_memory(gl.float32, [2, 4], SMEM_VECTOR),
        rope_full=rope_full,
    )


@gluon.jit
def alloc_block_counts(SLOTS: gl.constexpr):
    values = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], SMEM_VECTOR)
    return BlockCounts(values, alloc_barriers(SLOTS, 1))


@gluon.jit
def write_count(block_counts, tiles_done, count):
    slot = tiles_done & (block_counts.values.shape[0] - 1)
    block_counts.values.index(slot).store(gl.full([1], count, gl.int32, lane_layout(4)))
    mbarrier.arrive(block_counts.full.index(slot), count=1)


@gluon.jit
def read_count(block_counts, tiles_done):
    """Return the blocks of a work tile: at least one, whose entries may all be invalid."""
    SLOTS: gl.constexpr = block_counts.values.shape[0]
    slot = tiles_done & (SLOTS - 1)
    mbarrier.wait(block_counts.full.index(slot), tiles_done // SLOTS & 1)
    return gl.max(block_counts.values.index(slot).load(lane_layout(4)), 0)


@gluon.jit
def _load_scale_ids(work, blocks, block, FORMAT: gl.constexpr):
    ids = block
    if FORMAT.SCALED_BY != "group":
        ids = load_ids(work, blocks, block, SCALE_KEYS)
    return ids


@gluon.jit
def _locate_rows(work, blocks, block, ids, scale_ids):
    """Return (pointers to the rows of a block, which of them are valid, `Position`)"""
    slot = valid_slots(work, blocks, block, ids)
    start = row_pointers(work, blocks, block, slot, 4)
    return start, slot >= 0, Position(blocks, block, slot, scale_ids)


@gluon.jit
def dequant_warpgroup(work, row_scales, stages, block_counts, FORMAT: gl.constexpr):
    """Run the dequant warpgroup, which loads rows one block ahead and list entries two.

    The QK-softmax warpgroup releases a left half shortly before it needs the next one. That one is
    converted before if values are multiplied by scales; then the right half of the block after it
    is loaded later, since there are no registers for both.
    """
    CONVERTS_EARLY: gl.constexpr = FORMAT.SCALES_AT >= 0
    step = gl.num_programs(0)
    fill = step * 0
    tiles_done = step * 0
    # ids are loaded while the end of the list is sought: most lists are not padded
    expected = block_range(work, gl.program_id(0), IS_SCANNED=False)
    ids = load_ids(work, expected, expected.first, KEYS)
    scale_ids = _load_scale_ids(work, expected, expected.first, FORMAT)
    blocks = block_range(work, gl.program_id(0))
    is_expected = (blocks.first == expected.first) & (blocks.main_blocks == expected.main_blocks)
    for tile in range(gl.program_id(0), work.num_tiles, step):
        block = blocks.first
        if not is_expected:
            ids = load_ids(work, blocks, block, KEYS)
            scale_ids = _load_scale_ids(work, blocks, block, FORMAT)
        is_expected = False
        write_count(block_counts, tiles_done, gl.maximum(blocks.end - block, 1))
        start, is_valid, position = _locate_rows(work, blocks, block, ids, scale_ids)
        scales = load_scales(work, row_scales, position, FORMAT)
        left = load_left(start, is_valid)
        rope = load_rope(stages, work, position, start, is_valid, FORMAT)
        right = load_right(start, is_valid, FORMAT)
        ids = load_ids(work, blocks, block + 1, KEYS)
        scale_ids = _load_scale_ids(work, blocks, block + 1, FORMAT)
        # before the loop: the first block of the next tile then waits for no length
        next_blocks = block_range(work, tile + step)
        for block in range(blocks.first, gl.maximum(blocks.end, blocks.first + 1)):
            stage = fill & 1
            factors, inverse, consumer_scales = scale_factors(scales, right, FORMAT)
            named_wait(RIGHT_EMPTY + stage, 256, fill >= 2)
            store_right(stages, stage, right, factors, inverse, FORMAT)
            named_arrive(RIGHT_FULL + stage, 256)
            if CONVERTS_EARLY:
                left = convert_left(left, factors)
                rope = convert_rope(rope, inverse, FORMAT)
                named_wait(LEFT_EMPTY + stage, 256, fill >= 2)
                store_left(stages, stage, left)
                store_rope(stages, stage, start, is_valid, rope, FORMAT)
                store_scales(stages, stage, consumer_scales, FORMAT)
                named_arrive(LEFT_FULL + stage, 256)
                start, is_valid, position = _locate_rows(work, blocks, block + 1, ids, scale_ids)
                scales = load_scales(work, row_scales, position, FORMAT)
                right = load_right(start, is_valid, FORMAT)
            else:
                named_wait(LEFT_EMPTY + stage, 256, fill >= 2)
                store_scales(stages, stage, consumer_scales, FORMAT)
                rope = convert_rope(rope, inverse, FORMAT)
                store_rope(stages, stage, start, is_valid, rope, FORMAT)
                start, is_valid, position = _locate_rows(work, blocks, block + 1, ids, scale_ids)
                scales = load_scales(work, row_scales, position, FORMAT)
                right = load_right(start, is_valid, FORMAT)
                store_left(stages, stage, convert_left(left, factors))
                named_arrive(LEFT_FULL + stage, 256)
            left = load_left(start, is_valid)
            rope = load_rope(stages, work, position, start, is_valid, FORMAT)
            ids = load_ids(work, blocks, block + 2, KEYS)
            scale_ids = _load_scale_ids(work, blocks, block + 2, FORMAT)
            fill += 1
        tiles_done += 1
        blocks = next_blocks
    if work.num_splits > 1:
        allow_dependents()  # the merge kernel
    # no arrival is left at a named barrier
    for i in gl.static_range(2):
        named_wait(LEFT_EMPTY + ((fill + i) & 1), 256, fill + i >= 2)
        named_wait(RIGHT_EMPTY + ((fill + i) & 1), 256, fill + i >= 2)
