"""The dequant warpgroup of `m64_fp8_kv`: FP8 cache rows as float16 in shared memory.

Bytes go from the cache to registers: shared memory has no room for them beside two blocks of
float16. A fence waits for every load in flight, so their latency must be short: rows are prefetched
to L2 some blocks ahead. Rows past a query's last key are zeros, whatever the cache holds there, and
so are their scales. Rotated columns of bfloat16 are copied as they are, also past the last key:
those scores are masked, and no value has rotated columns.

Lineage    own design; ideas: the dequantising warpgroup of FlashMLA's FP8 sparse decode
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.compat import record, reinterpret
from mlakit.kernels.hopper.decode.fp8_convert import to_fp16, to_fp16_scaled
from mlakit.kernels.hopper.decode.paged_loads import (
    arrive_on_loads,
    expect_block,
    load_block,
    lookup_block,
    pages_ahead,
    pages_of_keys,
    producer_arrivals,
    row_ahead,
    row_in_page,
    rows_of_block,
)
from mlakit.kernels.hopper.decode.pipeline import two_stages
from mlakit.kernels.hopper.decode.scheduler import key_range, next_tile
from mlakit.kernels.hopper.primitives import (
    SMEM_16BIT,
    SMEM_VECTOR,
    alloc_barriers_by_loop,
    lane_layout,
    prefetch_l2,
)

HALF = gl.constexpr(64)  # words of a column half
ROPE_BYTES = gl.constexpr(64 * 64 * 2)
# the vectors of a block's scales (fp8_block128): see `_group_scales`
FIRST_SCALE = gl.constexpr(0)
SECOND_SCALE = gl.constexpr(1)
THIRD_RATIO = gl.constexpr(2)
FOURTH_RATIO = gl.constexpr(3)
NUM_SCALES = gl.constexpr(4)
SMEM_TABLE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SHIFT = gl.constexpr(6)  # values are up to 448 · 2**6, the largest power of two in float16's range
SMALLEST_EXPONENT = gl.constexpr(27 + 6)  # of a row's scale, biased by 127: 2**-94
AHEAD = gl.constexpr(2)  # blocks that are prefetched to L2 before they are loaded


@record
class CacheRows:
    """The cache, as this warpgroup reads it."""

    words: object
    ROPE_COLUMN: object
    IS_PACKED: object  # nothing lies between the rows of a page
    scales: object  # float32, or None
    stride_scales_page: object
    stride_scales_row: object
    FORMAT: object


@record
class BlockStages:
    """Two blocks of float16, from the dequant warpgroup to both others.

    Block n of a CTA is in stage n % 2. `right` is released by the PV warpgroup; `left`, `rope` and
    `scales` together by the QK-softmax warpgroup, after PV of the left half.
    """

    left: object  # [2, 64, 256] float16
    right: object
    rope: object  # [2, 64, 64] float16, or bfloat16 as the cache has it
    scales: object  # [2 · SCALES, 64] float32; of fp8_block128 `GroupScales`
    left_full: object
    left_empty: object
    right_full: object
    right_empty: object
    rope_full: object  # None: rotated columns come with the left half


@record
class Fetched:
    """A block in registers, or on its way there."""

    right: object  # words
    left: object
    rope: object  # in a tuple, which is empty where TMA copies them
    rope_rows: object  # where they are copied from
    scale: object  # in a tuple, which is empty where rows have none


@gluon.constexpr_function
def _words_layout(width):
    """[64, words]: sixteen bytes per thread.

    Eight threads have 64 bytes of two rows, which as float16 fill all banks of shared memory. A
    warp has lines of 128 bytes, where rows are that wide.
    """
    own = [[0, 1], [0, 2]]  # words
    if width == 16:
        registers, lanes, warps = [*own, [32, 0]], [[1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]
    else:
        registers, warps = [*own, [16, 0], [32, 0], [0, 32]], [[4, 0], [8, 0]]
        lanes = [[1, 0], [0, 16], [2, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 4], [0, 8], *lanes],
        warp_bases=warps,
        block_bases=[],
        shape=[64, width],
    )


@gluon.constexpr_function
def _grouped_layout(width):
    """[64, words of a column half], or [64, 4 scales]: each thread has two rows and their scales.

    A warp has pieces of 64 bytes.
    """
    own = [[0, 1], [0, 2]]
    is_scales = width == 4
    return gl.DistributedLinearLayout(
        reg_bases=[*own, [32, 0]] if is_scales else [*own, [0, 16], [0, 32], [32, 0]],
        lane_bases=[*([[0, 0], [0, 0]] if is_scales else [[0, 4], [0, 8]]), [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.constexpr_function
def _layout(format, width):
    return _grouped_layout(width) if format == "fp8_block128" else _words_layout(width)


@gluon.jit
def alloc_stages(FORMAT: gl.constexpr, words):
    rope_full: gl.constexpr = None
    rope_dtype: gl.constexpr = gl.float16 if FORMAT == "fp8" else gl.bfloat16
    SCALES: gl.constexpr = NUM_SCALES if FORMAT == "fp8_block128" else 1
    if FORMAT != "fp8":
        rope_full = alloc_barriers_by_loop(2, producer_arrivals(words))
    return BlockStages(
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], SMEM_16BIT),
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], SMEM_16BIT),
        gl.allocate_shared_memory(rope_dtype, [2, 64, 64], SMEM_16BIT),
        gl.allocate_shared_memory(gl.float32, [2 * SCALES, 64], SMEM_VECTOR),
        alloc_barriers_by_loop(2, 1),
        alloc_barriers_by_loop(2, 1),
        alloc_barriers_by_loop(2, 1),
        alloc_barriers_by_loop(2, 1),
        rope_full,
    )


@gluon.jit
def num_blocks(keys):
    """Blocks of a work tile; at least one, which then has no key."""
    return gl.maximum(keys.end_block - keys.first_block, 1)


@gluon.jit
def _lookup_pages(rows, inputs, keys, block):
    """The pages of a block's keys; where a block lies within one, also those of the next blocks."""
    if inputs.PAGE % 64 != 0:
        return pages_of_keys(inputs, keys, block, gl.SliceLayout(1, _layout(rows.FORMAT, HALF)))
    else:  # noqa: RET505
        return pages_ahead(inputs, keys, block, WARPS=4)


