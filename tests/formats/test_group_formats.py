"""Rows of e4m3 with one scale per row, or per 32, 64 or 128 columns, in a tensor beside them."""

from __future__ import annotations

import struct

import pytest
import torch

from mlakit.cache import PagedLatentCache
from mlakit.formats import GROUP_FORMATS, row_codec
from mlakit.model.geometry import RowShape
from tests.formats.format_rows import (
    E4M3,
    INF,
    NAN,
    SMALLEST_NORMAL,
    V3,
    e4m3_bytes,
    either_scale,
    expected_scale,
    in_groups,
    random_rows,
    raw,
    shape_id,
)

every_format = pytest.mark.parametrize("name", GROUP_FORMATS)
every_shape = pytest.mark.parametrize(
    "row", [V3, RowShape(256, 32), RowShape(128, 0), RowShape(128, 6)], ids=shape_id
)


def group_of(name: str, row: RowShape) -> int:
    """Columns that share a scale."""
    return row.width if name == "fp8_row" else int(name.removeprefix("fp8_group"))


@pytest.mark.parametrize(
    ("name", "row", "scales"),
    [
        ("fp8_row", V3, 1),
        ("fp8_group32", V3, 18),
        ("fp8_group64", V3, 9),
        ("fp8_group128", V3, 5),
        ("fp8_row", RowShape(33, 2), 1),
        ("fp8_group32", RowShape(96, 6), 4),
        ("fp8_group128", RowShape(512, 0), 4),
    ],
)
def test_sizes(name, row, scales):
    codec = row_codec(name, row)
    assert (codec.payload_dtype, codec.payload_elements) == (E4M3, row.width)
    assert (codec.beside_dtype, codec.beside_elements) == (torch.float32, scales)
    assert codec.scale_group == group_of(name, row)
    assert codec.bytes_per_token == row.width + 4 * scales


@either_scale
@every_shape
@every_format
def test_rows_byte_for_byte(name, row, power_of_two):
    rows = random_rows(row)
    payload, scales = row_codec(name, row).encode(rows, power_of_two=power_of_two)
    for values, stored, row_scales in zip(rows.numpy(), payload, scales, strict=True):
        groups = in_groups(values, group_of(name, row))
        expected = [expected_scale(group, SMALLEST_NORMAL, power_of_two) for group in groups]
        assert raw(row_scales) == struct.pack(f"<{len(groups)}f", *expected)
        pairs = zip(groups, expected, strict=True)
        assert raw(stored) == b"".join(e4m3_bytes(group, scale) for group, scale in pairs)


@every_shape
@every_format
def test_decoding_multiplies_each_group_by_its_scale(name, row):
    codec = row_codec(name, row)
    payload, scales = codec.encode(random_rows(row))
    scales *= -3.7  # any scale is taken as it is
    expanded = scales.double().repeat_interleave(group_of(name, row), -1)[:, : row.width]
    exact = codec.decode(payload, scales, dtype=torch.float64)
    assert torch.equal(exact, payload.double() * expanded)
    assert torch.equal(codec.decode(payload, scales), exact.float())
    assert torch.equal(
        codec.decode(payload, scales, dtype=torch.bfloat16), exact.float().bfloat16()
    )


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("column", [0, 200, 256, 287])
@every_format
def test_what_is_not_finite_harms_only_its_group(name, column, bad):
    row = RowShape(256, 32)
    codec, rows, group = row_codec(name, row), random_rows(row), group_of(name, row)
    clean = codec.decode(*codec.encode(rows))
    rows[2, column] = bad
    decoded = codec.decode(*codec.encode(rows))
    harmed = torch.zeros(rows.shape, dtype=torch.bool)
    harmed[2, column // group * group : (column // group + 1) * group] = True
    assert torch.equal(decoded.isnan(), harmed)
    assert torch.equal(decoded[~harmed], clean[~harmed])


@every_format
def test_rows_of_zeros_come_back(name):
    codec = row_codec(name, V3)
    payload, scales = codec.encode(torch.zeros(2, 576))
    assert scales.unique().tolist() == [SMALLEST_NORMAL]
    assert not codec.decode(payload, scales).any()


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "fp8_group32",
            RowShape(48, 8),
            r"^fp8_group32: kv_lora_rank .* multiple of 32 .*, got 48",
        ),
        ("fp8_group128", RowShape(64, 64), r"^fp8_group128: kv_lora_rank .* of 128 .*, got 64"),
        ("fp8_group64", RowShape(448, 64, 512), r"^fp8_group64: v_width .* 448, got 512"),
    ],
)
def test_shapes_that_do_not_fit(name, row, message):
    with pytest.raises(ValueError, match=message):
        row_codec(name, row)


@every_format
def test_a_pool_writes_and_reads_such_rows(name):
    codec = row_codec(name, V3)
    rows, slots = random_rows(V3), torch.tensor([7, 0, 3, 11, 4])
    pool = PagedLatentCache.allocate(V3, name, num_pages=4, page_size=3, num_layers=2)
    pool.layer(1).write(slots, rows)
    assert torch.equal(pool.layer(1).read(slots), codec.decode(*codec.encode(rows)))
    assert not pool.layer(0).read(slots).any()
    wrapped = PagedLatentCache.wrap(pool.payload[1], V3, format=name, scales=pool.scales[1])
    assert torch.equal(wrapped.layer(0).read(slots), pool.layer(1).read(slots))
