"""Values of kernels and arithmetic on them, for generated code.

A scalar is a Python integer, a bool or a numpy float; a tensor is an array. Narrow floats are
float32 values that the narrow type can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from mlakit.tools.emulator import dtypes
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.faults import Fault
from mlakit.tools.emulator.layouts import thread_elements
from mlakit.tools.emulator.types import Type

Combine = Callable[..., tuple[Array, ...]]

np.seterr(all="ignore")


class Divergent(np.lib.mixins.NDArrayOperatorsMixin):
    """A tensor whose copies in different threads differ, made by inline assembly on purpose.

    data  [warps, lanes, registers]; elementwise operations are done per thread, and an operation
          that takes the copies for one value is a fault
    """

    def __init__(self, data: Array, type: Type) -> None:
        self.data, self.type = data, type

    def lift(self, other: Any) -> Any:
        """Return a tensor of the same shape and layout as each thread holds it."""
        if isinstance(other, Divergent):
            return other.data
        if isinstance(other, np.ndarray) and other.ndim:
            assert self.type.shape is not None
            places = thread_elements(self.type.layout, self.type.shape, self.data.shape[0])
            return np.ascontiguousarray(other).reshape(-1)[places]
        return other

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Divergent:
        if method != "__call__":
            raise Fault("threads have different values of what a reduction takes for one")
        return Divergent(ufunc(*map(self.lift, inputs)), self.type)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.where:
            return Divergent(np.where(*map(self.lift, args)), self.type)
        raise Fault(f"threads have different values of what {function.__name__} takes for one")

    def astype(self, dtype: Any) -> Divergent:
        """Return the values as another type."""
        return Divergent(self.data.astype(dtype), self.type)


def reshape_last(value: Any, rank: int, shape: tuple[int, ...], is_broadcast: bool) -> Array:
    """Return the last `rank` dimensions in another shape."""
    value = np.asarray(value)
    first = value.shape[: value.ndim - rank]
    if is_broadcast:
        own = value.shape[value.ndim - rank :] or (1,) * len(shape)
        return np.broadcast_to(value.reshape(first + own), first + shape)
    return cast(Array, value.reshape(first + shape))


def transpose_last(value: Array, order: list[int]) -> Array:
    """Return the last dimensions in another order, given by negative numbers."""
    first = list(range(value.ndim - len(order)))
    return np.transpose(value, first + [value.ndim + each for each in order])


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a · b + c, rounded once."""
    return (np.asarray(a, np.float64) * b + c).astype(np.float32)


def astype(value: Any, dtype: Any) -> Any:
    """Return a value as another type."""
    return value.astype(dtype) if isinstance(value, Divergent) else np.asarray(value).astype(dtype)


def trunc_div(a: Any, b: Any) -> Any:
    """Return the quotient of integers, rounded towards zero."""
    if isinstance(a, np.ndarray):
        quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
        return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


def trunc_rem(a: Any, b: Any) -> Any:
    """Return the remainder of `trunc_div`."""
    rest = a - trunc_div(a, b) * b
    return rest.astype(a.dtype) if isinstance(a, np.ndarray) else rest


def unsigned(value: Any, kind: str) -> Any:
    """Return an integer's bits as an unsigned number."""
    if isinstance(value, np.ndarray):
        return value.view(dtypes.UNSIGNED[kind])
    return int(value) & ((1 << dtypes.BITS[kind]) - 1)


def signed(value: Any, kind: str) -> Any:
    """Return an integer's bits as a signed number."""
    if isinstance(value, np.ndarray):
        return value.view(dtypes.INTS[kind])
    half = 1 << (dtypes.BITS[kind] - 1)
    return ((int(value) + half) & (2 * half - 1)) - half


def scalar(value: Any, kind: str) -> Any:
    """Return a scalar as generated code has it."""
    if kind == "i1":
        return bool(value)
    if kind[0] == "i" or kind == "ptr":
        return int(value)
    return np.float32(value)


def bitcast(value: Any, source: str, target: str, is_tensor: bool) -> Any:
    """Return the bits of a value as another type of the same size."""
    if source == target or "ptr" in (source, target):
        return value
    if isinstance(value, Divergent):
        return Divergent(bitcast(value.data, source, target, True), value.type)
    array = np.asarray(value, dtypes.value_dtype(source))
    result = dtypes.from_bits(dtypes.to_bits(np.atleast_1d(array), source), target)
    return result.reshape(array.shape) if is_tensor else scalar(result[0], target)


def reduce(values: tuple[Array, ...], axis: int, combine: Combine) -> tuple[Array, ...]:
    """Reduce by halves, the order in which shuffles combine."""
    values = tuple(np.moveaxis(each, axis, 0) for each in values)
    while values[0].shape[0] > 1:
        half = values[0].shape[0] // 2
        rest = tuple(each[2 * half :] for each in values)
        low, high = ([each[half * i : half * (i + 1)] for each in values] for i in (0, 1))
        values = combine(*low, *high)
        if rest[0].shape[0]:
            pairs = zip(values, rest, strict=True)
            values = tuple(np.concatenate([each, more]) for each, more in pairs)
    return tuple(each[0] for each in values)


def scan(
    values: tuple[Array, ...], axis: int, is_reverse: bool, combine: Combine
) -> tuple[Array, ...]:
    """Combine each element with all before it, or behind it."""
    values = tuple(np.moveaxis(each, axis, 0) for each in values)
    if is_reverse:
        values = tuple(each[::-1] for each in values)
    step, count = 1, values[0].shape[0]
    while step < count:
        later = combine(*(each[:-step] for each in values), *(each[step:] for each in values))
        pairs = zip(values, later, strict=True)
        values = tuple(np.concatenate([each[:step], new]) for each, new in pairs)
        step *= 2
    if is_reverse:
        values = tuple(each[::-1] for each in values)
    return tuple(np.moveaxis(each, 0, axis) for each in values)
