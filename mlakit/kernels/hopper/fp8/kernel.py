"""Block-scaled product of FP8 matrices, plain and batched, on Hopper.

Maths      out[m, n] = Σ_g a_scale[g, m] b_scale[n/h, g] Σ_{k in g} a[m, k] b[n, k]
Work       persistent CTAs; a work tile is rows of the left operand by rows of the right one, over
           all of K in steps of 128 columns. Left is a, right is b; with few rows of a they are
           swapped, so that rows of b fill the M side of wgmma

             producer, one warp             two consumer warpgroups
             wait for an empty stage
             load both tiles      full ->   wait; P = left · rightᵀ of one step, piece by piece
                                            load the scales of the next step
                                 <- empty   when the last P of the step is complete
                                            acc += P · a_scale · b_scale
                                            after the last step: round, write

           Plain: a warpgroup has the same one or two pieces of 64 rows of every step. The tensor
           cores work for one warpgroup while the other one scales. Swapped: the warpgroups take
           turns at the steps, and add up their sums at the end (`epilogue`)
Memory     operands by TMA, which reads zeros past the last row and column; scales by threads, one
           step ahead. 4 to 16 stages, up to 208 KiB of shared memory
Deadlock   none: all roles walk the same tiles and steps, and fill, wait for and release stages in
           the same order
Limits     operands whose rows TMA can address; groups of multiples of 128; bf16 and e4m3 results
           (`kernels.hopper.support`)
Numbers    products of a step are accumulated as tensor cores accumulate FP8 products
           (`reference.hopper_fp8_mma`), the steps in float32
Lineage    DeepGEMM (promotion of each step to float32, roles, swapped operands); ours: warpgroups
           of two pieces in place of multicast, split K inside of a CTA
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from mlakit.kernels.hopper.device.compat import record, reinterpret, tma_load
from mlakit.kernels.hopper.device.primitives import (
    acc_layout,
    alloc_barrier,
    alloc_stage_barriers,
    smem_layout,
)
from mlakit.kernels.hopper.fp8 import configs
from mlakit.kernels.hopper.fp8.epilogue import Results, Sums, store_rows, store_swapped
from mlakit.kernels.hopper.fp8.tiles import locate_tile, make_sizes

STEP = gl.constexpr(configs.STEP)
PIECE = gl.constexpr(configs.PIECE)
WARPGROUPS = gl.constexpr(configs.WARPGROUPS)


@record
class Stages:
    """Tiles of both operands over a step of K."""

    left: object  # [STAGES, LEFT_ROWS, STEP]
    right: object  # [STAGES, COLUMNS, STEP]
    full: object
    empty: object


@record
class Scales:
    """The scales of both operands."""

    a: object
    b: object
    stride_a_batch: object
    stride_a_row: object
    stride_a_group: object
    stride_b_batch: object
    stride_b_row: object  # along the groups of N
    stride_b_group: object
    M: object
    N_GROUP: object
    K_GROUP: object


@gluon.jit
def _stage_of(fill, STAGES: gl.constexpr):
    """Return (stage, phase) of a fill; STAGES is a power of two."""
    return fill & (STAGES - 1), (fill // STAGES) & 1


@gluon.jit
def _producer(left, right, sizes, stages):
    """Run the producer warp."""
    STAGES: gl.constexpr = stages.left.shape[0]
    LEFT_ROWS: gl.constexpr = sizes.LEFT_ROWS
    COLUMNS: gl.constexpr = sizes.COLUMNS
    fill = gl.to_tensor(0)
    index = gl.program_id(0)
    while index < sizes.num_tiles:
        tile = locate_tile(sizes, index)
        for step in range(sizes.steps):
            stage, phase = _stage_of(fill, STAGES)
            full = stages.full.index(stage)
            mbarrier.wait(stages.empty.index(stage), phase ^ 1)
            mbarrier.expect(full, (LEFT_ROWS + COLUMNS) * STEP)
            left_tile = reinterpret(
                stages.left.index(stage), left.dtype, [1, LEFT_ROWS, STEP], left.layout
            )
            right_tile = reinterpret(
                stages.right.index(stage), right.dtype, [1, COLUMNS, STEP], right.layout
            )
            tma_load(left, [tile.batch, tile.left, step * STEP], full, left_tile)
            tma_load(right, [tile.batch, tile.right, step * STEP], full, right_tile)
            fill += 1
        index += gl.num_programs(0)


@gluon.jit
def _load_rows(scales, tile, row, step):
    """Load the scales of rows of `a` at a step of K."""
    group = (step * STEP // scales.K_GROUP).to(gl.int64)
    at = tile.batch.to(gl.int64) * scales.stride_a_batch + group * scales.stride_a_group
    rows = row.to(gl.int64) * scales.stride_a_row
    return gl.load(scales.a + at + rows, mask=row < scales.M, other=0.0)


@gluon.jit
def _load_block(scales, tile, row, step):
    """Load the scale of the block of `b` that has a row, at a step of K."""
    group = (step * STEP // scales.K_GROUP).to(gl.int64)
    at = tile.batch.to(gl.int64) * scales.stride_b_batch + group * scales.stride_b_group
    return gl.load(scales.b + at + (row // scales.N_GROUP).to(gl.int64) * scales.stride_b_row)


@gluon.jit
def _multiply(stages, stage, ROW: gl.constexpr):
    """Start the products of a piece, whose rows begin at ROW of the left tile."""
    COLUMNS: gl.constexpr = stages.right.shape[1]
    acc = gl.zeros([PIECE, COLUMNS], gl.float32, acc_layout(COLUMNS, 32))
    left = stages.left.index(stage).slice(ROW, PIECE, 0)
    right = stages.right.index(stage).permute((1, 0))
    return warpgroup_mma(left, right, acc, use_acc=False, is_async=True)


@gluon.jit
def _add_scaled(acc, products, factor):
    """acc + products · factor, computed here: moved behind the next wgmma, the products of two
    pieces would be live at the same time, and do not fit the registers."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [products, factor.broadcast_to(products.shape), acc],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _plain_consumer(sizes, stages, scales, results, WG: gl.constexpr):
    """Run a warpgroup over its pieces of every step."""
    STAGES: gl.constexpr = stages.left.shape[0]
    ACC: gl.constexpr = acc_layout(sizes.COLUMNS, 32)
    PIECES: gl.constexpr = sizes.LEFT_ROWS // (WARPGROUPS * PIECE)
    FIRST: gl.constexpr = WG * PIECES * PIECE
    fill = gl.to_tensor(0)
    index = gl.program_id(0)
    while index < sizes.num_tiles:
        tile = locate_tile(sizes, index)
        row = tile.left + FIRST + gl.arange(0, PIECE, gl.SliceLayout(1, ACC))
        acc_0 = gl.zeros([PIECE, sizes.COLUMNS], gl.float32, ACC)
        acc_1 = acc_0
        by_row_0 = _load_rows(scales, tile, row, fill * 0)
        by_row_1 = by_row_0
        if PIECES == 2:
            by_row_1 = _load_rows(scales, tile, row + PIECE, fill * 0)
        by_block = _load_block(scales, tile, tile.right, fill * 0)
        for step in range(sizes.steps):
            stage, phase = _stage_of(fill, STAGES)
            # the last step loads its own scales again
            ahead = gl.minimum(step + 1, sizes.steps - 1)
            mbarrier.wait(stages.full.index(stage), phase)
            products = _multiply(stages, stage, FIRST)
            factor_0 = gl.expand_dims(by_row_0 * by_block, 1)
            factor_1 = gl.expand_dims(by_row_1 * by_block, 1)
            by_row_0 = _load_rows(scales, tile, row, ahead)
            by_row_1 = by_row_0
            if PIECES == 2:
                by_row_1 = _load_rows(scales, tile, row + PIECE, ahead)
            by_block = _load_block(scales, tile, tile.right, ahead)
            products = warpgroup_mma_wait(0, deps=(products,))
            if PIECES == 2:
                acc_0 = _add_scaled(acc_0, products, factor_0)
                # complete already: its spin loop ends a basic block, which keeps ptxas from it, too
                mbarrier.wait(stages.full.index(stage), phase)
                products = _multiply(stages, stage, FIRST + PIECE)
                products = warpgroup_mma_wait(0, deps=(products,))
            mbarrier.arrive(stages.empty.index(stage), count=1)
            if PIECES == 2:
                acc_1 += products * factor_1
            else:
                acc_0 += products * factor_0
            fill += 1
        store_rows(results, tile, FIRST, acc_0)
        if PIECES == 2:
            store_rows(results, tile, FIRST + PIECE, acc_1)
        index += gl.num_programs(0)


