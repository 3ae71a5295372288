"""Tiny Gluon kernels, each right as it is and broken in one place where `BREAK` says so.

Every kernel computes `out` from `x` in a way that its test can check, so that one that is right is
right in its numbers too. `tiny_runs` launches them.
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
from mlakit.kernels.hopper.primitives import (
    acc_layout,
    alloc_barrier,
    alloc_barriers,
    lane_layout,
    named_arrive,
    named_wait,
    smem_layout,
)

ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(64)
TILE_BYTES = gl.constexpr(64 * 64 * 2)
SMEM = gl.constexpr(smem_layout(64, 16))
BLOCKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ACC = gl.constexpr(acc_layout(64))
LANES = gl.constexpr(lane_layout(4))
# to Triton 3.8 the second names
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
sync_threads = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def tile_offsets():
    """Offsets of a contiguous tile."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, BLOCKED))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, BLOCKED))
    return gl.expand_dims(row, 1) * COLUMNS + gl.expand_dims(column, 0)


@gluon.jit
def alloc_tile():
    return gl.allocate_shared_memory(gl.float16, [ROWS, COLUMNS], SMEM)


@gluon.jit
def tma_copy(tiles, x, out, BREAK: gl.constexpr):
    """out = x: one tile by TMA."""
    tile = alloc_tile()
    barrier = alloc_barrier(2 if BREAK == "one arrival more" else 1)
    if BREAK == "generic write before":
        tile.store(gl.zeros([ROWS, COLUMNS], gl.float16, BLOCKED))
    if BREAK == "more bytes":
        mbarrier.expect(barrier, 2 * TILE_BYTES)
    elif BREAK == "fewer bytes":
        mbarrier.expect(barrier, TILE_BYTES)
        tma_load(tiles, [0, 0], barrier, alloc_tile())
    elif BREAK != "no expectation":
        mbarrier.expect(barrier, TILE_BYTES)
    row = gl.to_tensor(0)
    column = gl.to_tensor(0)
    if BREAK == "unaligned coordinate":
        column += 4
    if BREAK == "overflow":
        row = (gl.num_programs(0) + 65535) * (gl.num_programs(0) + 65535)
    tma_load(tiles, [row, column], barrier, tile)
    if BREAK != "no wait" and BREAK != "nothing waits":
        mbarrier.wait(barrier, 1 if BREAK == "other phase" else 0)
    if BREAK != "nothing waits":
        gl.store(out + tile_offsets(), tile.load(BLOCKED))


