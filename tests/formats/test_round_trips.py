"""The error of a round trip through a cache-row format, and what a second one changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mlakit.formats import FORMATS, SMALLEST_TOKEN_SCALE, row_codec
from mlakit.model.geometry import RowShape
from tests.formats.format_rows import (
    PARTIAL,
    SCALED,
    SMALLEST_NORMAL,
    V3,
    V4,
    either_scale,
    every_format,
    every_shape,
    least_power_of_two,
    random_rows,
    raw,
    shape_id,
)


def e4m3_bound(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Half an ulp of a 4-bit significand, or half of the smallest step, 2**-9 · scale."""
    return np.maximum(np.abs(values) * 2.0**-4, scale * 2.0**-10)


def e2m1_bound(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Half an ulp of a 2-bit significand, or half of the smallest step, 2**-1 · scale."""
    return np.maximum(np.abs(values), scale) * 2.0**-2


def float_bound(values: np.ndarray, significand_bits: int, smallest_step: float) -> np.ndarray:
    return np.maximum(np.abs(values) * 2.0**-significand_bits, smallest_step / 2)


def scale_columns(
    latent: np.ndarray, group: int, smallest: float, pow2: bool, largest: float = 448.0
) -> np.ndarray:
    """The scale of every latent column, from the definition, in float64."""
    scales = np.empty_like(latent)
    for scale_row, row in zip(scales, latent, strict=True):
        for start in range(0, latent.shape[1], group):
            columns = slice(start, start + group)
            exact = max(np.abs(row[columns]).max() / largest, smallest)
            scale_row[columns] = least_power_of_two(exact) if pow2 else exact
    return scales


def round_trip_bound(
    name: str, row: RowShape, values: np.ndarray, tensor_scale: float, power_of_two: bool
) -> np.ndarray:
    """Largest error of each element; the last factor is for quotients rounded to float32."""
    latent, rope = values[:, : row.kv_lora_rank], values[:, row.kv_lora_rank :]
    bf16_rope = float_bound(rope, 8, 2.0**-133)
    if name == "fp32":
        return np.zeros_like(values)
    if name in ("bf16", "fp16"):
        return float_bound(values, *((8, 2.0**-133) if name == "bf16" else (11, 2.0**-24)))
    if name == "fp8":
        bound = e4m3_bound(values, np.full_like(values, tensor_scale))
    elif name == "fp8_token":
        scale = scale_columns(latent, row.kv_lora_rank, SMALLEST_TOKEN_SCALE, power_of_two)
        scaled_rope = float_bound(rope, 8, 2.0**-133 * scale[:, :1])
        bound = np.concatenate([e4m3_bound(latent, scale), scaled_rope], -1)
    elif name == "mxfp4_block32":
        scale = scale_columns(latent, 32, SMALLEST_NORMAL, pow2=True, largest=6.0)
        bound = np.concatenate([e2m1_bound(latent, scale), bf16_rope], -1)
    else:
        group = 128 if name == "fp8_block128" else 64
        pow2 = power_of_two or name == "fp8_block64"
        scale = scale_columns(latent, group, SMALLEST_NORMAL, pow2)
        bound = np.concatenate([e4m3_bound(latent, scale), bf16_rope], -1)
    return bound * (1 + 2.0**-20)


def assert_round_trip(name: str, row: RowShape, rows: torch.Tensor, power_of_two: bool) -> None:
    codec = row_codec(name, row)
    exact = rows.double().numpy()
    tensor_scale = 1.0
    if codec.has_tensor_scale:
        tensor_scale = max(float(np.float32(np.abs(exact).max(initial=0) / 448)), SMALLEST_NORMAL)
    payload, scales = codec.encode(rows, tensor_scale=tensor_scale, power_of_two=power_of_two)
    decoded = codec.decode(payload, scales, tensor_scale=tensor_scale, dtype=torch.float64).numpy()
    bound = round_trip_bound(name, row, exact, tensor_scale, power_of_two)
    error = np.abs(decoded - exact)
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), (
        f"{name} {shape_id(row)} at {worst}: {exact[worst]} came back {decoded[worst]}, "
        f"error {error[worst]:.3e} exceeds {bound[worst]:.3e}"
    )


def distribution(kind: str, row: RowShape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(8, row.width, generator=generator)
    if kind == "heavy tail":
        return (rows / torch.rand(rows.shape, generator=generator)).clamp(-3e4, 3e4)
    if kind == "tiny":
        return rows * 1e-30
    if kind == "subnormal":
        return rows * 1e-40
    if kind == "zero":
        return torch.zeros_like(rows)
    if kind == "outlier":
        rows[::2, 3] = 6e4
        rows[1::2, -1] = -6e4
    return rows


@either_scale
@pytest.mark.parametrize("kind", ["normal", "heavy tail", "tiny", "subnormal", "zero", "outlier"])
@every_shape
@every_format
def test_round_trip_error(name, row, kind, power_of_two):
    assert_round_trip(name, row, distribution(kind, row), power_of_two)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("magnitude", [1e30, 3e38])
def test_round_trip_error_near_the_end_of_float32(name, magnitude):
    rows = torch.randn(4, PARTIAL.width, generator=torch.Generator().manual_seed(2))
    rows[:, 1] = magnitude
    assert_round_trip(name, PARTIAL, rows, power_of_two=False)


@st.composite
def rows_of_some_shape(draw: st.DrawFn) -> tuple[RowShape, torch.Tensor]:
    row = RowShape(4 * draw(st.integers(1, 70)), 2 * draw(st.integers(0, 8)))
    finite = st.floats(-3e4, 3e4, width=32)
    shape = (draw(st.integers(1, 3)), row.width)
    values = draw(hnp.arrays(np.float32, shape, elements=finite))
    return row, torch.from_numpy(values)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(case=rows_of_some_shape(), power_of_two=st.booleans())
def test_round_trip_error_of_any_rows(name, case, power_of_two):
    row, rows = case
    assert_round_trip(name, row, rows, power_of_two)


def topped_rows(quotient: float) -> torch.Tensor:
    """Rows whose groups of 64 columns have `quotient` times a power of two as their largest."""
    rows = random_rows(V4, n=10)
    for row in rows:
        for group in row[:448].split(64):
            group[0] = quotient * least_power_of_two(float(group.abs().max()) / quotient)
    return rows


@every_format
def test_a_second_round_trip_changes_no_value(name):
    codec = row_codec(name, V4)
    once = codec.decode(*codec.encode(random_rows(V4, n=40), power_of_two=True))
    twice = codec.decode(*codec.encode(once, power_of_two=True))
    assert torch.equal(once, twice)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "mxfp4_block32"])
def test_a_second_round_trip_changes_no_byte(name):
    """Except where a group's largest code came out as 224: half the scale holds the same values.

    In four bits that code is 3.
    """
    codec = row_codec(name, V4)
    rows = topped_rows(300) if name in SCALED else random_rows(V4)
    payload, scales = codec.encode(rows, power_of_two=True)
    again, scales_again = codec.encode(codec.decode(payload, scales), power_of_two=True)
    assert raw(again) == raw(payload)
    if scales is not None:
        assert raw(scales_again) == raw(scales)


@pytest.mark.parametrize("name", SCALED)
def test_a_group_topped_by_224_settles_at_half_the_scale(name):
    codec = row_codec(name, V4)
    first = codec.encode(topped_rows(225), power_of_two=True)
    once = codec.decode(*first)
    second = codec.encode(once, power_of_two=True)
    assert raw(second[0]) != raw(first[0])
    third = codec.encode(codec.decode(*second), power_of_two=True)
    assert raw(second[0]) == raw(third[0])
    assert torch.equal(codec.decode(*second), once)


@pytest.mark.parametrize("name", SCALED)
def test_power_of_two_scales_are_the_least_that_hold_the_group(name):
    rows = random_rows(V4, n=40)
    rows[:8, :64] *= 1e-20
    codec = row_codec(name, V4)
    payload, scales = codec.encode(rows, power_of_two=True)
    if name == "fp8_block64":
        group, found = 64, 2.0 ** (scales[:, :7].double() - 127)
    elif name == "fp8_block128":
        group, found = 128, payload[:, 448:464].clone().view(torch.float32).double()
    else:
        group, found = 448, scales.double()
    mantissa, _ = torch.frexp(found)
    assert (mantissa == 0.5).all()
    amax = torch.stack([g.abs().amax(-1) for g in rows[:, :448].split(group, -1)], -1).double()
    assert (amax <= 448 * found).all()
    assert (amax > 448 * found / 2).all()


def test_arbitrary_scales_are_not_rounded():
    """A scale with all 24 bits set comes back whole, and so does its product in float64."""
    scale = float(np.nextafter(np.float32(2), np.float32(0)))
    rows = torch.zeros(1, 576)
    rows[0, 0] = 448 * scale
    rows[0, 1] = 3 * scale
    for name in ("fp8_token", "fp8_block128"):
        codec = row_codec(name, V3)
        decoded = codec.decode(*codec.encode(rows), dtype=torch.float64)
        assert decoded[0, :3].tolist() == [448 * scale, 3 * scale, 0.0], name
    payload, _ = row_codec("fp8", V3).encode(rows, tensor_scale=scale)
    decoded = row_codec("fp8", V3).decode(payload, None, tensor_scale=scale, dtype=torch.float64)
    assert decoded[0, :3].tolist() == [448 * scale, 3 * scale, 0.0]


@every_format
def test_decoding_to_other_dtypes_rounds_the_exact_product(name):
    codec = row_codec(name, V4)
    options = {"tensor_scale": 0.37} if codec.has_tensor_scale else {}
    stored = codec.encode(random_rows(V4), **options)
    exact = codec.decode(*stored, dtype=torch.float64, **options)
    single = codec.decode(*stored, dtype=torch.float32, **options)
    assert torch.equal(single, exact.float())
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(codec.decode(*stored, dtype=dtype, **options), single.to(dtype))
