"""The oracles of FP8 quantisation and of the product of quantised matrices."""

from __future__ import annotations

import math

import pytest
import torch

from mlakit import reference
from tests.reference.inputs import E4M3, assert_same, normal


def test_quantize_scales_every_group_of_every_row() -> None:
    """A last group of two columns is quantised like the others, and padding is zero."""
    x = torch.tensor([[1.0, -2.0, 4.0, 8.0, 7.0, -14.0], [0, 0, 0, 0, 28.0, 0]])
    q, scales = reference.quantize_fp8(x, 4)
    assert (q.dtype, scales.dtype) == (E4M3, torch.float32)
    assert scales.shape == (2, 4)
    unit = torch.tensor(1.0) / 448
    want = torch.tensor([[8.0, 0.0], [14.0, 28.0]]) * unit
    assert_same(scales[:, :2], want, 1e-7)
    assert torch.equal(scales[:, 2:], torch.zeros(2, 2))
    assert q.float().tolist() == [[56, -112, 224, 448, 224, -448], [0, 0, 0, 0, 448, 0]]
    assert_same(reference.dequantize_fp8(q, scales, 4), x, 1e-6)


def test_quantize_zero_tiny_and_large_groups() -> None:
    x = torch.zeros(5, 4)
    x[1] = 1e-42  # 1 / scale is not a float32 number
    x[2] = torch.tensor([5000.0, -1300.0, 1200.0, 600.0])
    x[3] = torch.tensor([math.nan, 1.0, 2.0, 3.0])
    q, scales = reference.quantize_fp8(x, 4, scale_ub=1200.0)
    assert torch.equal(q[:2].float(), torch.zeros(2, 4))
    assert scales[0, 0] == 0
    assert torch.equal(reference.dequantize_fp8(q, scales, 4)[:2], torch.zeros(2, 4).double())
    assert scales[0, 2] == torch.tensor(1200.0) / 448
    assert q[2].float().tolist() == [448.0, -448.0, 448.0, 224.0]
    assert q[3].float().isnan().tolist() == [True, False, False, False]
    assert scales[0, 3].isnan()
    assert torch.equal(scales[0, 4:], torch.zeros(4))
    _, unbounded = reference.quantize_fp8(x, 4)
    assert unbounded[0, 2] == torch.tensor(5000.0) / 448


def test_quantize_rounds_to_the_nearest_number_of_the_format() -> None:
    x = normal(6, 40, seed=1).float() * torch.tensor([1.0, 1e-3, 1e3, 30.0, 1.0, 1.0])[:, None]
    q, scales = reference.quantize_fp8(x, 16)
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    codes = codes[codes.isfinite()]
    scaled = x.double() / scales[:, :6].repeat_interleave(16, 0)[:40].T.double()
    closest = (scaled[..., None] - codes).abs().amin(-1)
    chosen = (scaled - q.double()).abs()
    assert (chosen <= closest + 1e-4).all()  # 448 · 2^-23: the reciprocal is a float32 number


@pytest.mark.slow
def test_scaled_product_equals_the_dequantised_one() -> None:
    """Group sizes that divide neither K nor N; the padding of the scales holds NaN."""
    m, n, k, n_group, k_group = 5, 7, 11, 3, 4
    a, a_scale = reference.quantize_fp8(normal(m, k, seed=1), k_group)
    a_scale[:, m:] = torch.nan
    b, b_scale = normal(n, k, seed=2).to(E4M3), normal(3, 3, seed=3).exp().float()
    exact = torch.zeros(m, n, dtype=torch.float64)
    for i in range(m):
        for j in range(n):
            for column in range(k):
                group = column // k_group
                scale = a_scale[group, i].double() * b_scale[j // n_group, group].double()
                exact[i, j] += a[i, column].double() * b[j, column].double() * scale
    product = reference.scaled_mm_fp8(a, a_scale, b, b_scale, n_group=n_group, k_group=k_group)
    assert_same(product, exact)
