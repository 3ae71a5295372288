"""Cache-row formats: the bytes, the error of a round trip, and what happens to NaN and infinity.

The expected bytes are built here from the definitions of e4m3, bf16 and e8m0 with numpy and struct,
not with torch's casts.
"""

from __future__ import annotations

import dataclasses
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mlakit.formats import (
    FORMATS,
    SMALLEST_TOKEN_SCALE,
    PageFooterCodec,
    round_up_power_of_two,
    row_codec,
    saturating_cast,
)
from mlakit.geometry import RowShape

E4M3 = torch.float8_e4m3fn
NAN, INF = math.nan, math.inf
V3 = RowShape(512, 64)
V4 = RowShape(448, 64, v_width=512)
PARTIAL = RowShape(132, 6)
"""Rows whose last scale group is short: 128 + 4 columns, and 64 + 64 + 4."""
SHAPES = (V3, V4, RowShape(256, 64), RowShape(256, 32), RowShape(512, 0), PARTIAL)
SCALED = ("fp8_token", "fp8_block128", "fp8_block64")
SMALLEST_NORMAL = 2.0**-126


def shape_id(row: RowShape) -> str:
    return f"{row.kv_lora_rank}+{row.qk_rope_head_dim}"


every_format = pytest.mark.parametrize("name", FORMATS)
every_shape = pytest.mark.parametrize("row", SHAPES, ids=shape_id)
either_scale = pytest.mark.parametrize("power_of_two", [False, True], ids=["any", "pow2"])


# e4m3 by its definition: 1 sign bit, 4 exponent bits of bias 7, 3 mantissa bits, one NaN per sign
E4M3_MAGNITUDES = np.array(
    [
        mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        for exponent in range(16)
        for mantissa in range(8)
    ][:127]
)


