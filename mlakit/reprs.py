"""What an object that holds tensors shows of them: shape, dtype and device, never the numbers.

Printing the numbers of a GPU tensor waits for the GPU, and those of a cache fill the screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor


def summary(value: object) -> str:
    """`bfloat16 [2, 64, 576] on cpu` for a tensor; for anything else its repr."""
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


def shown(holder: object, **parts: object) -> str:
    """The repr of `holder`: its type, and a summary of each part."""
    listed = ", ".join(f"{name}={summary(part)}" for name, part in parts.items())
    return f"{type(holder).__name__}({listed})"


def shapes_repr(holder: Any) -> str:
    """The `__repr__` of a dataclass or a named tuple with tensors among its fields."""
    names = getattr(holder, "_fields", None) or [f.name for f in fields(holder) if f.repr]
    return shown(holder, **{name: getattr(holder, name) for name in names})
