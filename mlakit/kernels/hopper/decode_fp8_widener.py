"""Blocks of e4m3 rows as halves in shared memory: what the widener of `decode_fp8_kernel` does.

Bytes come from the cache to registers: shared memory has no room for them beside two blocks of
halves. A fence waits for all that is on its way to registers, so that has to be a short one: L2 is
asked for rows some blocks before. Rows past a query's last key are zeros, whatever the cache holds
there, and so are their scales.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.compat import record, reinterpret
from mlakit.kernels.hopper.decode_work import (
    find_keys,
    next_unit,
    page_of,
    pages_of,
    row_in_page,
)
from mlakit.kernels.hopper.e4m3 import widen
from mlakit.kernels.hopper.primitives import ask_for, new_barriers

HALF = gl.constexpr(64)  # words of half the latent columns
HALVES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
AHEAD = gl.constexpr(2)  # blocks that L2 is asked for before they are loaded


@record
class Rows:
    """The cache."""

    words: object  # the first of them
    row_quads: object  # four words each, from a row to the next
    rope_word: object
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


@record
class Fetched:
    """A block in registers."""

    right: object  # words
    left: object
    rope: object
    scale: object  # in a tuple


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
        halves = [[0, 32]] if width == 64 else []
        registers, warps = [*own, [16, 0], [32, 0], *halves], [[4, 0], [8, 0]]
        lanes = [[1, 0], [0, 16], [2, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 4], [0, 8], *lanes],
        warp_bases=warps,
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def new_blocks(rope_dtype: gl.constexpr):
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Blocks(
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], HALVES),
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], HALVES),
        gl.allocate_shared_memory(rope_dtype, [2, 64, 64], HALVES),
        gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN),
        new_barriers(2, 1),
        new_barriers(2, 1),
        new_barriers(2, 1),
        new_barriers(2, 1),
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
def _load_words(rows, inputs, keys, pages, block, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Words [64, WIDTH] of a block's rows, from word FIRST of each on."""
    LAYOUT: gl.constexpr = _words_layout(WIDTH)
    KEY: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    offset = gl.arange(0, 64, KEY)
    is_there = gl.expand_dims(block * 64 + offset < keys.end, 1)
    if inputs.PAGE < 64:
        pages = gl.convert_layout(pages, KEY)
    row = pages.to(gl.int64) * inputs.PAGE_ROWS + row_in_page(inputs, block, offset)
    # the factor of four is there to be seen: sixteen bytes are read at once
    start = gl.expand_dims(row * rows.row_quads * 4, 1)
    word = gl.expand_dims(FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(rows.words + (start + word), mask=is_there, other=0, cache_modifier=".cg")


@gluon.jit
def _load_rope(rows, inputs, keys, pages, block):
    WIDTH: gl.constexpr = 16 if rows.FORMAT == "fp8" else 32
    return _load_words(rows, inputs, keys, pages, block, rows.rope_word, WIDTH)


@gluon.jit
def _load_scale(rows, inputs, keys, pages, block):
    """float32 [64 keys] in a tuple, which is empty where rows have none."""
    KEY: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    found = ()
    if rows.scales is not None:
        if inputs.PAGE < 64:
            pages = pages_of(inputs, keys, block, KEY)  # again: it would take more registers
        offset = gl.arange(0, 64, KEY)
        at = rows.scales + pages.to(gl.int64) * rows.stride_scales_page
        at += row_in_page(inputs, block, offset).to(gl.int64) * rows.stride_scales_row
        scale = gl.load(at, mask=block * 64 + offset < keys.end, other=0.0)
        found += (gl.where(scale < 0, 0.0, scale),)  # a NaN stays one
    return found


@gluon.jit
def _fetch(rows, inputs, keys, pages, block):
    """Start to load a block."""
    return Fetched(
        _load_words(rows, inputs, keys, pages, block, HALF, HALF),
        _load_words(rows, inputs, keys, pages, block, 0, HALF),
        _load_rope(rows, inputs, keys, pages, block),
        _load_scale(rows, inputs, keys, pages, block),
    )


@gluon.jit
def _far_page(inputs, keys, block):
    """The page of a block that L2 will be asked for."""
    if inputs.PAGE >= 64:
        return page_of(inputs, keys, block)
    else:  # noqa: RET505
        return block


@gluon.jit
def _ask_for(rows, inputs, keys, page, block):
    """Have a block's rows brought to L2, where they lie side by side."""
    if rows.side_by_side and inputs.PAGE >= 64:
        row = page.to(gl.int64) * inputs.PAGE_ROWS + row_in_page(inputs, block, 0)
        start = rows.words.to(gl.int64) + row * (rows.row_quads * 16)
        num_rows = gl.maximum(gl.minimum(keys.end - block * 64, 64), 0)
        ask_for(start, num_rows * (rows.row_quads * 16))


@gluon.jit
def _store_rope(box, words, FORMAT: gl.constexpr):
    if FORMAT == "fp8":
        box.store(widen(words))
    else:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=32, rank=2
        )
        reinterpret(box, gl.int32, [64, 32], LAYOUT).store(words)


@gluon.jit
def widen_blocks(item, index, inputs, work, rows, blocks):
    """All that the widener does."""
    KEY: gl.constexpr = gl.SliceLayout(1, _words_layout(HALF))
    number = item * 0
    while item < work.last_item:
        keys = find_keys(inputs, work, item, index)
        first_block = keys.first_block
        pages = pages_of(inputs, keys, first_block, KEY)
        fetched = _fetch(rows, inputs, keys, pages, first_block)
        pages = pages_of(inputs, keys, first_block + 1, KEY)
        far_page = _far_page(inputs, keys, first_block + AHEAD)
        for block in range(first_block, first_block + num_blocks(keys)):
            slot, turn = slot_of(number)
            mbarrier.wait(blocks.right_empty.index(slot), turn ^ 1)
            blocks.right.index(slot).store(widen(fetched.right))
            fence_async_shared()
            mbarrier.arrive(blocks.right_full.index(slot), count=1)
            mbarrier.wait(blocks.left_empty.index(slot), turn ^ 1)
            blocks.left.index(slot).store(widen(fetched.left))
            _store_rope(blocks.rope.index(slot), fetched.rope, rows.FORMAT)
            if rows.scales is not None:
                blocks.scales.index(slot).store(fetched.scale[0])
            fence_async_shared()
            mbarrier.arrive(blocks.left_full.index(slot), count=1)
            # only now: a fence waits for all that is on its way
            fetched = _fetch(rows, inputs, keys, pages, block + 1)
            pages = pages_of(inputs, keys, block + 2, KEY)
            _ask_for(rows, inputs, keys, far_page, block + AHEAD)
            far_page = _far_page(inputs, keys, block + AHEAD + 1)
            number += 1
        item, index = next_unit(work, item, index + gl.num_programs(0))
