"""Tiny Gluon kernels of two CTAs, each broken where `BREAK` says so: see `tiny_kernels`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    cluster,
    fence_async_shared,
    mbarrier,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
    tma,
)

ROWS = gl.constexpr(256)
COLUMNS = gl.constexpr(64)
STEP = gl.constexpr(32)  # of the dimension that a product sums over
SPLIT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]]))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[[0, 0]]))
PARTS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[1, 0]]))


@gluon.jit
def offsets(LAYOUT: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    row = gl.arange(0, rows, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, columns, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(row, 1) * columns + gl.expand_dims(column, 0)


@gluon.jit
def barrier_of(COUNT: gl.constexpr, IS_SHARED: gl.constexpr):
    barrier = mbarrier.allocate_mbarrier(two_ctas=IS_SHARED)
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit
def multicast(tiles, x, out, BREAK: gl.constexpr):
    """out = tile 0 + tile 1, of which each CTA has copies; half of the rows come from each CTA."""
    shape: gl.constexpr = tiles.block_shape
    tile = gl.allocate_shared_memory(tiles.dtype, shape, tiles.layout)
    full = barrier_of(1, False)
    empty = barrier_of(1, BREAK != "the peer's stage is not empty")
    total = gl.zeros(shape, gl.float32, COPIED)
    bytes: gl.constexpr = tiles.nbytes_per_cta // (2 if BREAK == "fewer bytes" else 1)
    for i in gl.static_range(2):
        if i > 0:
            mbarrier.wait(empty, 0)
        mbarrier.expect(full, bytes)
        tma.async_load(tiles, [i * shape[0], 0], full, tile, multicast=True)
        if BREAK != "no wait":
            mbarrier.wait(full, i)
        total += tile.load(COPIED).to(gl.float32)
        if BREAK != "no fence":
            fence_async_shared()
        mbarrier.arrive(empty)
    gl.store(out + offsets(SPLIT, shape[0], shape[1]), gl.convert_layout(total, SPLIT))


@gluon.jit
def pair(a, b, out, BREAK: gl.constexpr):
    """out = a b by the tensor cores of a pair, which load two steps to the same tiles."""
    left = gl.allocate_shared_memory(a.dtype, a.block_shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, b.block_shape, b.layout)
    LAYOUT: gl.constexpr = TensorMemoryLayout((128, 128), 1, cga_layout=[[1, 0]], two_ctas=True)
    acc = allocate_tensor_memory(gl.float32, [ROWS, 128], LAYOUT)
    full = barrier_of(1, BREAK != "the peer's part is not waited for")
    done = barrier_of(1, False)
    for i in gl.static_range(2):
        mbarrier.expect(full, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [0, i * STEP], full, left)
        tma.async_load(b, [i * STEP, 0], full, right)
        mbarrier.wait(full, i)
        tcgen05_mma(left, right, acc, use_acc=i > 0, mbarriers=[done])
        if BREAK != "no wait":
            mbarrier.wait(done, i)
    values = acc.load()
    gl.store(out + offsets(values.type.layout, ROWS, 128), values)


@gluon.jit
def pair_of_stored(x, out, BREAK: gl.constexpr):
    """out = x xᵀ for the first 128 columns: threads of each CTA store what a pair multiplies."""
    LEFT: gl.constexpr = gl.NVMMASharedLayout(128, 16, cga_layout=[[1, 0]])
    LAYOUT: gl.constexpr = TensorMemoryLayout((128, 128), 1, cga_layout=[[1, 0]], two_ctas=True)
    left = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], LEFT)
    right = gl.allocate_shared_memory(gl.bfloat16, [128, COLUMNS], LEFT)
    acc = allocate_tensor_memory(gl.float32, [ROWS, 128], LAYOUT)
    done = barrier_of(1, False)
    left.store(gl.load(x + offsets(SPLIT, ROWS, COLUMNS)))
    right.store(gl.load(x + offsets(SPLIT, 128, COLUMNS)))
    if BREAK == "" or BREAK == "relaxed barrier" or BREAK == "no barrier":
        fence_async_shared()
    if BREAK == "relaxed barrier":
        cluster.barrier(relaxed=True)
    elif BREAK != "no barrier":
        gl.barrier(cluster=True)
    if BREAK == "fence of a CTA for both":
        fence_async_shared()
    if BREAK == "right: fence of the cluster":
        fence_async_shared(cluster=True)
    tcgen05_mma(left, right.permute((1, 0)), acc, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 0)
    values = acc.load()
    gl.store(out + offsets(values.type.layout, ROWS, 128), values)


@gluon.jit
def multicast_product(a, b, out, BREAK: gl.constexpr):
    """out = a b: each CTA has rows of a and a copy of b, which one load brings to both."""
    left = gl.allocate_shared_memory(a.dtype, a.block_shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, b.block_shape, b.layout)
    LAYOUT: gl.constexpr = TensorMemoryLayout((128, 128), 1, cga_layout=[[1, 0]])
    acc = allocate_tensor_memory(gl.float32, [ROWS, 128], LAYOUT)
    is_multicast: gl.constexpr = BREAK != "commit to one CTA"
    full = barrier_of(1, False)
    done = barrier_of(tcgen05_mma_barrier_count([left, right], is_multicast, False), False)
    for i in gl.static_range(2):
        mbarrier.expect(full, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [0, i * STEP], full, left)
        tma.async_load(b, [i * STEP, 0], full, right, multicast=True)
        mbarrier.wait(full, i)
        tcgen05_mma(
            left, right, acc, use_acc=i > 0, multicast=is_multicast, mbarriers=[done]
        )  # fmt: skip
        mbarrier.wait(done, i)
    values = acc.load()
    gl.store(out + offsets(values.type.layout, ROWS, 128), values)


@gluon.jit
def peer_read(x, out, BREAK: gl.constexpr):
    """out = the rows of x that CTA 0 has, twice: half of them is read by CTA 1."""
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], PARTS)
    tile.store(gl.load(x + offsets(SPLIT, ROWS, COLUMNS)).to(gl.float32))
    if BREAK == "relaxed barrier":
        cluster.barrier(relaxed=True)
    elif BREAK != "no barrier":
        gl.barrier(cluster=True)
    first = tile.slice(0, 128, 0)
    values = gl.convert_layout(first.load(COPIED), SPLIT)
    if BREAK == "right: written after a barrier":
        gl.barrier(cluster=True)
    if BREAK == "written too soon" or BREAK == "right: written after a barrier":
        tile.store(gl.zeros([ROWS, COLUMNS], gl.float32, SPLIT))
    gl.store(out + offsets(SPLIT, 128, COLUMNS), values * 2.0)


@gluon.jit
def announced(x, out, BREAK: gl.constexpr):
    """The same; CTA 0 arrives at an mbarrier of each CTA when it has stored its rows."""
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], PARTS)
    ready = barrier_of(1, False)
    tile.store(gl.load(x + offsets(SPLIT, ROWS, COLUMNS)).to(gl.float32))
    if BREAK == "arrives at its own":
        mbarrier.arrive(ready)
    elif BREAK == "arrives twice":
        mbarrier.arrive(ready)
        mbarrier.arrive(ready, from_cta=0)
    else:
        mbarrier.arrive(ready, from_cta=0)
    mbarrier.wait(ready, 0)
    values = gl.convert_layout(tile.slice(0, 128, 0).load(COPIED), SPLIT)
    gl.store(out + offsets(SPLIT, 128, COLUMNS), values * 2.0)


@gluon.jit
def stored_tiles(tiles, x, out, BREAK: gl.constexpr):
    """Rows of tiles = x: each CTA writes its half of two tiles."""
    shape: gl.constexpr = tiles.block_shape
    tile = gl.allocate_shared_memory(tiles.dtype, shape, tiles.layout)
    # a tile that begins half a tile after another one: CTA 0 writes where CTA 1 did
    step: gl.constexpr = shape[0] // 2 if BREAK == "tiles overlap" else shape[0]
    for i in gl.static_range(2):
        tile.store(gl.load(x + i * shape[0] * shape[1] + offsets(SPLIT, shape[0], shape[1])))
        fence_async_shared()
        tma.async_store(tiles, [i * step, 0], tile)
        tma.store_wait(0)
