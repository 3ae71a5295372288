"""What the compiled launch functions of Triton 3.6 and 3.9 have in common.

A wrapper in Python encodes the TMA descriptors among a kernel's arguments before each launch. A
replay passes it by: descriptors are encoded once per address.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mlakit.launch_cache.launchers.descriptors import Descriptors, MovedDescriptor
from mlakit.launch_cache.launchers.prepared import is_descriptor, with_pointers

Encode = Callable[[MovedDescriptor, Any], Sequence[Any]]


def unwrap(launch: Any) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """The function in C, and how each descriptor is encoded. None for another form: of a kernel
    whose descriptors are not encoded for the hardware."""
    if inspect.isbuiltin(launch):
        return launch, ()
    wrapped = inspect.getclosurevars(launch).nonlocals
    function, encodings = wrapped.get("launcher"), wrapped.get("tensordesc_meta") or [None]
    if not inspect.isbuiltin(function) or None in encodings:
        return None
    return function, encodings


def encoded(arguments: Sequence[Any], encodings: Sequence[Any], encode: Encode) -> tuple[Any, ...]:
    """Arguments with pointers marked; a descriptor becomes its encoding, shape and strides."""
    remaining = iter(encodings)

    def descriptors(value: Any) -> Descriptors:
        encoding = next(remaining)
        return Descriptors(value, lambda moved: encode(moved, encoding)[0])

    expanded: list[Any] = []
    for value in arguments:
        expanded.append(with_pointers(value, descriptors))
        if is_descriptor(value):
            expanded += (*value.shape, *value.strides)
    return tuple(expanded)
