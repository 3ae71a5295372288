"""Formats of elements. Values of narrow floats are kept as float32, which holds all of them exactly;
memory holds their bits."""

from __future__ import annotations

import numpy as np

INTS = {"i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}
UNSIGNED = {"i1": np.uint8, "i8": np.uint8, "i16": np.uint16, "i32": np.uint32, "i64": np.uint64}
NARROW = {"bf16": np.uint16, "f16": np.uint16, "f8E4M3FN": np.uint8, "f8E5M2": np.uint8}
BITS = {
    "i1": 8,
    "i8": 8,
    "i16": 16,
    "i32": 32,
    "i64": 64,
    "f32": 32,
    "f64": 64,
    "bf16": 16,
    "f16": 16,
    "f8E4M3FN": 8,
    "f8E5M2": 8,
    "ptr": 64,
}


def element_size(kind: str) -> int:
    return BITS[kind] // 8


def value_dtype(kind: str) -> type:
    """Of arrays of values."""
    if kind in INTS:
        return INTS[kind]
    return {"f64": np.float64, "ptr": np.int64}.get(kind, np.float32)


def memory_dtype(kind: str) -> type:
    """Of arrays of bits in memory."""
    if kind in NARROW:
        return NARROW[kind]
    return np.uint8 if kind == "i1" else value_dtype(kind)


def _e4m3_table() -> np.ndarray:
    codes = np.arange(256)
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    value[(codes & 127) == 127] = np.nan
    return np.where(sign == 1, -value, value).astype(np.float32)


def _e5m2_table() -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


E4M3, E5M2 = _e4m3_table(), _e5m2_table()
_E4M3_POSITIVE = E4M3[:127].astype(np.float64)  # ascending


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """Values of what memory holds."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind == "f8E4M3FN":
        return E4M3[bits]
    if kind == "f8E5M2":
        return E5M2[bits]
    return bits.astype(np.bool_) if kind == "i1" else bits


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Bits of values, rounded to nearest even; e4m3 saturates, as Triton's conversions do."""
    if kind == "bf16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    if kind == "f16":
        with np.errstate(over="ignore"):
            return np.asarray(values, np.float32).astype(np.float16).view(np.uint16)
    if kind == "f8E4M3FN":
        return _encode_e4m3(np.asarray(values, np.float32))
    if kind == "f8E5M2":
        raise NotImplementedError("rounding to e5m2")
    return np.asarray(values).astype(memory_dtype(kind))


def _encode_e4m3(values: np.ndarray) -> np.ndarray:
    size = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    above = np.clip(np.searchsorted(_E4M3_POSITIVE, size), 0, 126)
    below = np.maximum(above - 1, 0)
    to_above, to_below = _E4M3_POSITIVE[above] - size, size - _E4M3_POSITIVE[below]
    is_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    code = np.where(is_below, below, above)
    code = np.where(np.isnan(values), 127, code)
    return (code | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Values as `kind` has them."""
    if kind in NARROW:
        return decode(encode(values, kind), kind)
    return np.asarray(values, value_dtype(kind)) if kind in ("f32", "f64") else values


def to_bits(values: np.ndarray, kind: str) -> np.ndarray:
    """Raw unsigned integers."""
    if kind in NARROW:
        return encode(values, kind)
    array = np.ascontiguousarray(values, memory_dtype(kind))
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize])


def from_bits(bits: np.ndarray, kind: str) -> np.ndarray:
    width = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[BITS[kind]]
    bits = np.ascontiguousarray(bits).astype(width)
    return decode(bits.view(memory_dtype(kind)), kind)
