"""Tile sizes, stages, register splits and thresholds of the decode kernels.

Plain data and pure functions: nothing here needs Triton. What a kernel is compiled with is a named
tuple, which Triton takes as one constexpr argument. A change is checked by `mlakit support
--compile` (shared memory, spills) and chosen by a run in docs/measured.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mlakit.formats import FormatTraits

SMEM_BYTES = 232_448  # of a CTA on sm_90
REGISTERS = 65_536  # of an SM
D_C, D_R = 512, 64  # latent and rotated columns
NARROW_D_C = 256  # latent columns of Mistral 4, which small_m_bf16 takes too
BLOCK = 64  # keys of a block
PAGES = (8, 16, 32)  # rows of a page that a block has several of, each a TMA tile

# `support` decides with these which kernel is faster
SMALL_M_HEADS = 32  # at most: more heads fill half of the 64 rows of an m64 kernel, or more
SMALL_WORK_BLOCKS = 16  # per SM: up to here the small_m kernels are faster, they start sooner

# softmax, log2 units
INITIAL_ROW_MAX = -3.0e38  # finite: the difference of two row_max is never inf − inf
RESCALE_THRESHOLD = 8.0  # row_max is kept until a score exceeds it by this much
RESCALE_THRESHOLD_ROW_SCALES = 0.9  # probabilities are up to 2**15 then, and float16 ends at 2**16
SMALLEST_SCALE = 2.0**-126  # with a scale of 0 the −inf of a hidden key would be NaN

# the range of float16
FP16_TARGET = 2.0**14  # what a power of two brings the largest value to: float16 ends at 2**16
PROB_SCALE = 2.0**6  # of float16 probabilities: with RESCALE_THRESHOLD they reach FP16_TARGET
MIN_ROPE_SHARE = 2.0**-30  # rotated queries take part in the scale of the others from here on
MAX_SCALE_RATIO = 2.0**12  # of row scales: beyond, probabilities need all of float16's range

OTHER_SMEM_BYTES = 3072  # barriers, exchange vectors, captures of warp_specialize
FP8_TILES_PER_STAGE = 2  # of 128 columns, in the pipeline of small_m_fp8_kv
MIN_TMA_PAGE_M64_BF16 = 16  # rows: with smaller TMA tiles m64_bf16 spills registers


@dataclass(frozen=True)
class Tiles:
    """The tile sizes of a kernel."""

    rows: int  # heads of a work tile
    q_columns: int  # latent columns of a TMA tile of queries
    kv_columns: int  # latent columns of a TMA tile of a 16-bit cache
    keys: int  # per iteration
    min_keys: int  # that are worth a CTA


def m64_tiles(kernel: str) -> Tiles:
    if kernel == "m64_bf16":
        return Tiles(rows=64, q_columns=256, kv_columns=256, keys=2 * BLOCK, min_keys=128)
    q_columns = 128 if kernel == "m64_fp8_qk" else 256
    return Tiles(rows=64, q_columns=q_columns, kv_columns=0, keys=BLOCK, min_keys=128)


def small_m_tiles(heads: int, page_size: int) -> Tiles:
    """Return tiles of 8, 16 or 32 heads; a TMA tile of a block of several pages is an atom wide."""
    rows = max(1 << (min(heads, SMALL_M_HEADS) - 1).bit_length(), 8)
    kv_columns = 64 if page_size in PAGES else 128
    return Tiles(rows=rows, q_columns=128, kv_columns=kv_columns, keys=BLOCK, min_keys=64)


class SmallMBf16Config(NamedTuple):
    STAGES: int  # of latent columns, 64 keys x 128 columns each
    ROPE_STAGES: int
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int | None = None  # per thread at launch, before warps share them out
    TILES: int = 4  # of latent columns of a block


def small_m_bf16_config(rows: int, latent_columns: int = D_C) -> SmallMBf16Config:
    """Return the config with the most stages that fit in shared memory beside the queries."""
    if latent_columns == NARROW_D_C:  # five blocks, and the rotated columns of four
        return SmallMBf16Config(10, ROPE_STAGES=4, PRODUCER_REGISTERS=96, TILES=2)
    return SmallMBf16Config({8: 12, 16: 11, 32: 10}[rows], ROPE_STAGES=3, PRODUCER_REGISTERS=96)


class SmallMFp4KvConfig(NamedTuple):
    STAGES: int  # of bf16, 64 keys x 256 columns each
    RAW_STAGES: int  # of blocks as the cache has them, and of rotated columns
    DEQUANT_REGISTERS: int = 112  # of each dequantising warpgroup; the consumer has the rest
    PRODUCER_REGISTERS: int = 40
    MAX_REGISTERS: int = 128


def small_m_fp4_kv_config(rows: int) -> SmallMFp4KvConfig:
    """Return the config with the most raw stages that fit beside the queries and bf16 stages."""
    stages, raw = {8: (4, 3), 16: (4, 3), 32: (3, 3)}[rows]
    return SmallMFp4KvConfig(stages, raw)


class SmallMFp8KvConfig(NamedTuple):
    TILES_PER_STAGE: int  # 64 keys x 128 columns each
    STAGES: int  # for two blocks at least
    ROPE_STAGES: int
    PV_WARPGROUPS: int
    SOFTMAX_REGISTERS: int  # per thread of a QK-softmax warpgroup
    PV_REGISTERS: int  # of the second PV warpgroup; the first one has the rest
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int


@lru_cache(maxsize=256)
def small_m_fp8_kv_config(
    rows: int, format: FormatTraits, *, rope_bytes: int, copied_bytes: int, is_gathered: bool
) -> SmallMFp8KvConfig:
    """Return the config with the most stages that fit in shared memory beside the queries.

    rope_bytes    of a block's rotated columns
    copied_bytes  of FP8 queries, which are converted to memory of their own"""
    copies = prob_copies(format)
    # the scales of a block, and the largest of them
    scale_bytes = 0 if format.SCALED_BY == "tensor" else (copies * BLOCK + 4) * 4
    stages = _fp8_stages(rows, copies, rope_bytes + scale_bytes, copied_bytes)
    return SmallMFp8KvConfig(*stages, *_fp8_registers(rows, format, is_gathered=is_gathered))


def prob_copies(format: FormatTraits) -> int:
    """Copies of probabilities: one per scale of a row, which multiplies them."""
    return 4 if format.SCALED_BY == "group" else 1


def _fp8_stages(rows: int, copies: int, rope_bytes: int, copied_bytes: int) -> tuple[int, int, int]:
    """Return (tiles per stage, stages, stages of rotated columns) that fit beside queries and the
    two stages of probabilities."""
    stage_bytes = FP8_TILES_PER_STAGE * BLOCK * 128
    other = rows * (D_C + D_R) * 2 + 2 * rows * (copies * BLOCK * 2 + 4) + OTHER_SMEM_BYTES
    room = SMEM_BYTES - other - copied_bytes
    per_block = 4 // FP8_TILES_PER_STAGE  # stages of latent columns
    stages = max(n for n in range(64) if n * stage_bytes + -(-n // per_block) * rope_bytes <= room)
    return FP8_TILES_PER_STAGE, stages, -(-stages // per_block)


def _fp8_registers(
    rows: int, format: FormatTraits, *, is_gathered: bool
) -> tuple[int, int, int, int, int]:
    """PV warpgroups; registers of QK-softmax, second PV and producer warps; and at launch.

    Two PV warpgroups are faster where acc and scales leave the QK-softmax warpgroups enough
    registers beside them. `tools.compile.spills` has what is spilled.
    """
    producer = 48 if is_gathered else 32
    if rows <= 16 and format.SCALED_BY != "group":
        return 2, 104, 112 if is_gathered else 120, producer, 96
    if rows <= 16:
        return 1, 152, 0, 48, 128
    if format.SCALED_BY == "group":
        return 1, 136, 0, 32, 128
    return 1, 128, 0, producer, 128


class M64Bf16Config(NamedTuple):
    HEAD_TILES: int  # constant in this kernel: it has no register for the number
    WARPGROUP_REGISTERS: int  # of the second warpgroup; the first one has the rest
    PRODUCER_REGISTERS: int  # of the gather producer
    MAX_REGISTERS: int | None


def m64_bf16_config(head_tiles: int, *, is_gathered: bool) -> M64Bf16Config:
    if is_gathered:
        return M64Bf16Config(head_tiles, 240, 32, 168)
    return M64Bf16Config(head_tiles, 248, 0, None)


class M64Fp8KvConfig(NamedTuple):
    IS_PACKED: bool  # nothing lies between the rows of a page
    PV_REGISTERS: int
    DEQUANT_REGISTERS: int
    MAX_REGISTERS: int


def m64_fp8_kv_config(*, is_packed: bool) -> M64Fp8KvConfig:
    return M64Fp8KvConfig(is_packed, PV_REGISTERS=160, DEQUANT_REGISTERS=136, MAX_REGISTERS=168)


class M64Fp8QkConfig(NamedTuple):
    STAGES: int  # of whole blocks, two at least
    PV_REGISTERS: int  # of the second PV warpgroup; the first one has the rest
    SOFTMAX_REGISTERS: int
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int


@lru_cache(maxsize=256)
def m64_fp8_qk_config(
    format: FormatTraits, *, rope_bytes: int, copied_bytes: int, is_gathered: bool
) -> M64Fp8QkConfig:
    """Return the config with the most blocks that fit in shared memory beside FP8 queries, their
    rotated columns as a 16-bit type, and two stages of probabilities."""
    converted = BLOCK * D_R * 2
    room = SMEM_BYTES - copied_bytes - converted - 2 * BLOCK * BLOCK * 2 - OTHER_SMEM_BYTES
    if format.SCALED_BY == "group":
        # four float16 and five float32 of each row
        stages = room // (BLOCK * D_C + rope_bytes + BLOCK * (4 * 2 + 5 * 4))
        return M64Fp8QkConfig(stages, *((184, 104, 40) if is_gathered else (184, 112, 32)), 128)
    stages = room // (BLOCK * D_C + rope_bytes)
    return M64Fp8QkConfig(stages, *((176, 104, 48) if is_gathered else (184, 112, 32)), 128)
