"""Copies of weights in another layout or dtype, and a watch for writes that torch does not count.

Torch counts the writes to a tensor, and copies are refreshed after them. It does not count writes
through `.data` and writes to tensors made in inference mode. To find these, each use of the copies
compares a sample of the weights with them: about `SAMPLE` elements of each, spread over the whole
tensor and shifted from one sample to the next until every element was compared.

    on a CPU    every use compares, and raises if the weight differs
    on a GPU    one use in `GPU_INTERVAL` compares, and a later use raises: none waits for the GPU
    not         while torch.compile traces or a CUDA graph is captured, nor in these graphs

`refresh` writes the copies where they are, so that CUDA graphs see the new values too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mlakit.dispatch import private
from mlakit.dispatch.checks import E4M3

SAMPLE = 256
GPU_INTERVAL = 16
_FIRST_USES = count()  # the layers of a model then do not all compare in the same step


def identity(tensor: Tensor | None) -> tuple[object, ...] | None:
    """Return a value that changes when a tensor is replaced, or written to as torch counts.

    A tensor with a tangent has the memory of one without. Where there may be some, and in
    transforms of torch.func, a tensor is always another one.
    """
    if tensor is None:
        return None
    if forward_ad._current_level >= 0 or private.is_transformed():
        return (object(),)
    return tensor.data_ptr(), _version(tensor), tensor.dtype, tensor.device, tuple(tensor.shape)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class WeightCopy:
    """A contiguous copy of a weight, or of blocks of it, in `dtype` and times `factor`.

    source   a view of the weight
    index    the entries of a small source to copy, as index tensors; None: all
    """

    def __init__(
        self,
        name: str,
        source: Tensor,
        *,
        dtype: torch.dtype | None = None,
        index: tuple[Tensor, ...] | None = None,
        factor: float = 1.0,
    ) -> None:
        self.name, self.source, self.index, self.factor = name, source, index, factor
        self.dtype = source.dtype if dtype is None else dtype
        self.values = self._computed().clone(memory_format=torch.contiguous_format)
        self.steps = _sample_steps(self.values.shape)
        self._phase = 0

    def refresh(self) -> None:
        """Copy the weight again, to the same memory."""
        self.values.copy_(self._computed())

    def differs(self) -> Tensor:
        """Return whether the weight's next sample differs from the copy, a bool on its device."""
        return _differ(*self._next_pair())

    def differs_on_cpu(self) -> bool:
        """`differs` in fewer operations: a sample that is equal has no NaN to look for."""
        now, kept = self._next_pair()
        return not torch.equal(now, kept) and bool(_differ(now, kept))

    def _next_pair(self) -> tuple[Tensor, Tensor]:
        """The next sample of the weight, converted, and of the copy."""
        at = self._next_sample()
        now = self._converted(self.source[at]) if self.index is None else self._computed()[at]
        kept = self.values[at]
        if self.dtype == E4M3:  # codes, which torch compares as bytes
            return now.view(torch.uint8), kept.view(torch.uint8)
        return now, kept

    def _computed(self) -> Tensor:
        return self._converted(self.source if self.index is None else self.source[self.index])

    def _converted(self, taken: Tensor) -> Tensor:
        taken = taken.to(self.dtype)
        return taken if self.factor == 1.0 else taken * self.factor

    def _next_sample(self) -> tuple[slice, ...]:
        phases = prod(self.steps)
        # an odd number of phases ahead: all of them are reached, in an order without a pattern
        self._phase = (self._phase + (int(0.618 * phases) | 1)) % phases
        rest, at = self._phase, []
        for step in self.steps:
            at.append(slice(rest % step, None, step))
            rest //= step
        return tuple(at)


def _differ(now: Tensor, kept: Tensor) -> Tensor:
    return ((now != kept) & ~(now.isnan() & kept.isnan())).any()


def _sample_steps(shape: Sequence[int]) -> tuple[int, ...]:
    """The step along each axis, a power of two, that leaves at most `SAMPLE` elements."""
    left, steps = list(shape), [1] * len(shape)
    while prod(left) > SAMPLE:
        axis = left.index(max(left))
        steps[axis] *= 2
        left[axis] = -(-shape[axis] // steps[axis])
    return tuple(steps)


class _Comparison(NamedTuple):
    """The result of a comparison on a GPU, on its way to the host."""

    differs: Tensor  # [copies] bool in pinned memory, valid after `event`
    event: torch.cuda.Event


class WeightCopies:
    """The copies of one owner's weights. `ensure_current` comes before each use of them."""

    def __init__(self, owner: str, copies: Sequence[WeightCopy]) -> None:
        """Watch a weight; `owner` begins the message of an error."""
        self.owner, self.copies = owner, tuple(copies)
        self._versions = self._current_versions()
        self._written: str | None = None  # the name of a weight that differs
        self._comparison: _Comparison | None = None
        self._uses = next(_FIRST_USES)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_comparison": None}  # an event is not copied

    def refresh(self) -> None:
        """Copy the weights again, whether or not they were written."""
        with torch.inference_mode():  # where tensors of both kinds may be written
            for copy in self.copies:
                copy.refresh()
        self._written = self._comparison = None
        if not _is_capturing(self._device):  # a capture runs nothing
            self._versions = self._current_versions()

    def ensure_current(self) -> None:
        """Refresh the copies after counted writes; raise RuntimeError if others were found."""
        if torch.compiler.is_compiling() or private.is_traced():
            return
        if private.is_transformed() and any(
            private.is_batched(copy.source) for copy in self.copies
        ):  # of torch.vmap, which the ops refuse by name
            return
        if self._versions != self._current_versions():
            self.refresh()
        elif self._device.type == "cpu":
            self._compare()
        elif self._device.type == "cuda" and not _is_capturing(self._device):
            self._compare_later()
        if self._written is not None:
            raise RuntimeError(
                f"{self.owner}: {self._written} must equal the copy that was made of it, got other "
                "values: it was written through .data or in inference mode, which torch does not "
                "count; call refresh_weights() after such a write"
            )

    @property
    def _device(self) -> torch.device:
        return self.copies[0].values.device

    def _current_versions(self) -> list[int]:
        return [_version(copy.source) for copy in self.copies]

    def _compare(self) -> None:
        for copy in self.copies:
            if copy.differs_on_cpu():
                self._written = copy.name

    def _compare_later(self) -> None:
        last = self._comparison
        if last is not None and last.event.query():
            self._comparison = None
            for copy, differs in zip(self.copies, last.differs.tolist(), strict=True):
                if differs:
                    self._written = copy.name
        self._uses += 1
        if self._comparison is None and self._uses % GPU_INTERVAL == 0:
            found = torch.stack([copy.differs() for copy in self.copies])
            host = torch.empty(found.shape, dtype=torch.bool, device="cpu", pin_memory=True)
            host.copy_(found, non_blocking=True)
            event = torch.cuda.current_stream(self._device).record_event()
            self._comparison = _Comparison(host, event)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
