"""Device functions and layouts that the Gluon kernels for Hopper share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from mlakit.kernels.hopper.device.compat import reinterpret, tma_load


@gluon.constexpr_function
def smem_layout(columns, bits):
    """The layout of an smem tile: rows of `columns` elements of `bits` bits.

    The swizzle atom is 128 bytes wide, or as wide as the row where that is narrower. TMA writes
    this layout and wgmma reads it.
    """
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(columns * bits // 8, 128), element_bitwidth=bits, rank=2
    )


@gluon.constexpr_function
def acc_layout(columns, k=16):
    """The layout of a wgmma accumulator [64 · n, columns] of four warps; k = 32 for 8-bit types."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, k])


@gluon.constexpr_function
def lane_layout(warps):
    """Return the layout of [32 · n], an element per lane; each of `warps` warps has all of [32]."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def in_each_thread(warps):
    """Return the layout of [4], all of which each thread of one or four warps has."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2]],
        lane_bases=[[0]] * 5,
        warp_bases=[[0]] * (warps // 2),
        block_bases=[],
        shape=[4],
    )


SMEM_16BIT = gl.constexpr(smem_layout(64, 16))  # of 64 or more columns
SMEM_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
IN_EACH_THREAD = gl.constexpr(in_each_thread(4))


@gluon.jit
def opaque_zero():
    """A zero that the compiler cannot fold: what is indexed with it is recomputed, not kept.

    The smem descriptors of wgmma operands are loop-invariant. Without this the compiler keeps about
    forty of them in registers and spills others.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def allow_dependents():
    """Let the next kernel start (PDL) once every CTA allows it; it waits for this one to end."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def log2(x):
    """Return log2(x) within 2**-22, relative to 1 or the result; gl.log2 takes 35 instructions."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _named_asm(kind, threads):
    return f"""{{
        .reg .pred is_asked;
        setp.ne.s32 is_asked, $2, 0;
        @is_asked bar.{kind} $1, {threads};
        mov.u32 $0, 0;
    }}"""


@gluon.jit
def named_arrive(barrier_id, THREADS: gl.constexpr):
    """Arrive at a named barrier of the hardware, and go on.

    An mbarrier counts one arrival per warp role, before which the compiler makes all warps of the
    role wait for each other, and after which it does so again. Here each warp arrives by itself.
    """
    gl.inline_asm_elementwise(
        _named_asm("arrive", THREADS),
        "=r,r,r",
        [gl.to_tensor(barrier_id), gl.to_tensor(1)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def named_wait(barrier_id, THREADS: gl.constexpr, is_asked=True):
    """Arrive at a named barrier and wait for the other threads, if `is_asked`."""
    asked = gl.to_tensor(is_asked).to(gl.int32)
    gl.inline_asm_elementwise(
        _named_asm("sync", THREADS),
        "=r,r,r",
        [gl.to_tensor(barrier_id), asked],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def alloc_vector(COUNT: gl.constexpr):
    """Return float32 [COUNT] in shared memory, which warpgroups exchange values through."""
    return gl.allocate_shared_memory(gl.float32, [COUNT], SMEM_VECTOR)


@gluon.jit
def alloc_barrier(ARRIVALS: gl.constexpr = 1):
    """Allocate one barrier. Separate allocations need no CTA-wide barrier between two barriers."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=ARRIVALS)
    return barrier


@gluon.jit
def alloc_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT barriers indexed at run time; each phase takes ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(COUNT):
        mbarrier.init(barriers.index(stage), count=ARRIVALS)
    return barriers


# First in a loop: ptxas then leaves it as it is. In a function of its own it would do nothing: a
# label would stand between the loop and the pragma.
_NO_UNROLL = gl.constexpr('.pragma "nounroll"; mov.u32 $0, 0;')


