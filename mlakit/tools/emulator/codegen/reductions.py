"""Reductions, scans and elementwise maps: operations whose region combines elements.

The region becomes a Python function that combines whole arrays of elements at once.
"""

from __future__ import annotations

from mlakit.tools.emulator.clusters import is_split
from mlakit.tools.emulator.codegen.emitter import Emitter, emits
from mlakit.tools.emulator.ir import Op, Unsupported
from mlakit.tools.emulator.scanning import split_top


def _combination(emitter: Emitter, op: Op, num_results: int) -> str:
    """Write the region of an operation as a function of arrays; return its name."""
    region, name = op.regions[0], f"combine{op.line}"
    args = [emitter.variable(each) for each in region.args]
    with emitter.indented(f"def {name}({', '.join(args)}):"):
        emitter.scalars_are_arrays = True
        results = [f"r{i}" for i in range(num_results)]
        emitter.region(region, results)
        emitter.write(f"return {', '.join(results)},")
        emitter.scalars_are_arrays = False
    return name


def _check_axis(emitter: Emitter, op: Op) -> None:
    """Refuse to combine elements of several CTAs."""
    first = split_top(op.types.split("->")[0].strip().strip("()"), ",")[0]
    if is_split(emitter.type(first), op.int_attr("axis")):
        raise Unsupported("a reduction or a scan of what several CTAs hold")


@emits("tt.reduce")
def reduce(emitter: Emitter, op: Op) -> None:
    """A reduction of one dimension of one or several tensors."""
    _check_axis(emitter, op)
    combine = _combination(emitter, op, len(op.results))
    values = ", ".join(f"value({each})" for each in emitter.operands(op))
    emitter.write(f"out = reduce(({values},), {op.int_attr('axis')}, {combine})")
    types = [emitter.type(each) for each in op.result_types()]
    for i, (result, type) in enumerate(zip(emitter.results(op), types, strict=True)):
        one = f"out[{i}]" if type.is_tensor else f"scalar(out[{i}], {type.kind!r})"
        emitter.write(f"{result} = {one}")


@emits("tt.scan")
def scan(emitter: Emitter, op: Op) -> None:
    """An inclusive scan along one dimension."""
    _check_axis(emitter, op)
    combine = _combination(emitter, op, len(op.results))
    is_reverse = op.attr("reverse", "false") == "true"
    values = ", ".join(f"value({each})" for each in emitter.operands(op))
    emitter.write(f"out = scan(({values},), {op.int_attr('axis')}, {is_reverse}, {combine})")
    for i, result in enumerate(emitter.results(op)):
        emitter.write(f"{result} = out[{i}]")


@emits("tt.map_elementwise")
def map_elementwise(emitter: Emitter, op: Op) -> None:
    """A function of scalars, applied to each element."""
    if op.int_attr("pack") != 1:
        raise Unsupported("a map of several elements at once")
    combine = _combination(emitter, op, len(op.results))
    values = ", ".join(f"value({each})" for each in emitter.operands(op))
    emitter.write(f"{', '.join(emitter.results(op))}, = {combine}({values})")
