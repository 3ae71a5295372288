"""Tile sizes, stages and registers of the indexer kernel.

Plain data and pure functions: nothing here needs Triton. A change is checked by `mlakit support
--compile` (shared memory, spills) and chosen by a run in docs/measured.md.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

WIDTH = 128  # columns of a key
PIECE = 64  # keys: rows of one wgmma
MAX_HEADS = 64
MIN_HEADS = 32  # fewer are padded
SCALE_BYTES = 4
MAX_INT32 = 2**31
MAX_SINGLE_TOKENS = 4  # of a batch of one token block


class IndexerConfig(NamedTuple):
    """Constants that the indexer kernel is compiled with."""

    TOKENS: int  # of a token block, which stays in shared memory while key tiles stream by
    HEADS: int  # of a token, padded
    WG_TOKENS: int  # tokens of a block that a consumer warpgroup scores: N = WG_TOKENS · HEADS
    WG_PIECES: int  # pieces of a key tile that it scores
    KEYS: int  # of a key tile
    STAGES: int
    IS_CHAINED: bool  # two accumulators: the next piece is multiplied while one is summed up
    ADDS_ODD_RELU: bool  # relu of odd columns as x + |x|: max has half the rate of an addition
    FILL_COLUMNS: int  # of a fill tile: takes about as long as a score tile
    CONSUMER_REGISTERS: int  # of each but the first warpgroup, which has the rest
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int  # per thread at launch, before warps share them out

    @property
    def warpgroups(self) -> int:
        return self.TOKENS // self.WG_TOKENS * (self.KEYS // (PIECE * self.WG_PIECES))

    @property
    def smem_bytes(self) -> int:
        """Two token blocks and the stages; barriers and captures come on top."""
        stage = self.KEYS * (WIDTH + SCALE_BYTES)
        return 2 * self.TOKENS * self.HEADS * WIDTH + self.STAGES * stage


TWO_WARPGROUPS = {"CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40, "MAX_REGISTERS": 168}
FOUR_WARPGROUPS = {"CONSUMER_REGISTERS": 112, "PRODUCER_REGISTERS": 32, "MAX_REGISTERS": 96}


def _decode(tokens: int, heads: int, stages: int, *, adds_odd_relu: bool) -> IndexerConfig:
    """Return the config of decode, bound by memory: two warpgroups side by side in the keys."""
    return IndexerConfig(
        TOKENS=tokens,
        HEADS=heads,
        WG_TOKENS=tokens,
        WG_PIECES=2,
        KEYS=256,
        STAGES=stages,
        IS_CHAINED=True,
        ADDS_ODD_RELU=adds_odd_relu,
        FILL_COLUMNS=8192 // tokens,
        **TWO_WARPGROUPS,
    )


def _prefill(tokens: int, heads: int, keys: int, stages: int) -> IndexerConfig:
    """Return the config of prefill, bound by tensor cores and the sum over heads: N = 128."""
    return IndexerConfig(
        TOKENS=tokens,
        HEADS=heads,
        WG_TOKENS=128 // heads,
        WG_PIECES=2,
        KEYS=keys,
        STAGES=stages,
        IS_CHAINED=False,
        ADDS_ODD_RELU=True,
        FILL_COLUMNS=4096,
        **FOUR_WARPGROUPS,
    )


# by padded heads and tokens of a block
CONFIGS = {
    (64, 1): _decode(1, 64, 3, adds_odd_relu=True),
    (64, 2): _decode(2, 64, 4, adds_odd_relu=False),
    (64, 4): _prefill(4, 64, 256, 4),
    (64, 8): _prefill(8, 64, 128, 5),
    (32, 1): _decode(1, 32, 3, adds_odd_relu=True),
    (32, 2): _decode(2, 32, 3, adds_odd_relu=True),
    (32, 4): _decode(4, 32, 4, adds_odd_relu=False),
    (32, 8): _prefill(8, 32, 256, 4),
}


def is_single_block(*, tokens: int, batch: int) -> bool:
    """Return whether the batch is one token block: CTAs then need no line of work tiles."""
    return batch == 1 and tokens <= MAX_SINGLE_TOKENS


def padded_heads(heads: int) -> int:
    """Return the heads of a token with those that are padding."""
    return MIN_HEADS if heads <= MIN_HEADS else MAX_HEADS


@lru_cache(maxsize=256)
def pick_config(*, heads: int, tokens: int, batch: int) -> IndexerConfig:
    """Pick a config by the query tokens per request: a token block has tokens of one request."""
    mean = tokens / max(batch, 1)
    block = next((size for size in (1, 2, 4) if mean <= size), 8)
    return CONFIGS[padded_heads(heads), block]


def fits_int32(config: IndexerConfig, *, tokens: int, batch: int, columns: int) -> bool:
    """Return whether sums of work tiles fit int32; otherwise the scheduler adds in int64."""
    blocks = tokens // config.TOKENS + batch
    tiles = columns // config.KEYS + columns // config.FILL_COLUMNS + 3
    return blocks * tiles < MAX_INT32 and columns // config.KEYS < 2**15
