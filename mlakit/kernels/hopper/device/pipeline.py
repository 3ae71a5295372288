"""Pipelines of smem tiles from a producer to its consumers, and the producer.

A block of 64 keys is its rotated columns and D_TILES tiles of 128 latent columns. A producer of
narrower rows is told how many tiles they have.

Stages     fill n of a pipeline goes to stage n % STAGES; its phase is the parity of n // STAGES. A
           consumer waits for the `full` barrier with this phase, the producer for the `empty`
           barrier with the other one, which on a fresh barrier counts as complete. Each barrier
           completes once per fill
Deadlock   none: producer and consumers walk the same work tiles and blocks (`next_tile`,
           `key_range`; a tile without keys has no block) and fill, wait for and release stages in
           the same order
Lineage    own design; ideas: CUTLASS's producer and consumer pipelines of full and empty barriers
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.decode.scheduler import key_range, locate_tile, next_tile, query_at
from mlakit.kernels.hopper.device.compat import record, tma_load
from mlakit.kernels.hopper.device.paged_loads import (
    arrive_on_loads,
    expect_block,
    load_block,
    lookup_block,
    rows_of_block,
)
from mlakit.kernels.hopper.device.primitives import alloc_stage_barriers
from mlakit.kernels.hopper.device.row_scales import (
    load_scales,
    lookup_scales,
    store_scalar,
    store_scales,
)

D_TILES = gl.constexpr(4)  # of 512 latent columns
D_TILE = gl.constexpr(128)  # columns


@record
class Pipeline:
    """Stages of one kind of smem tile."""

    tiles: object  # [stages · TILES_PER_STAGE, 64, columns]
    full: object  # barriers
    empty: object
    TILES_PER_STAGE: object


@record
class KVPipelines:
    """The pipelines that a block goes through.

    Where a stage of `latent` has all D_TILES of a block, `rope` has the same stages and barriers:
    one fill per block. Else the rotated columns have a pipeline of their own.
    """

    latent: object
    rope: object
    scales: object  # ScaleStages, with the stages of `rope`; or None
    min_scale: object  # float32 [stages, 1]: the smallest scale of a block above 0; or None


@record
class Query:
    """The queries of a work tile, in shared memory."""

    latent: object  # [tiles, ROWS, D_TILE]; FP8: words, a quarter as many
    rope: object  # [1, ROWS, 64], likewise
    full: object


@gluon.jit
def alloc_pipeline(
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,
    descriptor,
    CONSUMERS: gl.constexpr,
    TILES_PER_STAGE: gl.constexpr = 1,
    ARRIVALS: gl.constexpr = 1,
):
    tiles = gl.allocate_shared_memory(
        descriptor.dtype, [STAGES * TILES_PER_STAGE, 64, WIDTH], descriptor.layout
    )
    full, empty = alloc_stage_barriers(STAGES, ARRIVALS, CONSUMERS)
    return Pipeline(tiles, full, empty, TILES_PER_STAGE)


@gluon.jit
def advance(pipeline, stage, phase, STEPS: gl.constexpr = 1):
    """The (stage, phase) of the fill that is STEPS on, fewer than there are stages."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    wraps = stage >= STAGES - STEPS
    stage = gl.where(wraps, stage + STEPS - STAGES, stage + STEPS)
    return stage, gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def next_stage(pipeline, stage, phase):
    """`advance` by one, in fewer instructions."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def two_stages(fill):
    """Return (stage, phase) of `fill` in a pipeline of two stages."""
    return fill & 1, (fill >> 1) & 1


@gluon.jit
def release(pipeline, stage):
    """A consumer is done with a stage: once the wgmma that takes what it read has been issued.

    Not before: values that wait in registers may not even have arrived there. No barrier of
    threads waits for that, and the next load of the stage could be faster.
    """
    mbarrier.arrive(pipeline.empty.index(stage), count=1)


@gluon.jit
def release_read(pipeline, stage):
    """`release` of tiles that threads have read: TMA writes them next, through the other proxy."""
    fence_async_shared()
    release(pipeline, stage)


@gluon.jit
def _fill(inputs, pipeline, stage, phase, descriptor, rows, column):
    """Fill a stage once it is empty; `rows` as of `rows_of_block`."""
    TILES: gl.constexpr = pipeline.TILES_PER_STAGE
    WIDTH: gl.constexpr = pipeline.tiles.shape[2]
    BYTES: gl.constexpr = 64 * WIDTH * pipeline.tiles.dtype.primitive_bitwidth // 8
    mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)
    full = pipeline.full.index(stage)
    expect_block(inputs, full, TILES * BYTES)
    for tile in gl.static_range(TILES):
        smem = pipeline.tiles.index(stage * TILES + tile)
        load_block(inputs, descriptor, rows, column + tile * WIDTH, full, smem)
    arrive_on_loads(inputs, full)
    return advance(pipeline, stage, phase)


@gluon.jit
def _fill_block(inputs, pipelines, stage, phase, rows, ROPE_COLUMN: gl.constexpr):
    """Fill the stage of a whole block once it is empty."""
    latent, rope = pipelines.latent, pipelines.rope
    WIDTH: gl.constexpr = latent.tiles.shape[2]
    BITS: gl.constexpr = (
        D_TILES * WIDTH * latent.tiles.dtype.primitive_bitwidth
        + rope.tiles.shape[2] * rope.tiles.dtype.primitive_bitwidth
    )
    mbarrier.wait(latent.empty.index(stage), phase ^ 1)
    full = latent.full.index(stage)
    expect_block(inputs, full, 64 * BITS // 8)
    load_block(inputs, inputs.kv_rope, rows, ROPE_COLUMN, full, rope.tiles.index(stage))
    for d in gl.static_range(D_TILES):
        smem = latent.tiles.index(stage * D_TILES + d)
        load_block(inputs, inputs.kv, rows, d * WIDTH, full, smem)
    arrive_on_loads(inputs, full)


@gluon.jit
def _store_block_scales(scales, pipelines, stage, loaded):
    stored = store_scales(scales, pipelines.scales, stage, loaded)
    if pipelines.min_scale is not None:
        (scale,) = stored
        smallest = gl.min(gl.where(scale > 0, scale, float("inf")), 0)
        store_scalar(pipelines.min_scale.index(stage), smallest, scales.WARPS)


@gluon.jit
def producer(
    item,
    index,
    inputs,
    scheduler,
    pipelines,
    scales,
    ROPE_COLUMN: gl.constexpr,
    TILES: gl.constexpr = D_TILES,
):
    """Run the producer: load the rotated columns of every block, then its latent columns.

    The scales of rows, if there are any, go with the rotated columns.
    """
    latent, rope = pipelines.latent, pipelines.rope
    WIDTH: gl.constexpr = latent.tiles.shape[2] * latent.TILES_PER_STAGE
    IS_WHOLE: gl.constexpr = latent.TILES_PER_STAGE == TILES
    stage, phase, rope_stage, rope_phase = item * 0, item * 0, item * 0, item * 0
    while item < scheduler.last_item:
        keys = key_range(inputs, scheduler, item, index)
        lookup = lookup_block(inputs, keys, keys.first_block)
        pages = lookup_scales(scales, inputs, keys, keys.first_block)
        for block in range(keys.first_block, keys.end_block):
            # before the wait for an empty stage
            loaded, pages = load_scales(scales, inputs, keys, block, pages)
            rows = rows_of_block(inputs, keys, lookup, block)
            lookup = lookup_block(inputs, keys, block + 1)
            own_stage = rope_stage
            if IS_WHOLE:
                own_stage = stage
                _fill_block(inputs, pipelines, stage, phase, rows, ROPE_COLUMN)
            else:
                rope_stage, rope_phase = _fill(
                    inputs, rope, rope_stage, rope_phase, inputs.kv_rope, rows, ROPE_COLUMN
                )
                for fill in gl.static_range(TILES // latent.TILES_PER_STAGE):
                    column = fill * WIDTH
                    stage, phase = _fill(inputs, latent, stage, phase, inputs.kv, rows, column)
            if scales.first is not None:
                _store_block_scales(scales, pipelines, own_stage, loaded)
                mbarrier.arrive(rope.full.index(own_stage), count=1)
            if IS_WHOLE:
                stage, phase = next_stage(latent, stage, phase)
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit
def load_query(inputs, scheduler, item, index, query):
    """Start to load the queries of a work tile."""
    tile = locate_tile(scheduler, item, index)
    row, column = query_at(tile.token, tile.first_head, inputs.q_token_rows, inputs.Q_BY_HEAD)
    rope_row, rope_column = query_at(
        tile.token, tile.first_head, inputs.q_rope_token_rows, inputs.Q_ROPE_BY_HEAD
    )
    WIDTH: gl.constexpr = query.latent.shape[2]
    TILES: gl.constexpr = query.latent.shape[0]
    BITS: gl.constexpr = (
        TILES * WIDTH * query.latent.dtype.primitive_bitwidth
        + query.rope.shape[2] * query.rope.dtype.primitive_bitwidth
    )
    mbarrier.expect(query.full, scheduler.ROWS * BITS // 8)
    tma_load(inputs.q_rope, [rope_row, rope_column], query.full, query.rope.index(0))
    for d in gl.static_range(TILES):
        tma_load(inputs.q, [row, column + d * WIDTH], query.full, query.latent.index(d))
