"""examples/context_parallel.py under torchrun."""

from __future__ import annotations

from tests.parallel.test_torchrun import torchrun


def test_two_ranks_agree_with_one_process():
    arguments = ("--heads", "4", "--lengths", "70", "5", "1", "--interleave", "2")
    said = torchrun(2, "examples/context_parallel.py", *arguments)
    assert "2 ranks, gloo on cpu; 85 tokens" in said
    assert "one process agrees" in said