@gluon.jit
def _swapped_consumer(sizes, stages, scales, results, sums, WG: gl.constexpr):
    """Run a warpgroup over every second step."""
    STAGES: gl.constexpr = stages.left.shape[0]
    ACC: gl.constexpr = acc_layout(sizes.COLUMNS, 32)
    filled = gl.to_tensor(0)  # stages, by the tiles before
    tiles_done = gl.to_tensor(0)
    index = gl.program_id(0)
    while index < sizes.num_tiles:
        tile = locate_tile(sizes, index)
        row = tile.right + gl.arange(0, sizes.COLUMNS, gl.SliceLayout(0, ACC))
        acc = gl.zeros([PIECE, sizes.COLUMNS], gl.float32, ACC)
        ahead = gl.minimum(WG, sizes.steps - 1)
        by_row = _load_rows(scales, tile, row, ahead)
        by_block = _load_block(scales, tile, tile.left, ahead)
        for step in range(WG, sizes.steps, 2):
            stage, phase = _stage_of(filled + step, STAGES)
            ahead = gl.minimum(step + 2, sizes.steps - 1)
            mbarrier.wait(stages.full.index(stage), phase)
            products = _multiply(stages, stage, 0)
            factor = gl.expand_dims(by_row * by_block, 0)
            by_row = _load_rows(scales, tile, row, ahead)
            by_block = _load_block(scales, tile, tile.left, ahead)
            products = warpgroup_mma_wait(0, deps=(products,))
            mbarrier.arrive(stages.empty.index(stage), count=1)
            acc += products * factor
        filled += sizes.steps
        store_swapped(results, sums, tile, tiles_done, acc, WG)
        tiles_done += 1
        index += gl.num_programs(0)


