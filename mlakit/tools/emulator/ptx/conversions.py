"""Conversions (cvt), permutations of bytes (prmt), and arithmetic on pairs of 16-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.ptx.instruction import Execute, Instruction, runs
from mlakit.tools.emulator.ptx.threads import KINDS, Threads

FP8_PAIRS = {"e4m3x2": "f8E4M3FN", "e5m2x2": "f8E5M2"}
HALF_PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
PACKED: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


@runs("cvt")
def convert(instruction: Instruction) -> Execute:
    """A conversion; the mnemonic ends with the types of the result and of the source."""
    parts = instruction.mnemonic.split(".")
    if len(parts) < 3:
        raise instruction.unsupported()
    modifiers, target, source = set(parts[1:-2]), parts[-2], parts[-1]
    if target in FP8_PAIRS and modifiers == {"rn", "satfinite"}:
        return _to_fp8(instruction, FP8_PAIRS[target], source)
    if target == "f16x2" and source in FP8_PAIRS and modifiers == {"rn"}:
        return _from_fp8(instruction, FP8_PAIRS[source])
    if target in HALF_PAIRS and source == "f32" and modifiers == {"rn"}:
        return _pack_halves(instruction, HALF_PAIRS[target])
    if (target, source) in (("f16", "f32"), ("bf16", "f32")) and modifiers == {"rn"}:
        return _convert_one(instruction, "f32", lambda x: dtypes.encode(x, target))
    if (target, source) in (("f32", "f16"), ("f32", "bf16")) and not modifiers:
        return _convert_one(instruction, "b16", lambda x: dtypes.decode(np.asarray(x), source))
    if target in KINDS and source in KINDS:
        return _convert_number(instruction, modifiers, target, source)
    raise instruction.unsupported()


def _convert_one(instruction: Instruction, kind: str, function: Callable[[Any], Array]) -> Execute:
    (value,) = instruction.sources(kind)
    target = instruction.operands[0]
    return lambda threads: threads.write(target, function(value(threads)))


def _to_fp8(instruction: Instruction, kind: str, source: str) -> Execute:
    """Two floats to a pair of bytes; of two operands the first is the upper byte."""
    target = instruction.operands[0]
    if source == "f16x2":
        (pair,) = instruction.sources("b32")

        def convert_pair(threads: Threads) -> None:
            low, high = _halves(pair(threads), "f16")
            threads.write(target, _bytes(dtypes.encode(low, kind), dtypes.encode(high, kind)))

        return convert_pair
    if source != "f32":
        raise instruction.unsupported()
    high, low = instruction.sources("f32", "f32")

    def convert_two(threads: Threads) -> None:
        upper, lower = dtypes.encode(high(threads), kind), dtypes.encode(low(threads), kind)
        threads.write(target, _bytes(lower, upper))

    return convert_two


def _bytes(low: Array, high: Array) -> Array:
    return np.asarray(low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8)))


def _from_fp8(instruction: Instruction, kind: str) -> Execute:
    """A pair of bytes to a pair of f16."""
    (pair,) = instruction.sources("b16")
    target = instruction.operands[0]

    def execute(threads: Threads) -> None:
        bits = np.asarray(pair(threads))
        low = dtypes.decode(bits.astype(np.uint8), kind)
        high = dtypes.decode((bits >> np.uint16(8)).astype(np.uint8), kind)
        threads.write(target, _pair(low, high, "f16"))

    return execute


def _pack_halves(instruction: Instruction, kind: str) -> Execute:
    """Two float32 to a pair of 16-bit floats; the first operand is the upper one."""
    high, low = instruction.sources("f32", "f32")
    target = instruction.operands[0]
    return lambda threads: threads.write(target, _pair(low(threads), high(threads), kind))


def _pair(low: Any, high: Any, kind: str) -> Array:
    upper = dtypes.encode(high, kind).astype(np.uint32) << np.uint32(16)
    return np.asarray(dtypes.encode(low, kind).astype(np.uint32) | upper)


def _halves(pair: Any, kind: str) -> tuple[Array, Array]:
    """Return the values of the lower and of the upper half of a register."""
    bits = np.asarray(pair)
    low = dtypes.decode(bits.astype(np.uint16), kind)
    return low, dtypes.decode((bits >> np.uint32(16)).astype(np.uint16), kind)


def _convert_number(
    instruction: Instruction, modifiers: set[str], target: str, source: str
) -> Execute:
    """Between integers, between integers and floats, and between f32 and f64."""
    dtype = KINDS[target]
    if "pred" in (target, source) or "f16" in (target, source):
        raise instruction.unsupported()
    if target.startswith("f"):  # f64 holds an f32 exactly; all others round
        if not modifiers <= {"rn"}:
            raise instruction.unsupported()
        return _convert_one(instruction, source, lambda x: np.asarray(x).astype(dtype))
    if not source.startswith("f"):
        if modifiers:
            raise instruction.unsupported()
        return _convert_one(instruction, source, lambda x: np.asarray(x).astype(dtype))
    rounding = ROUNDINGS.get("".join(modifiers - {"ftz"}))
    if rounding is None or np.dtype(dtype).itemsize != 4:
        raise instruction.unsupported()
    limits = np.iinfo(dtype)

    def to_integer(value: Any) -> Array:
        """Out of range saturates, and NaN is zero."""
        whole = np.nan_to_num(rounding(np.asarray(value, np.float64)), nan=0.0)
        return np.asarray(np.clip(whole, limits.min, limits.max)).astype(dtype)

    return _convert_one(instruction, source, to_integer)


@runs("prmt")
def permute(instruction: Instruction) -> Execute:
    """Four bytes of eight; the top bit of a selector's digit copies the byte's sign instead."""
    instruction.modifiers()
    a, b, selector = instruction.sources("b32", "b32", "b32")
    target = instruction.operands[0]

    def execute(threads: Threads) -> None:
        low = np.asarray(a(threads)).astype(np.uint64)
        both = low | (np.asarray(b(threads)).astype(np.uint64) << np.uint64(32))
        digits = selector(threads)
        result: Array = np.zeros(threads.shape, np.uint32)
        for place in range(4):
            byte = _pick_byte(both, (digits >> np.uint32(4 * place)) & np.uint32(15))
            result |= byte << np.uint32(8 * place)
        threads.write(target, result)

    return execute


def _pick_byte(both: Array, digit: Any) -> Array:
    """Return a byte of 64 bits, or its sign; `digit` is a number, or one per thread."""
    places = np.asarray((digit & np.uint32(7)) * np.uint32(8)).astype(np.uint64)
    byte = (both >> places).astype(np.uint32) & np.uint32(255)
    if not np.any(digit >= 8):
        return np.asarray(byte)
    sign = np.where(byte >= 128, np.uint32(255), np.uint32(0))
    return np.where(digit >= 8, sign, byte)


def packed_arithmetic(instruction: Instruction) -> Execute:
    """Arithmetic on both halves of 32-bit registers, rounded once."""
    instruction.modifiers("rn")
    if instruction.name not in PACKED:
        raise instruction.unsupported()
    function, kind = PACKED[instruction.name], HALF_PAIRS[instruction.kind]
    sources = instruction.sources(*["b32"] * (3 if instruction.name == "fma" else 2))
    target = instruction.operands[0]

    def execute(threads: Threads) -> None:
        halves = [_halves(source(threads), kind) for source in sources]
        low, high = (
            _narrow(function(*(each.astype(np.float64) for each in values)), kind)
            for values in zip(*halves, strict=True)
        )
        threads.write(target, low | (high << np.uint32(16)))

    return execute


def _narrow(values: Array, kind: str) -> Array:
    """Round float64 to the bits of a 16-bit float, once."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return dtypes.encode(round_to_odd(values), kind).astype(np.uint32)


def round_to_odd(values: Array) -> Array:
    """Round float64 to float32 so that a second rounding, to fewer bits, is that of the float64."""
    nearest = np.asarray(values, np.float64).astype(np.float32)
    bits = nearest.view(np.uint32)
    is_inexact = np.isfinite(nearest) & (nearest != values)
    is_even = (bits & np.uint32(1)) == 0
    towards_zero = np.where(
        np.abs(nearest) > np.abs(values), bits - np.uint32(1), bits | np.uint32(1)
    )
    return np.where(is_inexact & is_even, towards_zero, bits).view(np.float32)
