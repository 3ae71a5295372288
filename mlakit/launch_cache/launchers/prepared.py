"""A recorded launch, ready to be made again: the launch function, and its arguments with marked
pointers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
    """Is it a TMA descriptor?"""
    return hasattr(value, "block_shape")
