"""Blocks of mxfp4_block32 rows in shared memory: as the cache has them, then as bfloat16.

Two dequantising warpgroups convert half of the columns of every block each. A raw stage has the
codes and scales of a block, and both of them as consumers; a stage of latent columns has half of a
block as bfloat16, from one of them. Rotated columns go past them.

Shared by `decode.small_m_fp4_kv` and `sparse.small_m_fp4_kv`: everything here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.fp4_rows import (
    CODE_WORDS,
    SCALE_WORDS,
    WORDS,
    convert_half,
    load_factors,
    store_half,
)
from mlakit.kernels.hopper.device.pipeline import D_TILE, D_TILES, Pipeline, advance, next_stage
from mlakit.kernels.hopper.device.primitives import SMEM_16BIT, alloc_stage_barriers

HALVES = gl.constexpr(2)  # of a row's latent columns: a tile of codes, a stage of bfloat16


@record
class RawStages:
    """Codes and scales of blocks, as the cache has them."""

    codes: object  # [STAGES · HALVES, 64, CODE_WORDS]
    scales: object  # [STAGES, 64, SCALE_WORDS]
    full: object
    empty: object


@gluon.jit
def alloc_raw_stages(
    STAGES: gl.constexpr, CODES: gl.constexpr, SCALES: gl.constexpr, ARRIVALS: gl.constexpr
):
    """Allocate raw stages, with layouts of a tile of codes and of scales; a stage is full after
    so many arrivals."""
    full, empty = alloc_stage_barriers(STAGES, ARRIVALS, HALVES)
    return RawStages(
        codes=gl.allocate_shared_memory(gl.int32, [STAGES * HALVES, 64, CODE_WORDS], CODES),
        scales=gl.allocate_shared_memory(gl.int32, [STAGES, 64, SCALE_WORDS], SCALES),
        full=full,
        empty=empty,
    )


@gluon.jit
def alloc_latent_stages(STAGES: gl.constexpr):
    """Allocate stages of latent columns as bfloat16, half of a block each."""
    full, empty = alloc_stage_barriers(STAGES, 1, 1)
    return Pipeline(
        tiles=gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, 64, D_TILE], SMEM_16BIT),
        full=full,
        empty=empty,
        TILES_PER_STAGE=D_TILES // HALVES,
    )


@gluon.jit
def first_target(latent, zero, HALF: gl.constexpr):
    """The (stage, phase) of the first half block that a dequantising warpgroup writes."""
    return advance(latent, zero, zero, HALF)


@gluon.jit
def dequantise_block(
    raw,
    latent,
    stage,
    phase,
    target,
    target_phase,
    HALF: gl.constexpr,
    IS_GATHERED: gl.constexpr = False,
):
    """Convert half of the columns of a block; return the next stages and phases.

    IS_GATHERED  cp.async writes raw stages, not TMA
    """
    mbarrier.wait(raw.full.index(stage), phase)
    codes = raw.codes.index(stage * HALVES + HALF).load(WORDS)
    factors = load_factors(raw.scales.index(stage), HALF)
    values = convert_half(codes, factors)
    if not IS_GATHERED:
        fence_async_shared()  # threads have read the stage, which TMA writes again
    mbarrier.arrive(raw.empty.index(stage), count=1)
    stage, phase = next_stage(raw, stage, phase)
    mbarrier.wait(latent.empty.index(target), target_phase ^ 1)
    store_half(latent.tiles, target, values)
    fence_async_shared()
    mbarrier.arrive(latent.full.index(target), count=1)
    target, target_phase = advance(latent, target, target_phase, HALVES)
    return stage, phase, target, target_phase
