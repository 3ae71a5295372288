"""Global and shared memory: loads, stores, atomics, allocations and views of them."""

from __future__ import annotations

import re

from mlakit.tools.emulator.codegen.emitter import Emitter, emits, optional
from mlakit.tools.emulator.ir import Op


@emits("tt.load")
def load(emitter: Emitter, op: Op) -> str:
    """A load from global memory, with a mask and the value of masked elements."""
    pointer, *rest = emitter.operands(op)
    mask, other = [*rest, "None", "None"][:2]
    kind = emitter.type(op.operand_types()[0]).pointee
    type = emitter.type_constant(op.operand_types()[0])
    return f"rt.load({pointer}, {mask}, {other}, {kind!r}, p, {type})"


@emits("tt.store")
def store(emitter: Emitter, op: Op) -> str:
    """A store to global memory, with a mask."""
    pointer, value, *rest = emitter.operands(op)
    kind = emitter.type(op.operand_types()[0]).pointee
    type = emitter.type_constant(op.operand_types()[0])
    return f"rt.store({pointer}, {value}, {optional(rest, 'None')}, {kind!r}, p, {type})"


@emits("tt.atomic_rmw")
def atomic(emitter: Emitter, op: Op) -> str:
    """An atomic read, modification and write of global memory."""
    operation = op.text.strip().split(",")[0]
    pointer, value, *rest = emitter.operands(op)
    kind = emitter.type(op.result_type).kind
    emitter.write("yield")
    return f"rt.atomic({operation!r}, {pointer}, {value}, {optional(rest, 'None')}, {kind!r})"


@emits("ttg.local_alloc")
def allocate(emitter: Emitter, op: Op) -> str:
    """An allocation of shared memory, with a first value if there is an operand."""
    type = emitter.type_constant(op.result_type)
    value = optional(emitter.operands(op), "None")
    return f"rt.allocate(p, {type}, {op.results[0][1:]!r}, {value})"


@emits("ttg.memdesc_index")
def index(emitter: Emitter, op: Op) -> str:
    """One tile of several, such as a stage of a pipeline."""
    tile, at = emitter.operands(op)
    return f"rt.index({tile}, {at}, {emitter.type_constant(op.result_type)})"


@emits("ttg.memdesc_subslice")
def subslice(emitter: Emitter, op: Op) -> str:
    """A part of a tile, at a constant place."""
    at = [int(each) for each in re.findall(r"-?\d+", op.text[op.text.index("[") :])]
    return f"rt.subslice({emitter.operands(op)[0]}, {at}, {emitter.type_constant(op.result_type)})"


@emits("ttg.memdesc_trans")
def transpose(emitter: Emitter, op: Op) -> str:
    """The same tile with its dimensions in another order."""
    tile, type = emitter.operands(op)[0], emitter.type_constant(op.result_type)
    return f"rt.transpose({tile}, {op.array_attr('order')}, {type})"


@emits("ttg.memdesc_reinterpret", "ttg.memdesc_reshape")
def reinterpret(emitter: Emitter, op: Op) -> str:
    """The same bytes as a tile of another type, shape or layout."""
    return f"rt.reinterpret({emitter.operands(op)[0]}, {emitter.type_constant(op.result_type)})"


@emits("ttg.local_load")
def local_load(emitter: Emitter, op: Op) -> str:
    """A load from shared memory through the generic proxy."""
    type = emitter.type_constant(op.result_type)
    return f"yield from rt.local_load(p, {emitter.operands(op)[0]}, {type})"


@emits("ttg.local_store")
def local_store(emitter: Emitter, op: Op) -> str:
    """A store to shared memory through the generic proxy."""
    value, tile = emitter.operands(op)[:2]
    type = emitter.type_constant(op.operand_types()[0])
    return f"yield from rt.local_store(p, {value}, {tile}, {type})"
