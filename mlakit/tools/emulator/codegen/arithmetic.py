"""Arithmetic: `arith` and `math`, on scalars (Python and numpy scalars) and tensors (arrays)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes
from mlakit.tools.emulator.codegen.emitter import Emitter, emits, numpy_name, rounded
from mlakit.tools.emulator.ir import Op, Unsupported

INT_BINARY = {
    "arith.addi": "+",
    "arith.subi": "-",
    "arith.muli": "*",
    "arith.shli": "<<",
    "arith.shrsi": ">>",
}
BITWISE = {"arith.andi": "&", "arith.ori": "|", "arith.xori": "^"}
FLOAT_BINARY = {"arith.addf": "+", "arith.subf": "-", "arith.mulf": "*", "arith.divf": "/"}
UNSIGNED = {
    "arith.maxui": "np.maximum({}, {})",
    "arith.minui": "np.minimum({}, {})",
    "arith.divui": "{} // {}",
    "arith.remui": "{} % {}",
    "arith.shrui": "{} >> {}",
}
EXTREMA = {
    "arith.maxsi": "np.maximum",
    "arith.minsi": "np.minimum",
    "arith.maxnumf": "np.fmax",
    "arith.minnumf": "np.fmin",
    "arith.maximumf": "np.maximum",
    "arith.minimumf": "np.minimum",
}
UNARY = {
    "math.absf": "np.abs",
    "math.absi": "np.abs",
    "math.ceil": "np.ceil",
    "math.exp": "np.exp",
    "math.exp2": "np.exp2",
    "math.floor": "np.floor",
    "math.log": "np.log",
    "math.log2": "np.log2",
    "math.sqrt": "np.sqrt",
}
INT_PREDICATES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# numpy's comparisons are false if an operand is NaN, except for !=
FLOAT_PREDICATES = {
    "oeq": "{0} == {1}",
    "ogt": "{0} > {1}",
    "oge": "{0} >= {1}",
    "olt": "{0} < {1}",
    "ole": "{0} <= {1}",
    "one": "({0} < {1}) | ({0} > {1})",
    "ord": "({0} == {0}) & ({1} == {1})",
    "ueq": "np.logical_not(({0} < {1}) | ({0} > {1}))",
    "ugt": "np.logical_not({0} <= {1})",
    "uge": "np.logical_not({0} < {1})",
    "ult": "np.logical_not({0} >= {1})",
    "ule": "np.logical_not({0} > {1})",
    "une": "{0} != {1}",
    "uno": "({0} != {0}) | ({1} != {1})",
}


@emits("arith.constant")
def constant(emitter: Emitter, op: Op) -> str:
    """A literal; one of a tensor is a read-only array."""
    text = op.text.strip()
    if text in ("true", "false"):
        return str(text == "true")
    type = emitter.type(op.types)
    found = re.match(r"(?:\{[^}]*\}\s*)?(?:dense<(.*)>|(\S+))$", text)
    if not found:
        raise Unsupported(f"constant {text}")
    literal = found.group(1) if found.group(1) is not None else found.group(2)
    value = _number(literal, type.kind)
    if type.is_tensor:
        array: dtypes.Array = np.full(type.shape, value, dtypes.value_dtype(type.kind))
        array.setflags(write=False)
        return emitter.constant(array, f"dense {literal} {type.kind} {type.shape}")
    if type.kind.startswith("i"):
        return str(int(value))
    scalar = dtypes.value_dtype(type.kind)(value)
    return emitter.constant(scalar, f"float {literal} {type.kind}")


def _number(literal: str, kind: str) -> Any:
    if literal in ("true", "false"):
        return literal == "true"
    if kind.startswith("i"):
        return int(literal, 0)
    if literal.startswith("0x"):
        return dtypes.from_bits(np.asarray([int(literal, 16)], np.uint64), kind)[0]
    # MLIR prints as many digits as the type needs, not as float32 would
    return dtypes.rounded(np.asarray(float(literal), dtypes.value_dtype(kind)), kind)


@emits(*INT_BINARY)
def int_binary(emitter: Emitter, op: Op) -> str:
    """Integers wrap around: arrays do so themselves, Python's integers are wrapped."""
    kind, is_array = emitter.kind(op.types)
    a, b = emitter.operands(op)
    plain = f"{a} {INT_BINARY[op.name]} {b}"
    return plain if is_array or kind == "i1" else f"wrap({plain}, {dtypes.BITS[kind]})"


@emits(*BITWISE)
def bitwise(emitter: Emitter, op: Op) -> str:
    """Bitwise operations need no wrapping."""
    a, b = emitter.operands(op)
    return f"{a} {BITWISE[op.name]} {b}"


@emits(*UNSIGNED)
def unsigned_binary(emitter: Emitter, op: Op) -> str:
    """Values are signed; these operations read them as unsigned."""
    kind, _ = emitter.kind(op.types)
    values = [f"unsigned({each}, {kind!r})" for each in emitter.operands(op)]
    return f"signed({UNSIGNED[op.name].format(*values)}, {kind!r})"


@emits("arith.divsi", "arith.remsi")
def signed_division(emitter: Emitter, op: Op) -> str:
    """Division rounds towards zero, unlike Python's."""
    a, b = emitter.operands(op)
    return f"{'trunc_div' if op.name == 'arith.divsi' else 'trunc_rem'}({a}, {b})"


