"""`mla_decode`: problems against the oracle, and the flat form of its page table."""

from __future__ import annotations

import pytest
import torch

from mlakit.tools.testing import NEVER_A_PAGE, assert_same_bits
from mlakit.tools.workloads import DecodeCase
from tests.ops.cases import CALLS, int32
from tests.ops.random_cases import problems_of


@pytest.mark.slow
@problems_of("mla_decode")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))


def test_slots_past_the_flat_list_may_be_anything():
    call = CALLS["decode-fp8-scale-tensor-flat"]()
    starts, slots = call.arguments["page_table"]
    longer = torch.cat([slots, int32([-1, NEVER_A_PAGE])])
    for result, want in zip(call.run(page_table=(starts, longer)), call.run(), strict=True):
        assert_same_bits("result", result, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "splits",
    [
        {"kv_lens": (400, 16, 40, 16, 16), "num_ctas": 3, "fixed_split": 16},
        {"kv_lens": (20_000, 20_000), "page_size": 1, "flat_table": True, "deterministic": True},
    ],
    ids=["plan", "deterministic"],
)
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_merges_do_not_depend_on_the_batch(splits, backend, device):
    """The long request has many splits alone, and the requests of the batch few on average."""
    if backend == "cpu" and device.type != "cpu":
        pytest.skip("the cpu backend takes CPU tensors only")
    case = DecodeCase(
        heads=1,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        q_lens=(1,) * len(splits["kv_lens"]),
        format="fp32",
        dtype="fp32",
        sharpness=2.0,
        seed=0,
        **splits,
    )
    case.run(device, backend)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [4, pytest.param(9, marks=pytest.mark.thorough)])
def test_whether_a_request_is_split_does_not_depend_on_the_batch(queries, device):
    """The first request has more queries than the requests of the batch on average, and partials
    with room for all queries of the batch would take more than 64 MB."""
    case = DecodeCase(
        heads=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_lens=(320, 320, 320, 320),
        q_lens=(queries, 1, 1, 1),
        num_ctas=3,
        fixed_split=16,
        format="bf16",
        dtype="bf16",
        sharpness=2.0,
        seed=0,  # of which the first request is also run alone
    )
    case.run(device, "triton")