def e4m3_byte(value: float) -> int:
    """The nearest e4m3 code, ties to the even one, beyond ±448 the last one."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    distance = np.abs(E4M3_MAGNITUDES - min(abs(value), 448.0))
    nearest = np.flatnonzero(distance == distance.min())
    return sign | int(nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0])


def bf16_bits(value: np.float32) -> int:
    """A float32 with its low 16 bits rounded away, to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def least_power_of_two(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def expected_scale(group: np.ndarray, smallest: float, power_of_two: bool) -> np.float32:
    scale = max(np.abs(group).max() / np.float32(448), np.float32(smallest))
    return np.float32(least_power_of_two(float(scale)) if power_of_two else scale)


def e4m3_bytes(group: np.ndarray, scale: np.float32) -> bytes:
    return bytes(e4m3_byte(float(x / scale)) for x in group)


def bf16_bytes(values: np.ndarray) -> bytes:
    return struct.pack(f"<{len(values)}H", *(bf16_bits(x) for x in values))


def in_groups(columns: np.ndarray, size: int) -> list[np.ndarray]:
    return [columns[start : start + size] for start in range(0, len(columns), size)]


def random_rows(row: RowShape, n: int = 5, seed: int = 0) -> torch.Tensor:
    """Rows whose scale groups differ in size by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, row.width, generator=generator)
    return rows * torch.exp(2 * torch.randn(n, row.width, generator=generator))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("name", "row", "payload", "scales", "bytes_per_token"),
    [
        ("bf16", V3, (torch.bfloat16, 576), (None, 0), 1152),
        ("fp16", V3, (torch.float16, 576), (None, 0), 1152),
        ("fp32", V3, (torch.float32, 576), (None, 0), 2304),
        ("fp8", V3, (E4M3, 576), (None, 0), 576),
        ("fp8_token", V3, (torch.uint8, 640), (torch.float32, 1), 644),
        ("fp8_block128", V3, (torch.uint8, 656), (None, 0), 656),
        ("fp8_block64", V4, (torch.uint8, 576), (torch.uint8, 8), 584),
        ("fp8_block128", RowShape(512, 0), (torch.uint8, 528), (None, 0), 528),
        ("fp8_block128", RowShape(256, 64), (torch.uint8, 392), (None, 0), 392),
        ("fp8_block128", RowShape(256, 32), (torch.uint8, 328), (None, 0), 328),
        ("fp8_block128", PARTIAL, (torch.uint8, 152), (None, 0), 152),
        ("fp8_block64", PARTIAL, (torch.uint8, 144), (torch.uint8, 8), 152),
        ("fp8_token", RowShape(512, 0), (torch.uint8, 512), (torch.float32, 1), 516),
        ("bf16", RowShape(256, 32), (torch.bfloat16, 288), (None, 0), 576),
    ],
)
def test_sizes(name, row, payload, scales, bytes_per_token):
    codec = row_codec(name, row)
    assert (codec.payload_dtype, codec.payload_elements) == payload
    assert (codec.scale_dtype, codec.scale_elements) == scales
    assert codec.bytes_per_token == bytes_per_token
    assert codec.has_tensor_scale == (name == "fp8")
    assert (codec.name, codec.row) == (name, row)


@every_shape
@every_format
def test_encode_gives_what_the_sizes_say(name, row):
    codec = row_codec(name, row)
    payload, scales = codec.encode(random_rows(row, n=3))
    assert (payload.dtype, payload.shape) == (codec.payload_dtype, (3, codec.payload_elements))
    stored_bytes = payload.nbytes
    if codec.scale_dtype is None:
        assert scales is None
    else:
        assert (scales.dtype, scales.shape) == (codec.scale_dtype, (3, codec.scale_elements))
        stored_bytes += scales.nbytes
    assert stored_bytes == 3 * codec.bytes_per_token
    decoded = codec.decode(payload, scales)
    assert (decoded.dtype, decoded.shape) == (torch.float32, (3, row.width))


def test_codecs_are_shared_and_frozen():
    codec = row_codec("fp8_block128", V3)
    assert row_codec("fp8_block128", RowShape(512, 64)) is codec
    assert row_codec("fp8_block128", V4) != codec
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.payload_elements = 1


@pytest.mark.parametrize(
    ("page_size", "expected"), [(1, 1152), (64, 37440), (72, 42048), (73, 43200), (256, 149760)]
)
def test_page_bytes_is_rows_and_footer_padded_to_whole_rows(page_size, expected):
    codec = row_codec("fp8_block64", V4)
    assert isinstance(codec, PageFooterCodec)
    assert codec.page_bytes(page_size) == expected


def test_saturating_cast_rounds_to_nearest_even():
    middles = (E4M3_MAGNITUDES[1:] + E4M3_MAGNITUDES[:-1]) / 2  # exact in float32
    middles = middles.astype(np.float32)
    nudged = [np.nextafter(middles, np.float32(towards)) for towards in (0, 1000)]
    magnitudes = np.concatenate([E4M3_MAGNITUDES.astype(np.float32), middles, *nudged])
    values = np.concatenate([magnitudes, -magnitudes])
    cast = saturating_cast(torch.from_numpy(values), E4M3)
    assert raw(cast) == bytes(e4m3_byte(float(x)) for x in values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_saturating_cast_clamps_and_keeps_nan(dtype):
    x = torch.tensor([1e4, -1e4, 449, 464, 480, INF, -INF, NAN], dtype=dtype)
    cast = saturating_cast(x, E4M3).double()
    assert cast[:-1].tolist() == [448, -448, 448, 448, 448, 448, -448]
    assert cast[-1].isnan()


def test_saturating_cast_to_other_dtypes_is_a_plain_cast():
    x = torch.tensor([1e4, -7e4, 1 + 2.0**-8, INF])
    assert saturating_cast(x, torch.bfloat16).tolist() == x.to(torch.bfloat16).tolist()
    assert saturating_cast(x, torch.float16).tolist() == [1e4, -INF, 1 + 2.0**-8, INF]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_up_power_of_two_is_exact(dtype):
    low, high = (-149, 127) if dtype == torch.float32 else (-1074, 1023)
    powers = torch.tensor([2.0**e for e in range(low, high + 1)], dtype=dtype)
    after = torch.cat([powers[1:], torch.tensor([INF], dtype=dtype)])
    assert torch.equal(round_up_power_of_two(powers), powers)
    above = powers.nextafter(after)
    assert torch.equal(round_up_power_of_two(above), after)
    below = powers.nextafter(torch.zeros_like(powers))
    # below the two least numbers lie 0 and another power of two
    assert torch.equal(round_up_power_of_two(below)[2:], powers[2:])


def test_round_up_power_of_two_leaves_zero_and_nonfinite():
    rounded = round_up_power_of_two(torch.tensor([0.0, INF, NAN]))
    assert rounded[:2].tolist() == [0.0, INF]
    assert rounded[2].isnan()


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_plain_rows_are_the_columns(name):
    rows = random_rows(V3)
    payload, _ = row_codec(name, V3).encode(rows)
    values = rows.numpy()
    if name == "bf16":
        assert raw(payload) == b"".join(bf16_bytes(row) for row in values)
    else:
        assert raw(payload) == values.astype({"fp16": "<f2", "fp32": "<f4"}[name]).tobytes()


@pytest.mark.parametrize(
    "scale", [1.0, 0.37, torch.tensor([0.37])], ids=["unit", "float", "tensor"]
)
def test_fp8_rows_are_e4m3_of_the_quotient(scale):
    rows = random_rows(V3)
    payload, _ = row_codec("fp8", V3).encode(rows, tensor_scale=scale)
    divisor = np.float32(float(scale))
    assert raw(payload) == b"".join(e4m3_bytes(row, divisor) for row in rows.numpy())


@either_scale
@pytest.mark.parametrize("row", [V3, RowShape(512, 0), PARTIAL], ids=shape_id)
def test_block128_rows_byte_for_byte(row, power_of_two):
    rows = random_rows(row)
    rows[1, :128] = 0  # a group of zeros takes the smallest scale
    payload, _ = row_codec("fp8_block128", row).encode(rows, power_of_two=power_of_two)
    for values, stored in zip(rows.numpy(), payload, strict=True):
        groups = in_groups(values[: row.kv_lora_rank], 128)
        scales = [expected_scale(group, SMALLEST_NORMAL, power_of_two) for group in groups]
        latent = b"".join(e4m3_bytes(g, s) for g, s in zip(groups, scales, strict=True))
        packed_scales = struct.pack(f"<{len(scales)}f", *scales)
        assert raw(stored) == latent + packed_scales + bf16_bytes(values[row.kv_lora_rank :])


@either_scale
@pytest.mark.parametrize("row", [V3, RowShape(512, 0), PARTIAL], ids=shape_id)
def test_token_rows_byte_for_byte(row, power_of_two):
    rows = random_rows(row)
    rows[1, : row.kv_lora_rank] = 0
    payload, scales = row_codec("fp8_token", row).encode(rows, power_of_two=power_of_two)
    for values, stored, scale in zip(rows.numpy(), payload, scales, strict=True):
        latent, rope = values[: row.kv_lora_rank], values[row.kv_lora_rank :]
        sigma = expected_scale(latent, SMALLEST_TOKEN_SCALE, power_of_two)
        assert raw(scale) == struct.pack("<f", sigma)
        assert raw(stored) == e4m3_bytes(latent, sigma) + bf16_bytes(rope / sigma)


@pytest.mark.parametrize("name", ["fp8", "fp8_token", "fp8_block128"])
def test_rows_are_divided_by_the_scale(name):
    """15 · 23 / 15 lies halfway between two codes; times the rounded 1/15 it does not."""
    quotients = [448.0, *range(17, 32, 2)]
    rows = torch.zeros(1, 576)
    rows[0, : len(quotients)] = 15 * torch.tensor(quotients)
    codec = row_codec(name, V3)
    payload, _ = codec.encode(rows, tensor_scale=15.0 if codec.has_tensor_scale else 1.0)
    assert raw(payload[0, : len(quotients)]) == bytes(e4m3_byte(q) for q in quotients)


@pytest.mark.parametrize("row", [V4, PARTIAL], ids=shape_id)
def test_block64_pages_byte_for_byte(row):
    page_size, num_pages = 3, 2
    codec = row_codec("fp8_block64", row)
    assert isinstance(codec, PageFooterCodec)
    rows = random_rows(row, n=num_pages * page_size)
    rows[1, :64] = 0
    payload, scales = codec.encode(rows)

    stride, footer_at = codec.page_bytes(page_size), page_size * codec.payload_elements
    pages = torch.full((num_pages, stride), 0xAB, dtype=torch.uint8)
    paged_rows = pages[:, :footer_at].view(num_pages, page_size, -1)
    paged_scales = pages[:, footer_at : footer_at + 8 * page_size].view(num_pages, page_size, 8)
    paged_rows.copy_(payload.view(num_pages, page_size, -1))
    paged_scales.copy_(scales.view(num_pages, page_size, 8))

    for page, page_rows in zip(pages, rows.numpy().reshape(num_pages, page_size, -1), strict=True):
        body, footer = b"", b""
        for values in page_rows:
            groups = in_groups(values[: row.kv_lora_rank], 64)
            exact = [expected_scale(group, SMALLEST_NORMAL, True) for group in groups]
            body += b"".join(e4m3_bytes(g, s) for g, s in zip(groups, exact, strict=True))
            body += bf16_bytes(values[row.kv_lora_rank :])
            footer += bytes(int(math.log2(s)) + 127 for s in exact).ljust(8, b"\0")
        padding = bytes([0xAB]) * (stride - len(body) - len(footer))
        assert raw(page) == body + footer + padding

    decoded = codec.decode(paged_rows, paged_scales, dtype=torch.float64)
    straight = codec.decode(payload, scales, dtype=torch.float64)
    assert torch.equal(decoded.view(-1, row.width), straight)


def test_block64_reads_every_exponent_exactly():
    """Byte b is 2**(b - 127), 0 included; 255 is NaN; bytes of no group are not looked at."""
    codec = row_codec("fp8_block64", RowShape(64, 0))
    payload = torch.full((256, 64), e4m3_byte(1.5), dtype=torch.uint8)
    scales = torch.full((256, 8), 0xFF, dtype=torch.uint8)
    scales[:, 0] = torch.arange(256)
    decoded = codec.decode(payload, scales, dtype=torch.float64)
    exact = torch.tensor([1.5 * 2.0 ** (b - 127) for b in range(255)], dtype=torch.float64)
    assert torch.equal(decoded[:255], exact[:, None].expand(255, 64))
    assert decoded[255].isnan().all()


def e4m3_bound(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Half an ulp of a 4-bit significand, or half of the smallest step, 2**-9 · scale."""
    return np.maximum(np.abs(values) * 2.0**-4, scale * 2.0**-10)


def float_bound(values: np.ndarray, significand_bits: int, smallest_step: float) -> np.ndarray:
    return np.maximum(np.abs(values) * 2.0**-significand_bits, smallest_step / 2)


def scale_columns(latent: np.ndarray, group: int, smallest: float, pow2: bool) -> np.ndarray:
    """The scale of every latent column, from the definition, in float64."""
    scales = np.empty_like(latent)
    for scale_row, row in zip(scales, latent, strict=True):
        for start in range(0, latent.shape[1], group):
            columns = slice(start, start + group)
            exact = max(np.abs(row[columns]).max() / 448, smallest)
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


@every_format
def test_a_second_round_trip_changes_no_byte(name):
    """Except where a group's largest code came out as 224: half the scale holds the same values."""
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


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_fp8_saturates(scale):
    codec = row_codec("fp8", V3)
    rows = torch.zeros(1, 576)
    rows[0, :6] = torch.tensor([1e4, -1e4, INF, -INF, 448 * scale, NAN])
    payload, _ = codec.encode(rows, tensor_scale=scale)
    decoded = codec.decode(payload, None, tensor_scale=scale)
    top = 448 * scale
    assert decoded[0, :5].tolist() == [top, -top, top, -top, top]
    assert decoded[0, 5].isnan()


def poisoned_columns(name: str, row: RowShape, column: int) -> slice:
    """The columns that share a scale with `column`, or the column alone."""
    if name == "fp8_token" and column < row.kv_lora_rank:
        return slice(0, row.width)
    group = {"fp8_block128": 128, "fp8_block64": 64}.get(name)
    if group is None or column >= row.kv_lora_rank:
        return slice(column, column + 1)
    start = column // group * group
    return slice(start, min(start + group, row.kv_lora_rank))


@either_scale
@pytest.mark.parametrize("column", [0, 130, 131, 132, 137])
@every_format
def test_nan_comes_back_nan_and_harms_only_its_group(name, column, power_of_two):
    codec = row_codec(name, PARTIAL)
    rows = random_rows(PARTIAL)
    clean = codec.decode(*codec.encode(rows, power_of_two=power_of_two))
    rows[2, column] = NAN
    decoded = codec.decode(*codec.encode(rows, power_of_two=power_of_two))
    harmed = torch.zeros(rows.shape, dtype=torch.bool)
    harmed[2, poisoned_columns(name, PARTIAL, column)] = True
    assert torch.equal(decoded.isnan(), harmed)
    assert torch.equal(decoded[~harmed], clean[~harmed])


@either_scale
@pytest.mark.parametrize("column", [0, 131])
@pytest.mark.parametrize("infinity", [INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCALED)
def test_an_infinite_latent_makes_its_group_nan(name, dtype, infinity, column, power_of_two):
    codec = row_codec(name, PARTIAL)
    rows = random_rows(PARTIAL)
    clean = codec.decode(*codec.encode(rows, power_of_two=power_of_two), dtype=dtype)
    rows[2, column] = infinity
    decoded = codec.decode(*codec.encode(rows, power_of_two=power_of_two), dtype=dtype)
    harmed = torch.zeros(rows.shape, dtype=torch.bool)
    harmed[2, poisoned_columns(name, PARTIAL, column)] = True
    assert torch.equal(decoded.isnan(), harmed)
    assert torch.equal(decoded[~harmed], clean[~harmed])


@pytest.mark.parametrize("infinity", [INF, -INF])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8"])
def test_an_infinity_outside_a_group_comes_back_as_itself(name, infinity):
    codec = row_codec(name, PARTIAL)
    rows = random_rows(PARTIAL)
    rows[2, -1] = infinity
    decoded = codec.decode(*codec.encode(rows))
    assert decoded[2, -1] == infinity
    assert decoded.isfinite().sum() == decoded.numel() - 1


def test_block64_writes_255_only_for_nan_and_infinity():
    rows = torch.zeros(4, 512)
    rows[0, 64] = NAN
    rows[1, 128] = INF
    rows[2, 192] = torch.finfo(torch.float32).max
    _, scales = row_codec("fp8_block64", V4).encode(rows)
    zero = 1  # the smallest normal scale, 2**-126
    expected = torch.tensor([[zero] * 7 + [0]] * 4, dtype=torch.uint8)
    expected[0, 1] = expected[1, 2] = 255
    expected[2, 3] = 127 + 120
    assert torch.equal(scales, expected)


def test_token_rope_stays_finite_over_a_zero_latent():
    codec = row_codec("fp8_token", V3)
    rows = torch.zeros(3, 576)
    rows[:, 512:] = torch.tensor([1e-4, 1e4, 1e28])[:, None]
    decoded = codec.decode(*codec.encode(rows), dtype=torch.float64)
    assert torch.equal(decoded[:, :512], torch.zeros(3, 512, dtype=torch.float64))
    exact = rows[:, 512:].double()
    assert ((decoded[:, 512:] - exact).abs() <= exact * 2.0**-8).all()


def test_token_scales_below_zero_read_as_zero_and_nan_as_nan():
    codec = row_codec("fp8_token", V3)
    payload, scales = codec.encode(random_rows(V3, n=3))
    clean = codec.decode(payload, scales)
    scales[0], scales[1] = -2.0, NAN
    decoded = codec.decode(payload, scales)
    assert (decoded[0] == 0).all()
    assert decoded[1].isnan().all()
    assert torch.equal(decoded[2], clean[2])


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_encode_takes_any_float_dtype_and_computes_in_float32(name, dtype):
    rows = random_rows(V4).to(dtype)
    codec = row_codec(name, V4)
    payload, scales = codec.encode(rows)
    expected, expected_scales = codec.encode(rows.float())
    assert raw(payload) == raw(expected)
    if scales is not None:
        assert raw(scales) == raw(expected_scales)


def test_half_rows_are_stored_exactly():
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        rows = random_rows(V3).to(dtype)
        codec = row_codec(name, V3)
        assert torch.equal(codec.decode(*codec.encode(rows), dtype=dtype), rows)


@every_format
def test_rows_that_require_grad_are_stored_like_others(name):
    rows = random_rows(V4)
    codec = row_codec(name, V4)
    payload, scales = codec.encode(rows.clone().requires_grad_())
    assert raw(payload) == raw(codec.encode(rows)[0])
    assert not codec.decode(payload, scales).requires_grad


@every_shape
@every_format
def test_strides_and_alignment_do_not_matter(name, row):
    codec = row_codec(name, row)
    rows = random_rows(row, n=6)
    spread = torch.full((6, 2 * row.width), NAN)[:, ::2]
    spread.copy_(rows)
    payload, scales = codec.encode(spread)
    expected = codec.decode(*codec.encode(rows))
    assert torch.equal(codec.decode(payload, scales), expected)

    odd = payload.new_empty(6, 2 * codec.payload_elements + 3)[:, 3::2]
    odd.copy_(payload)
    odd_scales = None
    if scales is not None:
        odd_scales = scales.new_empty(6, scales.shape[1] + 1)[:, 1:]
        odd_scales.copy_(scales)
    assert torch.equal(codec.decode(odd, odd_scales), expected)


@every_shape
@every_format
def test_leading_axes_and_empty_batches(name, row):
    codec = row_codec(name, row)
    rows = random_rows(row, n=6)
    payload, scales = codec.encode(rows.view(2, 3, -1))
    decoded = codec.decode(payload, scales)
    assert torch.equal(decoded.view(6, -1), codec.decode(*codec.encode(rows)))
    single = codec.decode(payload[1, 2], None if scales is None else scales[1, 2])
    assert torch.equal(single, decoded[1, 2])
    assert codec.decode(*codec.encode(rows[:0])).shape == (0, row.width)


@every_format
def test_encode_and_decode_leave_their_arguments_alone(name):
    codec = row_codec(name, V4)
    rows = random_rows(V4)
    before = rows.clone()
    payload, scales = codec.encode(rows)
    stored = raw(payload), None if scales is None else raw(scales)
    codec.decode(payload, scales, dtype=torch.float64)
    codec.decode(payload, scales)
    assert torch.equal(rows, before)
    assert stored == (raw(payload), None if scales is None else raw(scales))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@either_scale
@every_format
def test_cuda_gives_what_the_cpu_gives(name, power_of_two):
    """Compared as numbers and scales: the bits of a NaN may differ."""
    codec = row_codec(name, V4)
    rows = random_rows(V4, n=200)
    rows[3, 5], rows[4, 70], rows[5, -1], rows[6, :448] = NAN, INF, NAN, 0
    options = {"tensor_scale": 0.37} if codec.has_tensor_scale else {}
    payload, scales = codec.encode(rows, power_of_two=power_of_two, **options)
    cuda_payload, cuda_scales = codec.encode(rows.cuda(), power_of_two=power_of_two, **options)
    decoded = codec.decode(payload, scales, dtype=torch.float64, **options)
    cuda_decoded = codec.decode(cuda_payload, cuda_scales, dtype=torch.float64, **options)
    torch.testing.assert_close(cuda_decoded.cpu(), decoded, rtol=0, atol=0, equal_nan=True)
    if scales is not None:
        torch.testing.assert_close(cuda_scales.cpu(), scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("fp8_block32", V3, r"unknown cache format 'fp8_block32'; choose from bf16, .*fp8_block64"),
        ("fp8_block128", RowShape(130, 64), r"^fp8_block128: kv_lora_rank .* 4 .*, got 130"),
        ("fp8_block64", RowShape(66, 0), r"^fp8_block64: kv_lora_rank .* 4 .*, got 66"),
        ("fp8_token", RowShape(513, 64), r"^fp8_token: kv_lora_rank .* 4 .*, got 513"),
        ("fp8_block64", RowShape(516, 64), r"^fp8_block64: kv_lora_rank must not exceed 512 .*516"),
    ],
)
def test_formats_that_do_not_exist_or_do_not_fit(name, row, message):
    with pytest.raises(ValueError, match=message):
        row_codec(name, row)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "fp8"])
