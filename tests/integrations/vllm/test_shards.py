"""MLAKIT_SPARSE where ranks share the tokens of each request (decode context parallelism)."""

from __future__ import annotations

import pytest

from tests.integrations.vllm import shards

CASES = [(2, 1, "float"), (2, 16, "fp8_ds_mla"), (4, 1, "fp8_ds_mla"), (4, 16, "float")]


@pytest.mark.parametrize(("world", "interleave", "cache"), CASES)
def test_ranks_select_and_attend_together(ranks, world, interleave, cache):
    ranks.run(world, shards.check_step, interleave, cache)


@pytest.mark.parametrize(("world", "interleave", "cache"), CASES[1:3])
def test_ranks_that_take_turns(world, interleave, cache, device, monkeypatch):
    shards.check_turns(monkeypatch, device, world, interleave, cache)
