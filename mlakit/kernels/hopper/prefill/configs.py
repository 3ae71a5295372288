"""Tile sizes, registers and variants of the prefill kernel.

Plain data and pure functions: nothing here needs Triton. A change is checked by `mlakit support
--compile` (shared memory, spills) and chosen by a run in docs/measured.md.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mlakit.model.masks import MaskTraits

BLOCK_Q = 128  # queries of a work tile, 64 per consumer warpgroup
STAGES = 2  # of keys, and of values
# of the keys and values of a head group; twice as many cost 1 to 2 % with causal masks of 8k and
# more keys, and with 16 heads
L2_BYTES = 16 << 20
# equal requests whose query tiles are dealt out together. H200, 32 causal prompts of 512 tokens and
# 8 heads: 1, 4 and 8 take 77.1, 73.0 and 74.4 us without the schedule
MAX_INTERLEAVED = 4
# row_max is kept until a score exceeds it by this much (log2), by less in rows of few large
# weights. H200, 2026-11-17: 8, as in decode, takes 1 to 3 % less time than 1
RESCALE_THRESHOLD = 8
RESCALE_THRESHOLD_FEW_COLUMNS = 1  # 64 value columns: the tolerance of a row is smallest there
INITIAL_ROW_MAX = -3.0e38  # finite: the difference of two row_max is never inf − inf

# keys of a block by (D_N, D_R, D_V): what fits beside the queries in shared memory, and beside the
# accumulator in registers
BLOCK_K = {
    (128, 64, 128): 128,
    (192, 64, 256): 64,
    (128, 0, 128): 128,
    (64, 32, 64): 128,
    (256, 0, 256): 64,
    (64, 64, 128): 128,
}
# no GPU has run them yet: `auto` takes them where a check on that machine has passed
UNPROVED_WIDTHS = ((256, 0, 256), (64, 64, 128))
# widths of e4m3 queries, keys and values
FP8_BLOCK_K = {(128, 64, 128): 128, (128, 0, 128): 128}
# 64 per consumer warpgroup. H200, 2026-11-17, 2 causal prompts of 8192 tokens, cycles of a block of
# 128 queries: three warpgroups, each doing one thing at a time, take 2050; two, with softmax under
# PV, 2400
FP8_BLOCK_Q = 192
FP8_STAGES = 4  # of keys and values: a power of two
# probabilities are multiplied by 2 to this: the largest of a row is then 256, and e4m3 reaches 448
FP8_PROB_SHIFT = 8


class Traits(NamedTuple):
    """Constants that a prefill kernel is compiled for."""

    D_N: int
    D_R: int
    MASK: MaskTraits
    SIGN: int  # of softmax_scale: 1, 0 or −1


class PrefillConfig(NamedTuple):
    BLOCK_K: int
    CONSUMER_REGISTERS: int  # of the second consumer; the first one has the rest
    PRODUCER_REGISTERS: int  # of the producer and the masking warps
    MAX_REGISTERS: int
    RESCALE_THRESHOLD: int


@lru_cache(maxsize=64)
def prefill_config(widths: tuple[int, int, int]) -> PrefillConfig:
    """Return the config for `widths` (D_N, D_R, D_V)."""
    return PrefillConfig(
        BLOCK_K[widths],
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        MAX_REGISTERS=168,
        RESCALE_THRESHOLD=RESCALE_THRESHOLD if widths[2] > 64 else RESCALE_THRESHOLD_FEW_COLUMNS,
    )


class Fp8PrefillConfig(NamedTuple):
    BLOCK_Q: int
    BLOCK_K: int
    CONSUMER_REGISTERS: int  # of all consumers but the first, which has the rest
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int


@lru_cache(maxsize=64)
def fp8_prefill_config(widths: tuple[int, int, int]) -> Fp8PrefillConfig:
    """Return the FP8 config for `widths` (D_N, D_R, D_V)."""
    return Fp8PrefillConfig(
        FP8_BLOCK_Q,
        FP8_BLOCK_K[widths],
        CONSUMER_REGISTERS=160,
        PRODUCER_REGISTERS=24,
        MAX_REGISTERS=128,
    )
