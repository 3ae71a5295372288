"""What Gluon kernels for Hopper share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from mlakit.kernels.hopper.compat import reinterpret, tma_load


@gluon.jit
def opaque_zero():
    """A zero the compiler cannot see through: what is indexed with it is not kept in registers.

    The addresses of operands in shared memory never change, so some forty of them would be, and
    others would be spilled for them.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def new_barrier(ARRIVALS: gl.constexpr = 1):
    """Of its own allocation: between two of them the compiler then needs no block-wide barrier."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=ARRIVALS)
    return barrier


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many, to be chosen from at run time, each of them complete after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(barriers.index(place), count=ARRIVALS)
    return barriers


@gluon.constexpr_function
def lanes_of(warps):
    """[32], one element a lane, the same ones in each of so many warps."""
    return gl.BlockedLayout([1], [32], [warps], [0])


# four elements, all of them in each thread
IN_EACH_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2]],
        lane_bases=[[0], [0], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[4],
    )
)


_PREFETCH = gl.constexpr("""{
    .reg .pred is_there;
    setp.ne.u32 is_there, $2, 0;
    @is_there cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}""")


@gluon.jit
def ask_for_each(address, size):
    """`ask_for`, with an address and a size of each thread's own."""
    gl.inline_asm_elementwise(
        _PREFETCH, "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ask_for(address, size):
    """Have so many bytes brought to L2, multiples of 16, or none; for four warps."""
    # by one thread: requests of a warp go out one by one
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    ask_for_each(address, gl.where(thread == 0, size, 0))


@gluon.jit
def load_box(descriptor, row, column, barrier, buffer, BYTES: gl.constexpr):
    """Start one TMA load, and tell the barrier to wait for it."""
    mbarrier.expect(barrier, BYTES)
    tma_load(descriptor, [row, column], barrier, buffer)


@gluon.jit
def load_parts(descriptor, rows, column, barrier, buffer):
    """Start as many TMA loads as a buffer has boxes.

    rows    where the boxes of each part of the buffer's rows begin, in lanes as of `lanes_of`
    boxes   are as wide as a panel, what a swizzle is of: 128 bytes, or as the buffer if that is
            narrower. A panel's rows are contiguous, and swizzled alike from each eighth row on
    """
    PART: gl.constexpr = descriptor.block_shape[0]
    WIDTH: gl.constexpr = descriptor.block_shape[1]
    PARTS: gl.constexpr = buffer.shape[0] // PART
    PANELS: gl.constexpr = buffer.shape[1] // WIDTH
    boxes = reinterpret(buffer, buffer.dtype, [PANELS * PARTS, PART, WIDTH], buffer.layout)
    lane = gl.arange(0, 32, rows.type.layout)
    # from 0, which no compiler knows: written out, it would take registers a producer has not got
    for part in range(gl.program_id(2), PARTS):
        row = gl.sum(gl.where(lane == part, rows, 0), 0)
        for panel in gl.static_range(PANELS):
            box = boxes.index(panel * PARTS + part)
            tma_load(descriptor, [row, column + panel * WIDTH], barrier, box)


@gluon.jit
def load_rows(descriptor, rows, column, barrier, buffer):
    """Start to load the rows of a block: as one box, or as boxes of its pages (`load_parts`)."""
    if descriptor.block_shape[0] < 64:
        load_parts(descriptor, rows, column, barrier, buffer)
    else:
        tma_load(descriptor, [rows, column], barrier, buffer)


@gluon.jit
def load_slices(
    descriptor, rows, FIRST: gl.constexpr, column, barrier, buffer, BYTES: gl.constexpr
):  # fmt: skip
    """As `load_parts`, of boxes as wide as the buffer: four warps then load a panel each.

    FIRST  lane of the `rows`
    """
    PART: gl.constexpr = descriptor.block_shape[0]
    # opaque: rows that several buffers have in common would be kept in registers
    lane = gl.arange(0, 32, rows.type.layout) + opaque_zero()
    mbarrier.expect(barrier, BYTES)
    for part in gl.static_range(buffer.shape[0] // PART):
        row = gl.sum(gl.where(lane == FIRST + part, rows, 0), 0)
        tma_load(descriptor, [row, column], barrier, buffer.slice(part * PART, PART, 0))


@gluon.constexpr_function
def _scale_unless_ones(count):
    """So many of a thread's elements times as many factors, of which those of a row are alike.

    Elements 0 and 2 are of the two rows that a thread has.
    """
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i}; " for i in range(count))
    return f"""{{
        .reg .pred is_other;
        setp.neu.f32 is_other, ${2 * count}, 0f3F800000;
        setp.neu.or.f32 is_other, ${2 * count + 2}, 0f3F800000, is_other;
        vote.sync.any.pred is_other, is_other, 0xFFFFFFFF;
        @!is_other bra.uni DONE;
        {products}
    DONE:
    }}"""


@gluon.constexpr_function
def _in_place(count):
    """Registers of the elements before and after, and of factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def scale_rows(sums, factor):
    """sums [64, columns] of a dot times the rows' factors: nothing is done where a warp's are 1."""
    COUNT: gl.constexpr = min(
        sums.shape[1] // 2, 64
    )  # elements of a thread that are left out at once
    factors = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout)), 1)
    return gl.inline_asm_elementwise(
        _scale_unless_ones(COUNT), _in_place(COUNT), [sums, factors.broadcast_to(sums.shape)],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def zero_rows(boxes, places, first):
    """Zero the rows from `first` on of some boxes, [64, columns] of 16 bits: there may be NaN."""
    # as words, and one panel of 128 bytes a row after the other: less code, fewer registers
    PANELS: gl.constexpr = boxes.shape[2] // 64
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    if first < 64:
        is_kept = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1) < first
        for i in gl.static_range(len(places)):
            panels = reinterpret(boxes.index(places[i]), gl.int32, [PANELS, 64, 32], WORDS)
            for panel in range(PANELS):
                rows = panels.index(panel)
                rows.store(gl.where(is_kept, rows.load(LAYOUT), 0))
        fence_async_shared()
