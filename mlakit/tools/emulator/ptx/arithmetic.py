"""Arithmetic, logic, comparisons and moves of 16, 32 and 64 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.ptx.conversions import packed_arithmetic
from mlakit.tools.emulator.ptx.instruction import Execute, Instruction, runs
from mlakit.tools.emulator.ptx.threads import KINDS, Threads, reader

SMALLEST_NORMAL = np.finfo(np.float32).tiny
Function = Callable[..., Any]

BINARY: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
UNARY: dict[str, Function] = {
    "abs": np.abs,
    "neg": np.negative,
    "not": np.invert,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "rcp": lambda x: np.float32(1) / x,
}
COMPARISONS: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
COMBINATIONS: dict[str, Function] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def flush(value: Any) -> Any:
    """Replace subnormal numbers by zeros of their sign, as .ftz does."""
    return np.where(np.abs(value) < SMALLEST_NORMAL, np.copysign(np.float32(0), value), value)


def _elementwise(
    instruction: Instruction, function: Function, count: int, *, flushes: bool
) -> Execute:
    """Run a function of `count` sources, which have the type of the instruction."""
    kind = instruction.kind
    sources = instruction.sources(*[kind] * count)
    target = instruction.operands[0]
    dtype = KINDS[kind]

    def execute(threads: Threads) -> None:
        result = function(*(source(threads) for source in sources))
        threads.write(target, np.asarray(result, dtype))

    def execute_flushing(threads: Threads) -> None:
        result = function(*(flush(source(threads)) for source in sources))
        threads.write(target, np.asarray(flush(result), dtype))

    return execute_flushing if flushes else execute


@runs("add", "sub", "and", "or", "xor")
def binary(instruction: Instruction) -> Execute:
    """Two operands of one type; integers wrap around."""
    if instruction.kind in ("f16x2", "bf16x2"):
        return packed_arithmetic(instruction)
    found = instruction.modifiers("rn", "ftz")
    return _elementwise(instruction, BINARY[instruction.name], 2, flushes="ftz" in found)


@runs("mul")
def multiply(instruction: Instruction) -> Execute:
    """A product: the low half, the high half or all bits of integers."""
    kind = instruction.kind
    if kind in ("f16x2", "bf16x2"):
        return packed_arithmetic(instruction)
    found = instruction.modifiers("rn", "ftz", "lo", "hi", "wide")
    if not found & {"hi", "wide"}:
        return _elementwise(instruction, np.multiply, 2, flushes="ftz" in found)
    if kind not in ("s32", "u32"):
        raise instruction.unsupported()
    a, b = instruction.sources(kind, kind)
    target = instruction.operands[0]
    wide = np.int64 if kind == "s32" else np.uint64

    def execute(threads: Threads) -> None:
        product = np.asarray(a(threads)).astype(wide) * np.asarray(b(threads)).astype(wide)
        threads.write(
            target, product if "wide" in found else (product >> wide(32)).astype(KINDS[kind])
        )

    return execute


@runs("mad")
def multiply_add(instruction: Instruction) -> Execute:
    """The low half of a product of integers, and a sum."""
    if instruction.modifiers("lo") != {"lo"}:
        raise instruction.unsupported()
    return _elementwise(instruction, lambda a, b, c: a * b + c, 3, flushes=False)


@runs("fma")
def fused_multiply_add(instruction: Instruction) -> Execute:
    """A product and a sum of float32, rounded once but for float64's rounding."""
    if instruction.kind in ("f16x2", "bf16x2"):
        return packed_arithmetic(instruction)
    found = instruction.modifiers("rn", "ftz")
    if instruction.kind != "f32":
        raise instruction.unsupported()

    def fma(a: Array, b: Array, c: Array) -> Array:
        wide = [np.asarray(each).astype(np.float64) for each in (a, b, c)]
        return np.asarray(wide[0] * wide[1] + wide[2]).astype(np.float32)

    return _elementwise(instruction, fma, 3, flushes="ftz" in found)


@runs("max", "min")
def extremum(instruction: Instruction) -> Execute:
    """The larger or smaller value; floats without .NaN ignore a NaN."""
    found = instruction.modifiers("NaN", "ftz")
    is_max = instruction.name == "max"
    function: Function = np.maximum if is_max else np.minimum
    if instruction.kind.startswith("f") and "NaN" not in found:
        function = np.fmax if is_max else np.fmin
    return _elementwise(instruction, function, 2, flushes="ftz" in found)


@runs("abs", "neg", "not", "ex2", "lg2", "sqrt", "rsqrt", "rcp")
def unary(instruction: Instruction) -> Execute:
    """A function of one operand; approximate ones are computed exactly here."""
    found = instruction.modifiers("approx", "ftz", "rn")
    return _elementwise(instruction, UNARY[instruction.name], 1, flushes="ftz" in found)