@gluon.jit
def _first_rows(inputs, keys, pages, block):
    """The first row of a block, or of each key the first row of its page."""
    if inputs.PAGE % 64 != 0:
        return pages * inputs.PAGE_ROWS
    else:  # noqa: RET505
        return row_ahead(inputs, keys, pages, block, 0)


@gluon.jit
def _load_words(rows, inputs, keys, first_row, block, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Words [64, WIDTH] of a block's rows, from word FIRST of each on."""
    LAYOUT: gl.constexpr = _layout(rows.FORMAT, WIDTH)
    KEY: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    offset = gl.arange(0, 64, KEY)
    is_there = gl.expand_dims(block * 64 + offset < keys.end, 1)
    if inputs.PAGE % 64 != 0:
        first_row = gl.convert_layout(first_row, KEY)
        offset = row_in_page(inputs, block, offset)
    row = first_row.to(gl.int64) + offset
    # the explicit factor of four shows the compiler the alignment to 16 bytes
    start = gl.expand_dims(row * inputs.row_chunks * 4, 1)
    word = gl.expand_dims(FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(rows.words + (start + word), mask=is_there, other=0, cache_modifier=".cg")


@gluon.jit
def _load_rope(rows, inputs, keys, first_row, block):
    """In a tuple, which is empty where TMA copies them."""
    found = ()
    if rows.FORMAT == "fp8":
        found += (_load_words(rows, inputs, keys, first_row, block, rows.ROPE_COLUMN, 16),)
    return found


@gluon.jit
def _copy_rope(rows, inputs, blocks, stage, rope_rows):
    """Start to copy the rotated columns of a block, where they are bfloat16."""
    if rows.FORMAT != "fp8":
        full = blocks.rope_full.index(stage)
        expect_block(inputs, full, ROPE_BYTES)
        tile = blocks.rope.index(stage)
        load_block(inputs, inputs.kv_rope, rope_rows, rows.ROPE_COLUMN, full, tile)
        arrive_on_loads(inputs, full)


@gluon.jit
def _load_scale(rows, inputs, keys, first_row, block):
    """float32 [64 keys] in a tuple, which is empty where rows have none; of fp8_block128 the bits
    of the four scales."""
    KEY: gl.constexpr = lane_layout(4)
    found = ()
    if rows.FORMAT == "fp8_block128":
        found += (_load_words(rows, inputs, keys, first_row, block, 2 * HALF, 4),)
    elif rows.scales is not None:
        offset = gl.arange(0, 64, KEY)
        if inputs.PAGE % 64 != 0:
            # looked up again: kept, the pages would take more registers
            page = pages_of_keys(inputs, keys, block, KEY)
            row = row_in_page(inputs, block, offset)
        else:
            page = first_row // inputs.PAGE_ROWS
            row = first_row % inputs.PAGE_ROWS + offset
        at = rows.scales + page.to(gl.int64) * rows.stride_scales_page
        at += row.to(gl.int64) * rows.stride_scales_row
        found += (gl.load(at, mask=block * 64 + offset < keys.end, other=0.0),)
    return found


@gluon.jit
def _fetch(rows, inputs, keys, pages, block):
    """Start to load a block."""
    first_row = _first_rows(inputs, keys, pages, block)
    rope_rows = first_row
    if inputs.PAGE % 64 != 0:
        lookup = lookup_block(inputs, keys, block, WARPS=4)
        rope_rows = rows_of_block(inputs, keys, lookup, block)
    return Fetched(
        _load_words(rows, inputs, keys, first_row, block, HALF, HALF),
        _load_words(rows, inputs, keys, first_row, block, 0, HALF),
        _load_rope(rows, inputs, keys, first_row, block),
        rope_rows,
        _load_scale(rows, inputs, keys, first_row, block),
    )


@gluon.jit
def _prefetch(rows, inputs, keys, pages, block, BLOCKS: gl.constexpr):
    """Prefetch to L2 the rows of the block that is BLOCKS on, where they are contiguous."""
    if rows.IS_PACKED and inputs.PAGE % 64 == 0:
        row = row_ahead(inputs, keys, pages, block, BLOCKS).to(gl.int64)
        start = rows.words.to(gl.int64) + row * (inputs.row_chunks * 16)
        num_rows = gl.maximum(gl.minimum(keys.end - (block + BLOCKS) * 64, 64), 0)
        prefetch_l2(start, num_rows * (inputs.row_chunks * 16))


@gluon.jit
def _columns_of(table):
    """The four columns of [64, 4], as [64] each."""
    even, odd = gl.split(table.reshape([64, 2, 2]))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    return c0, c1, c2, c3


@gluon.jit
def _mantissa(bits):
    """The mantissa of a float32, with its sign: ±[1, 2)."""
    return ((bits & -0x7F800001) | 0x3F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _power(exponent, largest):
    """2**(exponent − largest + SHIFT), as words of a float16 twice; 0 for a scale of 0."""
    bits = gl.where(exponent == 0, 0, gl.maximum(exponent - largest + (127 + SHIFT), 0) << 23)
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [bits.to(gl.float32, bitcast=True)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _group_scales(blocks, stage, bits):
    """Store the scales of a block of fp8_block128, of which values get the powers of two: returns
    these, of the left and the right column half, [64 rows, 2 groups] each.

    A scale is 2**e · c with 1 ≤ c < 2. With the largest e of a row, E, a value becomes
    v · 2**(e − E + SHIFT), which float16 holds exactly (but for groups whose scale is 2**-21 of the
    row's largest, or smaller). What is left of the scales is c · 2**(E − SHIFT):

    FIRST_SCALE, SECOND_SCALE   of the first two groups of columns
    THIRD_RATIO, FOURTH_RATIO   of the third group over the first, of the fourth over the second
    """
    b0, b1, b2, b3 = _columns_of(bits)
    e0, e1, e2, e3 = (
        (b0 >> 23) & 0xFF, (b1 >> 23) & 0xFF, (b2 >> 23) & 0xFF, (b3 >> 23) & 0xFF,
    )  # fmt: skip
    largest = gl.maximum(gl.maximum(e0, e1), gl.maximum(e2, e3))
    largest = gl.maximum(largest, SMALLEST_EXPONENT)
    # a scale that is infinite or NaN makes the row NaN
    unit = gl.where(largest == 255, 0x7FC00000, (largest - SHIFT) << 23)
    unit = unit.to(gl.float32, bitcast=True)
    c0, c1 = _mantissa(b0), _mantissa(b1)
    # in the order of FIRST_SCALE, …: [64, which % 2, which // 2]
    table = gl.join(gl.join(c0 * unit, c1 * unit), gl.join(_mantissa(b2) / c0, _mantissa(b3) / c1))
    table = table.permute(0, 2, 1).reshape([64, NUM_SCALES])
    # one store: between two the compiler would need a barrier
    tables = reinterpret(blocks.scales, gl.float32, [2, NUM_SCALES, 64], SMEM_TABLE)
    tables.index(stage).permute((1, 0)).store(table)
    left = gl.join(_power(e0, largest), _power(e1, largest))
    right = gl.join(_power(e2, largest), _power(e3, largest))
    return left, right


@gluon.jit
def _scaled(words, powers):
    """A column half as float16, times powers of two [64 rows, 2 groups]."""
    GROUPS: gl.constexpr = words.reshape([64, 2, HALF // 2]).type.layout
    powers = gl.convert_layout(powers, gl.SliceLayout(2, GROUPS), assert_trivial=True)
    powers = gl.expand_dims(powers, 2).broadcast_to([64, 2, HALF // 2]).reshape([64, HALF])
    return to_fp16_scaled(words, gl.convert_layout(powers, words.type.layout, assert_trivial=True))


@gluon.jit
def dequant_warpgroup(item, index, inputs, scheduler, rows, blocks):
    number = item * 0
    while item < scheduler.last_item:
        keys = key_range(inputs, scheduler, item, index)
        first_block = keys.first_block
        pages = _lookup_pages(rows, inputs, keys, first_block)
        fetched = _fetch(rows, inputs, keys, pages, first_block)
        pages = _lookup_pages(rows, inputs, keys, first_block + 1)
        for block in range(first_block, first_block + num_blocks(keys)):
            stage, phase = two_stages(number)
            mbarrier.wait(blocks.right_empty.index(stage), phase ^ 1)
            if rows.FORMAT == "fp8_block128":
                # consumers have read the scales before they release the right half
                left_powers, right_powers = _group_scales(blocks, stage, fetched.scale[0])
                right = _scaled(fetched.right, right_powers)
            else:
                right = to_fp16(fetched.right)
            blocks.right.index(stage).store(right)
            fence_async_shared()
            mbarrier.arrive(blocks.right_full.index(stage), count=1)
            mbarrier.wait(blocks.left_empty.index(stage), phase ^ 1)
            _copy_rope(rows, inputs, blocks, stage, fetched.rope_rows)
            if rows.FORMAT == "fp8_block128":
                left = _scaled(fetched.left, left_powers)
            else:
                left = to_fp16(fetched.left)
            blocks.left.index(stage).store(left)
            if rows.FORMAT == "fp8":
                blocks.rope.index(stage).store(to_fp16(fetched.rope[0]))
            if rows.FORMAT != "fp8_block128" and rows.scales is not None:
                scale = fetched.scale[0]
                blocks.scales.index(stage).store(gl.where(scale < 0, 0.0, scale))  # a NaN stays one
            fence_async_shared()
            mbarrier.arrive(blocks.left_full.index(stage), count=1)
            # only now: the fence waits for every load in flight
            fetched = _fetch(rows, inputs, keys, pages, block + 1)
            _prefetch(rows, inputs, keys, pages, block + 1, AHEAD - 1)
            pages = _lookup_pages(rows, inputs, keys, block + 2)
            number += 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))
