"""Tile sizes of the block-scaled matmul of few rows; docs/notes/steps.md has the timings."""

from __future__ import annotations

from dataclasses import dataclass

from mlakit.kernels.triton.configs import power_of_two


@dataclass(frozen=True)
class FewRowsConfig:
    """Of the block-scaled matmul of few rows."""

    block_n: int
    lanes: int  # groups of K side by side, one warp each
    num_stages: int = 3

    def shared_bytes(self, rows: int, k_group: int) -> int:
        """Tiles of both operands of every stage."""
        return self.num_stages * self.lanes * k_group * (self.block_n + rows)


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
    """Few tiles: many warps read each of them. Many tiles with short rows: few warps, so that each
    has several steps. Wide tiles read the activations less often (docs/notes/steps.md)."""
    tiles = batch * columns // 16
    lanes = 4
    if tiles < num_sms:
        lanes = 8
    elif tiles >= 4 * num_sms and k_groups < 16:
        lanes = 2
    if 2 * tiles < num_sms and rows <= 16:
        widths = [8, 16]
    elif rows >= 16:
        widths = [64, 32, 16] if batch * columns // 64 >= 3 * num_sms // 4 else [16]
    else:
        widths = [32, 16] if lanes == 2 else [16]
    # wider tiles spill; without conversions in hardware, operands need more registers
    widest = (64 if has_fp8 else 32) * 16 // max(rows, 16)
    lanes = min(lanes, power_of_two(k_groups))
    candidates = [FewRowsConfig(width, lanes) for width in widths if width <= widest]
    candidates += [FewRowsConfig(16, fewer) for fewer in (4, 2, 1) if fewer < lanes]
    return next(
        config
        for config in candidates
        if n_group % config.block_n == 0 and config.shared_bytes(rows, k_group) <= shared_bytes
    )
