"""How the rows of a block come from the cache to shared memory: in boxes, or one by one.

Boxes       of 64 rows, or of a page that a block has several of: TMA copies them, one warp says so
One by one  where pages are of no size that boxes can have (`Inputs.words`). The threads of four
            warps ask for sixteen bytes at a time, and do not see them arrive: each arrives at the
            barrier of a box when its own copies are there. They are writes like any others to those
            who multiply, not like TMA's: a reader's dots need a fence before
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.compat import copy_words, reinterpret
from mlakit.kernels.hopper.decode_work import (
    NO_ROW,
    pages_from,
    pages_of,
    row_in_page,
    rows_of,
)
from mlakit.kernels.hopper.primitives import ask_for_each, load_rows


@gluon.constexpr_function
def copying_warps(words):
    return 1 if words is None else 4


@gluon.constexpr_function
def copying_threads(words):
    """Those that arrive at the barrier of a box."""
    return 1 if words is None else 4 * 32


@gluon.constexpr_function
def _words_layout(width):
    """[64, 16 or 32 words]: sixteen bytes a thread, which has the same rows of either."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [16, 0], [32, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16 if width == 32 else 0], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[64, width],
    )


KEYS = gl.constexpr(gl.SliceLayout(1, _words_layout(32)))
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def look_up_rows(inputs, keys, block, WARPS: gl.constexpr = 1):
    """Where the rows of a block are, for `find_rows`: to be waited for later.

    WARPS  that know where boxes are; rows one by one are for four
    """
    if inputs.words is None:
        return rows_of(inputs, keys, block, WARPS)
    else:  # noqa: RET505
        return pages_of(inputs, keys, block, KEYS)


@gluon.jit
def find_rows(inputs, keys, looked_up, block):
    """What `copy_rows` copies: the first row of each box, or all of them."""
    if inputs.words is None:
        return looked_up
    else:  # noqa: RET505
        offset = gl.arange(0, 64, KEYS)
        row = looked_up * inputs.PAGE_ROWS + row_in_page(inputs, block, offset)
        return gl.where(block * 64 + offset < keys.end, row, NO_ROW)


@gluon.jit
def expect_rows(inputs, full, BYTES: gl.constexpr):
    """Before those are copied that a barrier is for."""
    if inputs.words is None:
        mbarrier.expect(full, BYTES)


@gluon.jit
def copy_rows(inputs, descriptor, rows, column, full, box):
    """Start to copy a box's columns of the rows; past the last key it gets zeros, at least there.

    descriptor  `inputs.kv` or `inputs.kv_rope`, whose columns are meant
    """
    if inputs.words is None:
        load_rows(descriptor, rows, column, full, box)
    else:
        _copy_one_by_one(inputs, rows, column * box.dtype.primitive_bitwidth // 32, box)


@gluon.jit
def _copy_one_by_one(inputs, rows, word, box):
    WIDTH: gl.constexpr = box.shape[1] * box.dtype.primitive_bitwidth // 32
    PANEL: gl.constexpr = min(WIDTH, 32)
    PANELS: gl.constexpr = WIDTH // PANEL
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=PANEL * 4, element_bitwidth=32, rank=2
    )
    LAYOUT: gl.constexpr = _words_layout(PANEL)
    panels = reinterpret(box, gl.int32, [PANELS, 64, PANEL], SWIZZLED)
    row = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    row = gl.expand_dims(row, 1)
    column = word + gl.expand_dims(gl.arange(0, PANEL, gl.SliceLayout(0, LAYOUT)), 0)
    # the factor of four is there to be seen: sixteen bytes are copied at once
    start = inputs.words + row.to(gl.int64) * inputs.row_quads * 4
    for panel in gl.static_range(PANELS):
        copy_words(panels.index(panel), start + (panel * PANEL + column), mask=row < NO_ROW)


@gluon.jit
def arrive_when_copied(inputs, full):
    """After those have been started that a barrier is for."""
    if inputs.words is not None:
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def look_up_next(inputs, keys, block):
    """The pages of 128 rows from a block's first on, for `ask_for_rows`: a row each thread."""
    return pages_from(inputs, keys, block, ONE_EACH, 128)


@gluon.jit
def ask_for_rows(inputs, keys, pages, block, BYTES: gl.constexpr):
    """Have these rows brought to L2, which are not side by side."""
    offset = gl.arange(0, 128, ONE_EACH)
    row = pages * inputs.PAGE_ROWS + row_in_page(inputs, block, offset)
    address = inputs.words.to(gl.int64) + row.to(gl.int64) * inputs.row_quads * 16
    ask_for_each(address, gl.where(block * 64 + offset < keys.end, BYTES, 0))


@gluon.jit
def await_rows(inputs, full, turn):
    """Wait for rows that are to be multiplied where they are."""
    mbarrier.wait(full, turn)
    if inputs.words is not None:
        fence_async_shared()