@emits(*FLOAT_BINARY)
def float_binary(emitter: Emitter, op: Op) -> str:
    """A narrow float is computed in float32 and rounded."""
    kind, _ = emitter.kind(op.types)
    a, b = emitter.operands(op)
    return rounded(f"{a} {FLOAT_BINARY[op.name]} {b}", kind)


@emits(*EXTREMA)
def extremum(emitter: Emitter, op: Op) -> str:
    """maxnumf and minnumf ignore a NaN; maximumf and minimumf return it."""
    kind, is_array = emitter.kind(op.types)
    a, b = emitter.operands(op)
    if is_array or not kind.startswith("i"):
        return f"{EXTREMA[op.name]}({a}, {b})"
    return f"{'max' if op.name == 'arith.maxsi' else 'min'}({a}, {b})"


@emits("arith.cmpi")
def compare_integers(emitter: Emitter, op: Op) -> str:
    """A predicate such as `slt` or `ult`."""
    predicate = op.text.split(",")[0].strip()
    kind, is_array = emitter.kind(op.types)
    values = emitter.operands(op)
    if predicate.startswith("u"):
        values = [f"unsigned({each}, {kind!r})" for each in values]
    sign = INT_PREDICATES[predicate if predicate in INT_PREDICATES else predicate[1:]]
    plain = f"{values[0]} {sign} {values[1]}"
    return plain if is_array else f"bool({plain})"


@emits("arith.cmpf")
def compare_floats(emitter: Emitter, op: Op) -> str:
    """A predicate such as `olt` (ordered: false for NaN) or `ult` (unordered: true for NaN)."""
    predicate = op.text.split(",")[0].strip()
    _, is_array = emitter.kind(op.types)
    plain = FLOAT_PREDICATES[predicate].format(*emitter.operands(op))
    return plain if is_array else f"bool({plain})"


@emits("arith.select")
def select(emitter: Emitter, op: Op) -> str:
    """One of two values, elementwise if the condition is a tensor."""
    condition, a, b = emitter.operands(op)
    if emitter.type(op.operand_types()[0]).is_tensor or emitter.scalars_are_arrays:
        return f"np.where({condition}, {a}, {b})"
    return f"{a} if {condition} else {b}"


@emits(*UNARY)
def unary(emitter: Emitter, op: Op) -> str:
    """A function of one value."""
    kind, _ = emitter.kind(op.types)
    return rounded(f"{UNARY[op.name]}({emitter.operands(op)[0]})", kind)


@emits("math.fma")
def fused_multiply_add(emitter: Emitter, op: Op) -> str:
    """Multiply and add with one rounding."""
    return f"fma({', '.join(emitter.operands(op))})"


@emits("math.rsqrt")
def reciprocal_root(emitter: Emitter, op: Op) -> str:
    """The reciprocal of the square root, as two roundings."""
    return f"np.float32(1) / np.sqrt({emitter.operands(op)[0]})"


@emits("arith.negf")
def negate(emitter: Emitter, op: Op) -> str:
    """The opposite sign."""
    return f"-{emitter.operands(op)[0]}"


@emits(
    "arith.extsi",
    "arith.extui",
    "arith.fptosi",
    "arith.index_cast",
    "arith.sitofp",
    "arith.trunci",
    "arith.uitofp",
)
def convert_integer(emitter: Emitter, op: Op) -> str:
    """A conversion between integers, or between integers and floats."""
    source, target = emitter.type(op.source_type), emitter.type(op.result_type)
    value = emitter.operands(op)[0]
    is_unsigned = op.name in ("arith.extui", "arith.uitofp")
    if is_unsigned and source.kind != "i1":
        value = f"unsigned({value}, {source.kind!r})"
    if target.is_tensor or emitter.scalars_are_arrays:
        value = f"{value} & 1" if target.kind == "i1" else value
        plain = f"astype({value}, {numpy_name(target.kind)})"
    elif not target.kind.startswith("i"):
        plain = f"{numpy_name(target.kind)}({value})"
    elif target.kind == "i1":
        plain = f"bool(int({value}) & 1)"
    elif is_unsigned:
        plain = f"int({value})"
    else:
        plain = f"wrap({value}, {dtypes.BITS[target.kind]})"
    if source.kind == "i1" and op.name in ("arith.extsi", "arith.sitofp"):
        plain = f"-{plain}"  # a bit that is set is the sign
    return rounded(plain, target.kind)


@emits("arith.extf", "arith.truncf", "tt.fp_to_fp")
def convert_float(emitter: Emitter, op: Op) -> str:
    """A conversion between floats, rounded to nearest even."""
    kind, is_array = emitter.kind(op.result_type)
    value = emitter.operands(op)[0]
    if kind in dtypes.NARROW:
        return rounded(value, kind)
    if kind == "f32" and emitter.type(op.source_type).kind in dtypes.NARROW:
        return value  # narrow floats are float32 values already
    return f"astype({value}, {numpy_name(kind)})" if is_array else f"{numpy_name(kind)}({value})"


@emits("tt.bitcast", "arith.bitcast")
def bitcast(emitter: Emitter, op: Op) -> str:
    """The same bits as another type."""
    source, target = emitter.type(op.source_type), emitter.type(op.result_type)
    value = emitter.operands(op)[0]
    return f"bitcast({value}, {source.kind!r}, {target.kind!r}, {target.is_tensor})"


@emits("ub.poison")
def poison(emitter: Emitter, op: Op) -> str:
    """A value that must not be used."""
    return "None"
