"""Blocks of e4m3 rows as halves in shared memory: what the widener of `decode_fp8_kernel` does.

Bytes come from the cache to registers: shared memory has no room for them beside two blocks of
halves. A fence waits for all that is on its way to registers, so that has to be a short one: L2 is
asked for rows some blocks before. Rows past a query's last key are zeros, whatever the cache holds
there, and so are their scales. Rotated columns of bfloat16 are copied as they are, also such as are
past the last key: they are in no sum, and those scores are hidden.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.compat import record
from mlakit.kernels.hopper.decode_copies import (
    arrive_when_copied,
    copy_rows,
    copying_threads,
    expect_rows,
    find_rows,
    look_up_rows,
)
from mlakit.kernels.hopper.decode_work import (
    find_keys,
    next_unit,
    pages_ahead,
    pages_of,
    row_ahead,
    row_in_page,
)
from mlakit.kernels.hopper.e4m3 import widen
from mlakit.kernels.hopper.primitives import ask_for, new_barriers

HALF = gl.constexpr(64)  # words of half the latent columns
HALVES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
ROPE_BYTES = gl.constexpr(64 * 64 * 2)
AHEAD = gl.constexpr(2)  # blocks that L2 is asked for before they are loaded


@record
class Rows:
    """The cache."""

    words: object  # the first of them
    ROPE_COLUMN: object
    side_by_side: object  # is there nothing between rows of a page?
    scales: object  # float32, or None
    stride_scales_page: object
    stride_scales_row: object
    FORMAT: object


@record
class Blocks:
    """Two blocks of halves, on their way from the widener to those who multiply them.

    Block n of a program is in slot n % 2 in turn n // 2. `right` is free when it has been added,
    `left`, `rope` and `scales` together when the left half has.
    """

    left: object  # [2, 64, 256] float16
    right: object
    rope: object  # [2, 64, 64] float16, or bfloat16 as the cache has it
    scales: object  # [2, 64] float32
    left_full: object
    left_empty: object
    right_full: object
    right_empty: object
    rope_full: object  # or None: rotated columns come with the left half


@record
class Fetched:
    """A block in registers, or on its way there."""

    right: object  # words
    left: object
    rope: object  # in a tuple, which is empty where they are copied
    rope_rows: object  # where they are copied from
    scale: object  # in a tuple, likewise where rows have none


@gluon.constexpr_function
def _words_layout(width):
    """[64, words]: sixteen bytes a thread.

    Eight threads have 64 bytes of two rows, which as halves fill all banks of shared memory. A warp
    has lines of 128 bytes, if there are so many.
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


@gluon.jit
def new_blocks(rope_dtype: gl.constexpr, words):
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rope_full: gl.constexpr = None
    if rope_dtype == gl.bfloat16:
        rope_full = new_barriers(2, copying_threads(words))
    return Blocks(
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], HALVES),
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], HALVES),
        gl.allocate_shared_memory(rope_dtype, [2, 64, 64], HALVES),
        gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN),
        new_barriers(2, 1),
        new_barriers(2, 1),
        new_barriers(2, 1),
        new_barriers(2, 1),
        rope_full,
    )


@gluon.jit
def slot_of(number):
    """Of a program's block: its slot, and the parity of its turn."""
    return number & 1, (number >> 1) & 1


@gluon.jit
def num_blocks(keys):
    """Of a unit; one at least, which then has no key."""
    return gl.maximum(keys.end_block - keys.first_block, 1)


@gluon.jit
def _find_pages(inputs, keys, block):
    """Of a block's keys; of pages for whole blocks those of the next ones too."""
    if inputs.PAGE % 64 != 0:
        return pages_of(inputs, keys, block, gl.SliceLayout(1, _words_layout(HALF)))
    else:  # noqa: RET505
        return pages_ahead(inputs, keys, block, WARPS=4)


@gluon.jit
def _find_rows(inputs, keys, pages, block):
    """The first row of a block, or of each key the first row of its page."""
    if inputs.PAGE % 64 != 0:
        return pages * inputs.PAGE_ROWS
    else:  # noqa: RET505
        return row_ahead(inputs, keys, pages, block, 0)


