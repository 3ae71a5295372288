"""The parser of TTGIR: operations, attributes, regions, locations, types."""

from __future__ import annotations

import pytest

from mlakit.tools.emulator.ir import Module, Op, Unsupported
from mlakit.tools.emulator.parser import parse
from mlakit.tools.emulator.scanning import split_top, split_types, strip_locations
from mlakit.tools.emulator.types import Type, Types, expand_aliases

# forms of lines as Triton prints them, 3.6 to 3.9
TEXT = """
#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>
#shared = #ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}>
#smem = #ttg.shared_memory
#loc = loc("/path/to/kernel.py":10:0)
#loc1 = loc("/path/to/softmax.py":31:9)
#loc2 = loc("/path/to/consumer.py":42:5)
#loc3 = loc(callsite(#loc1 at #loc2))
#loc4 = loc("scores"(#loc3))
#loc5 = loc(callsite(#loc4 at #loc))
module attributes {"ttg.num-ctas" = 2 : i32, "ttg.num-warps" = 4 : i32, ttg.target = "cuda:90"} {
  tt.func public @kernel(%x: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("x"(#loc)), %desc: !tt.tensordesc<tensor<64x64xbf16, #shared>> loc("d"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
    %c0_i32 = arith.constant 0 : i32 loc(#loc)
    %cst = arith.constant {tt.note = 1 : i32} dense<1.000000e+00> : tensor<128xf32, #blocked> loc(#loc1)
    %range = tt.make_range {end = 128 : i32, start = 3 : i32} : tensor<128xi32, #blocked> loc(#loc1)
    %pair:2 = scf.for %i = %c0_i32 to %n step %n iter_args(%a = %c0_i32, %b = %cst) -> (i32, tensor<128xf32, #blocked>)  : i32 {
      %found = arith.cmpi slt, %a, %n : i32 loc(#loc5)
      %inner = scf.if %found -> (i32) {
        scf.yield %a : i32 loc(#loc2)
      } else {
        %more = arith.addi %a, %i : i32 loc(#loc2)
        scf.yield %more : i32 loc(#loc2)
      } loc(#loc2)
      scf.yield %inner, %b : i32, tensor<128xf32, #blocked> loc(#loc2)
    } {tt.warp_specialize} loc(#loc2)
    %w:2 = scf.while (%p = %c0_i32, %q = %n) : (i32, i32) -> (i32, i32) {
      %go = arith.cmpi slt, %p, %q : i32 loc(#loc)
      scf.condition(%go) %p, %q : i32, i32 loc(#loc)
    } do {
    ^bb0(%p2: i32 loc("p"(#loc)), %q2: i32 loc("q"(#loc))):
      scf.yield %q2, %q2 : i32, i32 loc(#loc)
    } loc(#loc3)
    %sum = "tt.reduce"(%pair#1) <{axis = 0 : i32}> ({
    ^bb0(%l: f32 loc(callsite(#loc1 at #loc2)), %r: f32 loc(unknown)):
      %s = arith.addf %l, %r : f32 loc(#loc5)
      tt.reduce.return %s : f32 loc(#loc5)
    }) : (tensor<128xf32, #blocked>) -> f32 loc(#loc5)
    %asm = tt.elementwise_inline_asm "{ mov.b32 $0, %laneid; // {\\0A }" {constraints = "=r,r", packed_element = 2 : i32, pure = true} %n : i32 -> i32 loc(#loc4)
    ttg.warp_specialize(%x, %n) attributes {warpGroupStartIds = array<i32: 4>}
    default {
      ttg.warp_yield loc(#loc)
    }
    partition0(%y: !tt.ptr<bf16> loc("y"(#loc)), %m: i32 loc("m"(#loc))) num_warps(2) {
      %t = tt.trans %cst {order = array<i32: 1, 0>} : tensor<64x32xf32, #mma> -> tensor<32x64xf32, #blocked> loc(#loc)
      ttg.warp_return loc(#loc)
    } : (!tt.ptr<bf16>, i32) -> () loc(#loc2)
    tt.return loc(#loc)
  } loc(#loc)
  tt.func private @"helper.f"(%x: i32 loc("x"(#loc))) -> i32 attributes {noinline = true} {
    cf.cond_br %flag, ^bb1, ^bb2(%x : i32) loc(#loc)
  ^bb1:  // pred: ^bb0
    cf.br ^bb2(%x : i32) loc(#loc)
  ^bb2(%y: i32 loc("y"(#loc))):  // 2 preds: ^bb0, ^bb1
    tt.return %y : i32 loc(#loc)
  } loc(#loc)
} loc(#loc)
"""  # noqa: E501


