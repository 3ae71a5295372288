"""An op on the CPU as if it were on a GPU: its kernels are functions that get addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.dispatch import private
from mlakit.kernels import launch as launching
from mlakit.kernels import workspace
from mlakit.launch_cache import calls, key, record
from mlakit.launch_cache.calls import RecordedCalls
from mlakit.launch_cache.counters import OpStats

CPU = torch.device("cpu")


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


class Multiply:
    """Stands in for a kernel, y[i] = x[i] · factor, as Triton lets one be started."""

    arg_names = ("x", "y", "factor", "COUNT")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def first(x: Tensor, y: Tensor, factor: float, *, COUNT: int, **options: object) -> Any:
            run(*grid, 1, 1, 0, "function", "metadata", None, None, None,
                x.data_ptr(), y.data_ptr(), factor, COUNT)  # fmt: skip
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        def run(*arguments: Any) -> None:
            assert arguments[3:9] == (0, "function", "metadata", None, None, None)
            x, y, factor, count = arguments[9:]
            source, target = floats(x, count), floats(y, count)
            for i in range(count):
                target[i] = source[i] * factor

        return first


def multiply(x: Tensor, y: Tensor, factor: float) -> None:
    launching.launch(Multiply(), (1,), x, y, factor, COUNT=x.numel(), num_warps=4)


class Add:
    """y[i] = Σ xs[i], of a tuple of tensors."""

    arg_names = ("xs", "y")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def first(xs: Sequence[Tensor], y: Tensor, **options: object) -> Any:
            run(*[None] * 9, tuple(x.data_ptr() for x in xs), y.data_ptr())
            return SimpleNamespace(run=run, function=None, packed_metadata=None)

        def run(*arguments: Any) -> None:
            xs, y = arguments[9:]
            sources, target = [floats(x, 5) for x in xs], floats(y, 5)
            for i in range(5):
                target[i] = sum(source[i] for source in sources)

        return first


def new(*shape: int) -> Tensor:
    """A result of the call."""
    return workspace.result(shape, torch.float32, CPU)


def four_times(x: Tensor, y: Tensor | None, factor: float, out: Tensor | None) -> tuple[Tensor]:
    """factor² · x, by way of scratch."""
    between = workspace.scratch(x.shape, torch.float32, CPU)
    other = workspace.scratch((3,), torch.float32, CPU)
    multiply(x, between, factor)
    multiply(x[:3], other, 0.0)
    out = new(*x.shape) if out is None else out
    multiply(between, out, factor)
    return (out,)


def add_both(x: Tensor, y: Tensor, factor: float, out: Tensor | None) -> tuple[Tensor]:
    out = new(5) if out is None else out
    launching.launch(Add(), (1,), (x, y, y), out)
    return (out,)


def complaining(*arguments: Any) -> tuple[Tensor, ...]:
    raise ValueError("what the op says")


@dataclass
class Calls:
    """An op with this body; counts how often it runs in full, and through the dispatcher."""

    body: Callable[..., tuple[Tensor, ...]]
    num_arguments: int = 3
    ran: int = 0
    dispatched: int = 0

    def __post_init__(self) -> None:
        self.recorded = RecordedCalls("op_in_tests", self._run, self._dispatch)
        self.recorded._stats = OpStats()  # the op's own are those of all such objects

    def _run(self, arguments: tuple[Any, ...], results: Sequence[Any]) -> tuple[Tensor, ...]:
        self.ran += 1
        return self.body(*arguments, *results)

    def _dispatch(self, arguments: tuple[Any, ...], results: Sequence[Any]) -> tuple[Tensor, ...]:
        self.dispatched += 1
        return (torch.empty(0),)

    def __call__(
        self, x: Any, y: Any = None, factor: float = 2.0, out: Tensor | None = None
    ) -> Tensor:
        return self.recorded.call((x, y, factor)[: self.num_arguments], (out,))[0]

    @property
    def stats(self) -> Any:
        return self.recorded._stats


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    monkeypatch.setattr(calls, "_has_kernels", lambda device: True)
    monkeypatch.setattr(private, "current_device", lambda: None)  # the index of every CPU device
    monkeypatch.setattr(calls, "_is_capturing", lambda: False)
    monkeypatch.setattr(private, "current_stream", lambda device: 0)
    monkeypatch.setattr(private, "triton_version", lambda: "3.7")  # `Multiply` has no launcher in C
    for module in (key, record):
        monkeypatch.setattr(module, "ALIGNMENT", 64)  # as torch allocates in host memory
    return lambda body=four_times, num_arguments=3: Calls(body, num_arguments)


def values(n: int = 5, start: float = 1.0) -> Tensor:
    return torch.arange(n, dtype=torch.float32) + start


def settled(call: Calls) -> Calls:
    """Whose recording is among those used last."""
    for _ in range(4):
        call(values())
    assert call.ran == 2
    return call
