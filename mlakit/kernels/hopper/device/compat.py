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
    """Make a struct of device values: `fields` is a class of annotations, in their order.

    Values are given in that order, by name, or both. `value.replace(name=other)` is a copy in which
    some fields have other values. Triton's own aggregate wants types and a constructor; here a
    field is any value of a kernel.
    """
    names = tuple(fields.__annotations__)

    def set_all(self: Any, *values: Any, **named: Any) -> None:
        given = dict(zip(names, values, strict=False)) | named
        if len(values) + len(named) != len(names) or given.keys() != set(names):
            raise TypeError(f"{fields.__name__} must be given each of {', '.join(names)} once")
        for name in names:
            # a member of a constexpr argument is a plain Python value
            value = given[name]
            setattr(self, name, value if isinstance(value, base_value) else constexpr(value))

    def replace(self: Any, _semantic: Any = None, **changes: Any) -> Any:
        return type(self)(**({name: getattr(self, name) for name in names} | changes))

    for function in (set_all, replace):
        function.__triton_builtin__ = True  # type: ignore[attr-defined]
    fields.__annotations__ = dict.fromkeys(names, base_value)
    fields.__init__ = set_all  # type: ignore[method-assign, misc]
    fields.replace = replace  # type: ignore[attr-defined]
    return _aggregate(fields)
