"""Rows in two tensors have the bytes of joined rows: the latent columns, and the rotated ones."""

from __future__ import annotations

import pytest
import torch

from mlakit.formats import SPLIT_FORMATS, row_codec, split_format
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_same_bits
from tests.formats.format_rows import V3, random_rows

every_format = pytest.mark.parametrize("format", SPLIT_FORMATS)


def joined(format: str, row: RowShape = V3):
    return row_codec(format.removesuffix("_split"), row)


@every_format
@pytest.mark.parametrize("row", [V3, RowShape(36, 6, 20)], ids=str)
def test_the_bytes_are_those_of_joined_rows(format, row):
    codec, rows = row_codec(format, row), random_rows(row)
    scale = 0.03 if codec.has_tensor_scale else 1.0
    latent, rope = codec.encode(rows, tensor_scale=scale)
    whole, nothing = joined(format, row).encode(rows, tensor_scale=scale)
    assert nothing is None
    assert_same_bits("latent", latent, whole[:, : row.kv_lora_rank])
    assert_same_bits("rope", rope, whole[:, row.kv_lora_rank :])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        got = codec.decode(latent, rope, tensor_scale=scale, dtype=dtype)
        want = joined(format, row).decode(whole, None, tensor_scale=scale, dtype=dtype)
        assert_same_bits("rows", got, want)


@every_format
def test_only_the_place_of_the_rotated_columns_differs(format):
    codec, whole = row_codec(format, V3), joined(format)
    assert codec.is_split
    assert not whole.is_split
    assert codec.traits == whole.traits._replace(ROPE_AT=-1)
    assert (codec.payload_elements, codec.beside_elements) == (512, 64)
    assert codec.payload_dtype == codec.beside_dtype == whole.payload_dtype
    assert codec.bytes_per_token == whole.bytes_per_token
    assert codec.page_bytes(64) == whole.page_bytes(64)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (RowShape(512, 0), "qk_rope_head_dim must be at least 1, got 0"),
        (RowShape(448, 64, 512), "v_width must not exceed kv_lora_rank 448, got 512"),
    ],
    ids=str,
)
@every_format
def test_rows_that_cannot_be_split(format, row, message):
    with pytest.raises(ValueError, match=f"^{format}: {message}"):
        row_codec(format, row)


def test_only_formats_without_scales_of_rows_can_be_split():
    assert [split_format(name) for name in ("bf16", "fp16", "fp32", "fp8")] == [*SPLIT_FORMATS]
    with pytest.raises(ValueError, match="unknown cache format 'fp8_token_split'"):
        split_format("fp8_token")


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (None, "rope must be a tensor, got NoneType"),
        (torch.zeros(3, 64, dtype=torch.float16), "rope must be bfloat16, got float16"),
        (
            torch.zeros(2, 64, dtype=torch.bfloat16),
            r"rope must have shape \(3, 64\), got \(2, 64\)",
        ),
    ],
    ids=["missing", "dtype", "shape"],
)
def test_wrong_rotated_columns_are_named(rope, message):
    with pytest.raises((TypeError, ValueError), match=message):
        row_codec("bf16_split", V3).decode(torch.zeros(3, 512, dtype=torch.bfloat16), rope)
