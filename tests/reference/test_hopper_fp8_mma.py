"""The model of Hopper's FP8 accumulation, and that torch's FP8 product on Hopper follows it."""

from __future__ import annotations

import pytest
import torch

from mlakit import ops, reference
from tests.reference import hopper_scaled_mm

E4M3 = torch.float8_e4m3fn


def test_a_small_term_is_truncated_beside_a_large_one() -> None:
    a = torch.zeros(1, 128)
    a[0, 0], a[0, 1:] = 1.0, 2.0**-9
    ones = torch.ones(1, 1)
    b = torch.ones(1, 128)
    b[0, 1:] = 2.0**-5  # products of 2**-14: half of the last place that is kept
    got = hopper_scaled_mm.scaled_mm(a.to(E4M3), ones, b.to(E4M3), ones)
    # beside the 1 of the first 32 columns they vanish, and so they do beside the running sum
    assert got.item() == 1.0
    b[0, 1:] = 2.0**-4
    assert (
        hopper_scaled_mm.scaled_mm(a.to(E4M3), ones, b.to(E4M3), ones).item()
        == 1.0 + 127 * 2.0**-13
    )


def test_accumulation_of_like_terms_is_nearly_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 512, generator=generator).to(E4M3) for n in (5, 256))
    a_scale, b_scale = (torch.rand(*shape, generator=generator) for shape in ((4, 5), (2, 4)))
    got = hopper_scaled_mm.scaled_mm(a, a_scale, b, b_scale)
    exact = reference.scaled_mm_fp8(a, a_scale, b, b_scale, n_group=128, k_group=128)
    error = (got - exact).abs().max() / exact.abs().max()
    assert 2.0**-20 < error < 2.0**-10


@pytest.mark.gpu
def test_the_library_adds_as_the_model_does() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, 512, generator=generator).bfloat16().cuda()
    b = torch.randn(256, 512, generator=generator).to(E4M3).cuda()
    b_scale = torch.rand(2, 4, generator=generator).cuda() + 0.5
    quantised, a_scale = ops.quantize_fp8(a, 128)
    groups = {"n_group": 128, "k_group": 128}
    got = ops.scaled_mm_fp8(quantised, a_scale, b, b_scale, **groups)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the model is that of sm_90")
    modelled = hopper_scaled_mm.scaled_mm(quantised, a_scale, b, b_scale).to(got.dtype)
    exact = reference.scaled_mm_fp8(quantised, a_scale, b, b_scale, **groups).to(got.dtype)
    assert torch.equal(got, modelled)
    assert not torch.equal(got, exact)
