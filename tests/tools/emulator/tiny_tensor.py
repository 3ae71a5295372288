"""Tiny Gluon kernels of Blackwell, each broken where `BREAK` says so: see `tiny_kernels`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tma,
)

from mlakit.kernels.hopper.device.primitives import alloc_barrier, smem_layout

ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(64)
SMEM = gl.constexpr(smem_layout(64, 16))
WORDS = gl.constexpr(smem_layout(64, 32))
BLOCKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
GATHERED = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0])))


@gluon.jit
def offsets(LAYOUT: gl.constexpr, columns: gl.constexpr):
    """Offsets of a contiguous tile of 128 rows."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, columns, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(row, 1) * columns + gl.expand_dims(column, 0)


@gluon.jit
def alloc_tensor(DTYPE: gl.constexpr, columns: gl.constexpr):
    LAYOUT: gl.constexpr = TensorMemoryLayout((128, columns), col_stride=1)
    return allocate_tensor_memory(DTYPE, [ROWS, columns], LAYOUT)


@gluon.jit
def stored_tile(x):
    """x in shared memory."""
    tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], SMEM)
    tile.store(gl.load(x + offsets(BLOCKED, COLUMNS)))
    return tile


@gluon.jit
def store_result(out, acc):
    values = acc.load()
    gl.store(out + offsets(values.type.layout, acc.shape[1]), values)


@gluon.jit
def tensor_product(rows, x, index, out, BREAK: gl.constexpr):
    """out = x xᵀ by two products, the second of which adds to the first."""
    tile = stored_tile(x)
    acc = alloc_tensor(gl.float32, ROWS)
    barrier = alloc_barrier()
    if BREAK != "no fence":
        fence_async_shared()
    left = tile.slice(0, 32, 1)
    right = tile.slice(32, 32, 1)
    tcgen05_mma(left, left.permute((1, 0)), acc, use_acc=BREAK == "no first value", mbarriers=[])
    if BREAK == "commits too soon":
        tcgen05_commit(barrier)
    tcgen05_mma(right, right.permute((1, 0)), acc, mbarriers=[])
    if BREAK != "commits too soon" and BREAK != "no commit":
        tcgen05_commit(barrier)
    if BREAK == "operand overwritten":
        tile.store(gl.load(x + offsets(BLOCKED, COLUMNS)))
    if BREAK == "not loaded":
        gl.store(out + offsets(BLOCKED, ROWS), gl.zeros([ROWS, ROWS], gl.float32, BLOCKED))
    else:
        if BREAK != "no wait":
            mbarrier.wait(barrier, 0)
        store_result(out, acc)


@gluon.jit
def _probabilities(x, out, p, acc, p_full, o_full, BREAK: gl.constexpr):
    values = gl.load(x + offsets(p.get_reg_layout(), COLUMNS))
    p.store(values)
    mbarrier.arrive(p_full, count=1)
    if BREAK != "P written too soon" and BREAK != "O scaled too soon":
        mbarrier.wait(o_full, 0)
    if BREAK != "O scaled too soon":
        p.store(values + values)
    acc.store(acc.load() * 2.0)
    mbarrier.arrive(p_full, count=1)
    if BREAK != "O read too soon":
        mbarrier.wait(o_full, 1)
    store_result(out, acc)


@gluon.jit
def _multiply(tile, p, acc, p_full, o_full, BREAK: gl.constexpr):
    if BREAK != "P read too soon":
        mbarrier.wait(p_full, 0)
    tcgen05_mma(p, tile.slice(0, COLUMNS, 0), acc, use_acc=False, mbarriers=[o_full])
    if BREAK != "O used too soon":
        mbarrier.wait(p_full, 1)
    tcgen05_mma(p, tile.slice(0, COLUMNS, 0), acc, mbarriers=[o_full])


@gluon.jit
def tensor_operand(rows, x, index, out, BREAK: gl.constexpr):
    """out = 4 x x[:64]: the left operand is in tensor memory, and the result is scaled there."""
    tile = stored_tile(x)
    fence_async_shared()
    p = alloc_tensor(gl.bfloat16, COLUMNS)
    acc = alloc_tensor(gl.float32, COLUMNS)
    p_full = alloc_barrier()
    o_full = alloc_barrier()
    gl.warp_specialize(
        [(_probabilities, (x, out, p, acc, p_full, o_full, BREAK)),
         (_multiply, (tile, p, acc, p_full, o_full, BREAK))],
        [1], [48],
    )  # fmt: skip