@pytest.fixture(scope="module")
def module() -> Module:
    return parse(TEXT)


def op_named(module: Module, name: str) -> Op:
    """The first operation of the kernel of that name."""
    return next(each for each in module.kernel.body.ops if each.name == name)


def test_the_module_has_its_attributes(module):
    assert (module.num_warps, module.num_ctas) == (4, 2)
    assert module.attributes["#smem"] == "#ttg.shared_memory"
    assert set(module.functions) == {"kernel", "helper.f"}
    assert module.kernel.name == "kernel"


def test_arguments_of_a_function(module):
    assert module.kernel.args == [
        ("%x", "!tt.ptr<bf16>"),
        ("%desc", "!tt.tensordesc<tensor<64x64xbf16, #shared>>"),
        ("%n", "i32"),
    ]
    assert not module.functions["helper.f"].is_public


def test_attributes_of_an_operation(module):
    made = op_named(module, "tt.make_range")
    assert (made.int_attr("start"), made.int_attr("end")) == (3, 128)
    assert made.attr("step") is None
    assert made.attr("step", "1") == "1"
    reduced = op_named(module, "tt.reduce")
    assert reduced.int_attr("axis") == 0
    trans = op_named(module, "ttg.warp_specialize").regions[1].ops[0]
    assert trans.array_attr("order") == [1, 0]
    asm = op_named(module, "tt.elementwise_inline_asm")
    assert asm.attr("constraints") == '"=r,r"'
    assert asm.int_attr("packed_element") == 2
    with pytest.raises(Unsupported, match=r"tt\.make_range has no attribute axis"):
        made.int_attr("axis")


def test_types_of_operands_and_results(module):
    loop = op_named(module, "scf.for")
    assert loop.results == ["%pair#0", "%pair#1"]
    reduced = op_named(module, "tt.reduce")
    assert reduced.operands == ["%pair#1"]
    assert reduced.result_types() == ["f32"]
    trans = op_named(module, "ttg.warp_specialize").regions[1].ops[0]
    assert trans.source_type == "tensor<64x32xf32, #mma>"
    assert trans.result_type == "tensor<32x64xf32, #blocked>"
    cast = Op("arith.extsi", ["%a"], ["%b"], " %b", "i32 to i64", "", 0)
    assert (cast.source_type, cast.result_type) == ("i32", "i64")
    stored = Op("tt.store", [], [], "", "tensor<8x!tt.ptr<f32>, #blocked>", "", 0)
    assert stored.operand_types() == ["tensor<8x!tt.ptr<f32>, #blocked>"]


def test_a_string_is_not_searched_for_operands(module):
    asm = op_named(module, "tt.elementwise_inline_asm")
    assert asm.operands == ["%n"]
    assert (asm.operand_types(), asm.result_types()) == (["i32"], ["i32"])


def test_regions_of_loops_and_branches(module):
    loop = op_named(module, "scf.for")
    assert loop.operands == ["%c0_i32", "%n", "%n"]
    assert loop.inits == [("%a", "%c0_i32"), ("%b", "%cst")]
    assert loop.regions[0].args == ["%i", "%a", "%b"]
    branch = loop.regions[0].ops[1]
    assert branch.name == "scf.if"
    assert [[op.name for op in region.ops] for region in branch.regions] == [
        ["scf.yield"],
        ["arith.addi", "scf.yield"],
    ]
    loop = op_named(module, "scf.while")
    assert loop.inits == [("%p", "%c0_i32"), ("%q", "%n")]
    assert [region.args for region in loop.regions] == [["%p", "%q"], ["%p2", "%q2"]]
    assert op_named(module, "tt.reduce").regions[0].args == ["%l", "%r"]


def test_partitions(module):
    op = op_named(module, "ttg.warp_specialize")
    assert op.operands == ["%x", "%n"]
    default, partition = op.regions
    assert (default.args, partition.args) == ([], ["%y", "%m"])
    assert partition.num_warps == 2
    assert [each.name for each in partition.ops] == ["tt.trans", "ttg.warp_return"]


def test_blocks_of_a_function(module):
    blocks = module.functions["helper.f"].body.blocks
    assert [(each.label, each.args) for each in blocks] == [
        ("", ["%x"]),
        ("^bb1", []),
        ("^bb2", ["%y"]),
    ]
    with pytest.raises(Unsupported, match="3 blocks"):
        _ = module.functions["helper.f"].body.ops


