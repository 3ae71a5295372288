"""The memory that launchers take: results, scratch, and constants that calls share.

Outside a recording these are plain allocations. Inside one, the recorder learns which is which: so
it knows where every pointer of a launch came from, and refuses a launch that points elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class Recorder(Protocol):
    """The interface through which launchers report to a recording."""

    def add_result(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor that the call returns."""

    def add_scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor that lives as long as the call."""

    def add_constant(self, tensor: Tensor) -> None:
        """A tensor that no call writes to."""

    def add_launch(
        self, kernel: object, grid: tuple[int, ...], arguments: tuple[object, ...]
    ) -> None:
        """A kernel that was started; `arguments` in the kernel's order, constexprs included."""

    def add_library_call(self, function: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        """A call of torch, which is made now and again at every replay."""


_RECORDER: ContextVar[Recorder | None] = ContextVar("mlakit_recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Report what happens in this scope to `recorder`."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def recorder() -> Recorder | None:
    """Return the recorder in scope; None in code that torch compiles: it cannot read it."""
    return None if torch.compiler.is_compiling() else _RECORDER.get()


def result(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor that the call returns."""
    listener = recorder()
    if listener is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return listener.add_result(shape, dtype, device)


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor that is not used after the call's kernels."""
    listener = recorder()
    if listener is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return listener.add_scratch(shape, dtype, device)


def library_call(function: Callable[..., None], *tensors: Tensor) -> None:
    """function(*tensors): launches kernels of torch, depends on nothing but its tensors.

    tensors  arguments and results of the call themselves, no views of them
    """
    listener = recorder()
    if listener is None:
        function(*tensors)
    else:
        listener.add_library_call(function, tensors)


def constant(tensor: Tensor) -> Tensor:
    """`tensor`, which is complete on every stream and never written again."""
    listener = recorder()
    if listener is not None:
        listener.add_constant(tensor)
    return tensor
