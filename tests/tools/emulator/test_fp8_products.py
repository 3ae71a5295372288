"""wgmma of e4m3 operands accumulates as Hopper's tensor cores do, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mlakit.reference.hopper_fp8_mma import fp8_mma

pytest.importorskip("triton.experimental.gluon")


Products = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _multiply_on(device: str, seed: int = 3) -> Products:
    """Return (a, b, a bᵀ + 1000), computed by a kernel."""
    from tests.tools.emulator import fp8_kernel

    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(64, 128, generator=g).mul(20).to(torch.float8_e4m3fn) for _ in range(2))
    out = torch.zeros(64, 64, device=device)
    fp8_kernel.multiply[(1,)](a.to(device), b.to(device), out, num_warps=4)
    return a, b, out.cpu()


def _multiply(is_exact: bool) -> Products:
    from mlakit.tools.emulator.frontend import emulating

    with emulating(exact_fp8=is_exact):
        return _multiply_on("cpu")


def test_products_of_e4m3_are_those_of_the_tensor_cores(in_emulator: Callable[..., Any]) -> None:
    a, b, out = in_emulator(_multiply, False)
    expected = fp8_mma(a, b, torch.full((64, 64), 1000.0))
    assert torch.equal(out, expected)
    assert not torch.equal(out, a.float() @ b.float().T + 1000)  # the rounding shows


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3, 7))
def test_a_gpu_gives_the_same_products_of_e4m3(seed: int) -> None:
    from tests.tools.emulator import gpu_findings

    a, b, out = _multiply_on("cuda", seed)
    expected = fp8_mma(a, b, torch.full((64, 64), 1000.0))
    differing = int((out != expected).sum())
    gpu_findings.add("e4m3 products", f"seed {seed}", products=out.numel(), differing=differing)
    assert differing == 0


def test_products_of_e4m3_are_exact_where_that_is_asked_for(
    in_emulator: Callable[..., Any],
) -> None:
    a, b, out = in_emulator(_multiply, True)
    a, b = a.double(), b.double()
    sizes = a.abs() @ b.abs().T + 1000  # of all terms: a sum of 129 rounds each at most once
    assert ((out - (a @ b.T + 1000)).abs() <= 129 * 2.0**-24 * sizes).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads(bad: float) -> None:
    from mlakit.tools.emulator.products import hardware_product

    a, b = np.ones((64, 32), np.float32), np.ones((32, 64), np.float32)
    a[3, 5] = np.nan
    accumulator = np.zeros((64, 64), np.float32)
    accumulator[7, 9] = bad
    out = hardware_product(fp8_mma, a, b, accumulator)
    assert np.isnan(out[3]).all()
    assert not np.isfinite(out[7, 9])
    assert out[0, 0] == 32
    finite = np.isfinite(out)
    expected = hardware_product(fp8_mma, np.nan_to_num(a), b, np.where(finite, accumulator, 0))
    assert np.array_equal(out[finite], expected[finite])
