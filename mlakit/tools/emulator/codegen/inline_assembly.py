"""Inline assembly: named barriers, and PTX that `ptx` runs."""

from __future__ import annotations

import re

from mlakit.tools.emulator import ptx
from mlakit.tools.emulator.codegen.emitter import Emitter, emits
from mlakit.tools.emulator.ir import SSA, Op, Unsupported
from mlakit.tools.emulator.scanning import split_top
from mlakit.tools.emulator.types import Type


@emits("tt.elementwise_inline_asm")
def inline_assembly(emitter: Emitter, op: Op) -> None:
    """PTX on the elements of tensors, `packed_element` of them at a time."""
    found = re.match(r'\s*"((?:[^"\\]|\\.)*)"\s*\{(.*?)\}\s*(.*)$', op.text)
    constraints = op.attr("constraints")
    if not found or constraints is None:
        raise Unsupported(f"inline assembly {op.text}")
    text, pack = found.group(1), op.int_attr("packed_element")
    values = [emitter.variable(each) for each in SSA.findall(found.group(3))]
    results = emitter.results(op)
    types = [emitter.type(each) for each in op.operand_types()] if values else []
    named = ptx.named_barrier(text)
    if named:
        _named_barrier(emitter, named, values, types)
        emitter.assign(results, ["0"] * len(results))
        return
    ptx.compile_program(text)  # an instruction that is not known is reported with its source line
    # without operands there is no colon, and the types of results are left in the text
    printed = op.result_types() if values else split_top(found.group(3).replace("->", ""), ",")
    outs = [emitter.type(each) for each in printed]
    code = emitter.constant(text, f"asm {text}")
    kinds = emitter.constant((types, outs), f"asm types {types} {outs}")
    arguments = f"{code}, {constraints[1:-1]!r}, {pack}, [{', '.join(values)}], *{kinds}"
    emitter.write(f"{', '.join(results)} = rt.asm(p, {arguments})")


def _named_barrier(
    emitter: Emitter, named: ptx.NamedBarrier, values: list[str], types: list[Type]
) -> None:
    """Write bar.sync or bar.arrive."""
    type = types[named.number - 1]
    is_asked = values[named.predicate - 1] if named.predicate else "True"
    if named.predicate and types[named.predicate - 1].is_tensor:
        raise Unsupported("a named barrier whose predicate is a tensor")
    name = emitter.constant(type, f"type {type}")
    arguments = f"{named.mode!r}, {values[named.number - 1]}, {named.threads}, {is_asked}, {name}"
    emitter.write(f"yield from rt.named(p, {arguments})")
