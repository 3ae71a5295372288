"""Tiny Gluon kernels of one partition with several copies or products in flight, as `tiny_kernels`.

Most cases are those of Triton's tests of its concurrency sanitizer (docs/emulator.md).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.compat import copy_words, tma_load
from mlakit.kernels.hopper.primitives import alloc_barrier, alloc_barriers
from tests.tools.emulator.tiny_kernels import (
    ACC,
    BLOCKED,
    COLUMNS,
    ROWS,
    SMEM,
    TILE_BYTES,
    alloc_tile,
    tile_offsets,
    tma_store,
)


@gluon.jit
def start_load(tiles, row, barrier, tile):
    mbarrier.expect(barrier, TILE_BYTES)
    tma_load(tiles, [row, 0], barrier, tile)


@gluon.jit
def two_loads(tiles, x, out, BREAK: gl.constexpr):
    """out = the sum of two tiles, each with a barrier."""
    first = alloc_tile()
    second = alloc_tile()
    one = alloc_barrier()
    two = alloc_barrier()
    if BREAK == "a few bytes fewer":
        mbarrier.expect(one, TILE_BYTES - 16)
        tma_load(tiles, [0, 0], one, first)
    elif BREAK == "a few bytes more":
        mbarrier.expect(one, TILE_BYTES + 16)
        tma_load(tiles, [0, 0], one, first)
    else:
        start_load(tiles, 0, one, first)
    if BREAK == "load over a load":
        start_load(tiles, 64, two, first)
    else:
        start_load(tiles, 64, two, second)
    if BREAK == "store of a pending load":
        tma_store(tiles, [0, 0], second)
        tma.store_wait(0)
    if BREAK != "waits for the other":
        mbarrier.wait(one, 0)
    if BREAK != "waits for one":
        mbarrier.wait(two, 0)
    if BREAK == "loaded again":
        start_load(tiles, 0, two, first)
        mbarrier.wait(one, 0)  # of the load before
    gl.store(out + tile_offsets(), first.load(BLOCKED) + second.load(BLOCKED))
    mbarrier.wait(one, 0)
    mbarrier.wait(two, 1 if BREAK == "loaded again" else 0)


@gluon.jit
def two_loads_on_one_barrier(tiles, x, out, BREAK: gl.constexpr):
    """out = the sum of two tiles with one barrier, which counts the bytes of both."""
    first = alloc_tile()
    second = alloc_tile()
    barrier = alloc_barrier()
    mbarrier.expect(barrier, 2 * TILE_BYTES)
    tma_load(tiles, [0, 0], barrier, first)
    tma_load(tiles, [64, 0], barrier, second)
    if BREAK != "no wait":
        mbarrier.wait(barrier, 0)
    gl.store(out + tile_offsets(), first.load(BLOCKED) + second.load(BLOCKED))
    mbarrier.wait(barrier, 0)


@gluon.jit
def two_stores(tiles, x, out, BREAK: gl.constexpr):
    """Two tiles of `tiles` = x and 2 x by TMA stores, whose tiles are written again; out = x."""
    first = alloc_tile()
    second = alloc_tile()
    values = gl.load(x + tile_offsets())
    first.store(values)
    second.store(values + values)
    fence_async_shared()
    tma_store(tiles, [0, 0], first)
    tma_store(tiles, [64, 0], second)
    tma.store_wait(1)
    first.store(values)
    if BREAK != "one left":
        tma.store_wait(0)
    second.store(values)
    tma.store_wait(0)
    gl.store(out + tile_offsets(), first.load(BLOCKED))


@gluon.jit
def copied_twice(tiles, x, out, BREAK: gl.constexpr):
    """out = x by two cp.async to one tile."""
    tile = alloc_tile()
    copy_words(tile, x + ROWS * COLUMNS + tile_offsets())
    async_copy.commit_group()
    if BREAK != "no wait":
        async_copy.wait_group(0)
    copy_words(tile, x + tile_offsets())
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(out + tile_offsets(), tile.load(BLOCKED))


@gluon.jit
def two_products(tiles, x, out, BREAK: gl.constexpr):
    """out = x xᵀ by the first of two wgmmas, whose operand is written again while one is left."""
    first = alloc_tile()
    second = alloc_tile()
    barrier = alloc_barrier()
    values = gl.load(x + tile_offsets())
    first.store(values)
    second.store(values)
    fence_async_shared()
    zeros = gl.zeros([64, 64], gl.float32, ACC)
    acc = warpgroup_mma(first, first.permute((1, 0)), zeros, use_acc=False, is_async=True)
    last = warpgroup_mma(second, second.permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    written = first if BREAK == "" or BREAK == "by cp.async" or BREAK == "by TMA" else second
    if BREAK == "by cp.async" or BREAK == "the pending one by cp.async":
        copy_words(written, x + tile_offsets())
        async_copy.commit_group()
        async_copy.wait_group(0)
    elif BREAK == "by TMA" or BREAK == "the pending one by TMA":
        fence_async_shared()
        start_load(tiles, 0, barrier, written)
        mbarrier.wait(barrier, 0)
    else:
        written.store(values)
    last = warpgroup_mma_wait(0, deps=(last,))
    gl.store(out + tile_offsets(), gl.convert_layout(acc, BLOCKED).to(gl.float16))


@gluon.jit
def ring_of_products(tiles, x, out, BREAK: gl.constexpr):
    """out = the sum of four tiles, times their transposes, through a ring of stages: while a wgmma
    reads one, the next is loaded, and one more is pending."""
    STAGES: gl.constexpr = 2 if BREAK == "one stage fewer" else 3
    stages = gl.allocate_shared_memory(gl.float16, [STAGES, ROWS, COLUMNS], SMEM)
    full = alloc_barriers(STAGES, 1)
    acc = gl.zeros([64, 64], gl.float32, ACC)
    start_load(tiles, 0, full.index(0), stages.index(0))
    for i in range(4):
        if i < 3:
            following = (i + 1) % STAGES
            start_load(tiles, (i + 1) * 64, full.index(following), stages.index(following))
        mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
        tile = stages.index(i % STAGES)
        pending = warpgroup_mma(tile, tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(pending,))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    gl.store(out + tile_offsets(), gl.convert_layout(acc, BLOCKED).to(gl.float16))
