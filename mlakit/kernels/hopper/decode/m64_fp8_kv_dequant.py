"""The dequant warpgroups of `m64_fp8_kv`: FP8 cache rows as float16 in shared memory.

Bytes go from the cache to registers: shared memory has no room for them beside two blocks of
float16. Their latency must be short, for there are no registers for two blocks: rows are prefetched
to L2 some blocks ahead. Rows past a query's last key are zeros, whatever the cache holds there, and
so are their scales.

fp8, fp8_token  rows are converted as they are. A fence of this warpgroup waits for every load in
                flight, so loads begin after it. Rotated columns of bfloat16 are copied by TMA, also
                past the last key: those scores are masked, and no value has rotated columns
fp8_block128    values are multiplied by their scales (`fp8_rows`), rotated columns by a power of
                two. Barriers are named ones of the hardware, at which each warp arrives by itself,
                and consumers issue the fence. For the other formats that is no gain

Lineage    own design; ideas: the dequantising warpgroup of FlashMLA's FP8 sparse decode
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.decode.scheduler import key_range, next_tile
from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.fp8_convert import to_fp16
from mlakit.kernels.hopper.device.fp8_rows import (
    KEYS,
    WORDS,
    as_words,
    convert_half,
    group_factors,
    load_group_scales,
    load_half,
    load_words,
    scale_rope,
    store_half,
)
from mlakit.kernels.hopper.device.named_barriers import NAMED_FIRST
from mlakit.kernels.hopper.device.paged_loads import (
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
from mlakit.kernels.hopper.device.pipeline import two_stages
from mlakit.kernels.hopper.device.primitives import (
    SMEM_16BIT,
    SMEM_VECTOR,
    alloc_barriers_by_loop,
    lane_layout,
    named_arrive,
    named_wait,
    prefetch_l2,
)

HALF = gl.constexpr(64)  # words of a column half
ROPE_BYTES = gl.constexpr(64 * 64 * 2)
# named barriers of fp8_block128, one per stage
LEFT_FULL = gl.constexpr(NAMED_FIRST)
LEFT_EMPTY = gl.constexpr(NAMED_FIRST + 2)
RIGHT_FULL = gl.constexpr(NAMED_FIRST + 4)
RIGHT_EMPTY = gl.constexpr(NAMED_FIRST + 6)
AHEAD = gl.constexpr(2)  # blocks that are prefetched to L2 before they are loaded


@record
class CacheRows:
    """The cache, as this warpgroup reads it."""

    words: object
    rope_words: object  # rotated columns in a tensor of their own, or None
    rope_row_chunks: object
    ROPE_COLUMN: object
    IS_PACKED: object  # nothing lies between the rows of a page, in both tensors
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
    scales: object  # [2, 64] float32: factors of a row's scores and values
    left_full: object  # this and the next three are None where barriers are named
    left_empty: object
    right_full: object
    right_empty: object
    rope_full: object  # None: rotated columns come with the left half


@record
class Fetched:
    """A block of fp8 or fp8_token in registers, or on its way there."""

    right: object  # words
    left: object
    rope: object  # in a tuple, which is empty where TMA copies them
    rope_rows: object  # where they are copied from
    scale: object  # in a tuple, which is empty where rows have none


@gluon.constexpr_function
def _words_layout(width):
    """Return [64, words]: sixteen bytes per thread.

    Eight threads have 64 bytes of two rows, which as float16 fill all banks of shared memory. A
    warp has lines of 128 bytes, where rows are that wide.
    """
    bases = [[0, 1], [0, 2]]  # words
    if width == 16:
        registers, lanes, warps = [*bases, [32, 0]], [[1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]
    else:
        registers, warps = [*bases, [16, 0], [32, 0], [0, 32]], [[4, 0], [8, 0]]
        lanes = [[1, 0], [0, 16], [2, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 4], [0, 8], *lanes],
        warp_bases=warps,
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def alloc_stages(FORMAT: gl.constexpr, words):
    rope_full: gl.constexpr = None
    rope_dtype: gl.constexpr = gl.bfloat16 if FORMAT.IS_BF16_ROPE else gl.float16
    if FORMAT.SCALED_BY == "row":
        rope_full = alloc_barriers_by_loop(2, producer_arrivals(words))
    if FORMAT.SCALED_BY == "group":
        barriers = (None, None, None, None)
    else:
        barriers = (
            alloc_barriers_by_loop(2, 1),
            alloc_barriers_by_loop(2, 1),
            alloc_barriers_by_loop(2, 1),
            alloc_barriers_by_loop(2, 1),
        )
    return BlockStages(
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], SMEM_16BIT),
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], SMEM_16BIT),
        gl.allocate_shared_memory(rope_dtype, [2, 64, 64], SMEM_16BIT),
        gl.allocate_shared_memory(gl.float32, [2, 64], SMEM_VECTOR),
        *barriers,
        rope_full,
    )


@gluon.jit
def wait_full(full, NUMBER: gl.constexpr, stage, phase):
    """Wait for a column half of a block.

    full  None: named barriers from NUMBER on, and the fence is the consumer's
    """
    if full is None:
        named_wait(NUMBER + stage, 256)
        fence_async_shared()
    else:
        mbarrier.wait(full.index(stage), phase)


@gluon.jit
def release(empty, NUMBER: gl.constexpr, stage):
    """Let the dequant warpgroup write a column half again."""
    if empty is None:
        named_arrive(NUMBER + stage, 256)
    else:
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def num_blocks(keys):
    """Blocks of a work tile; at least one, which then has no key."""
    return gl.maximum(keys.end_block - keys.first_block, 1)


@gluon.jit
def _lookup_pages(inputs, keys, block, KEY: gl.constexpr):
    """The pages of a block's keys; where a block lies within one, also those of the next blocks."""
    if inputs.PAGE % 64 != 0:
        return pages_of_keys(inputs, keys, block, KEY)
    else:
        return pages_ahead(inputs, keys, block, WARPS=4)


