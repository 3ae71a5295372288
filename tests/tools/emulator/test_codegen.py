"""Python that is generated from operations: control flow, arithmetic, constants, errors."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from mlakit.tools.emulator.codegen import OPERATIONS, compile_module
from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.machine import Machine
from mlakit.tools.emulator.memory import GlobalMemory
from mlakit.tools.emulator.parser import parse
from mlakit.tools.emulator.runtime import Runtime


def evaluate(body: str, *args: Any, signature: str = "", results: str = "i32") -> Any:
    """Run a function of the IR that needs neither memory nor other partitions."""
    text = f"""
module attributes {{"ttg.num-warps" = 4 : i32}} {{
  tt.func public @f({signature}) -> {results} {{
{body}
  }}
}}"""
    generator = compile_module(parse(text))[0](None, None, *args)
    with pytest.raises(StopIteration) as stopped:
        next(generator)
    return stopped.value.value


def test_branches_between_blocks():
    body = """
    %c1 = arith.constant 1 : i32
    %c9 = arith.constant 9 : i32
    %is_small = arith.cmpi slt, %n, %c9 : i32
    cf.cond_br %is_small, ^bb1(%n, %c1 : i32, i32), ^bb2
  ^bb1(%a: i32, %b: i32):  // 2 preds
    %sum = arith.addi %a, %b : i32
    %is_done = arith.cmpi sge, %sum, %c9 : i32
    cf.cond_br %is_done, ^bb3(%sum : i32), ^bb1(%sum, %a : i32, i32)
  ^bb2:
    cf.br ^bb3(%c1 : i32)
  ^bb3(%r: i32):
    tt.return %r : i32
"""
    assert evaluate(body, 3, signature="%n: i32") == 11  # 3, 4, 7, 11
    assert evaluate(body, 50, signature="%n: i32") == 1


def test_a_while_loop_passes_values():
    body = """
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r:2 = scf.while (%a = %c1, %b = %c0) : (i32, i32) -> (i32, i32) {
      %go = arith.cmpi slt, %a, %n : i32
      scf.condition(%go) %b, %a : i32, i32
    } do {
    ^bb0(%x: i32, %y: i32):
      %sum = arith.addi %x, %y : i32
      scf.yield %sum, %y : i32, i32
    }
    tt.return %r#1 : i32
"""
    assert evaluate(body, 20, signature="%n: i32") == 21  # Fibonacci


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        ("arith.addi %a, %b : i32", (2**31 - 1, 1), -(2**31)),
        ("arith.muli %a, %b : i32", (1 << 20, 1 << 13), 0),
        ("arith.divsi %a, %b : i32", (-7, 2), -3),
        ("arith.remsi %a, %b : i32", (-7, 2), -1),
        ("arith.divui %a, %b : i32", (-2, 2), 2**31 - 1),
        ("arith.shrui %a, %b : i32", (-1, 28), 15),
        ("arith.shrsi %a, %b : i32", (-16, 2), -4),
        ("arith.shli %a, %b : i32", (3, 31), -(2**31)),
        ("arith.maxui %a, %b : i32", (-1, 5), -1),
        ("arith.minsi %a, %b : i32", (-1, 5), -1),
        ("arith.cmpi ult, %a, %b : i32", (-1, 5), False),
        ("arith.cmpi slt, %a, %b : i32", (-1, 5), True),
        ("arith.xori %a, %b : i32", (-1, 5), -6),
        ("arith.trunci %a : i32 to i8", (200, 0), -56),
        ("arith.extui %a : i32 to i64", (-1, 0), 2**32 - 1),
    ],
)
def test_integer_arithmetic_of_scalars_and_tensors(op, args, expected):
    results = (
        "i64" if "to i64" in op else "i8" if "to i8" in op else "i1" if "cmpi" in op else "i32"
    )
    scalar = evaluate(
        f"    %r = {op}\n    tt.return %r : {results}",
        *args,
        signature="%a: i32, %b: i32",
        results=results,
    )
    assert scalar == expected
    tensor_op = op
    for kind in ("i64", "i32", "i8"):
        tensor_op = tensor_op.replace(f": {kind}", f": tensor<4x{kind}>").replace(
            f"to {kind}", f"to tensor<4x{kind}>"
        )
    arrays = [np.full(4, each, np.int32) for each in args]
    found = evaluate(
        f"    %r = {tensor_op}\n    tt.return %r : {results}",
        *arrays,
        signature="%a: tensor<4xi32>, %b: tensor<4xi32>",
        results=results,
    )
    np.testing.assert_array_equal(found, np.full(4, expected))


NAN = float("nan")


@pytest.mark.parametrize("predicate", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("is_unordered", [False, True])
def test_comparisons_of_floats(predicate, is_unordered):
    values = np.asarray([1.0, 2.0, 3.0, NAN, NAN], np.float32)
    others = np.asarray([2.0, 2.0, 2.0, 2.0, NAN], np.float32)
    compare = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less,
        "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    }[predicate]  # fmt: skip
    expected = compare(values, others)
    expected[3:] = is_unordered
    name = ("u" if is_unordered else "o") + predicate
    found = evaluate(
        f"    %r = arith.cmpf {name}, %a, %b : tensor<5xf32>\n    tt.return %r : i1",
        values,
        others,
        signature="%a: tensor<5xf32>, %b: tensor<5xf32>",
        results="i1",
    )
    np.testing.assert_array_equal(found, expected)
    for a, b, each in zip(values, others, expected, strict=True):
        one = evaluate(
            f"    %r = arith.cmpf {name}, %a, %b : f32\n    tt.return %r : i1",
            a,
            b,
            signature="%a: f32, %b: f32",
            results="i1",
        )
        assert one is bool(each)


@pytest.mark.parametrize(
    ("literal", "kind", "expected"),
    [
        ("1.001e-01", "bf16", 0.10009765625),
        ("9.997e-02", "f16", 0.0999755859375),
        ("0x7FC00000", "f32", NAN),
        ("0xFF80", "bf16", -np.inf),
        ("0xFF800000", "f32", -np.inf),
        ("1.000000e-01", "f64", 0.1),
        ("-7", "i32", -7),
        ("true", "i1", True),
        ("-2147483648", "i32", -(2**31)),
    ],
)
def test_constants(literal, kind, expected):
    one = evaluate(f"    %r = arith.constant {literal} : {kind}\n    tt.return %r : {kind}")
    if literal != "true":
        dense = f"arith.constant dense<{literal}> : tensor<2x{kind}>"
        many = evaluate(f"    %r = {dense}\n    tt.return %r : {kind}")
        np.testing.assert_array_equal(many, np.full(2, expected))
    np.testing.assert_array_equal(one, expected)


def test_a_bit_that_is_extended_with_its_sign_is_minus_one():
    body = "    %r = arith.extsi %a : i1 to i32\n    tt.return %r : i32"
    assert evaluate(body, True, signature="%a: i1") == -1
    body = "    %r = arith.extui %a : i1 to i32\n    tt.return %r : i32"
    assert evaluate(body, True, signature="%a: i1") == 1


def test_a_reduction_combines_tuples():
    body = """
    %m:2 = "tt.reduce"(%v, %i) <{axis = 0 : i32}> ({
    ^bb0(%a: f32, %ai: i32, %b: f32, %bi: i32):
      %is_more = arith.cmpf ogt, %a, %b : f32
      %top = arith.select %is_more, %a, %b : f32
      %at = arith.select %is_more, %ai, %bi : i32
      tt.reduce.return %top, %at : f32, i32
    }) : (tensor<8xf32>, tensor<8xi32>) -> (f32, i32)
    tt.return %m#0, %m#1 : f32, i32
