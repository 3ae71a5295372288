"""Moves and conversions of inline assembly, against plain Python and torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mlakit.tools.emulator.dtypes import decode, encode
from mlakit.tools.emulator.ptx.conversions import round_to_odd
from tests.tools.emulator.ptx_runs import FLOATS, INTEGERS, SHAPE, python, run


def test_moves_literals_and_lanes():
    lanes = np.broadcast_to(np.arange(32, dtype=np.uint32)[None, :, None], SHAPE)
    np.testing.assert_array_equal(run("mov.u32 $0, %laneid;"), lanes)
    np.testing.assert_array_equal(run("mov.b32 $0, $1;", INTEGERS[0]), INTEGERS[0])
    assert (run("mov.f32 $0, 0f3FC00000;").view(np.float32) == 1.5).all()
    assert (run("mov.s32 $0, -2;").view(np.int32) == -2).all()
    assert (run("mov.u64 $0, 0x123456789A;") == 0x123456789A).all()


def test_moves_of_halves():
    a, b, _ = INTEGERS
    swapped = python(lambda x: (x >> 16) | (x & 0xFFFF) << 16, a, dtype=np.uint32)
    np.testing.assert_array_equal(run("mov.b32 {l, h}, $1; mov.b32 $0, {h, l};", a), swapped)
    joined = python(lambda x, y: x | y << 32, a, b, dtype=np.uint64)
    np.testing.assert_array_equal(run("mov.b64 $0, {$1, $2};", a, b), joined)
    np.testing.assert_array_equal(run("mov.b64 x, {$1, $2}; mov.b64 {_, $0}, x;", a, b), b)


@pytest.mark.parametrize("is_immediate", [True, False])
def test_prmt_picks_bytes_and_signs(is_immediate):
    selectors = INTEGERS[2] & 0xFFFF

    def pick(a: int, b: int, selector: int) -> int:
        both, result = a | b << 32, 0
        for place in range(4):
            digit = selector >> 4 * place & 15
            byte = both >> 8 * (digit & 7) & 255
            if digit & 8:
                byte = 255 if byte & 128 else 0
            result |= byte << 8 * place
        return result

    if is_immediate:
        for selector in (0x5140, 0x7632, 0xBA98, 0x3210):
            constant = np.full(SHAPE, selector, np.uint32)
            found = run(f"prmt.b32 $0, $1, $2, {selector:#x};", *INTEGERS[:2])
            expected = python(pick, *INTEGERS[:2], constant, dtype=np.uint32)
            np.testing.assert_array_equal(found, expected)
    else:
        found = run("prmt.b32 $0, $1, $2, $3;", *INTEGERS[:2], selectors)
        expected = python(pick, *INTEGERS[:2], selectors, dtype=np.uint32)
        np.testing.assert_array_equal(found, expected)


def torch_bits(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_conversions_to_16_bits(kind, dtype):
    a, b = (np.nan_to_num(each) for each in FLOATS[:2])
    np.testing.assert_array_equal(run(f"cvt.rn.{kind}.f32 $0, $1;", a), torch_bits(a, dtype))
    pair = run(f"cvt.rn.{kind}x2.f32 $0, $1, $2;", a, b)
    np.testing.assert_array_equal(pair >> 16, torch_bits(a, dtype))
    np.testing.assert_array_equal(pair & 0xFFFF, torch_bits(b, dtype))
    back = run(f"cvt.rn.{kind}.f32 h, $1; cvt.f32.{kind} $0, h;", a).view(np.float32)
    np.testing.assert_array_equal(back, torch.from_numpy(a).to(dtype).float().numpy())


@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_conversions_of_8_bits(kind, dtype):
    a, b = (np.clip(np.nan_to_num(each), -448, 448) for each in FLOATS[:2])
    expected = [torch.from_numpy(each).to(dtype).view(torch.uint8).numpy() for each in (a, b)]
    pair = run(f"cvt.rn.satfinite.{kind}x2.f32 $0, $1, $2;", a, b)
    assert pair.dtype == np.uint16
    np.testing.assert_array_equal(pair >> 8, expected[0])
    np.testing.assert_array_equal(pair & 255, expected[1])
    halves = run(f"cvt.rn.f16x2.{kind}x2 $0, $1;", pair)
    values = [torch.from_numpy(each).view(dtype).float().numpy() for each in expected]
    np.testing.assert_array_equal(decode((halves >> 16).astype(np.uint16), "f16"), values[0])
    np.testing.assert_array_equal(decode((halves & 0xFFFF).astype(np.uint16), "f16"), values[1])
    np.testing.assert_array_equal(run(f"cvt.rn.satfinite.{kind}x2.f16x2 $0, $1;", halves), pair)


@pytest.mark.parametrize(
    ("mode", "function"),
    [("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)],
)
def test_conversions_to_integers_round_and_saturate(mode, function):
    values = np.asarray(FLOATS[2])
    values[0, :5, 0] = [0.5, -0.5, 1.5, 2.5, -2.5]
    np.testing.assert_array_equal(
        run(f"cvt.{mode}.s32.f32 $0, $1;", values).view(np.int32),
        python(function, values, dtype=np.int32),
    )
    extreme = np.asarray([np.nan, np.inf, -np.inf, 3e9, -3e9, -1], np.float32).reshape(1, 6, 1)
    signed = run(f"cvt.{mode}.s32.f32 $0, $1;", extreme, shape=extreme.shape).view(np.int32)
    low, high = -(2**31), 2**31 - 1
    assert signed.ravel().tolist() == [0, high, low, high, low, -1]
    unsigned = run(f"cvt.{mode}.u32.f32 $0, $1;", extreme, shape=extreme.shape)
    assert unsigned.ravel().tolist() == [0, 2**32 - 1, 0, 3 * 10**9, 0, 0]


def test_conversions_of_integers():
    a = INTEGERS[0]
    np.testing.assert_array_equal(run("cvt.u64.u32 $0, $1;", a), a.astype(np.uint64))
    signed = a.view(np.int32)
    np.testing.assert_array_equal(
        run("cvt.s64.s32 $0, $1;", signed).view(np.int64), signed.astype(np.int64)
    )
    for kind, values in (("s32", signed), ("u32", a)):
        found = run(f"cvt.rn.f32.{kind} $0, $1;", values).view(np.float32)
        np.testing.assert_array_equal(found, values.astype(np.float32))


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
        ("fma.rn", lambda a, b, c: a * b + c),
    ],
)
def test_pairs_of_16_bit_floats_are_rounded_once(name, function, kind, dtype):
    generator = np.random.default_rng(3)
    count = 3 if name == "fma.rn" else 2
    # of many sizes, so that float32 does not hold a sum
    size = 2.0 ** generator.integers(-9, 6, (count, 2, *SHAPE))
    values = (generator.standard_normal(size.shape) * size).astype(np.float32)
    bits = encode(values, kind).astype(np.uint32)
    pairs = [each[0] | each[1] << 16 for each in bits]
    found = run(f"{name}.{kind}x2 $0, {', '.join(f'${i + 1}' for i in range(count))};", *pairs)
    exact = decode(encode(values, kind), kind).astype(np.float64)
    for place, half in enumerate((found & 0xFFFF, found >> 16)):
        result = torch.from_numpy(function(*exact[:, place]))
        rounded = result.to(dtype) if kind == "f16" else _bf16_of(result)
        np.testing.assert_array_equal(half, rounded.view(torch.int16).numpy().view(np.uint16))


def _bf16_of(values: torch.Tensor) -> torch.Tensor:
    """Round float64 to the nearest bf16 by the distances to its two neighbours."""
    near = values.float().bfloat16()
    bits = near.view(torch.int16)
    candidates = torch.stack(
        [near, (bits + 1).view(torch.bfloat16), (bits - 1).view(torch.bfloat16)]
    )
    distance = (candidates.double() - values).abs()
    is_odd = (candidates.view(torch.int16) & 1).double()
    best = (distance * (1 + 1e-12 * is_odd)).argmin(0, keepdim=True)
    return candidates.view(torch.int16).gather(0, best)[0].view(torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "factors", "smallest", "expected"),
    [
        # a product halfway between two values, and a term that float32 drops beside it
        ("bf16", (7 / 16, 37 / 16), 2.0**-40, (1 + 2.0**-7, 1 + 2.0**-6)),
        ("f16", (7 / 8, 293 / 256), 2.0**-24, (1 + 2.0**-10, 1 + 2.0**-9)),
    ],
)
def test_a_sum_that_float32_does_not_hold_is_rounded_once(kind, factors, smallest, expected):
    def register(low: float, high: float) -> np.ndarray:
        bits = encode(np.asarray([low, high]), kind).astype(np.uint32)
        return np.full(SHAPE, bits[0] | bits[1] << 16, np.uint32)

    pairs = [register(each, each) for each in factors]
    found = run(f"fma.rn.{kind}x2 $0, $1, $2, $3;", *pairs, register(-smallest, smallest))
    for half, value in zip((found & 0xFFFF, found >> 16), expected, strict=True):
        assert (decode(half.astype(np.uint16), kind) == value).all()


def test_round_to_odd_marks_what_is_lost():
    exact = np.asarray([1.0, 1 + 2.0**-23, -3.5, 0.0, np.inf])
    np.testing.assert_array_equal(round_to_odd(exact), exact.astype(np.float32))
    for value in (1 + 2.0**-30, 1 + 2.0**-24 + 2.0**-30, -(1 + 2.0**-30), 2 - 2.0**-30):
        found = round_to_odd(np.asarray([value]))
        assert found.view(np.uint32)[0] & 1
        assert abs(float(found[0]) - value) < 2.0**-23
