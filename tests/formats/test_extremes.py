"""Cache-row formats at the end of their range: saturation, NaN, infinities, zero latents."""

from __future__ import annotations

import pytest
import torch

from mlakit.formats import FORMATS, row_codec
from mlakit.model.geometry import RowShape
from tests.formats.format_rows import (
    INF,
    NAN,
    PARTIAL,
    SCALED,
    V3,
    V4,
    either_scale,
    every_format,
    random_rows,
)


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
    group = {"fp8_block128": 128, "fp8_block64": 64, "mxfp4_block32": 32}.get(name)
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
@pytest.mark.parametrize("name", [*SCALED, "mxfp4_block32"])
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
