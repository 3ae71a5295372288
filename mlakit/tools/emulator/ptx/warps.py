"""Instructions of a whole warp: shfl, vote and redux.

All lanes of a warp have to reach such an instruction, as the member masks of mlakit's kernels say.
Lanes that have branched away, or whose guard is false, make it a fault of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.faults import Fault
from mlakit.tools.emulator.ptx.instruction import Execute, Instruction, runs
from mlakit.tools.emulator.ptx.threads import KINDS, Threads

ALL_LANES = 0xFFFFFFFF
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


def _check_members(instruction: Instruction) -> None:
    """Only a member mask of all lanes is known."""
    if int(instruction.operands[-1].rstrip("U"), 0) & ALL_LANES != ALL_LANES:
        raise instruction.unsupported()


def _check_lanes(instruction: Instruction, threads: Threads) -> None:
    if threads.is_every_active:
        return
    some, every = threads.active.any(1), threads.active.all(1)
    if not np.array_equal(some, every):
        raise Fault(f"{instruction.mnemonic} is reached by some lanes of a warp, and names all")


@runs("shfl")
def shuffle(instruction: Instruction) -> Execute:
    """The value of another lane; one outside of the segment keeps its own."""
    parts = instruction.mnemonic.split(".")
    if len(parts) != 4 or parts[1] != "sync" or parts[3] != "b32" or len(instruction.operands) != 5:
        raise instruction.unsupported()
    mode = parts[2]
    if mode not in ("up", "down", "bfly", "idx"):
        raise instruction.unsupported()
    _check_members(instruction)
    value, by, control, _ = instruction.sources("b32", "b32", "b32", "b32")
    target, _, predicate = instruction.operands[0].partition("|")

    def execute(threads: Threads) -> None:
        _check_lanes(instruction, threads)
        own = np.arange(32, dtype=np.int64)[None, :, None]
        distance = np.asarray(by(threads)).astype(np.int64) & 31
        clamp = np.asarray(control(threads)).astype(np.int64)
        source, is_inside = source_lane(mode, own, distance, clamp)
        lanes = np.broadcast_to(np.where(is_inside, source, own), threads.shape)
        moved = np.broadcast_to(value(threads), threads.shape)
        threads.write(target, np.take_along_axis(moved, lanes, 1))
        if predicate:
            threads.write(predicate, np.broadcast_to(is_inside, threads.shape))

    return execute


def source_lane(mode: str, own: Array, distance: Array, control: Array) -> tuple[Array, Array]:
    """Return the lane that a shuffle reads from, and whether it is in the segment.

    Bits 8 to 12 of `control` are those of a lane's number that a segment shares, bits 0 to 4 clamp.
    """
    shared, clamp = (control >> 8) & 31, control & 31
    last = (own & shared) | (clamp & ~shared)
    if mode == "up":
        source = own - distance
        return source, source >= last
    if mode == "down":
        source = own + distance
    elif mode == "bfly":
        source = own ^ distance
    else:
        source = (own & shared) | (distance & ~shared)
    return source, source <= last


@runs("vote")
def vote(instruction: Instruction) -> Execute:
    """Whether a predicate is true in any lane or in all, or a bit per lane."""
    parts = instruction.mnemonic.split(".")
    kinds = {"any": "pred", "all": "pred", "ballot": "b32"}
    if len(parts) != 4 or parts[1] != "sync" or kinds.get(parts[2]) != parts[3]:
        raise instruction.unsupported()
    _check_members(instruction)
    mode = parts[2]
    predicate, _ = instruction.sources("pred", "b32")
    target = instruction.operands[0]

    def execute(threads: Threads) -> None:
        _check_lanes(instruction, threads)
        value = np.broadcast_to(predicate(threads), threads.shape)
        result: Any
        if mode == "ballot":
            bits = value.astype(np.uint32) << np.arange(32, dtype=np.uint32)[None, :, None]
            result = np.bitwise_or.reduce(bits, 1, keepdims=True)
        else:
            result = value.any(1, keepdims=True) if mode == "any" else value.all(1, keepdims=True)
        threads.write(target, np.broadcast_to(result, threads.shape))

    return execute


@runs("redux")
def reduce(instruction: Instruction) -> Execute:
    """A reduction over the lanes of a warp, which all of them get."""
    parts = instruction.mnemonic.split(".")
    if len(parts) != 4 or parts[1] != "sync" or parts[2] not in REDUCTIONS:
        raise instruction.unsupported()
    if parts[3] not in ("s32", "u32", "b32"):
        raise instruction.unsupported()
    _check_members(instruction)
    function, kind = REDUCTIONS[parts[2]], parts[3]
    value, _ = instruction.sources(kind, "b32")
    target = instruction.operands[0]

    def execute(threads: Threads) -> None:
        _check_lanes(instruction, threads)
        whole = np.broadcast_to(value(threads), threads.shape)
        result = function(whole, 1, keepdims=True, dtype=KINDS[kind])
        threads.write(target, np.broadcast_to(result, threads.shape))

    return execute
