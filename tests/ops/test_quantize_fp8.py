"""`quantize_fp8` on random and on large problems, against the oracle."""

from __future__ import annotations

import pytest

from tests.ops.random_cases import problems_of


@pytest.mark.slow
@problems_of("quantize_fp8")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))
