"""Score modifiers of MAX's prefill: a term added to the scaled scores."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mlakit.dispatch.checks import Dims
from mlakit.model.masks import Mask

SCORE_MODS = ("no_pos", "alibi")


def slopes_from_name(
    dims: Dims, score_mod_str: str, mask: Mask, num_heads: int, device: torch.device
) -> Tensor | None:
    """ALiBi's slopes [heads] float32 for "alibi", None for "no_pos"."""
    dims.require(
        score_mod_str in SCORE_MODS,
        "score_mod_str",
        f"be one of {', '.join(SCORE_MODS)}",
        repr(score_mod_str),
    )
    if score_mod_str == "no_pos":
        return None
    dims.require(mask.is_causal, "mask_str", "be a causal mask for alibi", repr(mask.kind))
    return _slopes_on(device, num_heads)


@lru_cache(maxsize=64)
def _slopes_on(device: torch.device, num_heads: int) -> Tensor:
    """Return the slopes on a device, cached: the copy synchronises."""
    return torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(−8(h+1)/H) for H a power of two; otherwise the slopes of the power of two below H, then
    every other slope of the power above.

    The documented bias −(P − 1 − k)·slope differs from slope·(k − q) by a constant per query, which
    the softmax cancels: the prompt length P is not needed.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / below) for h in range(below)]
    above = [2.0 ** (-8.0 * (h + 1) / (2 * below)) for h in range(0, 2 * below, 2)]
    return slopes + above[: num_heads - below]
