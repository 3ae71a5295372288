"""The naive run of the kernels that round rows of fp8_block128 to float16."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache
from mlakit.dispatch.specs import pretending
from mlakit.model.geometry import RowShape
from mlakit.tools.workloads import DecodeCase
from mlakit.tools.workloads.fp16_rows import (
    block_scales,
    rounded_rows,
    rounds_rows,
    row_bits,
)
from mlakit.tools.workloads.inputs import Inputs


def written() -> tuple[torch.Tensor, torch.Tensor]:
    """(64 rows as they are stored, their scales)."""
    own = torch.Generator().manual_seed(0)
    cache = PagedLatentCache.allocate(
        RowShape(512, 64, 512), "fp8_block128", num_pages=1, page_size=64, device="cpu"
    )
    slots = torch.arange(64)
    cache.layer(0).write(slots, torch.randn(64, 576, generator=own))
    payload = cache.layer(0).payload.view(torch.uint8).view(64, -1)
    return cache.layer(0).read(slots, torch.float64), block_scales(payload)


def test_scales_are_those_inside_of_rows():
    stored, scales = written()
    largest = stored[:, :512].unflatten(-1, (4, 128)).abs().amax(-1)
    assert torch.equal(largest, 448 * scales)


def test_products_are_those_of_float16_at_any_magnitude():
    """2**13 times the scale of normal numbers is 32 to 128: nothing is subnormal in float16."""
    stored, scales = written()
    scale = (2.0**13 * scales).repeat_interleave(128, -1)
    large = scale.half()
    small = (scale - large).half()
    values = stored[:, :512] * 2.0**13 / scale
    assert torch.equal(values, values.float().to(torch.float8_e4m3fn).double())
    # exact in float64, so that each is rounded once
    low = (values * small.double()).half()
    want = (values * large.double() + low.double()).half().double() / 2.0**13
    assert torch.equal(rounded_rows(stored, scales)[:, :512], want)
    for power in (2.0**-60, 2.0**20, 2.0**100):
        assert torch.equal(rounded_rows(stored * power, scales * power)[:, :512], want * power)


def test_a_scale_of_one_float16_is_rounded_to_it():
    stored, scales = written()
    scale = (2.0**13 * scales).repeat_interleave(128, -1)
    values = stored[:, :512] * 2.0**13 / scale
    want = (values * scale.half().double()).half().double() / 2.0**13
    assert torch.equal(rounded_rows(stored, scales, parts=1)[:, :512], want)


def test_scales_that_are_powers_of_two_round_nothing():
    stored, scales = written()
    powers = scales.log2().round().exp2()
    exact = stored[:, :512] / scales.repeat_interleave(128, -1)
    exact = torch.cat([exact * powers.repeat_interleave(128, -1), stored[:, 512:]], -1)
    assert torch.equal(rounded_rows(exact, powers), exact)


def test_rotated_columns_and_poison_stay():
    stored, scales = written()
    stored[3], scales[3] = torch.nan, torch.nan
    stored[5, :128], scales[5, 0] = 0.0, 0.0
    rounded = rounded_rows(stored, scales)
    assert rounded[3].isnan().all()
    assert torch.equal(rounded[4:, 512:], stored[4:, 512:])
    assert (rounded[5, :128] == 0).all()
    assert not torch.equal(rounded[4:], stored[4:])


def test_what_the_docs_say_of_the_error_of_a_score():
    """Normal numbers, DeepSeek's softmax scale."""
    stored, scales = written()
    q = torch.randn(64, 576, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    lost = q @ (rounded_rows(stored, scales) - stored).T / 192**0.5
    assert 0.0002 < lost.square().mean().sqrt() < 0.0004
    bf16 = q[:, :512] @ (stored[:, :512].bfloat16().double() - stored[:, :512]).T / 192**0.5
    assert 0.0016 < bf16.square().mean().sqrt() < 0.0032


def test_only_kernels_of_64_heads_round():
    problem = {"format": "fp8_block128", "heads": 128}
    device = torch.device("cpu")
    with pretending(90):
        assert rounds_rows(device, "auto", **problem)
        assert rounds_rows(device, "hopper", **problem)
        for kernel in ("hopper:m64_fp8_kv", "hopper:m64_fp8_qk"):
            assert rounds_rows(device, kernel, **{**problem, "heads": 8})
        assert not rounds_rows(device, "hopper:small_m_fp8_kv", **problem)
        assert not rounds_rows(device, "triton", **problem)
        for other in ({"format": "fp8_token"}, {"heads": 32}):
            assert not rounds_rows(device, "auto", **{**problem, **other})
    with pretending(100):
        assert not rounds_rows(device, "auto", **problem)
    assert not rounds_rows(device, "auto", **problem)


def test_blackwell_rounds_rows_to_bfloat16():
    device = torch.device("cpu")
    problem = {"format": "fp8_block128", "heads": 128}
    with pretending(100):
        for backend in ("auto", "blackwell", "blackwell:n64_fp8_kv"):
            assert row_bits(device, backend, **problem) == 8
        assert row_bits(device, "triton", **problem) == 0
        assert row_bits(device, "auto", **{**problem, "format": "bf16"}) == 0
    with pretending(90):
        assert row_bits(device, "auto", **problem) == 11
        assert row_bits(device, "triton", **problem) == 0
    rows = torch.tensor([[1 + 2.0**-8, 1 + 2.0**-7, torch.inf, 0.0] * 128 + [1 + 2.0**-8]]).double()
    rounded = rounded_rows(rows, torch.ones(1, 4).double(), bits=8)
    assert rounded[0, :4].tolist() == [1.0, 1 + 2.0**-7, torch.inf, 0.0]
    assert torch.equal(rounded[:, :512].float().bfloat16().double(), rounded[:, :512])
    assert rounded[0, 512] == rows[0, 512], "rotated columns are not rounded"


@pytest.mark.parametrize("backend", ["auto", "hopper"])
def test_decode_with_little_work_is_compared_with_exact_rows(backend):
    """`small_m_fp8_kv` computes it: its check is no looser for the sake of another kernel."""
    row = {"format": "fp8_block128", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64}

    def rounds(columns: int, **more: object) -> bool:
        case = DecodeCase(**row, heads=128, kv_lens=(65,), q_lens=(1,), **more)
        pool = case.pool(Inputs("cpu", 0), "cache", 2)
        table = torch.zeros(1, columns, dtype=torch.int32)
        with pretending(90, 132):
            return case.row_bits(pool, table, backend) > 0

    assert not rounds(2)
    assert rounds(1 << 16)
    assert rounds(2, deterministic=True)
    assert rounds(2, num_splits=2)
    assert rounds(2, num_ctas=3)
