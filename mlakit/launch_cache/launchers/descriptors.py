"""TMA descriptors at other addresses, as launchers read them or as the hardware does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DESCRIPTORS = 4096  # of 128 bytes: one per layer of a cache, and one per address of the queries


class MovedDescriptor:
    """A descriptor's shape, strides and options at any address."""

    __slots__ = ("address", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, descriptor: Any, address: int) -> None:
        self.shape, self.strides = descriptor.shape, descriptor.strides
        self.padding = descriptor.padding
        self.round_f32_to_tf32 = getattr(descriptor, "round_f32_to_tf32", False)
        self.address = address

    @property
    def base(self) -> MovedDescriptor:
        """Itself: launchers ask a descriptor's tensor for its address only."""
        return self

    def data_ptr(self) -> int:
        return self.address


class Descriptors(dict[int, Any]):
    """By address: moved descriptors, or what `encode` makes of them."""

    def __init__(self, descriptor: Any, encode: Callable[[MovedDescriptor], Any] | None = None):
        super().__init__()
        # not the descriptor itself: it would keep its tensor alive
        self._like = MovedDescriptor(descriptor, 0)
        self._encode = encode

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_DESCRIPTORS:
            self.clear()
        moved = MovedDescriptor(self._like, address)
        self[address] = made = moved if self._encode is None else self._encode(moved)
        return made
