"""The naive run of FP8 scores: products of stored values with the hardware's accumulation."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from mlakit.model.geometry import RowShape
from mlakit.reference.hopper_fp8_mma import fp8_mma
from mlakit.tools.workloads import DecodeCase, fp8_scores
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import Pool

ROW = RowShape(512, 64)
FORMATS = pytest.mark.parametrize("format", fp8_scores.FORMATS)
E4M3 = torch.float8_e4m3fn


def stored_rows(format: str, tensor_scale: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, row_scales)"""
    case = DecodeCase(
        format=format, kv_lora_rank=512, qk_rope_head_dim=64, tensor_scale=tensor_scale
    )
    inputs = Inputs("cpu", seed=1, padded=False)
    pool: Pool = case.pool(inputs, "cache", 3)
    slots = torch.arange(40)
    rows = pool.write(slots, inputs.normal(40, 576) * torch.logspace(-3, 3, 40)[:, None])
    return rows, pool.row_scales(slots)


@FORMATS
def test_row_scales_times_stored_values_are_the_rows(format):
    rows, row_scales = stored_rows(format)
    stored = (rows / row_scales[:, None]).float()
    assert torch.equal(stored[:, :512], stored[:, :512].to(E4M3).float())
    rope_dtype = E4M3 if format == "fp8" else torch.bfloat16
    assert torch.equal(stored[:, 512:], stored[:, 512:].to(rope_dtype).float())


@FORMATS
def test_scores_lose_what_the_hardware_does_not_keep(format):
    rows, row_scales = stored_rows(format)
    q = torch.randn(16, 576, generator=torch.Generator().manual_seed(0)).to(E4M3).double()
    got = fp8_scores.fp8_qk_scores(q, rows, row_scales, ROW, format)
    exact = q @ rows.T
    error = (got - exact).abs() / (q.norm(dim=-1)[:, None] * rows.norm(dim=-1))
    assert 2.0**-20 < error.max() < 2.0**-11


@pytest.mark.parametrize("zero", [None, 0, 3])
def test_rows_with_four_scales(zero):
    """Scores are as exact as with one scale, whichever is 0 or far below the largest."""
    own = torch.Generator().manual_seed(0)
    values = torch.randn(40, 4, 128, generator=own).to(E4M3).double()
    scales = 2.0 ** torch.randint(-40, 4, (40, 4), generator=own).double()
    if zero is not None:
        scales[:, zero] = 0.0
    rope = torch.randn(40, 64, generator=own).double()
    rows = torch.cat([(values * scales[..., None]).flatten(1), rope], 1)
    q = torch.randn(16, 576, generator=own).to(E4M3).double()
    got = fp8_scores.fp8_qk_scores(q, rows, scales, ROW, "fp8_block128")
    error = (got - q @ rows.T).abs() / (q.norm(dim=-1)[:, None] * rows.norm(dim=-1))
    assert 2.0**-20 < error.max() < 2.0**-11
    unsummed = fp8_scores.fp8_qk_scores(q, rows[:7], scales[:7], ROW, "fp8_block128")
    assert torch.equal(unsummed, got[:, :7])


@pytest.mark.slow
def test_what_the_docs_say_of_the_error_of_a_score():
    """Normal numbers, DeepSeek's softmax scale, rows with their own scales."""
    own = torch.Generator().manual_seed(0)
    q, k = torch.randn(64, 576, generator=own), torch.randn(1024, 576, generator=own)
    row_scales = k.abs().amax(1).double() / 448
    stored, bytes_of_q = (k.double() / row_scales[:, None]).to(E4M3).double(), q.to(E4M3).double()
    rows = stored * row_scales[:, None]
    scores = bytes_of_q @ rows.T / 192**0.5
    assert 6 < scores.abs().max() < 9
    lost = fp8_scores.fp8_qk_scores(bytes_of_q, rows, row_scales, ROW, "fp8") / 192**0.5 - scores
    assert 0.0006 < lost.square().mean().sqrt() < 0.001
    assert 0.005 < lost.abs().max() < 0.025
    rounded = (bytes_of_q - q.double()) @ k.double().T / 192**0.5
    assert 0.04 < rounded.square().mean().sqrt() < 0.05
    assert 0.15 < rounded.abs().max() < 0.25


