"""Wrong arguments of cache-row formats: the error says which."""

from __future__ import annotations

import pytest
import torch

from mlakit.formats import ENGINE_NAMES, FORMATS, PageFooterCodec, known_format, row_codec
from mlakit.model.geometry import RowShape
from tests.formats.format_rows import E4M3, INF, NAN, V3, V4, random_rows


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


@pytest.mark.parametrize(("name", "format"), ENGINE_NAMES.items())
def test_a_name_of_an_engine_is_a_format(name, format):
    assert format in FORMATS
    assert known_format(name) == format
    assert row_codec(name, V3).name == format


@pytest.mark.parametrize("name", [["bf16"], None, 16])
def test_a_format_that_is_no_name(name):
    with pytest.raises(ValueError, match="unknown cache format"):
        known_format(name)


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


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF, 1e-46, 1e-40, 1e39])
def test_tensor_scale_must_be_finite_and_positive(scale, kind):
    codec = row_codec("fp8", V3)
    must = "tensor_scale must be (finite|positive and a normal float32), got"
    with pytest.raises(ValueError, match=f"^fp8 encode: {must}"):
        codec.encode(torch.zeros(1, 576), tensor_scale=kind(scale))
    payload, _ = codec.encode(torch.zeros(1, 576))
    with pytest.raises(ValueError, match=f"^fp8 decode: {must}"):
        codec.decode(payload, None, tensor_scale=kind(scale))


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