@gluon.jit
def alloc_barriers_by_loop(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """`alloc_barriers` in less code.

    Unrolled, a barrier takes 5 to 14 instructions, which run once, and wait to be fetched.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for stage in range(opaque_zero(), COUNT):
        gl.inline_asm_elementwise(_NO_UNROLL, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        mbarrier.init(barriers.index(stage), count=ARRIVALS)
    return barriers


@gluon.jit
def alloc_stage_barriers(STAGES: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """(full, empty) of a pipeline with many stages: `alloc_barriers_by_loop`, with one loop."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in range(opaque_zero(), STAGES):
        gl.inline_asm_elementwise(_NO_UNROLL, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        mbarrier.init(full.index(stage), count=FULL)
        mbarrier.init(empty.index(stage), count=EMPTY)
    return full, empty


_PREFETCH = gl.constexpr("""{
    .reg .pred is_there;
    setp.ne.u32 is_there, $2, 0;
    @is_there cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}""")


@gluon.jit
def prefetch_l2_each(address, size):
    """Prefetch `size` bytes to L2, an address and a size per thread: multiples of 16, or 0."""
    gl.inline_asm_elementwise(
        _PREFETCH, "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prefetch_l2(address, size):
    """Prefetch `size` bytes to L2, a multiple of 16, or 0; called by four warps."""
    # one thread issues it: the requests of a warp would go out one by one
    thread = gl.arange(0, 128, lane_layout(4))
    prefetch_l2_each(address, gl.where(thread == 0, size, 0))


@gluon.jit
def tma_load_tile(descriptor, row, column, barrier, smem, BYTES: gl.constexpr):
    """Start one TMA load that `barrier` expects."""
    mbarrier.expect(barrier, BYTES)
    tma_load(descriptor, [row, column], barrier, smem)


@gluon.jit
def _tma_load_pages(descriptor, rows, column, barrier, smem):
    """Load a block of keys whose pages are smaller than the block: one TMA tile per page and
    swizzle atom.

    rows  first row of each page, one page per lane (`lane_layout`)

    A TMA tile is 128 bytes wide, or as wide as the smem tile where that is narrower. The rows of a
    swizzle atom are contiguous, and the swizzle repeats every eight rows.
    """
    PAGE: gl.constexpr = descriptor.block_shape[0]
    WIDTH: gl.constexpr = descriptor.block_shape[1]
    PAGES: gl.constexpr = smem.shape[0] // PAGE
    ATOMS: gl.constexpr = smem.shape[1] // WIDTH
    tiles = reinterpret(smem, smem.dtype, [ATOMS * PAGES, PAGE, WIDTH], smem.layout)
    lane = gl.arange(0, 32, rows.type.layout)
    # program_id(2) is 0, which no compiler knows: unrolled, the loop would exceed the producer's
    # registers
    for page in range(gl.program_id(2), PAGES):
        row = gl.sum(gl.where(lane == page, rows, 0), 0)
        for atom in gl.static_range(ATOMS):
            tile = tiles.index(atom * PAGES + page)
            tma_load(descriptor, [row, column + atom * WIDTH], barrier, tile)


@gluon.jit
def tma_load_block(descriptor, rows, column, barrier, smem):
    """Start to load some columns of a block of 64 keys: one TMA tile, or one per page."""
    if descriptor.block_shape[0] < 64:
        _tma_load_pages(descriptor, rows, column, barrier, smem)
    else:
        tma_load(descriptor, [rows, column], barrier, smem)


@gluon.jit
def tma_load_page_slices(
    descriptor, rows, FIRST: gl.constexpr, column, barrier, smem, BYTES: gl.constexpr
):
    """Load pages like `_tma_load_pages`, with TMA tiles as wide as the smem tile: each of four
    warps then loads a swizzle atom.

    FIRST  lane of `rows` that has the first page
    """
    PAGE: gl.constexpr = descriptor.block_shape[0]
    # opaque: rows that several smem tiles share would be kept in registers
    lane = gl.arange(0, 32, rows.type.layout) + opaque_zero()
    mbarrier.expect(barrier, BYTES)
    for page in gl.static_range(smem.shape[0] // PAGE):
        row = gl.sum(gl.where(lane == FIRST + page, rows, 0), 0)
        tma_load(descriptor, [row, column], barrier, smem.slice(page * PAGE, PAGE, 0))


@gluon.constexpr_function
def _rescale_asm(count):
    """PTX that multiplies `count` elements of a thread, unless the rescale factors of its warp are
    all 1.

    Elements 0 and 2 belong to the two rows that a thread has.
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
def _rescale_constraints(count):
    """Registers of the elements after and before, and of the factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale_acc(acc, rescale):
    """acc [64, columns] · rescale [64]; a warp whose factors are all 1 skips the multiplication."""
    COUNT: gl.constexpr = min(acc.shape[1] // 2, 64)  # elements per inline assembly
    factors = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout)), 1)
    return gl.inline_asm_elementwise(
        _rescale_asm(COUNT),
        _rescale_constraints(COUNT),
        [acc, factors.broadcast_to(acc.shape)],
        dtype=gl.float32,
        is_pure=False,
        pack=COUNT,
    )


@gluon.jit
def zero_rows(tiles, stages, first):
    """Zero the rows from `first` on of some smem tiles [64, columns] of 16 bits.

    Rows past a request's last key may hold NaN, and 0 · NaN is NaN.
    """
    # view tiles as words, one swizzle atom after the other: less code, fewer registers
    ATOMS: gl.constexpr = tiles.shape[2] // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    if first < 64:
        is_kept = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1) < first
        for i in gl.static_range(len(stages)):
            atoms = reinterpret(
                tiles.index(stages[i]), gl.int32, [ATOMS, 64, 32], smem_layout(32, 32)
            )
            for atom in range(ATOMS):
                rows = atoms.index(atom)
                rows.store(gl.where(is_kept, rows.load(LAYOUT), 0))
        fence_async_shared()
