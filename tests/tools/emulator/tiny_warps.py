"""Tiny Gluon kernels of named barriers, at which warps arrive one by one, and of the life of an
mbarrier, as `tiny_kernels`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.primitives import alloc_barrier, named_arrive, named_wait
from tests.tools.emulator.tiny_copies import start_load
from tests.tools.emulator.tiny_kernels import (
    BLOCKED,
    LANES,
    SMEM,
    TILE_BYTES,
    alloc_tile,
    tile_offsets,
)

FULL = gl.constexpr(6)
EMPTY = gl.constexpr(8)
FIRST_WARPS = gl.constexpr("mov.u32 $0, 0; bar.sync $1, 64;")


@gluon.jit
def _send_stages(x, stages, BREAK: gl.constexpr):
    for i in range(4):
        if BREAK != "no wait for the stage":
            named_wait(EMPTY + i % 2, 256, i >= 2)
        stages.index(i % 2).store(gl.load(x + i * 64 * 64 + tile_offsets()))
        named_arrive(FULL + (0 if BREAK == "one barrier for both" else i % 2), 256)
    for i in gl.static_range(2):
        named_wait(EMPTY + i, 256)


@gluon.jit
def _receive_stages(out, stages, BREAK: gl.constexpr):
    total = gl.zeros([64, 64], gl.float32, BLOCKED)
    # no static range: Triton would take two loads of a stage for one, whatever assembly is between
    for i in range(4):
        named_wait(FULL + (0 if BREAK == "one barrier for both" else i % 2), 256)
        total += stages.index(i % 2).load(BLOCKED).to(gl.float32)
        named_arrive(EMPTY + i % 2, 256)
    gl.store(out + tile_offsets(), total.to(gl.float16))


@gluon.jit
def stages_by_name(tiles, x, out, BREAK: gl.constexpr):
    """out = the sum of four tiles, through two stages with named barriers."""
    stages = gl.allocate_shared_memory(gl.float16, [2, 64, 64], SMEM)
    gl.warp_specialize(
        [(_receive_stages, (out, stages, BREAK)), (_send_stages, (x, stages, BREAK))], [4], [64]
    )


@gluon.jit
def pairs_of_warps(tiles, x, out, BREAK: gl.constexpr):
    """out[:128] = x[:128] with warps 0 and 1 exchanged, and 2 and 3, through global memory."""
    scratch = x + 4 * 64 * 64
    thread = gl.arange(0, 128, LANES)
    gl.store(scratch + thread, gl.load(x + thread))
    if BREAK != "no barrier":
        pair = 6 + thread // 64
        gl.inline_asm_elementwise(
            FIRST_WARPS, "=r,r", [pair], dtype=gl.int32, is_pure=False, pack=1
        )
    other = thread ^ 64 if BREAK == "the other pair" else thread ^ 32
    gl.store(out + thread, gl.load(scratch + other))


@gluon.jit
def life_of_a_barrier(tiles, x, out, BREAK: gl.constexpr):
    """out = x: one load, and a barrier that is invalidated after it."""
    tile = alloc_tile()
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    UNTIMELY: gl.constexpr = BREAK != "" and BREAK != "invalidated before a wait"
    if BREAK == "copies arrive at the end of it" or BREAK == "awaited after its end":
        mbarrier.init(barrier, count=1)
        mbarrier.invalidate(barrier)
    if BREAK == "awaited before its start" or BREAK == "awaited after its end":
        mbarrier.wait(barrier, 1)
    elif BREAK == "reached before its start":
        mbarrier.arrive(barrier, count=1)
    elif BREAK == "expects before its start":
        mbarrier.expect(barrier, TILE_BYTES)
    elif BREAK == "ended before its start":
        mbarrier.invalidate(barrier)
    elif UNTIMELY:
        async_copy.mbarrier_arrive(barrier, increment_count=False)
    mbarrier.init(barrier, count=1)
    start_load(tiles, 0, barrier, tile)
    if BREAK == "invalidated before a wait":
        other = alloc_barrier()
        start_load(tiles, 64, other, alloc_tile())
        mbarrier.wait(other, 0)
    else:
        mbarrier.wait(barrier, 0)
    mbarrier.invalidate(barrier)
    gl.store(out + tile_offsets(), tile.load(BLOCKED))
