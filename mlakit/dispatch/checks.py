"""Argument checks with generated messages: `<op>: <argument> must <requirement>, got <value>`.

Shapes, dtypes, devices and strides are known on the host and are always checked. Values in tensors
are checked only if `values_visible`: CPU tensors always, GPU tensors with `knobs.check_values`.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from numbers import Real
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from mlakit.dispatch import knobs, private

INTEGERS = (torch.int32, torch.int64, torch.uint32)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = torch.float8_e4m3fn


class UnsupportedError(NotImplementedError):
    """The arguments are valid, but no kernel supports them; the message has the reasons."""


_HIDDEN: ContextVar[bool] = ContextVar("mlakit_values_hidden", default=False)


@contextmanager
def values_hidden() -> Iterator[None]:
    """Check no values in this scope: tensors stand for others, and theirs mean nothing."""
    token = _HIDDEN.set(True)
    try:
        yield
    finally:
        _HIDDEN.reset(token)


def values_visible(tensor: Tensor) -> bool:
    """Return whether the host may read `tensor`: without a synchronisation, or with one asked for.

    False while torch.compile traces: the traced ops check when they run.
    """
    if torch.compiler.is_compiling() or _HIDDEN.get():
        return False
    return tensor.device.type == "cpu" or (tensor.device.type != "meta" and knobs.check_values())


def refuse_gradient(op: str, name: str, tensor: Tensor) -> None:
    """There is no backward: a graph would end here silently."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise UnsupportedError(
            f"{op}: {name} must not require grad, for there is no backward; "
            "call it under torch.no_grad() or torch.inference_mode()"
        )


def refuse_tangent(op: str, name: str, tensor: Tensor) -> None:
    """There is no forward-mode derivative, which torch.no_grad() leaves on."""
    if forward_ad._current_level < 0 or not private.is_forward_mode():
        return
    if private.is_batched(tensor):  # torch.vmap is refused later
        return
    if forward_ad.unpack_dual(tensor).tangent is not None:
        raise UnsupportedError(
            f"{op}: {name} must not have a tangent, for there is no forward-mode derivative; "
            "call it outside of torch.func.jvp, torch.func.jacfwd and dual_level()"
        )


def as_signed(tensor: Tensor) -> Tensor:
    """`tensor` with uint32 viewed as int32: torch has no uint32 comparisons on the CPU."""
    return tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _whole_number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):  # first: under torch.compile a symbolic int fails the rest
        return value
    if not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # every tensor has __index__, but only one-element integer tensors allow it
        return None