@runs("shl", "shr")
def shift(instruction: Instruction) -> Execute:
    """A shift; counts beyond the width shift everything out, and copy the sign of s32."""
    instruction.modifiers()
    kind, target = instruction.kind, instruction.operands[0]
    value, count = instruction.sources(kind, "u32")
    dtype = KINDS[kind]
    width = np.dtype(dtype).itemsize * 8
    is_left = instruction.name == "shl"

    def execute(threads: Threads) -> None:
        bits, by = np.asarray(value(threads)), np.asarray(count(threads))
        inside = np.minimum(by, width - 1).astype(dtype)
        result = bits << inside if is_left else bits >> inside
        if is_left or not kind.startswith("s"):
            result = np.where(by >= width, dtype(0), result)
        threads.write(target, np.asarray(result, dtype))

    return execute


@runs("lop3")
def logic3(instruction: Instruction) -> Execute:
    """Any function of three bits: bit 4 a + 2 b + c of the table is its value."""
    instruction.modifiers()
    a, b, c, _ = instruction.sources("b32", "b32", "b32", "b32")
    target, table = instruction.operands[0], int(instruction.operands[4], 0)

    def execute(threads: Threads) -> None:
        values = [np.asarray(each(threads)) for each in (a, b, c)]
        result: Array = np.zeros(threads.shape, np.uint32)
        for row in range(8):
            if table >> row & 1:
                bits = [
                    value if row >> place & 1 else ~value
                    for value, place in zip(values, (2, 1, 0), strict=True)
                ]
                result |= bits[0] & bits[1] & bits[2]
        threads.write(target, result)

    return execute


@runs("setp")
def compare(instruction: Instruction) -> Execute:
    """A comparison, optionally combined with a predicate.

    For floats a comparison is false if an operand is NaN, and one with a `u` behind it is true.
    """
    _, comparison, *more = instruction.mnemonic.split(".")[:-1]
    kind, target = instruction.kind, instruction.operands[0]
    is_float = kind.startswith("f")
    is_unordered = is_float and len(comparison) == 3 and comparison.endswith("u")
    function = COMPARISONS.get(comparison.removesuffix("u") if is_unordered else comparison)
    combination = COMBINATIONS.get(more[0]) if more else None
    if function is None or len(more) > 1 or (more and combination is None) or "|" in target:
        raise instruction.unsupported()
    a, b, *rest = instruction.sources(kind, kind, *["pred"] * len(more))

    def execute(threads: Threads) -> None:
        left, right = a(threads), b(threads)
        result = function(left, right)
        if is_float:
            has_nan = np.isnan(left) | np.isnan(right)
            result = result | has_nan if is_unordered else result & ~has_nan
        if combination is not None:
            result = combination(result, rest[0](threads))
        threads.write(target, result)

    return execute


@runs("selp")
def select(instruction: Instruction) -> Execute:
    """One of two values, by a predicate."""
    instruction.modifiers()
    kind, target = instruction.kind, instruction.operands[0]
    a, b, condition = instruction.sources(kind, kind, "pred")

    def execute(threads: Threads) -> None:
        threads.write(target, np.where(condition(threads), a(threads), b(threads)))

    return execute


@runs("mov")
def move(instruction: Instruction) -> Execute:
    """A copy, or two halves from a register or to one: `mov.b32 {low, high}, x`."""
    instruction.modifiers()
    kind = instruction.kind
    if len(instruction.operands) != 2:
        raise instruction.unsupported()
    target, source = instruction.operands
    if not target.startswith("{") and not source.startswith("{"):
        value = reader(source, kind)
        return lambda threads: threads.write(target, value(threads))
    if kind not in ("b32", "b64"):
        raise instruction.unsupported()
    half = "b16" if kind == "b32" else "b32"
    shift = KINDS[kind](16 if kind == "b32" else 32)
    halves = [
        each.strip() for each in (target if target.startswith("{") else source)[1:-1].split(",")
    ]
    if len(halves) != 2:
        raise instruction.unsupported()
    if target.startswith("{"):
        whole = reader(source, kind)

        def unpack(threads: Threads) -> None:
            bits = whole(threads)
            threads.write(halves[0], bits.astype(KINDS[half]))
            threads.write(halves[1], (bits >> shift).astype(KINDS[half]))

        return unpack
    low, high = (reader(each, half) for each in halves)

    def pack(threads: Threads) -> None:
        upper = np.asarray(high(threads)).astype(KINDS[kind]) << shift
        threads.write(target, np.asarray(low(threads)).astype(KINDS[kind]) | upper)

    return pack
