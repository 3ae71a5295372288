"""`merge_states`: problems against the oracle, and results over its inputs."""

from __future__ import annotations

import pytest

from tests.ops.cases import CALLS
from tests.ops.every_op import assert_same_results, interpreted
from tests.ops.random_cases import problems_of


@pytest.mark.slow
@problems_of("merge_states")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))


@interpreted
def test_a_merge_may_write_into_one_of_its_parts(place):
    want = CALLS["merge"]().on(place.device).run()
    call = CALLS["merge"]().on(place.device)
    outs, lses = call.arguments["outs"], call.arguments["lses"]
    assert_same_results(call.run(out=outs[0], lse=lses[0]), want)
