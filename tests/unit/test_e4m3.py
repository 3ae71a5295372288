"""The conversion of e4m3 by integers, which x86 CPUs use, on any CPU."""

from __future__ import annotations

import pytest
import torch

from mlakit import e4m3
from mlakit.testing import assert_same_bits

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
