"""Inline assembly: named barriers, and PTX that `ptx` runs."""

from __future__ import annotations

import re

from mlakit.tools.emulator import ptx
from mlakit.tools.emulator.codegen.emitter import Emitter, emits
from mlakit.tools.emulator.ir import SSA, Op, Unsupported
from mlakit.tools.emulator.scanning import split_top


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
    named = ptx.NAMED_BARRIER.search(text)
    if named:
        _named_barrier(emitter, named, text, values)
        emitter.assign(results, ["0"] * len(results))
        return
    ptx.compile_program(text)  # an instruction that is not known is reported with its source line
    types = [emitter.type(each) for each in op.operand_types()] if values else []
    # without operands there is no colon, and the types of results are left in the text
    printed = op.result_types() if values else split_top(found.group(3).replace("->", ""), ",")
    outs = [emitter.type(each) for each in printed]
    code = emitter.constant(text, f"asm {text}")
    kinds = emitter.constant((types, outs), f"asm types {types} {outs}")
    arguments = f"{code}, {constraints[1:-1]!r}, {pack}, [{', '.join(values)}], *{kinds}"
    emitter.write(f"{', '.join(results)} = rt.asm(p, {arguments})")


def _named_barrier(emitter: Emitter, named: re.Match[str], text: str, values: list[str]) -> None:
    """Write bar.sync or bar.arrive; $1 is the number, $2 the predicate if there is one."""
    mode, operand, threads = named.groups()
    number = values[int(operand) - 1]
    is_asked = values[1] if "setp" in text else "True"
    emitter.write(f"yield from rt.named(p, {mode!r}, {number}, {threads}, {is_asked})")
