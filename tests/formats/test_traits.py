"""The traits of a format say where the bytes of its rows are, and what its scales cover."""

from __future__ import annotations

import pytest
import torch

from mlakit.formats import FORMATS, GROUP_FORMATS, row_codec
from mlakit.model.geometry import RowShape

ROWS = (RowShape(512, 64), RowShape(256, 0), RowShape(128, 8))
EACH_ROW = pytest.mark.parametrize("row", ROWS, ids=str)
EACH_FORMAT = pytest.mark.parametrize("format", [*FORMATS, *GROUP_FORMATS])


@EACH_ROW
@EACH_FORMAT
def test_rotated_columns_are_the_last_bytes_of_a_row(format, row):
    codec = row_codec(format, row)
    itemsize = 2 if codec.traits.IS_BF16_ROPE else codec.payload_dtype.itemsize
    row_bytes = codec.payload_elements * codec.payload_dtype.itemsize
    assert codec.traits.ROPE_AT + row.qk_rope_head_dim * itemsize == row_bytes
    is_narrow = codec.traits.IS_E4M3 or codec.traits.IS_E2M1
    assert (codec.payload_dtype.itemsize == 1) == is_narrow


@EACH_ROW
@EACH_FORMAT
def test_scales_are_in_the_row_or_beside_it(format, row):
    codec = row_codec(format, row)
    traits = codec.traits
    is_in_row, is_beside = traits.SCALES_AT >= 0, codec.beside_dtype is not None
    assert (is_in_row or is_beside) == (traits.GROUP > 0) == (traits.SCALED_BY in ("row", "group"))
    assert not (is_in_row and is_beside)
    if is_beside:
        assert codec.beside_dtype == (torch.uint8 if traits.HAS_E8M0_SCALES else torch.float32)


@EACH_ROW
@pytest.mark.parametrize("format", ["fp8_block128", "fp8_token", "fp8_block64", "fp8_group64"])
def test_a_latent_column_is_its_byte_times_the_scale_of_its_group(format, row):
    codec = row_codec(format, row)
    traits = codec.traits
    rows = torch.randn(3, row.width, generator=torch.Generator().manual_seed(0))
    payload, scales = codec.encode(rows)
    stored = payload.view(torch.uint8)[:, : row.kv_lora_rank].view(torch.float8_e4m3fn).float()
    if traits.SCALES_AT >= 0:
        scales = payload[:, traits.SCALES_AT : traits.ROPE_AT].contiguous().view(torch.float32)
    elif traits.HAS_E8M0_SCALES:
        scales = scales.view(torch.float8_e8m0fnu).float()
    group = torch.arange(row.kv_lora_rank) // traits.GROUP
    decoded = codec.decode(payload, None if traits.SCALES_AT >= 0 else codec.encode(rows)[1])
    assert torch.equal(decoded[:, : row.kv_lora_rank], stored * scales[:, group])


def test_only_formats_that_differ_in_their_bytes_have_different_traits():
    row = RowShape(512, 64)
    by_traits = {row_codec(format, row).traits for format in (*FORMATS, *GROUP_FORMATS)}
    # kernels see the type of plain rows by the tensor: bf16 and fp16 are alike
    assert len(by_traits) == len(FORMATS) + len(GROUP_FORMATS) - 1
