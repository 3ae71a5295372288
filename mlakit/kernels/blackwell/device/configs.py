"""Tile sizes of keys as M (`keys_as_m`). Nothing here needs Triton."""

from __future__ import annotations

from typing import NamedTuple

SMEM_BYTES = 232_448  # of a CTA on sm_100
OTHER_SMEM_BYTES = 4096  # barriers, validity, reductions over keys, captures of warp_specialize
KEYS = 128  # of a block: the M of a product
PART = 128  # latent columns of a stage
D_C, D_R = 512, 64  # latent and rotated columns
MIN_ROWS, MAX_ROWS = 16, 64  # heads of a work tile: the N of a product


class KeysAsMConfig(NamedTuple):
    ROWS: int  # heads of a work tile
    STAGES: int  # of 128 keys x 128 latent columns each: a block at least
    PRODUCER_REGISTERS: int
    ISSUE_REGISTERS: int
    MAX_REGISTERS: int  # per thread at launch, before warps share them out


def head_rows(heads: int) -> int:
    """Return the heads of a work tile: 16, 32 or 64."""
    return max(1 << (min(heads, MAX_ROWS) - 1).bit_length(), MIN_ROWS)


def keys_as_m_config(heads: int, *, has_rope: bool, is_dequantised: bool = False) -> KeysAsMConfig:
    """Return the config with the most stages that fit in shared memory beside the queries.

    is_dequantised  the producer converts rows in registers
    """
    rows = head_rows(heads)
    query = 2 * rows * (D_C + (D_R if has_rope else 0))
    stages = (SMEM_BYTES - OTHER_SMEM_BYTES - query - 2 * KEYS * D_R) // (2 * KEYS * PART)
    producer, issue = (176, 72) if is_dequantised else (144, 96)
    return KeysAsMConfig(rows, stages, producer, issue, MAX_REGISTERS=168)