@gluon.jit
def _first_rows(inputs, keys, pages, block):
    """The first row of a block, or of each key the first row of its page."""
    if inputs.PAGE % 64 != 0:
        return pages * inputs.PAGE_ROWS
    else:
        return row_ahead(inputs, keys, pages, block, 0)


@gluon.jit
def _load_words(
    words, row_chunks, inputs, keys, first_row, block, FIRST: gl.constexpr, WIDTH: gl.constexpr
):
    """Words [64, WIDTH] of a block's rows, from word FIRST of each on."""
    LAYOUT: gl.constexpr = _words_layout(WIDTH)
    KEY: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    offset = gl.arange(0, 64, KEY)
    is_there = gl.expand_dims(block * 64 + offset < keys.end, 1)
    if inputs.PAGE % 64 != 0:
        first_row = gl.convert_layout(first_row, KEY)
        offset = row_in_page(inputs, block, offset)
    row = first_row.to(gl.int64) + offset
    # the explicit factor of four shows the compiler the alignment to 16 bytes
    start = gl.expand_dims(row * row_chunks * 4, 1)
    word = gl.expand_dims(FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(words + (start + word), mask=is_there, other=0, cache_modifier=".cg")


@gluon.jit
def _load_rope(rows, inputs, keys, first_row, block):
    """Load the rotated columns of a block, as a tuple that is empty where TMA copies them."""
    loaded = ()
    if rows.rope_words is not None:
        words, chunks = rows.rope_words, rows.rope_row_chunks
        loaded += (_load_words(words, chunks, inputs, keys, first_row, block, 0, 16),)
    elif not rows.FORMAT.IS_BF16_ROPE:
        words, chunks = rows.words, inputs.row_chunks
        COLUMN: gl.constexpr = rows.ROPE_COLUMN
        loaded += (_load_words(words, chunks, inputs, keys, first_row, block, COLUMN, 16),)
    return loaded


@gluon.jit
def _copy_rope(rows, inputs, blocks, stage, rope_rows):
    """Start to copy the rotated columns of a block, where they are bfloat16."""
    if rows.FORMAT.IS_BF16_ROPE:
        full = blocks.rope_full.index(stage)
        expect_block(inputs, full, ROPE_BYTES)
        tile = blocks.rope.index(stage)
        load_block(inputs, inputs.kv_rope, rope_rows, rows.ROPE_COLUMN, full, tile)
        arrive_on_loads(inputs, full)


@gluon.jit
def _load_scale(rows, inputs, keys, first_row, block):
    """Return float32 [64 keys] in a tuple, which is empty where rows have none."""
    KEY: gl.constexpr = lane_layout(4)
    loaded = ()
    if rows.scales is not None:
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
        loaded += (gl.load(at, mask=block * 64 + offset < keys.end, other=0.0),)
    return loaded


@gluon.jit
def _fetch(rows, inputs, keys, pages, block):
    """Start to load a block of fp8 or fp8_token."""
    first_row = _first_rows(inputs, keys, pages, block)
    rope_rows = first_row
    if inputs.PAGE % 64 != 0:
        lookup = lookup_block(inputs, keys, block, WARPS=4)
        rope_rows = rows_of_block(inputs, keys, lookup, block)
    latents = (rows.words, inputs.row_chunks, inputs, keys, first_row, block)
    return Fetched(
        right=_load_words(*latents, HALF, HALF),
        left=_load_words(*latents, 0, HALF),
        rope=_load_rope(rows, inputs, keys, first_row, block),
        rope_rows=rope_rows,
        scale=_load_scale(rows, inputs, keys, first_row, block),
    )


@gluon.jit
def _prefetch(rows, inputs, keys, pages, block, BLOCKS: gl.constexpr):
    """Prefetch to L2 the rows of the block that is BLOCKS on, where they are contiguous."""
    if rows.IS_PACKED and inputs.PAGE % 64 == 0:
        row = row_ahead(inputs, keys, pages, block, BLOCKS).to(gl.int64)
        start = rows.words.to(gl.int64) + row * (inputs.row_chunks * 16)
        num_rows = gl.maximum(gl.minimum(keys.end - (block + BLOCKS) * 64, 64), 0)
        prefetch_l2(start, num_rows * (inputs.row_chunks * 16))
        if rows.rope_words is not None:
            start = rows.rope_words.to(gl.int64) + row * (rows.rope_row_chunks * 16)
            prefetch_l2(start, num_rows * (rows.rope_row_chunks * 16))


@gluon.jit
def dequant_warpgroup(item, index, inputs, scheduler, rows, blocks):
    """Run the dequant warpgroup of fp8 and fp8_token rows."""
    KEY: gl.constexpr = gl.SliceLayout(1, _words_layout(HALF))
    fill = item * 0
    while item < scheduler.last_item:
        keys = key_range(inputs, scheduler, item, index)
        first_block = keys.first_block
        pages = _lookup_pages(inputs, keys, first_block, KEY)
        fetched = _fetch(rows, inputs, keys, pages, first_block)
        pages = _lookup_pages(inputs, keys, first_block + 1, KEY)
        for block in range(first_block, first_block + num_blocks(keys)):
            stage, phase = two_stages(fill)
            mbarrier.wait(blocks.right_empty.index(stage), phase ^ 1)
            blocks.right.index(stage).store(to_fp16(fetched.right))
            fence_async_shared()
            mbarrier.arrive(blocks.right_full.index(stage), count=1)
            mbarrier.wait(blocks.left_empty.index(stage), phase ^ 1)
            _copy_rope(rows, inputs, blocks, stage, fetched.rope_rows)
            blocks.left.index(stage).store(to_fp16(fetched.left))
            if not rows.FORMAT.IS_BF16_ROPE:
                blocks.rope.index(stage).store(to_fp16(fetched.rope[0]))
            if rows.scales is not None:
                scale = fetched.scale[0]
                blocks.scales.index(stage).store(gl.where(scale < 0, 0.0, scale))  # a NaN stays one
            fence_async_shared()
            mbarrier.arrive(blocks.left_full.index(stage), count=1)
            # only now: the fence waits for every load in flight
            fetched = _fetch(rows, inputs, keys, pages, block + 1)
            _prefetch(rows, inputs, keys, pages, block + 1, AHEAD - 1)
            pages = _lookup_pages(inputs, keys, block + 2, KEY)
            fill += 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@record
class FetchedRows:
    """A block of fp8_block128 in registers, or on its way there."""

    is_there: object  # which rows are: others are zeros
    scales: object
    right: object
    left: object
    rope: object


@gluon.jit
def _fetch_rows(rows, inputs, keys, pages, block):
    """Start to load a block of fp8_block128."""
    first_row = _first_rows(inputs, keys, pages, block)
    offset = gl.arange(0, 64, KEYS)
    is_there = block * 64 + offset < keys.end
    if inputs.PAGE % 64 != 0:
        offset = row_in_page(inputs, block, offset)
    row = first_row.to(gl.int64) + offset
    # the explicit factor of four shows the compiler the alignment to 16 bytes
    start = rows.words + row * inputs.row_chunks * 4
    return FetchedRows(
        is_there=is_there,
        scales=load_group_scales(start, is_there, rows.FORMAT),
        right=load_half(start, is_there, HALF),
        left=load_half(start, is_there, 0),
        rope=load_words(start, is_there, rows.ROPE_COLUMN // 2, WORDS),
    )


@gluon.jit
def dequant_scaled_warpgroup(item, index, inputs, scheduler, rows, blocks):
    """Run the dequant warpgroup of fp8_block128 rows. The left half is converted before its stage
    is free: the QK-softmax warpgroup releases it shortly before it needs the next one."""
    fill = item * 0
    while item < scheduler.last_item:
        keys = key_range(inputs, scheduler, item, index)
        first_block = keys.first_block
        pages = _lookup_pages(inputs, keys, first_block, KEYS)
        fetched = _fetch_rows(rows, inputs, keys, pages, first_block)
        pages = _lookup_pages(inputs, keys, first_block + 1, KEYS)
        for block in range(first_block, first_block + num_blocks(keys)):
            stage = fill & 1
            factors, power, inverse, _ = group_factors(fetched.scales)
            named_wait(RIGHT_EMPTY + stage, 256, fill >= 2)
            right = convert_half(fetched.right, factors[2], factors[3])
            store_half(blocks.right.index(stage), right)
            named_arrive(RIGHT_FULL + stage, 256)
            left = convert_half(fetched.left, factors[0], factors[1])
            rope = scale_rope(fetched.rope, inverse)
            named_wait(LEFT_EMPTY + stage, 256, fill >= 2)
            store_half(blocks.left.index(stage), left)
            as_words(blocks.rope.index(stage)).store(rope)
            blocks.scales.index(stage).store(gl.where(fetched.is_there, power, 0.0))
            named_arrive(LEFT_FULL + stage, 256)
            fetched = _fetch_rows(rows, inputs, keys, pages, block + 1)
            _prefetch(rows, inputs, keys, pages, block + 1, AHEAD - 1)
            pages = _lookup_pages(inputs, keys, block + 2, KEYS)
            fill += 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))
    # no arrival is left at a named barrier
    for i in gl.static_range(2):
        named_wait(LEFT_EMPTY + ((fill + i) & 1), 256, fill + i >= 2)
        named_wait(RIGHT_EMPTY + ((fill + i) & 1), 256, fill + i >= 2)
