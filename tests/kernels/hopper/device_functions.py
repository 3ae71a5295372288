"""Device functions run by torch on the CPU: those that compute with numbers, not with layouts."""

from __future__ import annotations

from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction


def on_cpu(module: ModuleType, memory: Tensor, program: int, num_programs: int) -> SimpleNamespace:
    """The functions of a Gluon module over torch tensors; a pointer is an index of `memory`."""

    def tensor(value: Any) -> Tensor:
        return torch.as_tensor(value)

    def load(at: Tensor, mask: Tensor | None = None, other: int = 0) -> Tensor:
        if mask is None:
            return memory[at]
        return torch.where(mask, memory[torch.where(mask, at, 0)], other)

    language = SimpleNamespace(
        int32=torch.int32,
        int64=torch.int64,
        BlockedLayout=lambda *_: None,
        to_tensor=tensor,
        arange=lambda first, last, _: torch.arange(first, last, dtype=torch.int32),
        load=load,
        where=lambda is_true, a, b: torch.where(tensor(is_true), tensor(a), tensor(b)),
        maximum=lambda a, b: torch.maximum(tensor(a), tensor(b)),
        minimum=lambda a, b: torch.minimum(tensor(a), tensor(b)),
        max=lambda values, _: values.max(),
        sum=lambda values, _: values.sum(dtype=values.dtype),
        associative_scan=lambda values, _, add: values.cumsum(0, dtype=values.dtype),
        program_id=lambda _: tensor(program),
        num_programs=lambda _: num_programs,
        constexpr=None,
    )
    names: dict[str, Any] = {"gl": language, "range": _range}
    for name, value in vars(module).items():
        if isinstance(value, JITFunction):
            names[name] = FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
        elif hasattr(value, "value"):  # a constexpr
            names[name] = value.value
        elif isinstance(value, type) and "__annotations__" in vars(value):  # a record
            names[name] = _record(tuple(vars(value)["__annotations__"]))
        elif name not in names:
            names[name] = value
    return SimpleNamespace(**names)


def _range(first: Any, last: Any, step: int = 1) -> range:
    return range(int(first), int(last), step)


class _Value(SimpleNamespace):
    """A value of a record."""

    def replace(self, **changes: Any) -> _Value:
        assert changes.keys() <= vars(self).keys()
        return _Value(**(vars(self) | changes))


def _record(fields: tuple[str, ...]) -> Any:
    def make(*values: Any, **named: Any) -> _Value:
        given = dict(zip(fields, values, strict=False)) | named
        assert len(values) + len(named) == len(fields)
        assert given.keys() == set(fields)
        return _Value(**given)

    return make