def test_formats_without_bytes_take_any_rank(name):
    row = RowShape(513, 64)
    codec = row_codec(name, row)
    assert codec.decode(*codec.encode(random_rows(row))).shape == (5, 577)


def test_encode_errors():
    codec = row_codec("fp8_block128", V3)
    with pytest.raises(TypeError, match=r"^fp8_block128 encode: rows must be a tensor, got list"):
        codec.encode([[0.0] * 576])
    with pytest.raises(TypeError, match=r"^fp8_block128 encode: rows must be of a floating.*int64"):
        codec.encode(torch.zeros(1, 576, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"encode: rows must have a last axis of 576, got .*512"):
        codec.encode(torch.zeros(1, 512))
    for scale in (0.5, torch.ones(())):
        with pytest.raises(ValueError, match=r"encode: tensor_scale must be left at 1\.0"):
            codec.encode(torch.zeros(1, 576), tensor_scale=scale)


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF, 1e-46, 1e39])
def test_tensor_scale_must_be_finite_and_positive(scale):
    codec = row_codec("fp8", V3)
    with pytest.raises(ValueError, match=r"^fp8 encode: tensor_scale must be finite and positive"):
        codec.encode(torch.zeros(1, 576), tensor_scale=scale)
    payload, _ = codec.encode(torch.zeros(1, 576))
    with pytest.raises(ValueError, match=r"^fp8 decode: tensor_scale must be finite and positive"):
        codec.decode(payload, None, tensor_scale=scale)


