"""Tile sizes and register splits of the sparse kernels.

Plain data: nothing here needs Triton. What a kernel is compiled with is a named tuple, which Triton
takes as one constexpr argument. A change is checked by `mlakit support --compile` (shared memory,
spills) and chosen by a run in docs/measured.md.
"""

from __future__ import annotations

from typing import NamedTuple

D_V = 512  # columns of a result
D_R = 64  # columns of a row past the 512 that are values
ROWS = ((576, 512), (512, 512))  # (width, v_width)
BLOCK = 64  # list entries of a block
PAIR = 2 * BLOCK  # list entries of an iteration
HEAD_TILE = 64  # heads of a work tile


class Traits(NamedTuple):
    """What every sparse kernel is compiled for."""

    HAS_ROPE: bool  # rows have 64 columns past the 512 that are values
    HAS_EXTRA: bool  # there is a second cache
    PAGE: int  # rows of a page; 0: no gap between pages, so a row's address needs no page
    EXTRA_PAGE: int  # likewise of the second cache
    SIGN: int  # of softmax_scale: 1, 0 or −1


class M64Bf16Config(NamedTuple):
    CONSUMER_REGISTERS: int  # of the odd warpgroup; the even one has the rest
    PRODUCER_REGISTERS: int
    MAX_REGISTERS: int  # per thread at launch, before warps share them out


def m64_bf16_config() -> M64Bf16Config:
    return M64Bf16Config(CONSUMER_REGISTERS=216, PRODUCER_REGISTERS=72, MAX_REGISTERS=168)
