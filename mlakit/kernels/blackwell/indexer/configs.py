"""Tile sizes, stages and registers of the indexer kernel of Blackwell.

Plain data and pure functions: nothing here needs Triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mlakit.kernels.blackwell.device.configs import OTHER_SMEM_BYTES, SMEM_BYTES
from mlakit.kernels.hopper.indexer.configs import SCALE_BYTES, WIDTH, padded_heads

PART = 128  # keys: the M of a product
PRODUCT_COLUMNS = 256  # the most columns (token, head) of a product: its N
WARPGROUPS = 2  # that sum up products: of other keys, or of other tokens
MOST_STAGES = 8


class IndexerConfig(NamedTuple):
    """Constants that the indexer kernel is compiled with."""

    TOKENS: int  # of a token block, which stays in shared memory while key tiles stream by
    HEADS: int  # of a token, padded
    WG_TOKENS: int  # tokens of a block that a warpgroup sums up
    KEYS: int  # of a key tile: a part for each warpgroup, or one for both
    STAGES: int
    FILL_COLUMNS: int  # of a fill tile
    SUM_REGISTERS: int  # of the second summing warpgroup; the first one has the rest, as many
    OTHER_REGISTERS: int  # of the producer and of the issuing warp
    MAX_REGISTERS: int  # per thread at launch, before warps share them out

    @property
    def smem_bytes(self) -> int:
        """Two token blocks and the stages; barriers and captures come on top."""
        stage = self.KEYS * (WIDTH + SCALE_BYTES)
        return 2 * self.TOKENS * self.HEADS * WIDTH + self.STAGES * stage


def _config(tokens: int, heads: int) -> IndexerConfig:
    """Return the config with as many stages as fit in shared memory.

    A thread keeps the weights of its columns in registers, at most 128. With 256 columns each
    warpgroup has half of the tokens, with fewer columns half of the keys.
    """
    has_own_tokens = tokens * heads == PRODUCT_COLUMNS
    keys = PART if has_own_tokens else WARPGROUPS * PART
    wg_tokens = tokens // WARPGROUPS if has_own_tokens else tokens
    free = SMEM_BYTES - OTHER_SMEM_BYTES - 2 * tokens * heads * WIDTH
    return IndexerConfig(
        TOKENS=tokens,
        HEADS=heads,
        WG_TOKENS=wg_tokens,
        KEYS=keys,
        STAGES=min(free // (keys * (WIDTH + SCALE_BYTES)), MOST_STAGES),
        # as on Hopper, where it takes about as long as a score tile
        FILL_COLUMNS=4096 if has_own_tokens else 8192 // tokens,
        SUM_REGISTERS=224,
        OTHER_REGISTERS=56,
        MAX_REGISTERS=168,
    )


@lru_cache(maxsize=256)
def pick_config(*, heads: int, tokens: int, batch: int) -> IndexerConfig:
    """Pick a config by the query tokens per request: a token block has tokens of one request."""
    padded = padded_heads(heads)
    most = PRODUCT_COLUMNS // padded
    mean = tokens / max(batch, 1)
    return _config(next((size for size in (1, 2, 4) if mean <= size), most), padded)
