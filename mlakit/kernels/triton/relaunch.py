"""Starting a kernel once more, past Triton's look at its arguments.

Triton finds the compiled kernel for each launch by looking at every argument, and encodes every
descriptor for TMA anew. Where only addresses differ, both are known from the launch before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

# whose launcher in C is known; others are asked for a launch as Triton itself asks them
KNOWN_LAUNCHERS = ("3.6.",)
MAX_MAPS = 4096  # of 128 bytes: one per layer of a cache, and one per place of the queries


@dataclass(frozen=True)
class Pointer:
    """An argument that is an address; `taken_as` says what a launcher wants instead of it."""

    tensor: Tensor
    taken_as: Mapping[int, Any] | None = None


@dataclass(frozen=True)
class Prepared:
    """start(*before_stream, stream, *after_stream, *arguments) starts a kernel once more. Every
    `Pointer` among its arguments, also in tuples, is to be replaced by an address that is aligned
    like its own."""

    start: Callable[..., None]
    before_stream: tuple[Any, ...]
    after_stream: tuple[Any, ...]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Launch:
    """A kernel that was started."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # constants too, in the kernel's order

    def prepare(self) -> Prepared:
        """How to start it again, and with what."""
        blocks = (*self.grid, 1, 1)[:3]
        run, function = self.kernel.run, self.kernel.function
        metadata = (self.kernel.packed_metadata, None, None, None)
        known = _find_known_launcher(run)
        if known is None:
            marked = tuple(_marked(value, Boxes) for value in self.arguments)
            return Prepared(run, blocks, (function, *metadata), marked)

        launch, encodings = known
        remaining = iter(encodings)
        expanded: list[Any] = []
        for value in self.arguments:
            expanded.append(_marked(value, lambda box: TensorMaps(box, next(remaining))))
            if _is_descriptor(value):
                expanded += (*value.shape, *value.strides)
        options = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        return Prepared(launch, blocks, (function, *options, *metadata), tuple(expanded))


def _find_known_launcher(run: Any) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """The function in C, and how each of its descriptors is encoded."""
    if not triton.__version__.startswith(KNOWN_LAUNCHERS):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    if inspect.isbuiltin(run.launch):
        return run.launch, ()
    wrapped = inspect.getclosurevars(run.launch).nonlocals
    encodings = wrapped.get("tensordesc_meta", [None])
    if not inspect.isbuiltin(wrapped.get("launcher")) or None in encodings:
        return None
    return wrapped["launcher"], encodings


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "block_shape")


def _marked(value: Any, taken_as: Callable[[Any], Mapping[int, Any]]) -> Any:
    """With a `Pointer` for every address."""
    if isinstance(value, Tensor):
        return Pointer(value)
    if isinstance(value, tuple):
        return tuple(_marked(part, taken_as) for part in value)
    return Pointer(value.base, taken_as(value)) if _is_descriptor(value) else value


class Box:
    """A descriptor as a launcher reads it, at any address."""

    __slots__ = ("address", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, descriptor: Any, address: int) -> None:
        self.shape, self.strides = descriptor.shape, descriptor.strides
        self.padding = descriptor.padding
        self.round_f32_to_tf32 = getattr(descriptor, "round_f32_to_tf32", False)
        self.address = address

    @property
    def base(self) -> Box:
        """Itself, where a descriptor has a tensor, for that is only asked where it is."""
        return self

    def data_ptr(self) -> int:
        return self.address


class Boxes(dict[int, Any]):
    """By address."""

    def __init__(self, descriptor: Any) -> None:
        super().__init__()
        # without its tensor, which is to live no longer than its owner wants
        self._like = Box(descriptor, 0)

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_MAPS:
            self.clear()
        self[address] = made = self._make(Box(self._like, address))
        return made

    def _make(self, box: Box) -> Any:
        return box


class TensorMaps(Boxes):
    """Encoded as the hardware wants them."""

    def __init__(self, descriptor: Any, encoding: Mapping[str, Any]) -> None:
        super().__init__(descriptor)
        self._encoding = encoding

    def _make(self, box: Box) -> Any:
        # of one vendor, and only there where kernels with descriptors run
        from triton.backends.nvidia.driver import make_tensordesc_arg

        return make_tensordesc_arg(box, self._encoding)[0]
