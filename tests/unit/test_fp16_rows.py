"""The naive run of the sparse kernel that rounds rows of fp8_block128 to float16."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from mlakit.workloads import SparseCase, fp16_rows
from mlakit.workloads.inputs import Inputs


def stored_rows() -> torch.Tensor:
    case = SparseCase(format="fp8_block128", kv_lora_rank=512, qk_rope_head_dim=64, num_pages=8)
    inputs = Inputs("cpu", seed=1)
    pool = case.pool(inputs, "cache", 16)
    return pool.write(torch.arange(40), inputs.normal(40, 576))


def test_latent_columns_are_rounded_to_float16_and_rotated_ones_are_not():
    rows = stored_rows()
    rounded = fp16_rows.rounded_rows(rows, 512)
    assert torch.equal(rounded[:, :512], (rows[:, :512] * 256).half().double() / 256)
    assert torch.equal(rounded[:, 512:], rows[:, 512:])
    assert not torch.equal(rounded, rows)


@pytest.mark.parametrize("size", [1e-12, 1e6, 1e30])
def test_the_range_of_float16_does_not_matter(size):
    rows = stored_rows()
    power = 2.0 ** torch.tensor(size).log2().round().item()
    got = fp16_rows.rounded_rows(rows * power, 512) / power
    assert torch.equal(got, fp16_rows.rounded_rows(rows, 512))


def test_zeros_and_nan_stay():
    rows = torch.tensor([[0.0, torch.nan, torch.inf, 1.0]], dtype=torch.float64)
    assert torch.equal(fp16_rows.rounded_rows(rows, 4).nan_to_num(7.0), rows.nan_to_num(7.0))


def test_what_the_docs_say_of_the_error_of_a_score():
    """Normal numbers, DeepSeek's softmax scale."""
    rows = stored_rows()
    q = torch.randn(64, 576, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    lost = q @ (fp16_rows.rounded_rows(rows, 512) - rows).T / 192**0.5
    assert 0.0002 < lost.square().mean().sqrt() < 0.0004
    bf16 = q[:, :512] @ (rows[:, :512].bfloat16().double() - rows[:, :512]).T / 192**0.5
    assert 0.0016 < bf16.square().mean().sqrt() < 0.0032


def test_only_the_kernel_of_64_heads_rounds():
    problem = {"format": "fp8_block128", "heads": 128}
    cuda = torch.device("cuda")
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        assert fp16_rows.rounds_rows(cuda, "auto", **problem)
        assert fp16_rows.rounds_rows(cuda, "hopper", **problem)
        assert fp16_rows.rounds_rows(cuda, "hopper:m64_fp8_kv", **{**problem, "heads": 8})
        assert not fp16_rows.rounds_rows(cuda, "hopper:small_m_fp8_kv", **problem)
        assert not fp16_rows.rounds_rows(cuda, "triton", **problem)
        assert not fp16_rows.rounds_rows(torch.device("cpu"), "auto", **problem)
        for other in ({"format": "fp8_token"}, {"heads": 32}):
            assert not fp16_rows.rounds_rows(cuda, "auto", **{**problem, **other})
    with mock.patch("torch.cuda.get_device_capability", return_value=(10, 0)):
        assert not fp16_rows.rounds_rows(cuda, "auto", **problem)
