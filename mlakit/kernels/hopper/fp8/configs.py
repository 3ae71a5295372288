"""Tile sizes, stages and registers of the block-scaled FP8 product.

Plain data and pure functions: nothing here needs Triton. No GPU has run the kernel yet, so tiles
are picked by an estimate of clocks; a run of `mlakit bench fp8` replaces it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mlakit.dispatch.specs import ProductShape

STEP = 128  # columns of K in a stage
PIECE = 64  # rows of one wgmma
WARPGROUPS = 2
MAX_SWAPPED_ROWS = 64
MMA_PER_CLOCK = 4096  # multiply-adds of e4m3 of an SM
L2_BYTES_PER_CLOCK = 40  # to an SM where all SMs read


class ProductConfig(NamedTuple):
    """Constants that the kernel is compiled with.

    The left operand is the M side of wgmma, the right one the N side. `a` is the left one, unless
    operands are swapped: few rows of `a` would leave most of the M side empty.
    """

    IS_SWAPPED: bool
    LEFT_ROWS: int  # of a tile; swapped, both warpgroups have all of them, and half of K each
    COLUMNS: int  # rows of the right operand: columns of an accumulator
    STAGES: int  # a power of two
    BAND: int  # left tiles whose right tiles are neighbours in the order of work
    CONSUMER_REGISTERS: int = 232  # of the second warpgroup; the first one has the rest
    PRODUCER_REGISTERS: int = 40
    MAX_REGISTERS: int = 168  # per thread at launch, before warps share them out

    @property
    def smem_bytes(self) -> int:
        """Bytes of the stages, and of the sums that warpgroups exchange; barriers come on top."""
        sums = 4 * WARPGROUPS * PIECE * self.COLUMNS if self.IS_SWAPPED else 0
        return self.STAGES * STEP * (self.LEFT_ROWS + self.COLUMNS) + sums

    @property
    def name(self) -> str:
        """The name of the configuration, as checks of kernels record it."""
        return ("swapped " if self.IS_SWAPPED else "") + f"{self.LEFT_ROWS}x{self.COLUMNS}"

    def clocks(self, shape: ProductShape, num_sms: int) -> int:
        """Estimate the clocks of a product: tensor cores, or L2 where they wait for operands."""
        left, right = (shape.columns, shape.rows) if self.IS_SWAPPED else shape[1:3]
        tiles = shape.batch * -(-left // self.LEFT_ROWS) * -(-right // self.COLUMNS)
        step = max(
            self.LEFT_ROWS * self.COLUMNS * STEP // MMA_PER_CLOCK,
            (self.LEFT_ROWS + self.COLUMNS) * STEP // L2_BYTES_PER_CLOCK,
        )
        return -(-tiles // max(num_sms, 1)) * -(-shape.depth // STEP) * step


# many rows, the largest tile first: it reads operands from L2 least often
PLAIN = (
    ProductConfig(IS_SWAPPED=False, LEFT_ROWS=256, COLUMNS=128, STAGES=4, BAND=8),
    ProductConfig(IS_SWAPPED=False, LEFT_ROWS=128, COLUMNS=128, STAGES=4, BAND=16),
    ProductConfig(IS_SWAPPED=False, LEFT_ROWS=128, COLUMNS=64, STAGES=8, BAND=16),
)
SWAPPED = {
    16: ProductConfig(IS_SWAPPED=True, LEFT_ROWS=PIECE, COLUMNS=16, STAGES=16, BAND=1),
    32: ProductConfig(IS_SWAPPED=True, LEFT_ROWS=PIECE, COLUMNS=32, STAGES=16, BAND=1),
    64: ProductConfig(IS_SWAPPED=True, LEFT_ROWS=PIECE, COLUMNS=64, STAGES=8, BAND=1),
}
CONFIGS = (*PLAIN, *SWAPPED.values())


@lru_cache(maxsize=1024)
def pick_config(shape: ProductShape, num_sms: int) -> ProductConfig:
    """Pick the smallest swapped tile that has all rows of `a`, or the fastest plain one."""
    if shape.rows <= MAX_SWAPPED_ROWS:
        return next(config for rows, config in SWAPPED.items() if shape.rows <= rows)
    return min(PLAIN, key=lambda config: config.clocks(shape, num_sms))
