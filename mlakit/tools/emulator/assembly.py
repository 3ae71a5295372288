"""Inline assembly: from tensors to the registers of threads, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes, ptx
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.engines import AsyncTensor
from mlakit.tools.emulator.layouts import thread_elements
from mlakit.tools.emulator.machine import Partition
from mlakit.tools.emulator.types import Type
from mlakit.tools.emulator.values import Divergent, scalar

REGISTER_BITS = 32


class Assembly:
    """Inline assembly, which `ptx` runs on all threads at once."""

    def asm(
        self,
        p: Partition,
        text: str,
        constraints: str,
        pack: int,
        values: list[Any],
        types: list[Type],
        results: list[Type],
    ) -> Any:
        """Run PTX on elements, `pack` of a thread's at a time.

        Registers are numbered: results, then operands; a tied operand shares a result's.
        """
        kinds = [each.strip() for each in constraints.split(",")]
        num_out = sum(each.startswith("=") for each in kinds)
        for each in values:
            if isinstance(each, AsyncTensor):
                each.used()
        tensor = next((each for each in [*results, *types] if each.is_tensor), None)
        by_lane = pack > 1 or ptx.LANE_OPERATIONS.search(text) is not None
        by_lane = by_lane or any(isinstance(each, Divergent) for each in values)
        places, shape = _invocations(tensor, pack, p.num_warps, by_lane)
        registers: list[Array] = []
        for value, type in zip(values, types, strict=True):
            registers += _unpack(value, type, pack, places, shape)
        inputs: dict[str, Array] = {}
        for i, (kind, register) in enumerate(zip(kinds[num_out:], registers, strict=True)):
            inputs[f"${num_out + i}"] = register
            if kind.isdigit():
                inputs[f"${kind}"] = register
        threads = ptx.Threads(inputs, shape)
        ptx.compile_program(text).run(threads)
        outs, at = [], 0
        for type in results:
            count = pack // _per_register(type.kind, pack)
            raw = [threads.result(f"${at + k}") for k in range(count)]
            outs.append(_repack(raw, type, pack, places))
            at += count
        return outs[0] if len(outs) == 1 else tuple(outs)


def _invocations(
    tensor: Type | None, pack: int, num_warps: int, by_lane: bool
) -> tuple[Array | None, tuple[int, int, int]]:
    """Return which elements each invocation has, and the shape [warps, lanes, invocations].

    Assembly that looks at no other lane needs no threads: elements are lanes of one warp, and
    places are None.
    """
    if tensor is None or not by_lane:
        return None, (1, int(np.prod(tensor.shape or ())) if tensor else 1, 1)
    assert tensor.shape is not None
    places: Array = thread_elements(tensor.layout, tensor.shape, num_warps)
    warps, lanes, count = places.shape
    groups = max(count // pack, 1)
    if count < pack:  # the last element stands in for those that a thread does not have
        places = np.concatenate([places] + [places[..., -1:]] * (pack - count), -1)
    return places.reshape(warps, lanes, groups, pack), (warps, lanes, groups)


def _per_register(kind: str, pack: int) -> int:
    bits = dtypes.BITS[kind]
    return min(REGISTER_BITS // bits, pack) if bits < REGISTER_BITS else 1


def _unpack(
    value: Any, type: Type, pack: int, places: Array | None, shape: tuple[int, int, int]
) -> list[Array]:
    """Return the registers of an operand."""
    bits: Array
    if isinstance(value, Divergent):
        bits = dtypes.to_bits(value.data, type.kind).reshape(*shape, pack)
    elif places is None or not type.is_tensor:
        array = np.asarray(value, dtypes.value_dtype(type.kind)).reshape(-1)
        flat = dtypes.to_bits(array, type.kind)
        flat = flat.reshape(-1, 1, 1) if array.size == 1 else flat.reshape(1, -1, 1)
        bits = np.broadcast_to(flat, shape)[..., None]
    else:
        bits = dtypes.to_bits(np.ascontiguousarray(value).reshape(-1), type.kind)[places]
    per, width = _per_register(type.kind, pack), dtypes.BITS[type.kind]
    out: list[Array] = []
    for first in range(0, bits.shape[-1], per):
        register: Array = bits[..., first]
        if per > 1:
            register = np.zeros(shape, np.uint32)
            for i in range(per):
                register |= bits[..., first + i].astype(np.uint32) << np.uint32(i * width)
        out.append(np.ascontiguousarray(register))
    return out


def _repack(raw: list[Array], type: Type, pack: int, places: Array | None) -> Any:
    """Return a result from its registers; copies that differ make it `Divergent`."""
    per, width = _per_register(type.kind, pack), dtypes.BITS[type.kind]
    elements = []
    for register in raw:
        for i in range(per):
            low = np.uint32((1 << width) - 1) if per > 1 else None
            elements.append(register if low is None else (register >> np.uint32(i * width)) & low)
    bits = np.stack(elements, -1)
    if not type.is_tensor:
        return scalar(dtypes.from_bits(bits.reshape(-1)[:1], type.kind)[0], type.kind)
    assert type.shape is not None
    if places is None:
        return dtypes.from_bits(bits.reshape(-1), type.kind).reshape(type.shape)
    flat: Array = np.zeros(int(np.prod(type.shape)), bits.dtype)
    flat[places.reshape(-1)] = bits.reshape(-1)
    if not np.array_equal(flat[places], bits):
        values = dtypes.from_bits(bits, type.kind)
        return Divergent(values.reshape(*places.shape[:2], -1), type)
    return dtypes.from_bits(flat, type.kind).reshape(type.shape)