@gluon.jit(do_not_specialize=["batch", "M", "K", "stride_a_scale_group"])
def scaled_mm_fp8_kernel(
    left,  # TMA descriptors: [1, LEFT_ROWS, 128] of [batch, M or N, K]
    right,  # [1, COLUMNS, 128] of [batch, N or M, K]
    batch,
    M,
    N,
    K,
    stride_a_scale_group,
    a,  # `launch.FactorArguments`
    b,
    product,  # `launch.ResultArguments`
    TRAITS: gl.constexpr,  # `launch.ProductTraits`
    CONFIG: gl.constexpr,  # `configs.ProductConfig`
):
    """Run persistent CTAs, at most one per SM, each over every num_programs-th work tile."""
    STAGES: gl.constexpr = CONFIG.STAGES
    LAYOUT: gl.constexpr = smem_layout(STEP, 8)
    # swapped, a stage is released by the warpgroup whose turn it is
    full, empty = alloc_stage_barriers(STAGES, 1, 1 if CONFIG.IS_SWAPPED else 2)
    stages = Stages(
        left=gl.allocate_shared_memory(left.dtype, [STAGES, CONFIG.LEFT_ROWS, STEP], LAYOUT),
        right=gl.allocate_shared_memory(right.dtype, [STAGES, CONFIG.COLUMNS, STEP], LAYOUT),
        full=full,
        empty=empty,
    )
    scales = Scales(
        a=a.scale,
        b=b.scale,
        stride_a_batch=a.stride_batch,
        stride_a_row=a.stride_row,
        stride_a_group=stride_a_scale_group,
        stride_b_batch=b.stride_batch,
        stride_b_row=b.stride_row,
        stride_b_group=b.stride_group,
        M=M,
        N_GROUP=TRAITS.N_GROUP,
        K_GROUP=TRAITS.K_GROUP,
    )
    results = Results(
        out=product.out,
        stride_batch=product.stride_batch,
        stride_row=product.stride_row,
        M=M,
        N=N,
    )
    if TRAITS.PDL:
        gdc_wait()  # for the activations
    if CONFIG.IS_SWAPPED:
        sizes = make_sizes(batch, N, M, K, STEP, CONFIG)
        sums = Sums(
            tiles=gl.allocate_shared_memory(
                gl.float32, [2, PIECE, CONFIG.COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
            ),
            full=alloc_barrier(2),
            empty=alloc_barrier(2),
        )
        gl.warp_specialize(
            [
                (_swapped_consumer, (sizes, stages, scales, results, sums, 0)),
                (_swapped_consumer, (sizes, stages, scales, results, sums, 1)),
                (_producer, (left, right, sizes, stages)),
            ],
            [4, 1],
            [CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS],
        )
    else:
        sizes = make_sizes(batch, M, N, K, STEP, CONFIG)
        gl.warp_specialize(
            [
                (_plain_consumer, (sizes, stages, scales, results, 0)),
                (_plain_consumer, (sizes, stages, scales, results, 1)),
                (_producer, (left, right, sizes, stages)),
            ],
            [4, 1],
            [CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS],
        )
