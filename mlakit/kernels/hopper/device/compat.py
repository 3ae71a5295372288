"""One Gluon for every Triton from 3.6 on: names that moved, under one name each."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate, base_value, constexpr

# 3.6 and 3.7 have only the second name, 3.9 has only the first
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_words = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# shared memory as another type, of the same size; to 3.7 the second name
_descriptor: Any = shared_memory_descriptor
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret


def record(fields: type) -> Any:
    """A struct of device values: `fields` is a class of annotations, in their order.

    Triton's own aggregate wants types and a constructor; here a field is any value of a kernel.
    """
    names = tuple(fields.__annotations__)

    def set_all(self: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            # a member of a constexpr argument is a plain Python value
            setattr(self, name, value if isinstance(value, base_value) else constexpr(value))

    set_all.__triton_builtin__ = True  # type: ignore[attr-defined]
    fields.__annotations__ = dict.fromkeys(names, base_value)
    fields.__init__ = set_all  # type: ignore[method-assign, misc]
    return _aggregate(fields)
