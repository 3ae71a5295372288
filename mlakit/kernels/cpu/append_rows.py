"""Finished rows, quantised and stored at their slots.

Work       a few operations for each block of tokens, which torch shares out among its threads
Memory     writes one cache row per token, none for a token with slot -1
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.kernels.arguments import AppendRowsArguments
from mlakit.kernels.cpu.workspace import row_blocks


def store_rows(
    layer: CacheLayer,
    slots: Tensor,
    latent: Tensor,
    k_rope: Tensor | None,
    *,
    power_of_two_scales: bool,
) -> None:
    """Quantise rows [latent | k_rope] into int64 `slots`; negative slots are skipped."""
    parts = [latent] if k_rope is None else [latent, k_rope]
    rows = torch.cat([part.float() for part in parts], dim=-1)
    is_stored = slots >= 0
    if not bool(is_stored.all()):
        slots, rows = slots[is_stored], rows[is_stored]
    layer.write_unchecked(slots, rows, power_of_two_scales=power_of_two_scales)


def append_rows(a: AppendRowsArguments) -> None:
    latent, k_rope, layer, slots = a.latent, a.k_rope, a.layer, a.slots.long()
    tokens, width = latent.shape[0], layer.codec.row.width
    # quantising takes about six float32 values per input
    for block in row_blocks(tokens, width, 4 * 6 * width):
        rope = None if k_rope is None else k_rope[block]
        store_rows(
            layer, slots[block], latent[block], rope, power_of_two_scales=a.power_of_two_scales
        )