@gluon.jit
def _load_words(rows, inputs, keys, first_row, block, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Words [64, WIDTH] of a block's rows, from word FIRST of each on."""
    LAYOUT: gl.constexpr = _words_layout(WIDTH)
    KEY: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    offset = gl.arange(0, 64, KEY)
    is_there = gl.expand_dims(block * 64 + offset < keys.end, 1)
    if inputs.PAGE % 64 != 0:
        first_row = gl.convert_layout(first_row, KEY)
        offset = row_in_page(inputs, block, offset)
    row = first_row.to(gl.int64) + offset
    # the factor of four is there to be seen: sixteen bytes are read at once
    start = gl.expand_dims(row * inputs.row_quads * 4, 1)
    word = gl.expand_dims(FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(rows.words + (start + word), mask=is_there, other=0, cache_modifier=".cg")


@gluon.jit
def _load_rope(rows, inputs, keys, first_row, block):
    """In a tuple, which is empty where they are copied as they are."""
    found = ()
    if rows.FORMAT == "fp8":
        found += (_load_words(rows, inputs, keys, first_row, block, rows.ROPE_COLUMN, 16),)
    return found


@gluon.jit
def _copy_rope(rows, inputs, blocks, slot, rope_rows):
    """Start to copy the rotated columns of a block, where they are not widened."""
    if rows.FORMAT != "fp8":
        full = blocks.rope_full.index(slot)
        expect_rows(inputs, full, ROPE_BYTES)
        box = blocks.rope.index(slot)
        copy_rows(inputs, inputs.kv_rope, rope_rows, rows.ROPE_COLUMN, full, box)
        arrive_when_copied(inputs, full)


@gluon.jit
def _load_scale(rows, inputs, keys, first_row, block):
    """float32 [64 keys] in a tuple, which is empty where rows have none."""
    KEY: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    found = ()
    if rows.scales is not None:
        offset = gl.arange(0, 64, KEY)
        if inputs.PAGE % 64 != 0:
            page = pages_of(inputs, keys, block, KEY)  # again: it would take more registers
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
    first_row = _find_rows(inputs, keys, pages, block)
    rope_rows = first_row
    if inputs.PAGE % 64 != 0:
        found = look_up_rows(inputs, keys, block, WARPS=4)
        rope_rows = find_rows(inputs, keys, found, block)
    return Fetched(
        _load_words(rows, inputs, keys, first_row, block, HALF, HALF),
        _load_words(rows, inputs, keys, first_row, block, 0, HALF),
        _load_rope(rows, inputs, keys, first_row, block),
        rope_rows,
        _load_scale(rows, inputs, keys, first_row, block),
    )


@gluon.jit
def _ask_for(rows, inputs, keys, pages, block, BLOCKS: gl.constexpr):
    """Have the rows of a block so many further on brought to L2, where they lie side by side."""
    if rows.side_by_side and inputs.PAGE % 64 == 0:
        row = row_ahead(inputs, keys, pages, block, BLOCKS).to(gl.int64)
        start = rows.words.to(gl.int64) + row * (inputs.row_quads * 16)
        num_rows = gl.maximum(gl.minimum(keys.end - (block + BLOCKS) * 64, 64), 0)
        ask_for(start, num_rows * (inputs.row_quads * 16))


@gluon.jit
def widen_blocks(item, index, inputs, work, rows, blocks):
    """All that the widener does."""
    number = item * 0
    while item < work.last_item:
        keys = find_keys(inputs, work, item, index)
        first_block = keys.first_block
        pages = _find_pages(inputs, keys, first_block)
        fetched = _fetch(rows, inputs, keys, pages, first_block)
        pages = _find_pages(inputs, keys, first_block + 1)
        for block in range(first_block, first_block + num_blocks(keys)):
            slot, turn = slot_of(number)
            mbarrier.wait(blocks.right_empty.index(slot), turn ^ 1)
            blocks.right.index(slot).store(widen(fetched.right))
            fence_async_shared()
            mbarrier.arrive(blocks.right_full.index(slot), count=1)
            mbarrier.wait(blocks.left_empty.index(slot), turn ^ 1)
            _copy_rope(rows, inputs, blocks, slot, fetched.rope_rows)
            blocks.left.index(slot).store(widen(fetched.left))
            if rows.FORMAT == "fp8":
                blocks.rope.index(slot).store(widen(fetched.rope[0]))
            if rows.scales is not None:
                scale = fetched.scale[0]
                blocks.scales.index(slot).store(gl.where(scale < 0, 0.0, scale))  # a NaN stays one
            fence_async_shared()
            mbarrier.arrive(blocks.left_full.index(slot), count=1)
            # only now: a fence waits for all that is on its way
            fetched = _fetch(rows, inputs, keys, pages, block + 1)
            _ask_for(rows, inputs, keys, pages, block + 1, AHEAD - 1)
            pages = _find_pages(inputs, keys, block + 2)
            number += 1
        item, index = next_unit(work, item, index + gl.num_programs(0))
