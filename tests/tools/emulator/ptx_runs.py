"""Runs of inline assembly on random registers, and the same in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mlakit.tools.emulator import ptx

SHAPE = (2, 32, 3)  # warps, lanes, invocations
COUNT = math.prod(SHAPE)
INTEGERS = np.random.default_rng(1).integers(0, 1 << 32, (3, *SHAPE), np.uint32)
INTEGERS[:, 0, :6, 0] = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 31]
FLOATS = (np.random.default_rng(2).standard_normal((3, *SHAPE)) * 30).astype(np.float32)
FLOATS[0, 0, :4, 0] = FLOATS[1, 0, 3:7, 0] = [np.nan, np.inf, -np.inf, -0.0]


def run(text: str, *operands: np.ndarray, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    """Run assembly with operands $1, $2, ...; return the bits of $0."""
    inputs = {f"${i}": each.view(f"u{each.itemsize}") for i, each in enumerate(operands, start=1)}
    threads = ptx.Threads(inputs, shape)
    ptx.compile_program(text).run(threads)
    return threads.read("$0")


def python(function: Callable[..., Any], *operands: np.ndarray, dtype: Any) -> np.ndarray:
    """Apply a function of Python numbers to each thread."""
    rows = zip(*(each.ravel().tolist() for each in operands), strict=True)
    return np.asarray([function(*row) for row in rows], dtype).reshape(operands[0].shape)


def wrapped(function: Callable[..., int], kind: str) -> Callable[..., int]:
    """Wrap the result of a function of integers around, as a type does."""
    bits = int(kind[1:])

    def wrap(*values: int) -> int:
        low = function(*values) & ((1 << bits) - 1)
        return low - (1 << bits) if kind[0] == "s" and low >> (bits - 1) else low

    return wrap


NUMPY = {"s32": np.int32, "u32": np.uint32, "b32": np.uint32, "s64": np.int64, "u64": np.uint64}
