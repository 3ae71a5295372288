"""What a kernel says it can take, and what it is asked to take.

A `Problem` is a plain description of one call: names and numbers, no tensors. A `KernelSpec` holds
a `why_not` predicate over problems that returns the reason of a refusal, or None. Adding a kernel
is adding a spec; nothing else decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from mlakit.geometry import RowShape
from mlakit.knobs import Backend


@dataclass(frozen=True)
class Problem:
    """One call of an op. Fields an op has no use for keep their defaults."""

    device: str  # "cpu", "cuda"
    arch: int = 0  # compute capability as 90 for sm_90; 0 off CUDA
    dtype: str = ""  # of the queries or activations, as torch prints it
    format: str = ""  # of the cache rows
    heads: int = 0
    page_size: int = 0
    row: RowShape | None = None
    head_widths: tuple[int, int, int] | None = None  # (D_N, D_R, D_V) of the expanded form
    mask: str = ""
    uses: tuple[str, ...] = ()  # what few kernels take, in words: "kv_shard", "loose rows"

    def __str__(self) -> str:
        where = self.device + (f" sm_{self.arch}" if self.arch else "")
        facts = {
            "dtype": self.dtype,
            "format": self.format,
            "heads": self.heads,
            "page_size": self.page_size,
            "row": f"{self.row.width}/{self.row.v_width}" if self.row else "",
            "widths": "+".join(map(str, self.head_widths or ())),
            "mask": self.mask,
            "uses": " and ".join(self.uses),
        }
        return ", ".join([where, *(f"{name}={fact}" for name, fact in facts.items() if fact)])


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: which op it serves on which backend, where its launcher is, what it refuses."""

    backend: Backend
    op: str
    launcher: str  # "module:function", imported at the first call
    why_not: Callable[[Problem], str | None]
    planner: str = ""  # "module:function" that makes its plans, where they can be made ahead

    def __str__(self) -> str:
        return f"{self.backend}-{self.op}"

    @cached_property
    def launch(self) -> Callable[..., Any]:
        """The launcher itself."""
        return _imported(self.launcher)

    @cached_property
    def plan(self) -> Callable[..., Any]:
        """The planner itself."""
        return _imported(self.planner)


def _imported(path: str) -> Callable[..., Any]:
    module, name = path.split(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


_PRETENDED_ARCH: ContextVar[int | None] = ContextVar("mlakit_pretended_arch", default=None)


@contextmanager
def pretending(arch: int) -> Iterator[None]:
    """Have problems in this scope described as if their tensors were on a GPU of `arch`."""
    token = _PRETENDED_ARCH.set(arch)
    try:
        yield
    finally:
        _PRETENDED_ARCH.reset(token)


def device_facts(device: torch.device) -> tuple[str, int]:
    """(device type, arch) of a torch device, as `Problem` wants them."""
    pretended = _PRETENDED_ARCH.get()
    if pretended is not None:
        return "cuda", pretended
    if device.type != "cuda":
        return device.type, 0
    major, minor = torch.cuda.get_device_capability(device)
    return "cuda", 10 * major + minor
