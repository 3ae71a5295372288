"""Control flow: loops, branches, calls, warp partitions.

Structured control flow (`scf`) becomes Python's own. Functions with several blocks (`cf`) become a
loop that runs the block whose number is in `block`.
"""

from __future__ import annotations

import re

from mlakit.tools.emulator.codegen.emitter import Emitter, emits
from mlakit.tools.emulator.ir import SSA, Function, Op, Unsupported


def function(emitter: Emitter, function: Function) -> None:
    """Write a function as a generator of the runtime, the partition that runs it, its arguments."""
    emitter.variables = {}
    args = ["rt", "p", *(emitter.variable(name) for name, _ in function.args)]
    with emitter.indented(f"def {emitter.functions[function.name]}({', '.join(args)}):"):
        emitter.write("if False: yield")
        blocks = function.body.blocks
        if len(blocks) == 1:
            emitter.region(function.body, [])
            return
        emitter.blocks = {each.label: each for each in blocks}
        emitter.write("block = 0")
        with emitter.indented("while True:"):
            for number, block in enumerate(blocks):
                with emitter.indented(f"{'elif' if number else 'if'} block == {number}:"):
                    for op in block.ops:
                        emitter.op(op)


@emits("cf.br", "cf.cond_br")
def branch(emitter: Emitter, op: Op) -> None:
    """Go on with a block, or with one of two."""
    goals = re.findall(r"(\^\w+)(?:\(([^:)]*)(?::[^)]*)?\))?", op.text)
    if op.name == "cf.br":
        _go_to(emitter, *goals[0])
        return
    condition = emitter.variable(op.operands[0])
    with emitter.indented(f"if {condition}:"):
        _go_to(emitter, *goals[0])
    with emitter.indented("else:"):
        _go_to(emitter, *goals[1])


def _go_to(emitter: Emitter, label: str, passed: str) -> None:
    block = emitter.blocks[label]
    values = [emitter.variable(each) for each in SSA.findall(passed)]
    emitter.assign([emitter.variable(each) for each in block.args], values)
    emitter.write(f"block = {list(emitter.blocks).index(label)}")


@emits("scf.yield", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return")
def yield_values(emitter: Emitter, op: Op) -> None:
    """Give the values of a region to the operation that has it."""
    emitter.assign(emitter.targets, emitter.operands(op))


@emits("scf.for")
def for_loop(emitter: Emitter, op: Op) -> None:
    """A loop over a range that carries values."""
    low, high, step = emitter.operands(op)
    carried = _start_loop(emitter, op)
    induction = emitter.variable(op.regions[0].args[0])
    with emitter.indented(f"for {induction} in range({low}, {high}, {step}):"):
        emitter.region(op.regions[0], carried)
    emitter.assign(emitter.results(op), carried)


@emits("scf.while")
def while_loop(emitter: Emitter, op: Op) -> None:
    """A loop with a condition that is computed before each turn and passes values to it."""
    carried = _start_loop(emitter, op)
    before, after = op.regions
    passed = [emitter.variable(each) for each in after.args]
    with emitter.indented("while True:"):
        emitter.region(before, passed)
        emitter.region(after, carried)
    emitter.assign(emitter.results(op), passed)


@emits("scf.condition")
def loop_condition(emitter: Emitter, op: Op) -> None:
    """The condition of a while loop, and what it passes to the body or to the results."""
    condition, *values = emitter.operands(op)
    emitter.assign(emitter.targets, values)
    emitter.write(f"if not {condition}: break")


def _start_loop(emitter: Emitter, op: Op) -> list[str]:
    """Give the carried variables their first values; return their names."""
    carried = [emitter.variable(name) for name, _ in op.inits]
    emitter.assign(carried, [emitter.variable(value) for _, value in op.inits])
    return carried


@emits("scf.if")
def if_branch(emitter: Emitter, op: Op) -> None:
    """A branch with one or two regions."""
    results = emitter.results(op)
    with emitter.indented(f"if {emitter.operands(op)[0]}:"):
        emitter.region(op.regions[0], results)
    if len(op.regions) > 1:
        with emitter.indented("else:"):
            emitter.region(op.regions[1], results)


@emits("tt.call")
def call(emitter: Emitter, op: Op) -> str:
    """A call of a function that was not inlined."""
    found = re.match(r'\s*@("[^"]*"|[\w.$]+)\((.*)\)', op.text)
    if not found:
        raise Unsupported(f"call {op.text}")
    values = [emitter.variable(each) for each in SSA.findall(found.group(2))]
    name = emitter.functions[found.group(1).strip('"')]
    return f"yield from {name}({', '.join(['rt', 'p', *values])})"


@emits("tt.return")
def return_values(emitter: Emitter, op: Op) -> None:
    """The end of a function."""
    emitter.write(f"return {', '.join(emitter.operands(op))}".rstrip())


@emits("ttg.warp_specialize")
def warp_specialize(emitter: Emitter, op: Op) -> None:
    """Partitions that run at once: the default one here, others as generators of their own."""
    default, *others = op.regions
    captured = emitter.operands(op)
    bodies: list[str] = []
    for number, region in enumerate(others):
        name = f"w{op.line}_{number}"
        args = ["p", *(emitter.variable(each) for each in region.args)]
        with emitter.indented(f"def {name}({', '.join(args)}):"):
            emitter.write("if False: yield")
            emitter.region(region, [])
        bodies.append(f"lambda p: {name}({', '.join(['p', *captured])})")
    warps = [region.num_warps for region in others]
    emitter.write(f"workers = rt.fork(p, [{', '.join(bodies)}], {warps})")
    emitter.region(default, [])
    emitter.write("yield from rt.join(p, workers)")
