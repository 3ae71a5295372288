"""MLAKIT_SPARSE where ranks share the tokens of each request (decode context parallelism)."""

from __future__ import annotations

import pytest

from tests.integrations.vllm import shards


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("cache", ["float", "fp8_ds_mla"])
def test_ranks_select_and_attend_together(ranks, world, interleave, cache):
    ranks.run(world, shards.check_step, interleave, cache)
