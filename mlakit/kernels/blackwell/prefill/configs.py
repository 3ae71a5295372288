"""Tile sizes and register splits of the prefill kernel of Blackwell. Nothing here needs Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mlakit.kernels.blackwell.device.configs import SMEM_BYTES
from mlakit.kernels.hopper.prefill import configs as hopper

QUERIES = 128  # of a tile: the M of a product
KEYS = 128  # of a block
PART = 128  # columns of a stage
TAIL = 64  # columns of queries and keys past the last whole part
ATOM_BYTES = 128  # of a row of a TMA tile: a swizzle atom
ACC_COLUMNS = 256  # of tensor memory; the rest is for the scores of two tiles or blocks
WIDTHS = ((128, 64, 128), (192, 64, 256), (128, 0, 128))  # D_N, D_R, D_V
FP8_WIDTHS = ((128, 64, 128), (128, 0, 128))
FP8_STAGES = 8
OTHER_SMEM_BYTES = 3072  # barriers, work tiles, captures of warp_specialize, reductions


class PrefillConfig(NamedTuple):
    TILES: int  # query tiles of a work tile: one after the other, each with a softmax warpgroup
    STAGES: int  # of 128 keys x 128 columns each
    AHEAD: int  # a block takes over stages of the block so many before it, or of later ones
    RESCALE_THRESHOLD: int
    SOFTMAX_REGISTERS: int  # of the second softmax warpgroup; the first one has the rest
    OTHER_REGISTERS: int  # of the producer, the issuing warp and the masking warps
    MAX_REGISTERS: int  # per thread at launch, before warps share them out


@lru_cache(maxsize=64)
def prefill_config(widths: tuple[int, int, int]) -> PrefillConfig:
    """Return the config for `widths` (D_N, D_R, D_V)."""
    d_n, d_r, d_v = widths
    tiles = ACC_COLUMNS // d_v
    tails = 2 * KEYS * TAIL if (d_n + d_r) % PART else 0
    query = tiles * QUERIES * (d_n + d_r)
    stages = (SMEM_BYTES - OTHER_SMEM_BYTES - 2 * (query + tails)) // (2 * KEYS * PART)
    return PrefillConfig(
        tiles,
        stages,
        AHEAD=2,
        RESCALE_THRESHOLD=hopper.RESCALE_THRESHOLD,
        SOFTMAX_REGISTERS=208,
        OTHER_REGISTERS=88,
        MAX_REGISTERS=168,
    )


@lru_cache(maxsize=64)
def fp8_prefill_config(widths: tuple[int, int, int]) -> PrefillConfig:
    """Return the config of e4m3 for `widths` (D_N, D_R, D_V)."""
    return prefill_config(widths)._replace(
        STAGES=FP8_STAGES,
        AHEAD=FP8_STAGES // 2,  # keys have one part, and values have one
        RESCALE_THRESHOLD=0,  # probabilities fill the range of e4m3
    )
