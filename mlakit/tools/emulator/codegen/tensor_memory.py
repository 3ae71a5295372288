"""Tensor memory and tcgen05 of Blackwell."""

from __future__ import annotations

import re

from mlakit.tools.emulator.codegen.asynchronous import is_multicast
from mlakit.tools.emulator.codegen.emitter import Emitter, emits, optional, rounded
from mlakit.tools.emulator.ir import SSA, Op, Unsupported

PACKED = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "fma": "fma({0}, {1}, {2})",
    "min": "np.fmin({0}, {1})",
    "max": "np.fmax({0}, {1})",
}


@emits("ttng.tmem_alloc")
def allocate(emitter: Emitter, op: Op) -> None:
    """An allocation of tensor memory at its place, with a first value if there is an operand."""
    type = emitter.type_constant(op.result_types()[0])
    value = optional(emitter.operands(op), "None")
    name = op.results[0][1:]
    lane, column = (op.int_attr(f"tensor_memory_{each}_offset") for each in ("row", "col"))
    tile = f"rt.allocate_tensor_memory(p, {type}, {name!r}, {lane}, {column}, {value})"
    emitter.write(f"{emitter.variable(op.results[0])} = {tile}")
    emitter.assign_tokens(op.results[1:])


@emits("ttng.tmem_load")
def load(emitter: Emitter, op: Op) -> None:
    """A load from tensor memory."""
    if op.attr("redOp") is not None:
        raise Unsupported("a load from tensor memory with a reduction")
    tile = emitter.operands(op)[0]
    emitter.write(f"{emitter.variable(op.results[0])} = yield from rt.tmem_load(p, {tile})")
    emitter.assign_tokens(op.results[1:])


@emits("ttng.tmem_store")
def store(emitter: Emitter, op: Op) -> None:
    """A store to tensor memory, under a predicate."""
    value, tile, *rest = emitter.operands(op)
    emitter.write(f"yield from rt.tmem_store(p, {value}, {tile}, {['True', *rest][-1]})")
    emitter.assign_tokens(op.results)


@emits("ttng.tmem_subslice")
def subslice(emitter: Emitter, op: Op) -> str:
    """Some columns of a tile."""
    offset = op.int_attr("offset" if op.attr("offset") is not None else "N")
    tile, type = emitter.operands(op)[0], emitter.type_constant(op.result_type)
    return f"rt.subslice({tile}, [0, {offset}], {type})"


@emits("ttng.tc_gen5_mma")
def mma(emitter: Emitter, op: Op) -> None:
    """A tcgen05.mma, with the barriers that it completes on."""
    found = re.match(r"\s*(%\S+), (%\S+), (%[^\s\[]+)\[[^\]]*\], (%\S+), (%[^\s,]+)(.*)$", op.text)
    if not found:
        raise Unsupported(f"operands {op.text}")
    a, b, d, uses_d, is_asked = (emitter.variable(each.rstrip(",")) for each in found.groups()[:5])
    barriers = re.findall(r"(%[^\s\[,]+)\[(%[^\s\],]+)\]", found.group(6))
    pairs = ", ".join(
        f"({emitter.variable(barrier)}, {emitter.variable(predicate)})"
        for barrier, predicate in barriers
    )
    is_in_tensor_memory = "tensor_memory" in emitter.type(op.operand_types()[0]).space
    operands = f"{a}, {b}, {d}, {uses_d}, {is_asked}, [{pairs}], {is_in_tensor_memory}"
    is_pair = "two_ctas" in found.group(6)
    emitter.write(f"yield from rt.mma(p, {operands}, {is_pair}, {is_multicast(op)})")
    emitter.assign_tokens(op.results)


@emits("ttng.tc_gen5_commit")
def commit(emitter: Emitter, op: Op) -> None:
    """An arrival when all tcgen05 operations so far are complete, under a predicate.

    `descs` are the tiles that these have read: CTAs that have copies of them are told, too.
    """
    before, _, after = op.text.partition("descs")
    barrier, *rest = (emitter.variable(each) for each in SSA.findall(before))
    tiles = ", ".join(emitter.variable(each) for each in SSA.findall(after))
    emitter.write("yield")
    guard = f"if {rest[0]}: " if rest else ""
    emitter.write(f"{guard}rt.commit(p, {barrier}, {emitter.module.has_pairs}, [{tiles}])")


@emits("ttng.tmem_copy")
def copy(emitter: Emitter, op: Op) -> str:
    """A copy from shared to tensor memory."""
    source, target = emitter.operands(op)[:2]
    is_pair = emitter.module.has_pairs
    return f"yield from rt.copy_to_tensor_memory(p, {source}, {target}, {is_pair})"


@emits("ttng.packed_arith")
def packed_arithmetic(emitter: Emitter, op: Op) -> str:
    """Arithmetic on pairs of floats, which is elementwise."""
    operation = op.text.split()[0]
    if operation not in PACKED:
        raise Unsupported(f"packed {operation}")
    kind = emitter.type(op.result_type).kind
    return rounded(PACKED[operation].format(*emitter.operands(op)), kind)