class Dims:
    """Binds the named axes of an op's arguments and reports the first size that differs."""

    def __init__(self, op: str, **known: int) -> None:
        self.op = op
        self._bound = {axis: (size, f"{axis} of the call") for axis, size in known.items()}
        self._device: tuple[torch.device, str] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the tensors matched so far."""
        if self._device is None:
            raise LookupError(f"{self.op}: no tensor has been matched yet")
        return self._device[0]

    def __getitem__(self, axis: str) -> int:
        return self._bound[axis][0]

    def bind(self, axis: str, size: int, source: str) -> None:
        """Bind `axis` to a size that does not come from a matched tensor."""
        want, known = self._bound.setdefault(axis, (size, source))
        self.require(size == want, source, f"equal {known}, {want}", size)

    def fail(self, arg: str, must: str, got: object) -> NoReturn:
        raise ValueError(f"{self.op}: {arg} must {must}, got {got}")

    def require(self, condition: bool, arg: str, must: str, got: object) -> None:
        if not condition:
            self.fail(arg, must, got)

    def tensor(self, arg: str, value: object) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.op}: {arg} must be a tensor, got {type(value).__name__}")
        return value

    def instance(self, arg: str, value: object, kind: type) -> None:
        if not isinstance(value, kind):
            raise TypeError(f"{self.op}: {arg} must be {kind.__name__}, got {type(value).__name__}")

    def integer(self, arg: str, value: object, minimum: int) -> int:
        """An integer of at least `minimum`: an int, or a value with `__index__`."""
        number = _whole_number(value)
        if number is None:
            raise TypeError(f"{self.op}: {arg} must be an integer, got {type(value).__name__}")
        self.require(number >= minimum, arg, f"be at least {minimum}", number)
        return number

    def integers(self, arg: str, values: object, minimum: int) -> tuple[int, ...]:
        """A sequence of integers of at least `minimum`."""
        if not isinstance(values, Iterable):
            got = type(values).__name__
            raise TypeError(f"{self.op}: {arg} must be a sequence of integers, got {got}")
        return tuple(self.integer(f"{arg}[{i}]", n, minimum) for i, n in enumerate(values))

    def finite(self, arg: str, value: object) -> float:
        """A finite real number on the host: of Python, or a scalar of NumPy."""
        if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
            raise TypeError(f"{self.op}: {arg} must be a number, got {type(value).__name__}")
        try:
            number = float(value)
        except OverflowError:
            self.fail(arg, "be finite", f"a number above {sys.float_info.max}")
        self.require(math.isfinite(number), arg, "be finite", number)
        return number

    def scale(self, arg: str, scale: float | Tensor) -> float | Tensor:
        """The scale of a whole tensor: a positive normal float32, or a tensor of one element.

        The value of a tensor is checked where the host may read it; a fake tensor has none.
        """
        value: object = scale
        if isinstance(scale, Tensor):
            self.dtype(arg, scale, *FLOATS, torch.float64)
            self.require(scale.numel() == 1, arg, "have one element", f"shape {tuple(scale.shape)}")
            if type(scale) not in (Tensor, nn.Parameter) or not values_visible(scale):
                return scale
            value = scale.item()
        number, float32 = self.finite(arg, value), torch.finfo(torch.float32)
        usable = float32.smallest_normal <= number <= float32.max
        self.require(usable, arg, "be positive and a normal float32", value)
        return scale if isinstance(scale, Tensor) else number

    def dtype(self, arg: str, tensor: Tensor, *allowed: torch.dtype) -> None:
        if tensor.dtype not in allowed:
            got = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(f"{self.op}: {arg} must be {_names(allowed)}, got {got}")

    def match(
        self, arg: str, value: object, *axes: str, dtypes: Iterable[torch.dtype] = ()
    ) -> Tensor:
        """Check a tensor argument's rank, axis sizes, dtype and device; bind axes not yet known."""
        tensor = self.tensor(arg, value)
        if tensor.ndim != len(axes):
            self.fail(arg, f"have axes ({', '.join(axes)})", f"shape {tuple(tensor.shape)}")
        allowed = tuple(dtypes)
        if allowed:
            self.dtype(arg, tensor, *allowed)
        for i, (axis, size) in enumerate(zip(axes, tensor.shape, strict=True)):
            want, source = self._bound.setdefault(axis, (size, f"{arg}.shape[{i}]"))
            if size != want:
                self.fail(f"{arg}.shape[{i}] ({axis})", f"equal {source}, {want}", size)
        self.same_device(arg, tensor)
        return tensor

    def same_device(self, arg: str, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            self.fail(arg, "be on a device that holds data", "a meta tensor")
        if self._device is None:
            self._device = (tensor.device, arg)
        device, source = self._device
        if tensor.device != device:
            self.fail(arg, f"be on the device of {source}, {device}", tensor.device)

    def rows_contiguous(self, arg: str, tensor: Tensor) -> None:
        """Require a contiguous last axis; other axes may have any stride."""
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            self.fail(arg, "have a contiguous last axis", f"strides {tensor.stride()}")

    def writable(self, arg: str, tensor: Tensor) -> None:
        """Require a contiguous last axis, and no two elements at the same address."""
        self.rows_contiguous(arg, tensor)
        self.not_overlapping(arg, tensor)

    def not_overlapping(self, arg: str, tensor: Tensor) -> None:
        """Require that no two elements have the same address: a write would change several of them.

        Axes must be nested in memory, as in every slice of a packed tensor: a step along one of
        them goes beyond all elements of those with smaller strides.
        """
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and tensor.is_contiguous():
            return
        axes = tuple(zip(tensor.stride(), tensor.shape, strict=True))
        for i, (stride, size) in enumerate(axes):
            if size > 1 and stride == 0:
                self.fail(arg, "be writable", f"stride 0 on axis {i} (an expanded tensor)")
        if is_compiling:  # sizes are symbols: the traced ops check the rest when they run
            return
        last = 0  # the largest offset along the axes so far
        for stride, size in sorted(axes):
            if size > 1 and stride <= last:
                got = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
                self.fail(arg, "be writable", f"{got}, whose elements share memory")
            last += (size - 1) * stride

    def starts(
        self,
        arg: str,
        offsets: Tensor,
        total: int | None,
        total_name: str = "",
        *,
        is_padded: bool = False,
    ) -> None:
        """Require row offsets to start at 0, never decrease, and end at `total` if it is given.

        is_padded  they may end before `total`
        """
        if offsets.shape[0] < 1:
            self.fail(arg, "have batch + 1 entries", "none")
        if not values_visible(offsets):
            return
        host = as_signed(offsets).tolist()
        self.require(host[0] == 0, f"{arg}[0]", "be 0", host[0])
        for i, (low, high) in enumerate(pairwise(host)):
            self.require(high >= low, f"{arg}[{i + 1}]", f"not be below {arg}[{i}] = {low}", high)
        if total is not None and is_padded:
            must = f"not exceed {total_name}, {total}"
            self.require(host[-1] <= total, f"{arg}[-1]", must, host[-1])
        elif total is not None:
            self.require(host[-1] == total, f"{arg}[-1]", f"equal {total_name}, {total}", host[-1])

    def lengths(
        self, arg: str, lengths: Tensor, maximum: int | None = None, maximum_name: str = ""
    ) -> None:
        """Require every entry of `lengths` to be in [0, maximum]; None: any maximum."""
        if not values_visible(lengths):
            return
        for i, length in enumerate(as_signed(lengths).tolist()):
            self.require(length >= 0, f"{arg}[{i}]", "not be negative", length)
            if maximum is not None and length > maximum:
                self.fail(f"{arg}[{i}]", f"not exceed {maximum_name}, {maximum}", length)

    def not_negative(self, arg: str, tensor: Tensor) -> None:
        """Require that no element is below 0."""
        if values_visible(tensor) and bool((tensor < 0).any()):
            self.fail(arg, "not be negative", float(tensor[tensor < 0].amin()))

    def new_tokens_counted(self, kv_lens: Sequence[int], q_lens: Sequence[int]) -> None:
        """Require that the length of every request includes its new tokens."""
        for request, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
            must = f"include the {q_len} new tokens of the request"
            self.require(kv_len >= q_len, f"kv_lens[{request}]", must, kv_len)
