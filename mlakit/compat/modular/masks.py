"""MAX's mask objects and mask names."""

from __future__ import annotations

from mlakit.dispatch.checks import Dims
from mlakit.model.masks import KINDS, WINDOWED, Mask

NAMES = tuple(kind for kind, traits in KINDS.items() if not traits.IS_COMPRESSED)
"""The kinds of masks that MAX has."""


class CausalMask(Mask):
    """A query sees itself and every key before it."""

    def __init__(self) -> None:
        super().__init__("causal")


class NullMask(Mask):
    """A query sees every key."""

    def __init__(self) -> None:
        super().__init__("null")


class _WindowedMask(Mask):
    KIND = ""

    def __init__(self, local_window_size: int) -> None:
        dims = Dims(type(self).__name__)
        super().__init__(self.KIND, dims.integer("local_window_size", local_window_size, 1))


class SlidingWindowCausalMask(_WindowedMask):
    """A query sees the `local_window_size` newest keys, including its own."""

    KIND = "sliding_window_causal"


class SlidingWindowNonCausalMask(_WindowedMask):
    """The keys of `SlidingWindowCausalMask`, and every later key."""

    KIND = "sliding_window_noncausal"


class ChunkedMask(_WindowedMask):
    """A query sees the keys of its own chunk of `local_window_size` positions."""

    KIND = "chunked"


class ChunkedCausalMask(_WindowedMask):
    """A query sees the keys of its own chunk, up to itself."""

    KIND = "chunked_causal"


def mask_from_name(dims: Dims, mask_str: str, local_window_size: int | None) -> Mask:
    """The mask named `mask_str`; `local_window_size` is for masks with a window only."""
    dims.require(mask_str in NAMES, "mask_str", f"be one of {', '.join(NAMES)}", repr(mask_str))
    if mask_str not in WINDOWED:
        dims.require(
            local_window_size is None,
            "local_window_size",
            f"be None for mask_str={mask_str!r}",
            local_window_size,
        )
        return Mask(mask_str)
    return Mask(mask_str, dims.integer("local_window_size", local_window_size, 1))
