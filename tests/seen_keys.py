"""The table of masks, written out: does the query at position q see key k, with window w?"""

from __future__ import annotations

from collections.abc import Callable

from mlakit.model.masks import Mask

SEES: dict[str, Callable[[int, int, int], bool]] = {
    "null": lambda q, k, w: True,
    "causal": lambda q, k, w: k <= q,
    "sliding_window_causal": lambda q, k, w: q - w < k <= q,
    "sliding_window_noncausal": lambda q, k, w: k + w > q,
    "chunked": lambda q, k, w: k // w == q // w,
    "chunked_causal": lambda q, k, w: k <= q and k // w == q // w,
    "compressed_causal": lambda q, k, w: k * w + w - 1 <= q,
}


def sees(mask: Mask, q: int, k: int) -> bool:
    return SEES[mask.kind](q, k, mask.window)
