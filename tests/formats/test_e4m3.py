"""The conversion of e4m3 by integers, which x86 CPUs use, on any CPU."""

from __future__ import annotations

import pytest
import torch

from mlakit.formats import e4m3
from mlakit.tools.testing import assert_same_bits

CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize("by_integers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_code_is_widened_exactly(dtype, by_integers, monkeypatch):
    monkeypatch.setattr(e4m3, "_converts_halves", lambda: by_integers)
    stored = CODES.view(2, 128)[:, 3:]
    want = stored.view(torch.float8_e4m3fn).to(dtype)
    for given in (stored, stored.view(torch.float8_e4m3fn)):
        got = e4m3.widen_e4m3(given, dtype)
        assert_same_bits("NaN", got.isnan(), want.isnan())
        assert_same_bits("widened", got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert want.isnan().sum() == 2


SCALES = {
    "usual": [0.5, 3e-5, 7.0, 1.1],
    "times 256 is infinite": [1e37, 2.0, 3e38, 1e-38],
    "not finite": [torch.nan, 1.0, torch.inf, 0.0],
}


@pytest.mark.parametrize("by_integers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("columns", [128, 125])
def test_every_code_is_multiplied_by_the_scale_of_its_group(
    columns, scales, dtype, by_integers, monkeypatch
):
    monkeypatch.setattr(e4m3, "_converts_halves", lambda: by_integers)
    stored = CODES.view(2, 128)[:, :columns]
    scale = torch.tensor(scales, dtype=dtype).expand(2, -1)
    want = stored.view(torch.float8_e4m3fn).to(dtype) * scale.repeat_interleave(32, -1)[:, :columns]
    got = torch.empty_like(want)
    e4m3.dequantise_e4m3(stored, scale, 32, got)
    assert_same_bits("NaN", got.isnan(), want.isnan())
    assert_same_bits("dequantised", got.nan_to_num(7.0), want.nan_to_num(7.0))
