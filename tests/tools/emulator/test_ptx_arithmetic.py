"""Arithmetic, logic and comparisons of inline assembly, against plain Python."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from tests.tools.emulator.ptx_runs import FLOATS, INTEGERS, NUMPY, SHAPE, python, run, wrapped


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
        ("min", min),
        ("max", max),
    ],
)
def test_integers(name, function, kind):
    a, b = (each.astype(NUMPY[kind]) for each in INTEGERS[:2])
    if kind.endswith("64"):
        a, b = a * 0x1234567, b * -77777 if kind == "s64" else b * 77777
    expected = python(wrapped(function, kind), a, b, dtype=NUMPY[kind])
    np.testing.assert_array_equal(
        run(f"{name}.{kind} $0, $1, $2;", a, b).view(NUMPY[kind]), expected
    )


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_high_and_wide_products(kind):
    a, b = (each.view(NUMPY[kind]) for each in INTEGERS[:2])
    high = python(wrapped(lambda x, y: x * y >> 32, kind), a, b, dtype=NUMPY[kind])
    np.testing.assert_array_equal(run(f"mul.hi.{kind} $0, $1, $2;", a, b).view(NUMPY[kind]), high)
    wide = NUMPY[kind[0] + "64"]
    np.testing.assert_array_equal(
        run(f"mul.wide.{kind} $0, $1, $2;", a, b).view(wide),
        python(lambda x, y: x * y, a, b, dtype=wide),
    )


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_mad_is_a_product_and_a_sum(kind):
    values = [each.view(NUMPY[kind]) for each in INTEGERS]
    expected = python(wrapped(lambda a, b, c: a * b + c, kind), *values, dtype=NUMPY[kind])
    found = run(f"mad.lo.{kind} $0, $1, $2, $3;", *values).view(NUMPY[kind])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "function"),
    [("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)],
)
def test_logic(name, function):
    a, b, _ = INTEGERS
    np.testing.assert_array_equal(
        run(f"{name}.b32 $0, $1, $2;", a, b), python(function, a, b, dtype=np.uint32)
    )
    text = f"""{{ .reg .pred p, q;
        setp.lt.u32 p, $1, $2; setp.gt.u32 q, $1, 77;
        {name}.pred p, p, q; selp.u32 $0, 1, 0, p; }}"""
    expected = python(lambda x, y: int(function(x < y, x > 77)), a, b, dtype=np.uint32)
    np.testing.assert_array_equal(run(text, a, b), expected)


def test_not():
    np.testing.assert_array_equal(run("not.b32 $0, $1;", INTEGERS[0]), ~INTEGERS[0])


@pytest.mark.parametrize("table", [0x96, 0xE8, 0xCA, 0x01, 0xFF])
def test_lop3_looks_up_three_bits(table):
    def logic(*values: int) -> int:
        bits = ([value >> place & 1 for value in values] for place in range(32))
        return sum((table >> (4 * a + 2 * b + c) & 1) << i for i, (a, b, c) in enumerate(bits))

    np.testing.assert_array_equal(
        run(f"lop3.b32 $0, $1, $2, $3, {table:#x};", *INTEGERS),
        python(logic, *INTEGERS, dtype=np.uint32),
    )


@pytest.mark.parametrize("kind", ["s32", "u32", "b32"])
def test_shifts_beyond_the_width(kind):
    value, count = INTEGERS[0].view(NUMPY[kind]), INTEGERS[1] % 40
    left = python(lambda x, n: (x << n) & 0xFFFFFFFF, value, count, dtype=np.uint32)
    np.testing.assert_array_equal(run(f"shl.{kind} $0, $1, $2;", value, count), left)
    right = python(lambda x, n: x >> n, value, count, dtype=NUMPY[kind])  # Python copies the sign
    found = run(f"shr.{kind} $0, $1, $2;", value, count).view(NUMPY[kind])
    np.testing.assert_array_equal(found, right)


# ---------------------------------------------------------- floats


def same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(expected.dtype), expected)


def to_float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
        ("add.rn.ftz", lambda a, b: a + b),
    ],
)
def test_floats(name, function):
    a, b, _ = FLOATS
    same(run(f"{name}.f32 $0, $1, $2;", a, b),
         python(lambda x, y: to_float32(function(x, y)), a, b, dtype=np.float32))  # fmt: skip


def test_fma_rounds_once():
    a, b, c = FLOATS
    same(run("fma.rn.f32 $0, $1, $2, $3;", a, b, c),
         python(lambda x, y, z: to_float32(x * y + z), a, b, c, dtype=np.float32))  # fmt: skip
    one = np.full(SHAPE, 1 + 2.0**-12, np.float32)
    minus = np.full(SHAPE, -1 - 2.0**-11, np.float32)
    found = run("fma.rn.f32 $0, $1, $2, $3;", one, one, minus).view(np.float32)
    assert (found == 2.0**-24).all()  # a product that is rounded first gives zero


def test_extrema_of_floats_and_nan():
    a, b, _ = FLOATS
    for name, pick in (("max", max), ("min", min)):

        def ignoring(x: float, y: float, pick: Any = pick) -> float:
            return y if math.isnan(x) else x if math.isnan(y) else pick(x, y)

        def keeping(x: float, y: float, pick: Any = pick) -> float:
            return math.nan if math.isnan(x) or math.isnan(y) else pick(x, y)

        same(run(f"{name}.f32 $0, $1, $2;", a, b), python(ignoring, a, b, dtype=np.float32))
        same(run(f"{name}.NaN.f32 $0, $1, $2;", a, b), python(keeping, a, b, dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("abs", abs),
        ("neg", lambda x: -x),
        ("ex2.approx.ftz", lambda x: 2.0**x),
        ("lg2.approx.ftz", math.log2),
        ("sqrt.rn", math.sqrt),
        ("rsqrt.approx.ftz", lambda x: 1 / math.sqrt(x)),
        ("rcp.approx.ftz", lambda x: 1 / x),
    ],
)
def test_functions_of_floats(name, function):
    values = np.abs(FLOATS[2]) + np.float32(0.1)
    found = run(f"{name}.f32 $0, $1;", values).view(np.float32)
    expected = python(function, values, dtype=np.float64)
    np.testing.assert_allclose(found, expected, rtol=4e-7)


def test_ftz_flushes_subnormal_operands_and_results():
    tiny = np.full(SHAPE, -1e-40, np.float32)
    flushed = run("add.ftz.f32 $0, $1, 0f00000000;", tiny).view(np.float32)
    assert (flushed == 0).all()
    assert (run("add.f32 $0, $1, 0f00000000;", tiny).view(np.float32) == tiny).all()
    small = np.full(SHAPE, 2e-38, np.float32)
    assert (run("mul.ftz.f32 $0, $1, 0f3F000000;", small).view(np.float32) == 0).all()
    assert np.isneginf(run("lg2.approx.ftz.f32 $0, $1;", -tiny).view(np.float32)).all()


COMPARED = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("name", COMPARED)
def test_comparisons(name):
    text = "setp.{}.{} p, $1, $2; selp.u32 $0, 1, 0, p;"
    a, b = INTEGERS[0], np.where(INTEGERS[2] & 1, INTEGERS[0], INTEGERS[1])
    for kind in ("s32", "u32"):
        x, y = a.view(NUMPY[kind]), b.view(NUMPY[kind])
        expected = python(COMPARED[name], x, y, dtype=np.uint32)
        np.testing.assert_array_equal(run(text.format(name, kind), x, y), expected)
    x, y = FLOATS[0], np.where(INTEGERS[2] & 1, FLOATS[0], FLOATS[1])

    def compare(u: float, v: float, *, with_nan: bool) -> bool:
        return with_nan if math.isnan(u) or math.isnan(v) else COMPARED[name](u, v)

    for suffix, with_nan in (("", False), ("u", True)):
        expected = python(lambda u, v, n=with_nan: compare(u, v, with_nan=n), x, y, dtype=np.uint32)
        np.testing.assert_array_equal(run(text.format(name + suffix, "f32"), x, y), expected)


@pytest.mark.parametrize("combination", ["and", "or", "xor"])
def test_a_comparison_combined_with_a_predicate(combination):
    a, b, _ = INTEGERS
    text = f"""setp.lt.u32 q, $2, 99999999;
        setp.gt.{combination}.u32 p, $1, $2, !q; selp.b32 $0, 5, 6, p;"""
    combine = {"and": lambda x, y: x and y, "or": lambda x, y: x or y, "xor": lambda x, y: x != y}
    np.testing.assert_array_equal(
        run(text, a, b),
        python(lambda x, y: 5 if combine[combination](x > y, y >= 99999999) else 6, a, b,
               dtype=np.uint32),
    )  # fmt: skip
