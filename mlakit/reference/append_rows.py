"""Reference of the append of finished rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast


@without_autocast
def append_rows(
    latent: Tensor,  # [tokens, D_C]
    k_rope: Tensor | None,  # [tokens, D_R]; None: no rope columns
    cached: Tensor,  # [slots, D_C + D_R] rows before the append
    slots: Sequence[int],
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The rows of a cache after the append, one token at a time, before quantisation.

        cached[slots[t]] = latent[t] | k_rope[t]

    A token with slot -1 is not stored.
    """
    rows = cached.to(dtype, copy=True)
    d_c = latent.shape[1]
    for token, slot in enumerate(slots):
        if slot == -1:
            continue
        rows[slot, :d_c] = latent[token].to(dtype)
        if k_rope is not None:
            rows[slot, d_c:] = k_rope[token].to(dtype)
    return rows
