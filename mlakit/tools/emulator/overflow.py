"""Integers that remember an overflow.

Scalar arithmetic of kernels wraps as the hardware's does. A value that has wrapped is a number like
any other, and a coordinate or an address that is computed from it is wrong: `Wrapped` stays with
what is computed from such a value, so that a copy can refuse it. Tensors of numbers wrap silently.
"""

from __future__ import annotations

from typing import Any


class Wrapped(int):
    """An integer in whose computation an overflow happened."""

    def __add__(self, other: Any) -> Wrapped:
        return Wrapped(int(self) + int(other))

    def __sub__(self, other: Any) -> Wrapped:
        return Wrapped(int(self) - int(other))

    def __rsub__(self, other: Any) -> Wrapped:
        return Wrapped(int(other) - int(self))

    def __mul__(self, other: Any) -> Wrapped:
        return Wrapped(int(self) * int(other))

    def __floordiv__(self, other: Any) -> Wrapped:
        return Wrapped(int(self) // int(other))

    def __abs__(self) -> Wrapped:
        return Wrapped(abs(int(self)))

    def __neg__(self) -> Wrapped:
        return Wrapped(-int(self))

    __radd__ = __add__
    __rmul__ = __mul__


def wrap(value: int, bits: int) -> int:
    """Return the value that a signed integer of `bits` bits has."""
    half = 1 << (bits - 1)
    if -half <= value < half:
        return value
    return Wrapped(((int(value) + half) & ((1 << bits) - 1)) - half)
