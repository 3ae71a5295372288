"""Formats of elements: integers, float32, float64, and the narrow floats bf16, f16, e4m3, e5m2.

Values  narrow floats are float32 arrays, which hold all of them exactly; i1 is bool; pointers are
        int64 addresses; other kinds have their own numpy type. Unsigned integers are signed ones,
        as in the IR
Memory  holds bits: unsigned integers for narrow floats, the values themselves for the rest
Names   are those of the IR, such as `f8E4M3FN`
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

INTS: dict[str, type[Any]] = {
    "i1": np.bool_,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}
UNSIGNED: dict[str, type[Any]] = {
    "i1": np.uint8,
    "i8": np.uint8,
    "i16": np.uint16,
    "i32": np.uint32,
    "i64": np.uint64,
}
NARROW: dict[str, type[Any]] = {
    "bf16": np.uint16,
    "f16": np.uint16,
    "f8E4M3FN": np.uint8,
    "f8E5M2": np.uint8,
}
# an i1 takes a byte of memory
BITS = {
    "i1": 8, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "ptr": 64,
    "f32": 32, "f64": 64, "bf16": 16, "f16": 16, "f8E4M3FN": 8, "f8E5M2": 8,
}  # fmt: skip
_RAW: dict[int, type[Any]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def element_size(kind: str) -> int:
    """Return the bytes of an element in memory."""
    return BITS[kind] // 8


def value_dtype(kind: str) -> type[Any]:
    """Return the numpy type of values."""
    if kind in INTS:
        return INTS[kind]
    if kind == "ptr":
        return np.int64
    return np.float64 if kind == "f64" else np.float32


def memory_dtype(kind: str) -> type[Any]:
    """Return the numpy type of what memory holds."""
    if kind in NARROW:
        return NARROW[kind]
    return np.uint8 if kind == "i1" else value_dtype(kind)


def _e4m3_table() -> Array:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    value[(codes & 127) == 127] = np.nan
    return np.where(codes >= 128, -value, value).astype(np.float32)


def _e5m2_table() -> Array:
    """The upper byte of an f16 is an e5m2."""
    with np.errstate(invalid="ignore"):
        return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


E4M3, E5M2 = _e4m3_table(), _e5m2_table()
E4M3_MAX, E5M2_MAX = 448.0, 57344.0


def decode(bits: Array, kind: str) -> Array:
    """Return the values of what memory holds."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind == "f8E4M3FN":
        return np.asarray(E4M3[bits])
    if kind == "f8E5M2":
        return np.asarray(E5M2[bits])
    return bits.astype(np.bool_) if kind == "i1" else bits


def encode(values: Any, kind: str) -> Array:
    """Return the bits of values, rounded to nearest even; 8-bit floats saturate.

    Triton converts to 8-bit floats by `cvt.rn.satfinite`, which has the largest finite value for
    all that is larger, infinity included.
    """
    if kind == "bf16":
        return (_round_to_bf16(values) >> np.uint32(16)).astype(np.uint16)
    if kind == "f16":
        with np.errstate(over="ignore"):
            return np.asarray(values, np.float32).astype(np.float16).view(np.uint16)
    if kind == "f8E4M3FN":
        return _encode_fp8(values, mantissa_bits=3, bias=7, largest=E4M3_MAX)
    if kind == "f8E5M2":
        return _encode_fp8(values, mantissa_bits=2, bias=15, largest=E5M2_MAX)
    return np.asarray(values).astype(memory_dtype(kind))


def _round_to_bf16(values: Any) -> Array:
    """Return the bits of float32 values that are rounded to bf16; the lower half is zeros."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return np.where(np.isnan(values), np.uint32(0x7FC00000), rounded)


def _encode_fp8(values: Any, *, mantissa_bits: int, bias: int, largest: float) -> Array:
    values = np.asarray(values, np.float32)
    size = np.minimum(np.abs(values), np.float32(largest))
    bits = size.view(np.uint32)
    shift = np.uint32(23 - mantissa_bits)
    half = np.uint32((1 << (22 - mantissa_bits)) - 1)
    nearest = (bits + half + ((bits >> shift) & np.uint32(1))) >> shift
    normal = nearest - np.uint32((127 - bias) << mantissa_bits)
    is_subnormal = size < 2.0 ** (1 - bias)
    steps = np.rint(np.where(is_subnormal, size, 0) * 2.0 ** (mantissa_bits + bias - 1))
    code = np.where(is_subnormal, steps.astype(np.uint32), normal)
    code = np.where(np.isnan(values), np.uint32(127), code)
    sign = np.signbit(values).astype(np.uint32) << np.uint32(7)
    return np.asarray(code | sign).astype(np.uint8)


def rounded(values: Any, kind: str) -> Any:
    """Round values to a kind; a scalar stays one."""
    if kind == "bf16":
        return _round_to_bf16(values).view(np.float32)[()]
    if kind in NARROW:
        return decode(encode(values, kind), kind)[()]
    return np.asarray(values, value_dtype(kind))[()] if kind in ("f32", "f64") else values


def to_bits(values: Any, kind: str) -> Array:
    """Return the bits of values as unsigned integers."""
    if kind in NARROW:
        return encode(values, kind)
    array: Array = np.ascontiguousarray(values, memory_dtype(kind))
    return array.view(_RAW[array.itemsize * 8])


def from_bits(bits: Any, kind: str) -> Array:
    """Return the values of unsigned integers that may be wider than the kind."""
    raw = np.ascontiguousarray(bits).astype(_RAW[BITS[kind]])
    return decode(raw.view(memory_dtype(kind)), kind)
