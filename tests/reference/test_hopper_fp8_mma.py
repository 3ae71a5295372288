"""The model of Hopper's FP8 accumulation, and that torch's FP8 product on Hopper follows it."""

from __future__ import annotations

import pytest
import torch

from mlakit import ops, reference
from mlakit.reference.hopper_fp8_mma import bf16_mma, fp16_mma
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


@pytest.mark.parametrize(
    ("mma", "dtype"),
    [(bf16_mma, torch.bfloat16), (fp16_mma, torch.float16)],
    ids=["bf16", "fp16"],
)
def test_16_bit_products_are_truncated_after_25_places(mma, dtype) -> None:
    a, b = torch.zeros(1, 32, dtype=dtype), torch.ones(1, 32, dtype=dtype)
    a[0, 0], a[0, 1] = 1.0, 2.0**-12
    b[0, 1] = 2.0**-13  # a product of 2**-25, the last place that is kept beside 1
    start = torch.full((1, 1), 2.0**-1)
    assert mma(a, b, start).item() == 1.5  # 24 bits of the result do not hold it
    a[0, 2:18], b[0, 2:18] = 2.0**-12, 2.0**-13
    # The first instruction adds 15 of 17 such terms beside 1 and truncates the sum to 24 bits; the
    # two of the second one are below its last place.
    assert mma(a, b, start).item() == 1.5 + 3 * 2.0**-23
    a[0, 0] = 0.0
    assert mma(a, b).item() == 17 * 2.0**-25  # alone they are exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_products_are_nearly_exact(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 512, generator=generator).to(dtype) for n in (5, 64))
    mma = bf16_mma if dtype == torch.bfloat16 else fp16_mma
    exact = a.double() @ b.double().T
    error = (mma(a, b) - exact).abs().max() / exact.abs().max()
    assert 2.0**-26 < error < 2.0**-19
