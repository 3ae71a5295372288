"""Attention masks: which keys a query sees, described once for every backend.

Under every mask a query at position q sees one interval [first, last) of key positions. References
use it as a boolean mask, kernels as loop bounds. A kind of mask is a record of traits: kernels read
the traits and the window, never a name.

    null                       [0, N)
    causal                     [0, q + 1)
    sliding_window_causal      [q - W + 1, q + 1)
    sliding_window_noncausal   [q - W + 1, N)
    chunked                    [C, C + W)     C = W * (q // W)
    chunked_causal             [C, q + 1)
    compressed_causal          [0, (q + 1) // W)

In the last one key j stands for tokens [j * W, (j + 1) * W), as `compress_rows` makes them, and
positions and N count tokens.

N is the number of keys of the request; every interval is clamped to [0, N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class MaskTraits(NamedTuple):
    """What hides keys from a query; a constant of the kernels that have a mask."""

    IS_CAUSAL: bool = False  # keys after the query
    IS_SLIDING: bool = False  # keys that are `window` or more positions before the query
    IS_CHUNKED: bool = False  # keys of other chunks of `window` positions than the query's own

    IS_COMPRESSED: bool = False  # keys of `window` tokens, of which one is after the query

    @property
    def has_window(self) -> bool:
        """Whether a mask of this kind needs the number `window`."""
        return self.IS_SLIDING or self.IS_CHUNKED or self.IS_COMPRESSED


KINDS = {
    "null": MaskTraits(),
    "causal": MaskTraits(IS_CAUSAL=True),
    "sliding_window_causal": MaskTraits(IS_CAUSAL=True, IS_SLIDING=True),
    "sliding_window_noncausal": MaskTraits(IS_SLIDING=True),
    "chunked": MaskTraits(IS_CHUNKED=True),
    "chunked_causal": MaskTraits(IS_CAUSAL=True, IS_CHUNKED=True),
    "compressed_causal": MaskTraits(IS_CAUSAL=True, IS_COMPRESSED=True),
}
WINDOWED = tuple(kind for kind, traits in KINDS.items() if traits.has_window)
INTERVAL_TRAITS = ("IS_CAUSAL", "IS_SLIDING", "IS_CHUNKED", "IS_COMPRESSED")
"""The traits that `Mask.interval`, `Mask.visible` and, on GPUs, `mask_interval` know."""


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask by name; `window` is W, and 0 for masks without a window.

    Masks are compared by value: an object of a subclass equals the mask with its kind and window.
    """

    kind: str
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"mask kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if type(self.window) is not int:  # 5.0 would equal 5, and True 1
            raise TypeError(f"mask {self.kind}: window must be an int, got {self.window!r}")
        if self.kind in WINDOWED and self.window < 1:
            raise ValueError(f"mask {self.kind}: window must be at least 1, got {self.window}")
        if self.kind not in WINDOWED and self.window != 0:
            raise ValueError(f"mask {self.kind}: window must be 0, got {self.window}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return self.kind == other.kind and self.window == other.window

    def __hash__(self) -> int:
        return hash((self.kind, self.window))

    @property
    def traits(self) -> MaskTraits:
        """What hides keys from a query."""
        return KINDS[self.kind]

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return self.traits.IS_CAUSAL

    def num_keys(self, num_tokens: int) -> int:
        """Keys of a request of `num_tokens` tokens."""
        return num_tokens // self.window if self.traits.IS_COMPRESSED else num_tokens

    def interval(self, position: int, num_keys: int) -> tuple[int, int]:
        """The keys [first, last) that the query at `position` sees, out of `num_keys`."""
        first, last = 0, num_keys
        if self.traits.IS_SLIDING:
            first = position - self.window + 1
        if self.traits.IS_CHUNKED:
            first = position // self.window * self.window
            last = first + self.window
        if self.is_causal:
            last = position + 1
        if self.traits.IS_COMPRESSED:
            last //= self.window
        first = max(first, 0)
        return first, max(min(last, num_keys), first)

    def first_visible_keys(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The first key that any new token of each request sees; `after` if it has none.

        before, after  tokens of each request before and after the step
        """
        return [
            self.interval(low, high)[0] if high > low else high
            for low, high in zip(before, after, strict=True)
        ]

    def first_visible_keys_on_device(self, before: Tensor, after: Tensor) -> Tensor:
        """`first_visible_keys` for lengths on a device, without a synchronisation."""
        first = torch.zeros_like(before)
        if self.traits.IS_SLIDING:
            first = (before - self.window + 1).clamp_min(0)
        if self.traits.IS_CHUNKED:
            first = before // self.window * self.window
        return torch.where(after > before, first, after)

    def visible(self, positions: Tensor, keys: Tensor) -> Tensor:
        """Boolean [len(positions), len(keys)]: whether each query sees each key."""
        q, k = positions[:, None], keys[None, :]
        seen = (k >= 0).expand(len(positions), len(keys))
        if self.is_causal:
            seen = seen & (k <= q)
        if self.traits.IS_COMPRESSED:
            seen = seen & ((k + 1) * self.window <= q + 1)
        if self.traits.IS_SLIDING:
            seen = seen & (k > q - self.window)
        if self.traits.IS_CHUNKED:
            seen = seen & (
                torch.div(k, self.window, rounding_mode="floor")
                == torch.div(q, self.window, rounding_mode="floor")
            )
        return seen


NULL = Mask("null")
CAUSAL = Mask("causal")


def sliding_window_causal(window: int) -> Mask:
    """The `window` newest keys, including the query's own."""
    return Mask("sliding_window_causal", window)


def sliding_window_noncausal(window: int) -> Mask:
    """The keys of `sliding_window_causal`, and every later key."""
    return Mask("sliding_window_noncausal", window)


def chunked(window: int) -> Mask:
    """The keys of the query's own chunk of `window` positions."""
    return Mask("chunked", window)


def chunked_causal(window: int) -> Mask:
    """The keys of the query's own chunk, up to itself."""
    return Mask("chunked_causal", window)


def compressed_causal(rate: int) -> Mask:
    """The keys of `rate` tokens whose last token is the query's own or an earlier one."""
    return Mask("compressed_causal", rate)