@gluon.jit
def tensor_copy(rows, x, index, out, BREAK: gl.constexpr):
    """out = x, which is copied from shared memory to tensor memory."""
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], WORDS)
    tile.store(gl.load(x + offsets(BLOCKED, COLUMNS)).to(gl.float32))
    if BREAK != "no fence":
        fence_async_shared()
    acc = alloc_tensor(gl.float32, COLUMNS)
    barrier = alloc_barrier()
    tcgen05_copy(tile, acc)
    tcgen05_commit(barrier)
    if BREAK != "no wait":
        mbarrier.wait(barrier, 0)
    store_result(out, acc)


@gluon.jit
def gathered(rows, x, index, out, BREAK: gl.constexpr):
    """out = x[index] by a TMA gather, with zeros for the rows that are not there."""
    tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], SMEM)
    barrier = alloc_barrier()
    row = gl.load(index + gl.arange(0, ROWS, GATHERED))
    mbarrier.expect(barrier, ROWS * COLUMNS * 2 // (2 if BREAK == "fewer bytes" else 1))
    column = gl.to_tensor(4 if BREAK == "unaligned column" else 0)
    tma.async_gather(rows, row, column, barrier, tile)
    if BREAK != "no wait":
        mbarrier.wait(barrier, 0)
    gl.store(out + offsets(BLOCKED, COLUMNS), tile.load(BLOCKED).to(gl.float32))


@gluon.jit
def _load_twice(rows, index, tile, full, empty, BREAK: gl.constexpr):
    row = gl.load(index + gl.arange(0, ROWS, GATHERED))
    for i in gl.static_range(2):
        if i > 0 and BREAK != "loaded too soon":
            mbarrier.wait(empty, 0)
        mbarrier.expect(full, ROWS * COLUMNS * 2)
        tma.async_gather(rows, row, gl.to_tensor(0), full, tile)


@gluon.jit
def _multiply_twice(out, tile, acc, full, empty, BREAK: gl.constexpr):
    for i in gl.static_range(2):
        mbarrier.wait(full, i)
        tcgen05_mma(tile, tile.permute((1, 0)), acc, use_acc=i > 0, mbarriers=[empty])
    mbarrier.wait(empty, 1)
    store_result(out, acc)


@gluon.jit
def reloaded(rows, x, index, out, BREAK: gl.constexpr):
    """out = 2 y yᵀ, y = x[index]: TMA writes again what tcgen05 has read.

    Who loads learns of that from the commit, which does not say that the first load is complete.
    """
    tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], SMEM)
    acc = alloc_tensor(gl.float32, ROWS)
    full = alloc_barrier()
    empty = alloc_barrier()
    gl.warp_specialize(
        [(_multiply_twice, (out, tile, acc, full, empty, BREAK)),
         (_load_twice, (rows, index, tile, full, empty, BREAK))],
        [4], [96],
    )  # fmt: skip


@gluon.jit
def reused_columns(rows, x, index, out, BREAK: gl.constexpr):
    """out = x xᵀ: the product has columns of a tile that another product has been done with."""
    tile = stored_tile(x)
    fence_async_shared()
    barrier = alloc_barrier()
    kept = alloc_tensor(gl.float32, 256)
    kept.store(gl.zeros([ROWS, 256], gl.float32, kept.get_reg_layout()))
    first = alloc_tensor(gl.float32, ROWS)
    tcgen05_mma(tile, tile.permute((1, 0)), first, use_acc=False, mbarriers=[barrier])
    if BREAK != "used before it is released":
        mbarrier.wait(barrier, 0)
    if BREAK == "released too late":
        first.store(first.load() * 2.0)
    # with the tile that is kept, two of these are one more than there are columns for
    second = alloc_tensor(gl.float32, 256)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, second.slice(0, ROWS).get_reg_layout())
    acc = second.slice(0, ROWS)
    if BREAK != "value of the last tile":
        acc.store(zeros)
    tcgen05_mma(tile, tile.permute((1, 0)), acc, use_acc=True, mbarriers=[barrier])
    mbarrier.wait(barrier, 1)
    if BREAK == "released too late":
        acc.store(acc.load() + first.load())
    store_result(out, acc)
    kept.store(gl.zeros([ROWS, 256], gl.float32, kept.get_reg_layout()))