"""
    values = np.asarray([3, 1, 4, 1, 5, 9, 2, 6], np.float32)
    found = evaluate(
        body, values, np.arange(8, dtype=np.int32), signature="%v: tensor<8xf32>, %i: tensor<8xi32>"
    )
    assert found == (9.0, 5)


def test_an_operation_that_is_not_known_is_named_with_its_source_line():
    text = """
#loc1 = loc("/somewhere/epilogue.py":17:3)
module attributes {"ttg.num-warps" = 4 : i32} {
  tt.func public @kernel(%x: i32) {
    "tt.unheard_of"(%x) : (i32) -> () loc(#loc1)
    tt.return
  }
}"""
    with pytest.raises(Unsupported, match=r"tt\.unheard_of at epilogue\.py:17 \(IR line 5"):
        compile_module(parse(text))


def test_a_form_of_an_operation_that_is_not_known_is_named_with_its_source_line():
    text = """
#loc1 = loc("/somewhere/epilogue.py":17:3)
module attributes {"ttg.num-warps" = 4 : i32} {
  tt.func public @kernel(%x: i32) {
    %r = ttng.packed_arith pow %x, %x : i32 loc(#loc1)
    tt.return
  }
}"""
    with pytest.raises(Unsupported, match=r"packed pow.*ttng\.packed_arith at epilogue\.py:17"):
        compile_module(parse(text))


def test_every_operation_of_the_table_says_what_it_does():
    assert [name for name, emit in OPERATIONS.items() if not inspect.getdoc(emit)] == []


def test_a_layout_that_is_not_known_is_named_with_the_source_line_that_runs():
    attributes = '{constraints = "=r", packed_element = 1 : i32, pure = true}'
    text = f"""
#mma = #ttg.nvidia_mma<{{versionMajor = 2, warpsPerCTA = [4, 1], instrShape = [16, 8]}}>
#loc1 = loc("/somewhere/lanes.py":5:1)
module attributes {{"ttg.num-warps" = 4 : i32}} {{
  tt.func public @kernel() {{
    %r = tt.elementwise_inline_asm "mov.u32 $0, %laneid;" {attributes} -> tensor<16x8xi32, #mma> loc(#loc1)
    tt.return
  }}
}}"""  # noqa: E501
    kernel = compile_module(parse(text))[0]
    machine = Machine(GlobalMemory(), (0, 0, 0), (1, 1, 1), 0)
    with pytest.raises(Unsupported, match=r"(?s)nvidia_mma.*in default at lanes\.py:5"):
        machine.run(lambda partition: kernel(Runtime(machine), partition), 4)
