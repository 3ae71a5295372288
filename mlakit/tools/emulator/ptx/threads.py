"""The threads that run inline assembly: their registers, and which of them are active."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.ir import Unsupported

# types of PTX as numpy's; a predicate is an array of bool
KINDS: dict[str, type[Any]] = {
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
    "pred": np.bool_,
}  # fmt: skip
_RAW: dict[int, type[Any]] = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
UNDEFINED = 0xFFC0DEAD  # a NaN as a float, and a negative integer
SINK = "_"  # a destination that drops what it is given

Shape: TypeAlias = tuple[int, int, int]  # warps, lanes, invocations
Reader: TypeAlias = Callable[["Threads"], Any]


class Threads:
    """All threads of a warp partition, in step.

    registers  by name; operands of the assembly are $0, $1, ...
    active     the threads that run the current instruction
    waiting    threads that have branched ahead, by the label that they wait at
    """

    def __init__(self, inputs: dict[str, Array], shape: Shape) -> None:
        self.registers: dict[str, Array] = dict(inputs)
        self.shape = shape
        self.active: Array = np.ones(shape, np.bool_)
        self.is_every_active = True
        self.waiting: dict[str, Array] = {}

    def set_active(self, active: Array) -> None:
        """Choose the threads that run the next instructions."""
        self.active = active
        self.is_every_active = bool(active.all())

    def read(self, register: str) -> Array:
        """Return the raw bits of a register."""
        try:
            return self.registers[register]
        except KeyError:
            raise Unsupported(f"PTX register {register} is read before it is written") from None

    def result(self, register: str) -> Array:
        """Return the raw bits of a result; one that is never written has bits of no use."""
        written = self.registers.get(register)
        return np.full(self.shape, UNDEFINED, np.uint32) if written is None else written

    def write(self, register: str, value: Any) -> None:
        """Set a register in the threads that are active."""
        if register == SINK:
            return
        value = np.asarray(value)
        if value.shape != self.shape:
            value = np.broadcast_to(value, self.shape)
        if value.dtype != np.bool_:
            value = np.ascontiguousarray(value).view(_RAW[value.dtype.itemsize])
        if not self.is_every_active and register in self.registers:
            value = np.where(self.active, value, self.registers[register])
        self.registers[register] = value


def reader(operand: str, kind: str) -> Reader:
    """Return a function that reads an operand as a type: a register, a literal, a lane number."""
    if kind not in KINDS:
        raise Unsupported(f"PTX type .{kind}")
    dtype = KINDS[kind]
    if operand == "%laneid":
        lanes = np.arange(32, dtype=np.uint32)[None, :, None]
        return lambda threads: np.broadcast_to(lanes, threads.shape)
    if operand.startswith("%"):
        raise Unsupported(f"PTX special register {operand}")
    if operand.startswith("!"):
        return lambda threads: ~threads.read(operand[1:])
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
        literal = np.uint32(int(operand[2:], 16)).view(np.float32)
        return lambda threads: literal
    if _INTEGER.fullmatch(operand):
        number = _integer(int(operand.rstrip("U"), 0), dtype)
        return lambda threads: number
    if kind == "pred":
        return lambda threads: threads.read(operand)
    return _register(operand, dtype)


def _integer(value: int, dtype: type[Any]) -> Any:
    size = np.dtype(dtype).itemsize
    return _RAW[size](value & ((1 << (8 * size)) - 1)).view(dtype)


def _register(name: str, dtype: type[Any]) -> Reader:
    raw_dtype = _RAW[np.dtype(dtype).itemsize]

    def read(threads: Threads) -> Array:
        raw = threads.read(name)
        if raw.dtype != raw_dtype:  # a wider register gives its low bits
            raw = raw.astype(raw_dtype)
        return raw.view(dtype)

    return read