def test_locations_are_lines_of_source_innermost_first(module):
    compared = op_named(module, "scf.for").regions[0].ops[0]
    assert compared.location == "#loc5"
    assert module.where(compared.location) == "softmax.py:31 <- consumer.py:42 <- kernel.py:10"
    assert module.where("#loc2") == "consumer.py:42"
    assert module.where("unknown") == "unknown"
    # the location of an operation with regions is behind the last of them
    assert module.where(op_named(module, "scf.while").location) == "softmax.py:31 <- consumer.py:42"
    assert op_named(module, "ttg.warp_specialize").location == "#loc2"
    text = module.source_of(compared)
    assert text.startswith("arith.cmpi at softmax.py:31 <- consumer.py:42")
    assert "arith.cmpi slt" in text


@pytest.mark.parametrize("line", ["tt.func @nameless", "%a = !!", "scf.for %i in %n {"])
def test_a_line_that_cannot_be_read_is_named(line):
    text = "\n".join(["module {", "  tt.func public @k() {", f"    {line}", "  }", "}"])
    with pytest.raises(Unsupported, match="line 3 of the IR"):
        parse(text if not line.startswith("tt.func") else f"module {{\n\n{line} {{\n}}\n}}")


# ---------------------------------------------------------- text


def test_splitting_respects_brackets_quotes_and_arrows():
    assert split_top('a<b, c>, "d, e", f(g, h) -> (i, j), k', ",") == [
        "a<b, c>",
        ' "d, e"',
        " f(g, h) -> (i, j)",
        " k",
    ]
    assert split_top("", ",") == [""]
    assert split_types(' %a {x = 1 : i32}, "b : c" : i32 -> f32') == (
        ' %a {x = 1 : i32}, "b : c"',
        "i32 -> f32",
    )
    assert split_types(" %a") == (" %a", "")


def test_locations_are_taken_off_a_line():
    line = '%a = f(%x: i32 loc("x)"(#loc3)), %y: local(1) loc(callsite(#loc1 at #loc2))) loc(#loc7)'
    assert strip_locations(line) == ("%a = f(%x: i32, %y: local(1))", "#loc7")


# ---------------------------------------------------------- types


SLICES = "#ttg.slice<{dim = 1, parent = #ttg.slice<{dim = 0, parent = #ttg.linear<{}>}>}>"


@pytest.mark.parametrize(
    ("text", "type"),
    [
        ("i32", Type("i32")),
        ("index", Type("i64")),
        ("!tt.ptr<bf16>", Type("ptr", pointee="bf16")),
        ("!tt.ptr<f32, 1>", Type("ptr", pointee="f32")),
        ("tensor<64x128xf32>", Type("f32", shape=(64, 128), is_tensor=True)),
        (
            "tensor<8x!tt.ptr<i8>, #a>",
            Type("ptr", shape=(8,), layout="#ttg.linear<{}>", pointee="i8", is_tensor=True),
        ),
        (
            "tensor<8xf8E4M3FN, #ttg.slice<{dim = 1, parent = #b}>>",
            Type(
                "f8E4M3FN",
                shape=(8,),
                layout=SLICES,
                is_tensor=True,
            ),
        ),
        (
            "!ttg.memdesc<64x64xbf16, #s, #smem, mutable>",
            Type(
                "memdesc", (64, 64), "#ttg.nvmma_shared<{}>", "bf16", (64, 64), "#ttg.shared_memory"
            ),
        ),
        (
            "!ttg.memdesc<16x64xbf16, #s, #smem, mutable, 3x64x64>",
            Type(
                "memdesc", (16, 64), "#ttg.nvmma_shared<{}>", "bf16", (64, 64), "#ttg.shared_memory"
            ),
        ),
        ("!tt.tensordesc<tensor<64x64xbf16, #s>>", Type("tensordesc", (64, 64), pointee="bf16")),
        ("!tt.tensordesc<64x64xbf16, #s>", Type("tensordesc", (64, 64), pointee="bf16")),
    ],
)
def test_types(text, type):
    aliases = {
        "#a": "#ttg.linear<{}>",
        "#b": "#ttg.slice<{dim = 0, parent = #a}>",
        "#s": "#ttg.nvmma_shared<{}>",
        "#smem": "#ttg.shared_memory",
    }
    assert Types(aliases).parse(text) == type


def test_aliases_that_never_end_are_an_error():
    with pytest.raises(Unsupported, match="nested deeper"):
        expand_aliases("#a", {"#a": "<#a>"})