@FORMATS
def test_rows_of_zeros_have_scores_of_zero(format):
    rows, row_scales = stored_rows(format)
    rows[3], row_scales[3] = 0.0, 0.0
    q = torch.ones(2, 576).double()
    got = fp8_scores.fp8_qk_scores(q, rows, row_scales, ROW, format)
    assert torch.equal(got[:, 3], torch.zeros(2))
    assert got.isfinite().all()


def test_only_hopper_multiplies_fp8_by_fp8_and_only_with_many_heads():
    problem = {"format": "fp8", "q_dtype": "e4m3", "heads": 128}
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        cuda = torch.device("cuda")
        assert fp8_scores.uses_fp8_qk(cuda, "auto", **problem)
        assert fp8_scores.uses_fp8_qk(cuda, "hopper", **problem)
        assert fp8_scores.uses_fp8_qk(cuda, "hopper:m64_fp8_qk", **{**problem, "heads": 8})
        assert not fp8_scores.uses_fp8_qk(cuda, "hopper:small_m_fp8_kv", **problem)
        assert not fp8_scores.uses_fp8_qk(cuda, "triton", **problem)
        assert not fp8_scores.uses_fp8_qk(torch.device("cpu"), "auto", **problem)
        for other in ({"format": "fp8_block128"}, {"q_dtype": "bf16"}, {"heads": 32}):
            assert not fp8_scores.uses_fp8_qk(cuda, "auto", **{**problem, **other})
    with mock.patch("torch.cuda.get_device_capability", return_value=(10, 0)):
        assert not fp8_scores.uses_fp8_qk(cuda, "auto", **problem)


@pytest.mark.slow
@FORMATS
@pytest.mark.parametrize("loss", [2.0**-11, 2.0**-5], ids=["as much as hardware", "more"])
def test_the_tolerance_allows_what_the_hardware_loses_and_no_more(format, loss):
    """Exact results with lse off by so much of the largest score."""
    case = DecodeCase(
        kv_lens=(70, 3), q_lens=(1, 1), heads=40, dtype="e4m3", q_scaled=True, format=format,
        kv_lora_rank=512, qk_rope_head_dim=64, sharpness=4.0,
    )  # fmt: skip
    trial = case.trial("cpu")
    with mock.patch.object(DecodeCase, "uses_fp8_qk", return_value=True):
        out, lse = trial.call("cpu")
    noise = torch.randn(lse.shape, generator=torch.Generator().manual_seed(0)) * loss
    trial.check((out, lse))
    if loss > 2.0**-8:
        with pytest.raises(AssertionError, match="lse"):
            trial.check((out, lse + noise))
    else:
        trial.check((out, lse + noise))
    out, lse = trial.call("cpu")
    with pytest.raises(AssertionError, match="lse"):
        trial.check((out, lse + noise))


def test_fp8_logits_are_weighted_products_of_stored_keys(generator):
    """Each query by itself, with the accumulation of FP8 tensor cores."""
    e4m3 = torch.randn(4, 70, 128, generator=generator).to(E4M3).double()
    q, stored = e4m3[:3, :5], e4m3[3]
    weights = torch.randn(3, 5, generator=generator)
    scales = torch.rand(70, generator=generator, dtype=torch.float64)
    got = fp8_scores.fp8_logits(q, weights, stored * scales[:, None], scales)
    for own, factors, logits in zip(q, weights, got, strict=True):
        products = fp8_mma(own, stored).relu()
        want = factors @ products * scales.float()
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-4)
        precise = factors @ (own @ stored.T).relu().float() * scales.float()
        assert not torch.allclose(logits, precise, rtol=1e-5, atol=1e-4)
