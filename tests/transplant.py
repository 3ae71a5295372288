"""Carrying a call to another device: cases and oracles stay on the CPU, the function runs there.

Every storage that the arguments reach is copied there once, so views that share memory share it
there too, with the same strides and the same poison between their rows. After the call every
storage is copied back: what was written, and where nothing may be, shows on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from mlakit.compat.modular import KVCollection

T = TypeVar("T")
CPU = torch.device("cpu")
_DEVICE: ContextVar[torch.device] = ContextVar("device", default=CPU)
_WAITING: ContextVar[str] = ContextVar("waiting", default="default")


@contextmanager
def calls_run_on(device: torch.device) -> Iterator[None]:
    """Where `carried` functions run in this scope."""
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


@contextmanager
def calls_may_not_wait() -> Iterator[None]:
    """A `carried` function that makes the host wait for the GPU fails in this scope."""
    token = _WAITING.set("error")
    try:
        yield
    finally:
        _WAITING.reset(token)


def device_of_calls() -> torch.device:
    return _DEVICE.get()


def carried(function: Callable[..., T], *, host: Collection[int | str] = ()) -> Callable[..., T]:
    """`function`, run where `calls_run_on` says.

    host  arguments that stay on the CPU, by their place or by their name
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> T:
        device = device_of_calls()
        if device == CPU:
            return function(*args, **kwargs)
        there = Transplant(device)
        moved = [arg if i in host else there.moved(arg) for i, arg in enumerate(args)]
        named = {name: arg if name in host else there.moved(arg) for name, arg in kwargs.items()}
        try:
            with _sync_mode(_WAITING.get()):
                result = function(*moved, **named)
            return there.original(result)
        finally:
            there.copy_back()

    return run


@contextmanager
def _sync_mode(mode: str) -> Iterator[None]:
    if mode == "default":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Transplant:
    """Arguments of one call, and their copies on `device`."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._storages: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._tensors: list[tuple[Tensor, Tensor]] = []  # (here, there)

    def moved(self, value: Any) -> Any:
        """`value` with all tensors in it on the device; itself where there is none."""
        if isinstance(value, Tensor):
            return self._moved_tensor(value)
        if isinstance(value, (list, tuple)):
            parts = [self.moved(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, KVCollection):
            return self._rebuilt(value, list(vars(value)))
        if is_dataclass(value) and not isinstance(value, type):
            return self._rebuilt(value, [field.name for field in fields(value)])
        if callable(value) and not isinstance(value, type):
            return lambda *args: self.moved(value(*(self.original(arg) for arg in args)))
        return value

    def _moved_tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = (storage, self._copied(storage))
        _, copied = self._storages[storage._cdata]
        there = copied.view(tensor.dtype).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        there.requires_grad_(tensor.requires_grad)
        self._tensors.append((tensor, there))
        return there

    def _copied(self, storage: torch.UntypedStorage) -> Tensor:
        """Bytes, a whole number of elements of any type."""
        copied = torch.zeros(-(-storage.nbytes() // 8) * 8, dtype=torch.uint8, device=self.device)
        copied[: storage.nbytes()].copy_(_bytes_of(storage))
        return copied

    def _rebuilt(self, value: Any, names: list[str]) -> Any:
        parts = {name: getattr(value, name) for name in names}
        others = {name: self.moved(part) for name, part in parts.items()}
        if all(others[name] is parts[name] for name in names):
            return value
        rebuilt = copy.copy(value)
        for name, other in others.items():
            object.__setattr__(rebuilt, name, other)
        return rebuilt

    def original(self, value: Any) -> Any:
        """What stands for a result here: the argument that it is, or a copy."""
        if isinstance(value, Tensor):
            for here, there in self._tensors:
                if there is value:
                    return here
            return value.cpu()
        if isinstance(value, tuple):
            parts = [self.original(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    def copy_back(self) -> None:
        """What the device holds now, into the storages it came from."""
        for storage, copied in self._storages.values():
            _bytes_of(storage).copy_(copied[: storage.nbytes()])
