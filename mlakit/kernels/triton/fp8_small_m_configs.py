"""Tile sizes of the block-scaled matmul of few rows; docs/notes/steps.md has the timings."""

from __future__ import annotations

from dataclasses import dataclass

from mlakit.kernels.triton.configs import power_of_two


@dataclass(frozen=True)
class FewRowsConfig:
    """Tile sizes of the block-scaled matmul of few rows."""

    block_n: int
    lanes: int  # groups of K side by side, one warp each
    rows: int  # of a tile
    num_stages: int = 3

    def shared_bytes(self, k_group: int) -> int:
        """Tiles of both operands of every stage."""
        return self.num_stages * self.lanes * k_group * (self.block_n + self.rows)


def pick_few_rows_config(
    *,
    batch: int,
    rows: int,
    columns: int,
    n_group: int,
    k_group: int,
    k_groups: int,
    num_sms: int,
    shared_bytes: int,
    has_fp8: bool,
) -> FewRowsConfig:
    """Few programs: many warps read each tile. Many tiles with short rows: few warps, so that each
    has several steps. Wide tiles read the activations less often (docs/notes/steps.md)."""
    tile = power_of_two(rows)
    if rows > 4:  # two tiles of 16 rows are faster than one of 32, unless K is short
        tile = 32 if rows > 16 and k_groups < 4 else 16
    tiles = batch * columns // 16
    programs = tiles * -(-rows // tile)
    lanes = 4
    if programs < num_sms:
        lanes = 8
    elif tiles >= 3 * num_sms and k_groups <= 16:
        lanes = 2 if k_groups > 4 else 1
    wide_tiles = batch * columns // 64
    if 2 * programs < num_sms:
        widths = [8, 16]
    elif rows > 16 and tile == 16 and num_sms <= programs < 2 * num_sms:
        widths = [8, 16]  # one or two programs per SM have too few loads in flight
    elif lanes == 1:
        is_wide = rows > (4 if k_groups == 1 else 16) and wide_tiles >= 3 * num_sms // 2
        widths = [64, 32, 16] if is_wide else [32, 16]
    elif rows > 4 and wide_tiles >= (3 * num_sms // 4 if lanes == 4 else 3 * num_sms // 2):
        widths = [64, 32, 16]
    else:
        widths = [32, 16] if lanes == 2 and (rows > 16 or tiles >= 4 * num_sms) else [16]
    # wider tiles spill; without conversions in hardware, operands need more registers
    widest = (64 if has_fp8 else 32) * 16 // max(tile, 16)
    lanes = min(lanes, power_of_two(k_groups))
    candidates = [FewRowsConfig(width, lanes, tile) for width in widths if width <= widest]
    candidates += [FewRowsConfig(16, fewer, tile) for fewer in (4, 2, 1) if fewer < lanes]
    return next(
        config
        for config in candidates
        if n_group % config.block_n == 0 and config.shared_bytes(k_group) <= shared_bytes
    )
