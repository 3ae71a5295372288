"""Tiny Gluon kernels whose partitions hand tiles on to each other, as `tiny_kernels`."""

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

from mlakit.kernels.hopper.compat import copy_words
from mlakit.kernels.hopper.primitives import alloc_barrier, alloc_vector, lane_layout
from tests.tools.emulator.tiny_copies import start_load
from tests.tools.emulator.tiny_kernels import (
    ACC,
    BLOCKED,
    alloc_tile,
    tile_offsets,
    tma_store,
)


@gluon.jit
def _nothing():
    pass


@gluon.jit
def _fill(tiles, x, tile, barrier, BREAK: gl.constexpr):
    if BREAK == "the load is pending":
        start_load(tiles, 0, barrier, tile)
    else:
        tile.store(gl.load(x + tile_offsets()))
    if BREAK == "":
        fence_async_shared()


@gluon.jit
def joined(tiles, x, out, BREAK: gl.constexpr):
    """The tile of `tiles` = x, filled by a partition that has ended; out = x."""
    tile = alloc_tile()
    barrier = alloc_barrier()
    gl.warp_specialize(
        [(_nothing, ()), (_fill, (tiles, x, tile, barrier, BREAK))], [4], [64]
    )  # fmt: skip
    if BREAK == "fence after the end":
        fence_async_shared()
    if BREAK != "the load is pending":
        tma_store(tiles, [0, 0], tile)
        tma.store_wait(0)
    gl.store(out + tile_offsets(), tile.load(BLOCKED))


@gluon.jit
def _store_tile(x, tile, ready, BREAK: gl.constexpr):
    tile.store(gl.load(x + tile_offsets()))
    if BREAK == "":
        fence_async_shared()
    mbarrier.arrive(ready, count=1)
    if BREAK == "fence after the arrival":
        fence_async_shared()


@gluon.jit
def _store_to_tiles(tiles, x, out, tile, ready, BREAK: gl.constexpr):
    if BREAK != "no wait":
        mbarrier.wait(ready, 0)
    if BREAK == "fence of the reader":
        fence_async_shared()
    tma_store(tiles, [0, 0], tile)
    tma.store_wait(0)
    gl.store(out + tile_offsets(), gl.load(x + tile_offsets()))


@gluon.jit
def stored_by_another(tiles, x, out, BREAK: gl.constexpr):
    """The tile of `tiles` = x, written by one partition and stored by TMA by another; out = x."""
    tile = alloc_tile()
    ready = alloc_barrier()
    gl.warp_specialize(
        [(_store_tile, (x, tile, ready, BREAK)),
         (_store_to_tiles, (tiles, x, out, tile, ready, BREAK))],
        [4], [64],
    )  # fmt: skip


@gluon.jit
def _give(x, tile, given, BREAK: gl.constexpr):
    tile.store(gl.load(x + tile_offsets()))
    mbarrier.arrive(given, count=1)


@gluon.jit
def _take(out, tile, given, BREAK: gl.constexpr):
    if BREAK != "no wait":
        mbarrier.wait(given, 0)
    gl.store(out + tile_offsets(), tile.load(BLOCKED))


@gluon.jit
def given(tiles, x, out, BREAK: gl.constexpr):
    """out = x, from partition to partition through shared memory."""
    tile = alloc_tile()
    barrier = alloc_barrier()
    gl.warp_specialize(
        [(_give, (x, tile, barrier, BREAK)), (_take, (out, tile, barrier, BREAK))],
        [4], [64],
    )  # fmt: skip


