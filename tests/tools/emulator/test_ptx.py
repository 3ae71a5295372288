"""Inline assembly: instructions of a whole warp, control flow, and what is not known."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mlakit.tools.emulator import ptx
from mlakit.tools.emulator.codegen import compile_module
from mlakit.tools.emulator.faults import Fault
from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.parser import parse
from mlakit.tools.emulator.ptx.instruction import INSTRUCTIONS
from tests.tools.emulator.ptx_runs import INTEGERS, NUMPY, SHAPE, python, run


def shuffled(mode: str, by: int, control: int) -> np.ndarray:
    """PTX's description of shfl, lane by lane; -1 where the source is outside of the segment."""
    shared, clamp = control >> 8 & 31, control & 31
    sources = []
    for lane in range(32):
        last = (lane & shared) | (clamp & ~shared)
        source = {
            "up": lane - by,
            "down": lane + by,
            "bfly": lane ^ by,
            "idx": (lane & shared) | (by & ~shared),
        }[mode]
        is_inside = source >= last if mode == "up" else source <= last
        sources.append(source if is_inside else -1)
    return np.asarray(sources)


@pytest.mark.parametrize(
    ("mode", "by", "control"),
    [
        ("bfly", 1, 0x1F), ("bfly", 16, 0x1F), ("bfly", 3, 0x1C1F),
        ("idx", 0, 0x1C1F), ("idx", 5, 0x1F), ("idx", 9, 0x181F),
        ("up", 1, 0), ("up", 4, 0x1800), ("down", 1, 0x1F), ("down", 2, 0x1C1F),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_register", [False, True])
def test_shuffles(mode, by, control, is_register):
    a = INTEGERS[0]
    text = (
        f"shfl.sync.{mode}.b32 $0|p, $1, {'$2' if is_register else by}, {control:#x}, 0xffffffff;"
    )
    text += " selp.u32 q, 1, 0, p;"
    source = shuffled(mode, by, control)
    expected = a[:, np.where(source < 0, np.arange(32), source)]
    operands = [a, np.full(SHAPE, by, np.uint32)][: 1 + is_register]
    np.testing.assert_array_equal(run(text, *operands), expected)
    inside = run(text + " mov.u32 $0, q;", *operands)
    np.testing.assert_array_equal(inside, np.broadcast_to((source >= 0)[None, :, None], SHAPE))


def test_votes():
    values = (np.random.default_rng(4).random(SHAPE) < 0.1).astype(np.uint32)
    values[0, :, 0], values[0, :, 1] = 1, 0
    text = "setp.ne.u32 p, $1, 0; vote.sync.{}.pred p, {}p, 0xFFFFFFFF; selp.u32 $0, 1, 0, p;"
    every = np.broadcast_to(values.all(1, keepdims=True), SHAPE)
    some = np.broadcast_to(values.any(1, keepdims=True), SHAPE)
    np.testing.assert_array_equal(run(text.format("all", ""), values), every)
    np.testing.assert_array_equal(run(text.format("any", ""), values), some)
    np.testing.assert_array_equal(run(text.format("any", "!"), values), ~every)
    ballot = run("setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;", values)
    expected = [
        [sum(int(values[warp, lane, group]) << lane for lane in range(32)) for group in range(3)]
        for warp in range(2)
    ]
    np.testing.assert_array_equal(ballot, np.broadcast_to(np.asarray(expected)[:, None], SHAPE))


@pytest.mark.parametrize(
    ("name", "kind", "function"),
    [
        ("max", "s32", max),
        ("min", "s32", min),
        ("max", "u32", max),
        ("min", "u32", min),
        ("add", "u32", lambda a, b: (a + b) & 0xFFFFFFFF),
        ("and", "b32", lambda a, b: a & b),
        ("or", "b32", lambda a, b: a | b),
        ("xor", "b32", lambda a, b: a ^ b),
    ],
)
def test_redux(name, kind, function):
    values = INTEGERS[0].view(NUMPY[kind])
    found = run(f"redux.sync.{name}.{kind} $0, $1, 0xffffffff;", values).view(NUMPY[kind])
    for warp in range(2):
        for group in range(3):
            lanes = values[warp, :, group].tolist()
            expected = lanes[0]
            for each in lanes[1:]:
                expected = function(expected, each)
            assert (found[warp, :, group] == expected).all()


def test_a_warp_wide_instruction_that_some_lanes_do_not_reach_is_a_fault():
    text = "setp.lt.u32 p, %laneid, 7; @p shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;"
    text = text.replace("setp.lt.u32 p, %laneid", "mov.u32 l, %laneid; setp.lt.u32 p, l")
    with pytest.raises(Fault, match=r"shfl\.sync\.bfly\.b32 is reached by some lanes"):
        run(text, INTEGERS[0])
    whole = "setp.lt.u32 p, $2, 1; @p redux.sync.max.u32 $0, $1, 0xffffffff;"
    warps = np.broadcast_to(np.arange(2, dtype=np.uint32)[:, None, None], SHAPE).copy()
    run(whole, INTEGERS[0], warps)  # a whole warp may stay away


# ---------------------------------------------------------- control


def test_guards_and_branches():
    a, b, _ = INTEGERS
    text = r"""
    {
        .reg .pred p, q;          // a comment; with a semicolon
        .reg .u32 x;
        mov.u32 x, 7;\0A
        setp.lt.u32 p, $1, $2;
        @p mov.u32 x, 8;
        setp.lt.u32 q, $1, 0x80000000;
        @q bra.uni DONE;
        @!p bra DONE;
        add.u32 x, x, 100;
    DONE:
        add.u32 $0, x, 1;
    }"""

    def expected(x: int, y: int) -> int:
        value = 8 if x < y else 7
        return value + (101 if not x < 0x80000000 and x < y else 1)

    np.testing.assert_array_equal(run(text, a, b), python(expected, a, b, dtype=np.uint32))


def test_hints_do_nothing():
    text = """griddepcontrol.wait; prefetch.global.L2 [$1];
        cp.async.bulk.prefetch.L2.global [$1], 4; mov.b32 $0, $1;"""
    np.testing.assert_array_equal(run(text, INTEGERS[0]), INTEGERS[0])


def test_a_sixteen_bit_read_of_a_wider_register_takes_its_low_bits():
    low = run("mov.b16 $0, $1;", INTEGERS[0])
    np.testing.assert_array_equal(low, (INTEGERS[0] & 0xFFFF).astype(np.uint16))


@pytest.mark.parametrize(
    "text",
    [
        "wgmma.fence.sync.aligned",
        "ld.shared.b32 $0, [$1]",
        "bfe.u32 $0, $1, 3, 4",
        "mov.u32 $0, %clock",
        "add.sat.s32 $0, $1, $2",
        "add.e4m3 $0, $1, $2",
        "mul.hi.u64 $0, $1, $2",
        "mad.wide.u32 $0, $1, $2, $3",
        "fma.rn.f64 $0, $1, $2, $3",
        "max.xorsign.abs.f32 $0, $1, $2",
        "max.f16x2 $0, $1, $2",
        "cvt.rz.bf16.f32 $0, $1",
        "cvt.rn.e4m3x2.f32 $0, $1, $2",
        "cvt.u32.f32 $0, $1",
        "cvt.rn.relu.f16x2.f32 $0, $1, $2",
        "prmt.b32.f4e $0, $1, $2, $3",
        "setp.lt.nand.s32 $0, $1, $2, p",
        "setp.lo.u32 $0, $1, $2",
        "shfl.bfly.b32 $0, $1, 1, 0x1f",
        "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffff",
        "vote.sync.uni.pred $0, $1, 0xffffffff",
        "redux.sync.max.f32 $0, $1, 0xffffffff",
        "mov.b32 {a, b, c, d}, $1",
        "mov.v2.b32 $0, $1",
        "add.u32 $0, $1",
    ],
)
def test_an_instruction_that_is_not_known_is_named(text):
    name = text.split()[0].split(".")[0]
    with pytest.raises(Unsupported, match=rf"PTX instruction {name}\."):
        ptx.compile_program(text + ";")


GUARDED = "setp.ne.s32 p, $2, 0; @p bar.arrive $1, 256; mov.u32 $0, 0;"


def test_a_named_barrier_is_told_from_other_assembly():
    assert ptx.named_barrier("add.u32 $0, $1, $2;") is None
    assert ptx.named_barrier("barrier.cta.sync $1, 64;") == ptx.NamedBarrier("sync", 1, 64)
    assert ptx.named_barrier(f"{{ .reg .pred p; {GUARDED} }}") == (
        ptx.NamedBarrier("arrive", 1, 256, predicate=2)
    )


@pytest.mark.parametrize(
    "text",
    [
        "bar.sync 1, 128;",
        "bar.sync $1;",
        "bar.sync $1, $2;",
        "bar.warp.sync 0xffffffff;",
        "bar.red.popc.u32 $0, $1, 128, p;",
        "@p bar.sync $1, 128;",
        "bar.sync $1, 128; bar.sync $2, 128;",
        "add.u32 $0, $0, 1; bar.sync $1, 128;",
        GUARDED.replace("$2, 0", "$2, 1"),
    ],
)
def test_another_named_barrier_is_not_known(text):
    with pytest.raises(Unsupported, match=r"PTX instruction @?p? ?bar\."):
        ptx.named_barrier(text)


def test_a_branch_back_is_not_known():
    with pytest.raises(Unsupported, match="branch to AGAIN"):
        ptx.compile_program("AGAIN: add.u32 $0, $0, 1; bra AGAIN;")


def test_a_register_that_was_not_written_cannot_be_read():
    with pytest.raises(Unsupported, match="register x is read before it is written"):
        run("add.u32 $0, x, 1;")
    assert (ptx.Threads({}, SHAPE).result("$0").view(np.int32) < 0).all()


def test_an_instruction_that_is_not_known_is_reported_with_its_source_line():
    attributes = '{constraints = "=r,r", packed_element = 1 : i32, pure = true}'
    text = f"""
#loc1 = loc("/somewhere/softmax.py":31:9)
module attributes {{"ttg.num-warps" = 4 : i32}} {{
  tt.func public @kernel(%x: i32) {{
    %0 = tt.elementwise_inline_asm "bfe.u32 $0, $1, 3, 4;" {attributes} %x : i32 -> i32 loc(#loc1)
    tt.return
  }}
}}"""
    with pytest.raises(Unsupported, match=r"PTX instruction bfe\.u32.*softmax\.py:31"):
        compile_module(parse(text))


def test_every_instruction_of_the_table_is_tested():
    tests = "".join(each.read_text("utf-8") for each in Path(__file__).parent.glob("test_ptx*.py"))
    names = {name for name in INSTRUCTIONS if not re.search(rf"\b{name}\b", tests)}
    assert names == set()
