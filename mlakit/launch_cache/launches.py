"""A launch that is made again: its arguments with marked pointers, TMA descriptors among them.

Only addresses differ between two calls with one key. So the compiled kernel and all other arguments
are known from the recorded launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

MAX_DESCRIPTORS = 4096  # of 128 bytes: one per layer of a cache, and one per address of the queries


@dataclass(frozen=True)
class Pointer:
    """An argument that is an address; `encode[address]` is what the launch function takes for it,
    None where it takes the address itself."""

    tensor: Tensor
    encode: Mapping[int, Any] | None = None


@dataclass(frozen=True)
class PreparedLaunch:
    """`function(*before_stream, stream, *after_stream, *arguments)` makes the launch again.

    Every `Pointer` among the arguments, also in tuples, is replaced by an address first, aligned
    like the recorded one. With `arguments_are_one` the function takes them as one tuple.
    """

    function: Callable[..., None]
    before_stream: tuple[Any, ...]
    after_stream: tuple[Any, ...]
    arguments: tuple[Any, ...]
    arguments_are_one: bool = False


def with_pointers(value: Any, encoder: Callable[[Any], Mapping[int, Any]]) -> Any:
    """`value` with a `Pointer` for every address; `encoder` makes the mapping of a descriptor."""
    if isinstance(value, Tensor):
        return Pointer(value)
    if isinstance(value, tuple):
        return tuple(with_pointers(part, encoder) for part in value)
    return Pointer(value.base, encoder(value)) if is_descriptor(value) else value


def is_descriptor(value: Any) -> bool:
    """Return whether a value is a TMA descriptor."""
    return hasattr(value, "block_shape")


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
    """A map from addresses to moved descriptors, or to what `encode` makes of them."""

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