@gluon.jit
def _read_vector(vector, sink, is_read, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = lane_layout(WARPS)
    gl.store(sink + gl.arange(0, 256, LAYOUT), vector.load(LAYOUT).to(gl.float16))
    mbarrier.arrive(is_read, count=1)


@gluon.jit
def _write_vector(x, out, vector, one, two, BREAK: gl.constexpr):
    if BREAK != "one is not waited for":
        mbarrier.wait(one, 0)
    if BREAK != "two is not waited for" and BREAK != "one arrival too few":
        mbarrier.wait(two, 0)
    vector.store(gl.zeros([256], gl.float32, lane_layout(4)))
    gl.store(out + tile_offsets(), gl.load(x + tile_offsets()))
    mbarrier.wait(one, 0)
    if BREAK != "one arrival too few":
        mbarrier.wait(two, 0)


@gluon.jit
def two_readers(tiles, x, out, BREAK: gl.constexpr):
    """out = x, after a write that waits for readers of two and of eight warps."""
    vector = alloc_vector(256)
    vector.store(gl.load(x + gl.arange(0, 256, lane_layout(4))).to(gl.float32))
    sink = x + 4 * 64 * 64
    one = alloc_barrier()
    two = one if BREAK == "one arrival too few" else alloc_barrier()
    gl.warp_specialize(
        [(_write_vector, (x, out, vector, one, two, BREAK)),
         (_read_vector, (vector, sink, one, 2)),
         (_read_vector, (vector, sink + 256, two, 8))],
        [2, 8], [64, 64],
    )  # fmt: skip


@gluon.jit
def _copy_two(x, first, second, ready):
    copy_words(first, x + tile_offsets())
    async_copy.commit_group()
    copy_words(second, x + tile_offsets())
    async_copy.commit_group()
    async_copy.wait_group(1)
    mbarrier.arrive(ready, count=1)
    async_copy.wait_group(0)


@gluon.jit
def _read_one(out, first, second, ready, BREAK: gl.constexpr):
    mbarrier.wait(ready, 0)
    tile = second if BREAK == "the other one" else first
    gl.store(out + tile_offsets(), tile.load(BLOCKED))


@gluon.jit
def copied_for_another(tiles, x, out, BREAK: gl.constexpr):
    """out = x by the first of two cp.async groups, which one partition waits for and another
    reads."""
    first = alloc_tile()
    second = alloc_tile()
    ready = alloc_barrier()
    gl.warp_specialize(
        [(_copy_two, (x, first, second, ready)), (_read_one, (out, first, second, ready, BREAK))],
        [4], [64],
    )  # fmt: skip


@gluon.jit
def _multiply_two(x, out, first, second, is_read):
    zeros = gl.zeros([64, 64], gl.float32, ACC)
    acc = warpgroup_mma(first, first.permute((1, 0)), zeros, use_acc=False, is_async=True)
    last = warpgroup_mma(second, second.permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(is_read, count=1)
    last = warpgroup_mma_wait(0, deps=(last,))
    gl.store(out + tile_offsets(), gl.convert_layout(acc, BLOCKED).to(gl.float16))


@gluon.jit
def _overwrite_one(x, first, second, is_read, BREAK: gl.constexpr):
    mbarrier.wait(is_read, 0)
    tile = second if BREAK == "the other one" else first
    tile.store(gl.load(x + tile_offsets()))


@gluon.jit
def multiplied_for_another(tiles, x, out, BREAK: gl.constexpr):
    """out = x xᵀ by the first of two wgmmas, which one partition waits for; another one then
    writes its operand."""
    first = alloc_tile()
    second = alloc_tile()
    values = gl.load(x + tile_offsets())
    first.store(values)
    second.store(values)
    fence_async_shared()
    is_read = alloc_barrier()
    gl.warp_specialize(
        [(_multiply_two, (x, out, first, second, is_read)),
         (_overwrite_one, (x, first, second, is_read, BREAK))],
        [4], [64],
    )  # fmt: skip


@gluon.jit
def _load_in_second_phase(tiles, tile, both, started):
    mbarrier.arrive(both, count=1)
    mbarrier.wait(both, 0)
    start_load(tiles, 0, both, tile)
    mbarrier.arrive(started, count=1)
    mbarrier.wait(both, 1)


@gluon.jit
def _read_in_second_phase(out, tile, both, started, BREAK: gl.constexpr):
    mbarrier.arrive(both, count=1)
    mbarrier.wait(started, 0)
    mbarrier.wait(both, 0)
    if BREAK != "waits for the first phase":
        mbarrier.arrive(both, count=1)
        mbarrier.wait(both, 1)
    gl.store(out + tile_offsets(), tile.load(BLOCKED))
    if BREAK == "waits for the first phase":
        mbarrier.arrive(both, count=1)
        mbarrier.wait(both, 1)


@gluon.jit
def two_phases(tiles, x, out, BREAK: gl.constexpr):
    """out = x by a load that completes in the second phase of a barrier of two arrivals."""
    tile = alloc_tile()
    both = alloc_barrier(2)
    started = alloc_barrier()
    gl.warp_specialize(
        [(_read_in_second_phase, (out, tile, both, started, BREAK)),
         (_load_in_second_phase, (tiles, tile, both, started))],
        [4], [64],
    )  # fmt: skip


@gluon.jit
def _write_half(x, half, BREAK: gl.constexpr):
    WIDTH: gl.constexpr = half.shape[1]
    half.store(gl.zeros([64, WIDTH], gl.float16, BLOCKED))


@gluon.jit
def _read_half(x, out, half):
    total = gl.sum(half.load(BLOCKED).to(gl.float32), 1)
    kept = gl.load(x + tile_offsets()).to(gl.float32) + gl.expand_dims(total * 0.0, 1)
    gl.store(out + tile_offsets(), kept.to(gl.float16))


@gluon.jit
def halves(tiles, x, out, BREAK: gl.constexpr):
    """out = x; one partition writes the left half of a tile, another one reads the right half."""
    tile = alloc_tile()
    tile.store(gl.load(x + tile_offsets()))
    LEFT: gl.constexpr = 64 if BREAK == "more than half" else 32
    gl.warp_specialize(
        [(_write_half, (x, tile.slice(0, LEFT, dim=1), BREAK)),
         (_read_half, (x, out, tile.slice(32, 32, dim=1)))],
        [4], [64],
    )  # fmt: skip


@gluon.jit
def _wait_and_arrive(barrier):
    mbarrier.wait(barrier, 0)
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _wait_for_both(x, out, barrier):
    mbarrier.wait(barrier, 1)
    gl.store(out + tile_offsets(), gl.load(x + tile_offsets()))


@gluon.jit
def phase_by_phase(tiles, x, out, BREAK: gl.constexpr):
    """out = x, after two phases of a barrier, the second of which another partition completes."""
    barrier = alloc_barrier(2 if BREAK == "one arrival fewer" else 1)
    mbarrier.arrive(barrier, count=1)
    if BREAK == "one arrival more":
        mbarrier.arrive(barrier, count=1)
        mbarrier.wait(barrier, 0)
    elif BREAK == "two arrivals at once":
        mbarrier.arrive(barrier, count=2)
    gl.warp_specialize(
        [(_wait_for_both, (x, out, barrier)), (_wait_and_arrive, (barrier,))], [4], [64]
    )
