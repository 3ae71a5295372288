"""Loads of blocks of 64 keys from the paged cache to shared memory.

TMA      one tile of 64 rows, or one per page where a block has several; a producer warp issues it
Gather   where no TMA tile fits a page (`Inputs.words`). The 128 threads of a gather producer issue
         cp.async copies of 16 bytes; each thread arrives at the stage's barrier when its own copies
         are done. cp.async writes go through the generic proxy: fence before wgmma (`wait_block`)

Page lookups are one block ahead of the loads that need them. Entries of the page table past a
request's last key are not read, and rows past it are zeros (TMA reads NO_ROW as zeros).

Lineage    own design; ideas: FlashAttention-3's cp.async loads for pages that TMA cannot load
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.device.compat import copy_words, reinterpret
from mlakit.kernels.hopper.device.primitives import (
    lane_layout,
    prefetch_l2_each,
    smem_layout,
    tma_load_block,
)

NO_ROW = gl.constexpr(2**30)  # past the end of every cache: TMA reads zeros there


@gluon.constexpr_function
def producer_warps(words):
    return 1 if words is None else 4


@gluon.constexpr_function
def producer_arrivals(words):
    """Arrivals at the barrier of a stage: of the warp that issues TMA, or of gathering threads."""
    return 1 if words is None else 4 * 32


@gluon.constexpr_function
def gather_layout(width):
    """Return [64, 4, 16 or 32 words]: 16 bytes per thread, which has the same rows of any width."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [16, 0], [32, 0]],
        lane_bases=[*([0, n if n < width else 0] for n in (4, 8, 16)), [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[64, width],
    )


GATHERED_KEYS = gl.constexpr(gl.SliceLayout(1, gather_layout(32)))


@gluon.jit
def _load_page(inputs, keys, entry, is_there):
    """An entry of the request's row of the page table, or several; 0 where none `is_there`."""
    at = keys.pages + entry.to(gl.int64) * inputs.stride_entry
    return gl.load(at, mask=is_there, other=0).to(gl.int32)


@gluon.jit
def _pages_from(inputs, keys, block, LAYOUT: gl.constexpr, COUNT: gl.constexpr):
    """The page of each of COUNT keys from the block's first on; page 0 past the last key."""
    key = block * 64 + gl.arange(0, COUNT, LAYOUT)
    return _load_page(inputs, keys, key // inputs.PAGE, key < keys.end)


@gluon.jit
def _page_of_block(inputs, keys, block):
    """The page of a block that lies within one; page 0 past the last key."""
    return _load_page(inputs, keys, block // (inputs.PAGE // 64), block < keys.end_block)


@gluon.jit
def pages_ahead(inputs, keys, block, WARPS: gl.constexpr):
    """The pages of a block that lies within one and of the next 31 blocks, one per lane.

    A scalar would go to a uniform register, and the warp would wait for its load at once.
    """
    blocks = block + gl.arange(0, 32, lane_layout(WARPS))
    return _load_page(inputs, keys, blocks // (inputs.PAGE // 64), blocks < keys.end_block)


@gluon.jit
def row_ahead(inputs, keys, pages, block, AHEAD: gl.constexpr):
    """The first row of block + AHEAD, where `pages` are `pages_ahead` of `block`."""
    lane = gl.arange(0, 32, pages.type.layout)
    page = gl.sum(gl.where(lane == AHEAD, pages, 0), 0)
    return _first_row(inputs, keys, page, block + AHEAD)


@gluon.jit
def _first_row(inputs, keys, page, block):
    """The first row of a block within this page; NO_ROW past the last key."""
    row = page * inputs.PAGE_ROWS + block % (inputs.PAGE // 64) * 64
    return gl.where(block < keys.end_block, row, NO_ROW)


@gluon.jit
def pages_of_keys(inputs, keys, block, LAYOUT: gl.constexpr):
    """The page of each key of a block, [64], or one page for all; page 0 past the last key."""
    if inputs.PAGE % 64 != 0:
        return _pages_from(inputs, keys, block, LAYOUT, 64)
    else:
        return _page_of_block(inputs, keys, block)


@gluon.jit
def row_in_page(inputs, block, offset):
    """The row in its page of the key at `offset` in a block."""
    if 64 % inputs.PAGE == 0:
        return offset % inputs.PAGE
    elif inputs.PAGE % 64 != 0:
        return (block * 64 + offset) % inputs.PAGE
    else:
        return offset + block % (inputs.PAGE // 64) * 64


@gluon.jit
def tma_rows(inputs, keys, block, WARPS: gl.constexpr):
    """The first row of a block in the cache's descriptor; NO_ROW past the last key.

    Where a block has several pages: the first row of each, one per lane of WARPS warps.
    """
    if inputs.PAGE < 64:
        # a page per lane costs one register, however many pages there are
        entry = block * (64 // inputs.PAGE) + gl.arange(0, 32, lane_layout(WARPS))
        is_there = entry * inputs.PAGE < keys.end
        page = _load_page(inputs, keys, entry, is_there)
        return gl.where(is_there, page * inputs.PAGE_ROWS, NO_ROW)
    else:
        return _first_row(inputs, keys, _page_of_block(inputs, keys, block), block)


@gluon.jit
def lookup_block(inputs, keys, block, WARPS: gl.constexpr = 1):
    """Start the page lookup of a block, for `rows_of_block`.

    WARPS  that hold the rows of TMA tiles; a gather producer has four
    """
    if inputs.words is None:
        return tma_rows(inputs, keys, block, WARPS)
    else:
        return pages_of_keys(inputs, keys, block, GATHERED_KEYS)


@gluon.jit
def rows_of_block(inputs, keys, lookup, block):
    """Return the first row of each TMA tile, or the row of each key, for `load_block`."""
    if inputs.words is None:
        return lookup
    else:
        offset = gl.arange(0, 64, GATHERED_KEYS)
        row = lookup * inputs.PAGE_ROWS + row_in_page(inputs, block, offset)
        return gl.where(block * 64 + offset < keys.end, row, NO_ROW)


@gluon.jit
def expect_block(inputs, full, BYTES: gl.constexpr):
    """Expect the bytes that TMA will load; called before the loads that a barrier waits for."""
    if inputs.words is None:
        mbarrier.expect(full, BYTES)


@gluon.jit
def load_block(inputs, descriptor, rows, column, full, smem):
    """Start to load some columns of a block into an smem tile; rows past the last key are zeros,
    at least where a block has none before.

    descriptor  `inputs.kv` or `inputs.kv_rope`, whose columns `column` counts
    """
    if inputs.words is None:
        tma_load_block(descriptor, rows, column, full, smem)
    else:
        _gather_block(inputs, rows, column * smem.dtype.primitive_bitwidth // 32, smem)


@gluon.jit
def _gather_block(inputs, rows, word, smem):
    WIDTH: gl.constexpr = smem.shape[1] * smem.dtype.primitive_bitwidth // 32
    ATOM: gl.constexpr = min(WIDTH, 32)
    ATOMS: gl.constexpr = WIDTH // ATOM
    LAYOUT: gl.constexpr = gather_layout(ATOM)
    atoms = reinterpret(smem, gl.int32, [ATOMS, 64, ATOM], smem_layout(ATOM, 32))
    row = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    row = gl.expand_dims(row, 1)
    column = word + gl.expand_dims(gl.arange(0, ATOM, gl.SliceLayout(0, LAYOUT)), 0)
    # the explicit factor of four shows the compiler the alignment to 16 bytes
    start = inputs.words + row.to(gl.int64) * inputs.row_chunks * 4
    for atom in gl.static_range(ATOMS):
        copy_words(atoms.index(atom), start + (atom * ATOM + column), mask=row < NO_ROW)


@gluon.jit
def arrive_on_loads(inputs, full):
    """Arrive once the loads are issued: gathering threads arrive when theirs are done."""
    if inputs.words is not None:
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def wait_block(inputs, full, phase):
    """Wait for rows that wgmma reads from shared memory."""
    mbarrier.wait(full, phase)
    if inputs.words is not None:
        fence_async_shared()


@gluon.jit
def lookup_prefetch(inputs, keys, block):
    """The pages of 128 rows from a block's first on, for `prefetch_rows`: one row per thread."""
    return _pages_from(inputs, keys, block, lane_layout(4), 128)


@gluon.jit
def prefetch_rows(inputs, keys, pages, block, BYTES: gl.constexpr):
    """Prefetch 128 rows to L2 that are not contiguous."""
    offset = gl.arange(0, 128, lane_layout(4))
    row = pages * inputs.PAGE_ROWS + row_in_page(inputs, block, offset)
    address = inputs.words.to(gl.int64) + row.to(gl.int64) * inputs.row_chunks * 16
    prefetch_l2_each(address, gl.where(block * 64 + offset < keys.end, BYTES, 0))
