"""Tile sizes and register splits of the sparse kernels of Blackwell. Nothing here needs Triton."""

from __future__ import annotations

HEAD_TILE = 128  # heads of a work tile
BLOCK = 64  # list entries of a block
HALF = 256  # columns of a result that a CTA computes
D_R = 64  # columns of a row past the 512 that are values
CTAS_PER_TILE = 2  # of a work tile: one for each column half
PRODUCER_REGISTERS = 96
ISSUE_REGISTERS = 48
MAX_REGISTERS = 168  # per thread at launch, before warps share them out
