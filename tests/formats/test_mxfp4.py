"""Rows of four-bit columns: their bytes, built here from the definitions of e2m1 and e8m0."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from mlakit.formats import row_codec
from mlakit.model.geometry import RowShape
from tests.formats.format_rows import (
    PARTIAL,
    SMALLEST_NORMAL,
    V3,
    V4,
    bf16_bytes,
    in_groups,
    least_power_of_two,
    random_rows,
    raw,
    shape_id,
)

NAME = "mxfp4_block32"
ROWS = (V3, V4, PARTIAL, RowShape(128, 0), RowShape(36, 4))
# 1 sign bit, 2 exponent bits of bias 1, 1 mantissa bit
MAGNITUDES = [
    mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    for exponent in range(4)
    for mantissa in range(2)
]


def e2m1_code(value: float) -> int:
    """The nearest code, ties to the even one, beyond ±6 the last one."""
    sign = 8 if math.copysign(1.0, value) < 0 else 0
    distance = [abs(each - min(abs(value), 6.0)) for each in MAGNITUDES]
    nearest = [code for code, each in enumerate(distance) if each == min(distance)]
    return sign | (nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0))


def expected_row(row: RowShape, values: np.ndarray) -> bytes:
    latent, rope = values[: row.kv_lora_rank], values[row.kv_lora_rank :]
    codes, exponents = [], []
    for group in in_groups(latent, 32):
        scale = least_power_of_two(max(float(np.abs(group).max()) / 6, SMALLEST_NORMAL))
        exponents.append(int(math.log2(scale)) + 127)
        codes += [e2m1_code(float(x) / scale) for x in group]
    pairs = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    stored = pairs + bytes(exponents)
    padding = -len(stored) % 16 if len(rope) else 0
    return stored + bytes(padding) + bf16_bytes(rope)


@pytest.mark.parametrize("row", ROWS, ids=shape_id)
def test_bytes_of_rows(row):
    rows = random_rows(row, n=20)
    rows[3] = 0.0
    rows[4] *= 1e-38
    payload, beside = row_codec(NAME, row).encode(rows)
    assert beside is None
    assert raw(payload) == b"".join(expected_row(row, values.numpy()) for values in rows)


def test_values_between_two_codes_become_the_even_one():
    middles = [(low + high) / 2 for low, high in pairwise(MAGNITUDES)]
    values = torch.zeros(1, 32)
    for at, middle in enumerate(middles):
        values[0, 2 * at], values[0, 2 * at + 1] = middle, -middle
    values[0, -1] = 6.0  # the scale is 1
    row = RowShape(32, 0)
    decoded = row_codec(NAME, row).decode(row_codec(NAME, row).encode(values)[0], None)
    assert decoded[0, : 2 * len(middles) : 2].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert torch.equal(decoded[0, 1 : 2 * len(middles) : 2], -decoded[0, : 2 * len(middles) : 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_code_has_its_value(dtype):
    row = RowShape(32, 0)
    codes = torch.arange(16, dtype=torch.uint8)
    payload = torch.cat([codes[::2] | codes[1::2] << 4, codes[::2] | codes[1::2] << 4])[None]
    exponent = torch.tensor([[127 + 5]], dtype=torch.uint8)
    decoded = row_codec(NAME, row).decode(torch.cat([payload, exponent], 1), None, dtype=dtype)
    expected = [32 * each for each in (*MAGNITUDES, *(-each for each in MAGNITUDES))] * 2
    assert decoded.dtype == dtype
    assert decoded[0].tolist() == expected


def test_a_group_topped_by_3_settles_at_half_the_scale():
    codec = row_codec(NAME, V4)
    first, _ = codec.encode(random_rows(V4, n=40))
    once = codec.decode(first, None)
    second, _ = codec.encode(once)
    assert raw(second) != raw(first)
    assert torch.equal(codec.decode(second, None), once)
    third, _ = codec.encode(codec.decode(second, None))
    assert raw(third) == raw(second)


def test_rows_of_an_odd_width_are_refused():
    with pytest.raises(ValueError, match=r"^mxfp4_block32: kv_lora_rank must be even .* got 33"):
        row_codec(NAME, RowShape(33, 0))