def test_tensor_scale_must_be_one_number():
    with pytest.raises(ValueError, match=r"tensor_scale must have one element, got shape \(2,\)"):
        row_codec("fp8", V3).encode(torch.zeros(1, 576), tensor_scale=torch.ones(2))


def test_decode_errors():
    codec = row_codec("fp8_token", V3)
    payload, scales = codec.encode(torch.zeros(3, 576))
    with pytest.raises(
        TypeError, match=r"^fp8_token decode: scales must be a tensor, got NoneType"
    ):
        codec.decode(payload, None)
    with pytest.raises(TypeError, match=r"decode: scales must be float32, got float64"):
        codec.decode(payload, scales.double())
    with pytest.raises(ValueError, match=r"decode: scales must have shape \(3, 1\), got \(2, 1\)"):
        codec.decode(payload, scales[:2])
    with pytest.raises(TypeError, match=r"decode: payload must be uint8, got float8_e4m3fn"):
        codec.decode(payload.view(E4M3), scales)
    with pytest.raises(ValueError, match=r"payload must have a last axis of 640, got .*\(3, 639\)"):
        codec.decode(payload[:, 1:], scales)
    inline = row_codec("fp8_block128", V3)
    with pytest.raises(ValueError, match=r"^fp8_block128 decode: scales must be None"):
        inline.decode(inline.encode(torch.zeros(3, 576))[0], scales)


def test_page_bytes_error():
    codec = row_codec("fp8_block64", V4)
    assert isinstance(codec, PageFooterCodec)
    with pytest.raises(ValueError, match=r"^fp8_block64 page_bytes: page_size .* 1, got 0"):
        codec.page_bytes(0)
