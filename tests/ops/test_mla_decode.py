"""`mla_decode`: problems against the oracle, and the flat form of its page table."""

from __future__ import annotations

import pytest
import torch

from mlakit.tools.testing import NEVER_A_PAGE, assert_same_bits
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
