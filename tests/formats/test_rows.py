"""Cache-row formats: their sizes, their bytes, and what may not change them."""

from __future__ import annotations

import dataclasses
import math
import struct

import numpy as np
import pytest
import torch

from mlakit.formats import (
    SMALLEST_TOKEN_SCALE,
    PageFooterCodec,
    format_of_dtype,
    round_up_power_of_two,
    row_codec,
    saturating_cast,
)
from mlakit.model.geometry import RowShape
from tests.formats.format_rows import (
    E4M3,
    E4M3_MAGNITUDES,
    INF,
    NAN,
    PARTIAL,
    SMALLEST_NORMAL,
    V3,
    V4,
    bf16_bytes,
    e4m3_byte,
    e4m3_bytes,
    either_scale,
    every_format,
    every_shape,
    expected_scale,
    in_groups,
    random_rows,
    raw,
    shape_id,
)


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
        ("mxfp4_block32", V3, (torch.uint8, 400), (None, 0), 400),
        ("mxfp4_block32", V4, (torch.uint8, 368), (None, 0), 368),
        ("mxfp4_block32", RowShape(128, 0), (torch.uint8, 68), (None, 0), 68),
        ("mxfp4_block32", PARTIAL, (torch.uint8, 92), (None, 0), 92),
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
    assert (codec.beside_dtype, codec.beside_elements) == scales
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
    if codec.beside_dtype is None:
        assert scales is None
    else:
        assert (scales.dtype, scales.shape) == (codec.beside_dtype, (3, codec.beside_elements))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "scale", [1.0, 0.37, torch.tensor([0.37])], ids=["unit", "float", "tensor"]
)
def test_fp8_rows_are_e4m3_of_the_quotient(scale):
    rows = random_rows(V3)
    payload, _ = row_codec("fp8", V3).encode(rows, tensor_scale=scale)
    divisor = np.float32(float(scale))
    assert raw(payload) == b"".join(e4m3_bytes(row, divisor) for row in rows.numpy())


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_formats_by_dtype():
    for name in ("bf16", "fp16", "fp32", "fp8"):
        codec = row_codec(name, RowShape(32, 8))
        assert format_of_dtype(codec.payload_dtype) == name
    with pytest.raises(TypeError, match=r"^format_of_dtype: dtype must be one of .*, got float64$"):
        format_of_dtype(torch.float64)