@gluon.jit
def _produce(tiles, stages, full, empty, BREAK: gl.constexpr):
    for i in range(4):
        if BREAK != "no wait for the stage":
            mbarrier.wait(empty.index(i % 2), ((i // 2) & 1) ^ 1)
        mbarrier.expect(full.index(i % 2), TILE_BYTES)
        stage = i % 2
        if BREAK == "stage out of range":
            stage = i
        if BREAK == "fence of the producer":
            fence_async_shared()
        tma_load(tiles, [i * 64, 0], full.index(i % 2), stages.index(stage))


@gluon.jit
def _consume(stages, full, empty, out, BREAK: gl.constexpr):
    total = gl.zeros([ROWS, COLUMNS], gl.float32, BLOCKED)
    for i in range(4):
        if BREAK != "no wait for the tile":
            mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        if BREAK == "release before read":
            mbarrier.arrive(empty.index(i % 2), count=1)
        total += stages.index(i % 2).load(BLOCKED).to(gl.float32)
        if BREAK != "no fence" and BREAK != "fence of the producer":
            fence_async_shared()  # of the read, before TMA writes the stage again
        if BREAK != "no release" and BREAK != "release before read":
            mbarrier.arrive(empty.index(i % 2), count=1)
        if BREAK == "two releases":
            mbarrier.arrive(empty.index(i % 2), count=1)
    gl.store(out + tile_offsets(), total.to(gl.float16))


@gluon.jit
def pipeline(tiles, x, out, BREAK: gl.constexpr):
    """out = the sum of four tiles, through two stages from a producer to a consumer."""
    stages = gl.allocate_shared_memory(gl.float16, [2, ROWS, COLUMNS], SMEM)
    full = alloc_barriers(2, 1)
    empty = alloc_barriers(2, 1)
    gl.warp_specialize(
        [(_consume, (stages, full, empty, out, BREAK)),
         (_produce, (tiles, stages, full, empty, BREAK))],
        [1], [24],
    )  # fmt: skip


@gluon.jit
def product(tiles, x, out, BREAK: gl.constexpr):
    """out = x xᵀ by one wgmma over a tile that threads store."""
    tile = alloc_tile()
    values = gl.load(x + tile_offsets())
    tile.store(values)
    if BREAK != "no fence":
        fence_async_shared()
    zeros = gl.zeros([64, 64], gl.float32, ACC)
    pending = warpgroup_mma(tile, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if BREAK == "operand overwritten":
        tile.store(values)
    LEFT: gl.constexpr = 1 if BREAK == "one left" or BREAK == "nothing waits" else 0
    if BREAK == "nothing waits":
        last = warpgroup_mma(tile, tile, zeros, use_acc=False, is_async=True)
        acc, last = warpgroup_mma_wait(LEFT, deps=(pending, last))
    else:
        acc = warpgroup_mma_wait(LEFT, deps=(pending,))
    result = gl.convert_layout(acc, BLOCKED)
    gl.store(out + tile_offsets(), result.to(gl.float16))


@gluon.jit
def tma_write(tiles, x, out, BREAK: gl.constexpr):
    """The tile of `tiles` = 2 x by a TMA store, and out = x."""
    tile = alloc_tile()
    values = gl.load(x + tile_offsets())
    tile.store(values + values)
    if BREAK != "no fence":
        fence_async_shared()
    tma_store(tiles, [0, 0], tile)
    if BREAK == "tile reused":
        tile.store(values)
    if BREAK == "waits for the writes":
        tma.store_wait(0, read_only=False)
    elif BREAK != "nothing waits":
        tma.store_wait(0)
    if BREAK == "read back" or BREAK == "waits for the writes":
        values = gl.load(tiles_of(x) + tile_offsets()) - values
    gl.store(out + tile_offsets(), values)


@gluon.jit
def tiles_of(x):
    """The tensor that the descriptor is of: it lies behind x."""
    return x + 4 * ROWS * COLUMNS


@gluon.jit
def copy_groups(tiles, x, out, BREAK: gl.constexpr):
    """out = x by cp.async, and one group more that is waited for later."""
    first = alloc_tile()
    second = alloc_tile()
    copy_words(first, x + tile_offsets())
    if BREAK != "no group":
        async_copy.commit_group()
    copy_words(second, x + tile_offsets())
    async_copy.commit_group()
    async_copy.wait_group(2 if BREAK == "one group left" else 1)
    tile = second if BREAK == "other group" else first
    values = tile.load(BLOCKED)
    if BREAK != "nothing waits":
        async_copy.wait_group(0)
    gl.store(out + tile_offsets(), values)


@gluon.jit
def _gather(x, tile, full, is_used, relay, BREAK: gl.constexpr):
    """Waits for the reader, then copies, and tells the writer both."""
    mbarrier.wait(is_used, 0)
    copy_words(tile, x + tile_offsets())
    async_copy.mbarrier_arrive(full, increment_count=False)
    if BREAK != "only the copies arrive":
        mbarrier.arrive(relay, count=1)


@gluon.jit
def _reader(x, other, out, is_used, BREAK: gl.constexpr):
    """Reads `other`, and tells the gather producer alone."""
    gl.store(out + tile_offsets(), other.load(BLOCKED))
    mbarrier.arrive(is_used, count=1)


@gluon.jit
def _writer(x, tile, other, out, full, relay, BREAK: gl.constexpr):
    """Writes `other` when the copies have arrived and the gather producer has seen the reader."""
    mbarrier.wait(full, 0)
    if BREAK != "only the copies arrive":
        mbarrier.wait(relay, 0)
    other.store(tile.load(BLOCKED))


@gluon.jit
def relayed(tiles, x, out, BREAK: gl.constexpr):
    """out = x, and a write after a read that a third partition has waited for."""
    tile = alloc_tile()
    other = alloc_tile()
    other.store(gl.load(x + tile_offsets()))
    full = alloc_barrier(127 if BREAK == "too many copies" else 128)
    is_used = alloc_barrier()
    relay = alloc_barrier()
    gl.warp_specialize(
        [(_writer, (x, tile, other, out, full, relay, BREAK)),
         (_reader, (x, other, out, is_used, BREAK)),
         (_gather, (x, tile, full, is_used, relay, BREAK))],
        [4, 4], [64, 64],
    )  # fmt: skip


@gluon.jit
def reused_barrier(tiles, x, out, BREAK: gl.constexpr):
    """out = x by two loads; the barrier is made anew between them."""
    tile = alloc_tile()
    barrier = alloc_barrier()
    for _ in gl.static_range(2):
        if BREAK == "initialised in a phase":
            mbarrier.expect(barrier, TILE_BYTES)
        else:
            mbarrier.expect(barrier, TILE_BYTES)
            tma_load(tiles, [0, 0], barrier, tile)
            mbarrier.wait(barrier, 0)
        if BREAK != "initialised twice":
            mbarrier.invalidate(barrier)
        if BREAK != "used after its end":
            mbarrier.init(barrier, count=1)
    gl.store(out + tile_offsets(), tile.load(BLOCKED))


@gluon.jit
def exchange(tiles, x, out, BREAK: gl.constexpr):
    """out[:128] = x[:128] reversed, from warp to warp through global memory."""
    scratch = x + 4 * ROWS * COLUMNS
    thread = gl.arange(0, 128, LANES)
    gl.store(scratch + thread, gl.load(x + thread))
    if BREAK == "":
        sync_threads()
    elif BREAK == "by a named barrier":
        named_wait(6, 128)
    elif BREAK == "by an arrival alone":
        named_arrive(6, 256)
    elif BREAK == "own elements":
        thread = 127 - thread
    gl.store(out + thread, gl.load(scratch + 127 - thread))


@gluon.jit
def _send(x, scratch, ready, BREAK: gl.constexpr):
    gl.store(scratch + tile_offsets(), gl.load(x + tile_offsets()))
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _receive(scratch, out, ready, BREAK: gl.constexpr):
    if BREAK != "no wait":
        mbarrier.wait(ready, 0)
    gl.store(out + tile_offsets(), gl.load(scratch + tile_offsets()))


@gluon.jit
def handover(tiles, x, out, BREAK: gl.constexpr):
    """out = x, from partition to partition through global memory."""
    ready = alloc_barrier()
    scratch = x + 4 * ROWS * COLUMNS
    gl.warp_specialize(
        [(_send, (x, scratch, ready, BREAK)), (_receive, (scratch, out, ready, BREAK))],
        [4], [64],
    )  # fmt: skip


@gluon.jit
def _named_send(x, tile, BREAK: gl.constexpr):
    tile.store(gl.load(x + tile_offsets()))
    if BREAK == "other count":
        named_arrive(6, 128 + 64)
    elif BREAK == "too few threads":
        named_arrive(6, 64)
    elif BREAK != "no arrival":
        named_arrive(6, 256)


@gluon.jit
def _named_receive(tile, out, BREAK: gl.constexpr):
    if BREAK != "no wait":
        named_wait(6, 256)
    gl.store(out + tile_offsets(), tile.load(BLOCKED))


@gluon.jit
def named(tiles, x, out, BREAK: gl.constexpr):
    """out = x, from partition to partition by a named barrier."""
    tile = alloc_tile()
    gl.warp_specialize(
        [(_named_send, (x, tile, BREAK)), (_named_receive, (tile, out, BREAK))], [4], [64]
    )


@gluon.jit
def _init_late(barrier, other, BREAK: gl.constexpr):
    if BREAK == "initialised by the other":
        mbarrier.init(barrier, count=1)
    mbarrier.arrive(other, count=1)


@gluon.jit
def _use(x, out, barrier, other, BREAK: gl.constexpr):
    if BREAK == "waits for each other":
        mbarrier.wait(barrier, 0)
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, 0)
    mbarrier.wait(other, 0)
    gl.store(out + tile_offsets(), gl.load(x + tile_offsets()))


@gluon.jit
def initialised(tiles, x, out, BREAK: gl.constexpr):
    """out = x, after two barriers of two partitions."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if BREAK != "initialised by the other":
        mbarrier.init(barrier, count=1)
    other = alloc_barrier()
    gl.warp_specialize(
        [(_use, (x, out, barrier, other, BREAK)), (_init_late, (barrier, other, BREAK))],
        [4], [64],
    )  # fmt: skip


@gluon.jit
def outside(tiles, x, out, BREAK: gl.constexpr):
    """out = x by loads of threads."""
    far = 1 << 20 if BREAK == "address" else 0
    gl.store(out + tile_offsets(), gl.load(x + far + tile_offsets()))
