"""Tile sizes and register splits of the sparse kernels.

Plain data: nothing here needs Triton. What a kernel is compiled with is a named tuple, which Triton
takes as one constexpr argument. A change is checked by `mlakit support --compile` (shared memory,
spills) and chosen by a run in docs/measured.md.
"""

from __future__ import annotations

from typing import NamedTuple

from mlakit.formats import FormatTraits
from mlakit.kernels.hopper.decode.configs import SMALL_M_HEADS, small_m_tiles
from mlakit.kernels.hopper.decode.configs import small_m_fp4_kv_config as fp4_decode_config
from mlakit.kernels.hopper.decode.configs import small_m_fp8_kv_config as decode_config

D_V = 512  # columns of a result
D_R = 64  # columns of a row past the 512 that are values
ROWS = ((576, 512), (512, 512))  # (width, v_width)
BLOCK = 64  # list entries of a block
PAIR = 2 * BLOCK  # list entries of an iteration
HEAD_TILE = 64  # heads of a work tile


MIN_TAIL_ENTRIES = 1024  # of a token's lists: a shorter tile costs less than a second launch
MAX_TAIL_SHARE = 4  # a fourth of the SMs: splits of a longer tail would save too little


def tail_start(tokens: int, head_tiles: int, topk: int, num_sms: int) -> int:
    """The first of the last tokens that get a launch of their own, with lists that are split.

    Every CTA computes as many work tiles as the busiest one. Where a few tiles are left after the
    last full wave, that wave takes as long as any other: with 4096 tokens of 64 heads on 132 SMs
    it is 3 % of the time. Splits of those tiles keep all SMs busy.
    """
    waves, left = divmod(tokens * head_tiles, num_sms)
    if waves == 0 or left == 0 or topk < MIN_TAIL_ENTRIES or left * MAX_TAIL_SHARE > num_sms:
        return tokens
    return waves * num_sms // head_tiles


class Traits(NamedTuple):
    """Constants that every sparse kernel is compiled for."""

    HAS_ROPE: bool  # rows have 64 columns past the 512 that are values
    HAS_EXTRA: bool  # there is a second cache
    PAGE: int  # rows of a page; 0: no gap between pages, so a row's address needs no page
    EXTRA_PAGE: int  # likewise of the second cache
    SIGN: int  # of softmax_scale: 1, 0 or −1
    FORMAT: FormatTraits  # of cache rows
    ROW_CHUNKS: int = 0  # chunks of 16 bytes from a row to the next if packed; 0: not a constant
    EXTRA_ROW_CHUNKS: int = 0


class M64Bf16Config(NamedTuple):
    CONSUMER_REGISTERS: int  # of the odd warpgroup; the even one has the rest
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int  # per thread at launch, before warps share them out


def m64_bf16_config(has_extra: bool) -> M64Bf16Config:
    # without a second cache the even warpgroup keeps columns of the queries in registers
    consumer = 216 if has_extra else 208
    return M64Bf16Config(CONSUMER_REGISTERS=consumer, PRODUCER_REGISTERS=72, MAX_REGISTERS=168)


class M64Fp8KvConfig(NamedTuple):
    PV_REGISTERS: int
    DEQUANT_REGISTERS: int  # the QK-softmax warpgroup has the rest
    MAX_REGISTERS: int


def m64_fp8_kv_config(has_rope: bool) -> M64Fp8KvConfig:
    # without rope columns to convert; with 136 the QK-softmax warpgroup spills 14 registers
    dequant = 136 if has_rope else 120
    return M64Fp8KvConfig(PV_REGISTERS=160, DEQUANT_REGISTERS=dequant, MAX_REGISTERS=168)


class SmallMFp8KvConfig(NamedTuple):
    HEADS: int  # of a work tile
    TILES_PER_STAGE: int  # 64 entries x 128 columns each
    STAGES: int  # for two blocks at least
    ROPE_STAGES: int
    SOFTMAX_REGISTERS: int  # per thread of a QK-softmax warpgroup; the PV warpgroup has the rest
    GATHER_REGISTERS: int
    MAX_REGISTERS: int


def head_tile(kernel: str, heads: int) -> int:
    """Heads of a work tile."""
    return small_m_tiles(heads, 1).rows if kernel.startswith("small_m") else HEAD_TILE


def small_m_fp8_kv_config(format: FormatTraits, heads: int, has_rope: bool) -> SmallMFp8KvConfig:
    tile = head_tile("small_m_fp8_kv", heads)
    rope_bytes = BLOCK * D_R * 2 if has_rope else 0
    stages = decode_config(tile, format, rope_bytes=rope_bytes, copied_bytes=0, is_gathered=True)
    softmax, gather = (128, 48) if tile == SMALL_M_HEADS else (152, 56)
    return SmallMFp8KvConfig(
        HEADS=tile,
        TILES_PER_STAGE=stages.TILES_PER_STAGE,
        STAGES=stages.STAGES,
        ROPE_STAGES=stages.ROPE_STAGES,
        SOFTMAX_REGISTERS=softmax,
        GATHER_REGISTERS=gather,
        MAX_REGISTERS=128,
    )


class SmallMFp4KvConfig(NamedTuple):
    HEADS: int  # of a work tile
    STAGES: int  # of bf16, 64 entries x 256 columns each
    RAW_STAGES: int  # of blocks as the cache has them, and of rotated columns
    DEQUANT_REGISTERS: int = 104  # of each dequantising warpgroup; the consumer has the rest
    GATHER_REGISTERS: int = 56
    MAX_REGISTERS: int = 128


def small_m_fp4_kv_config(heads: int) -> SmallMFp4KvConfig:
    """Return the config with the stages of the decode kernel, whose shared memory this one has."""
    tile = head_tile("small_m_fp4_kv", heads)
    stages = fp4_decode_config(tile)
    return SmallMFp4KvConfig(tile, stages.STAGES, stages.RAW_STAGES)
