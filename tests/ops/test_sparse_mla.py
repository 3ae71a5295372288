"""`sparse_mla`: problems against the oracle, lists that are empty or hold no rows."""

from __future__ import annotations

import pytest
import torch

from mlakit.tools.testing import assert_same_bits
from tests.ops.cases import sparse_call
from tests.ops.every_op import interpreted
from tests.ops.random_cases import problems_of


@pytest.mark.slow
@problems_of("sparse_mla")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))


@pytest.mark.slow
@interpreted
def test_a_list_of_no_rows_attends_nothing(place):
    call = sparse_call().on(place.device)
    out, lse, max_logits = call.run(rows=call.arguments["rows"][:, :0])
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert (max_logits == -torch.inf).all()


def test_invalid_rows_are_not_attended():
    """Unlike a page id, a listed row may be anything: top-k fills its lists with -1."""
    call = sparse_call()
    rows = call.arguments["rows"]
    assert (rows < 0).any()
    assert (rows > 10_000).any()
    want = call.run()
    others = torch.where((rows < 0) | (rows > 10_000), -(2**31), rows)
    for result, expected in zip(call.run(rows=others), want, strict=True):
        assert_same_bits("result", result, expected)
