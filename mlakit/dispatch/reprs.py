"""Reprs of objects with tensors: shape, dtype and device, never the values.

Printing the values of a GPU tensor synchronises, and those of a cache fill the screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor


def summary(value: object) -> str:
    """`bfloat16 [2, 64, 576] on cpu` for a tensor; otherwise the repr."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)} on {value.device}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {summary(each)}' for key, each in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(map(summary, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(summary, value))})"
    return repr(value)


def fields_repr(owner: object, **values: object) -> str:
    """The repr of `owner`: its type and a summary of each value."""
    listed = ", ".join(f"{name}={summary(value)}" for name, value in values.items())
    return f"{type(owner).__name__}({listed})"


def shapes_repr(owner: Any) -> str:
    """The `__repr__` of a dataclass or a named tuple with tensor fields."""
    names = getattr(owner, "_fields", None) or [f.name for f in fields(owner) if f.repr]
    return fields_repr(owner, **{name: getattr(owner, name) for name in names})
