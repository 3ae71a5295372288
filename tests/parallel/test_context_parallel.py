"""Context parallel decode on 2 and 4 ranks against one process."""

from __future__ import annotations

import pytest
import torch

from mlakit.parallel import context_parallel_decode, merge_over_ranks
from mlakit.plan import plan_decode
from tests.parallel import steps
from tests.parallel.ranks import WORLDS
from tests.parallel.steps import BF16, F32, STEP

METHODS = ("all_gather", "all_to_all", "all_reduce")
worlds = pytest.mark.parametrize("world", WORLDS)
methods = pytest.mark.parametrize("method", METHODS)


@pytest.mark.slow
@worlds
@methods
@pytest.mark.parametrize("interleave", [1, 4])
def test_decode_is_that_of_one_process(ranks, world, method, interleave):
    ranks.run(world, steps.check_decode, interleave, method)


@pytest.mark.slow
@worlds
@methods
def test_bf16(ranks, world, method):
    ranks.run(world, steps.check_bf16, "bf16", method)


@pytest.mark.slow
@worlds
@pytest.mark.parametrize("format", ["fp8_token", "fp8_block128"])
def test_fp8_rows(ranks, world, format):
    ranks.run(world, steps.check_bf16, format, "all_gather")


@pytest.mark.slow
@worlds
def test_bf16_with_sharded_heads(ranks, world):
    ranks.run(world, steps.check_bf16, "bf16", "all_to_all", is_head_sharded=True)


@pytest.mark.slow
@worlds
def test_plans_are_of_a_ranks_lengths(ranks, world):
    ranks.run(world, steps.check_plans)


@pytest.mark.slow
@worlds
@pytest.mark.parametrize("interleave", [1, 4])
def test_sharded_heads(ranks, world, interleave):
    ranks.run(world, steps.check_head_sharded, interleave)


@pytest.mark.slow
@worlds
def test_results_of_functional_collectives(ranks, world):
    ranks.run(world, steps.check_functional_collectives)


@pytest.mark.slow
@worlds
@methods
@pytest.mark.parametrize(("dtype", "width"), [(F32, 6), (BF16, 3)], ids=str)
def test_merge_matches_the_oracle(ranks, world, method, dtype, width):
    """Three columns of bf16: lse must still be aligned."""
    ranks.run(world, steps.check_merge, method, dtype, width)


@pytest.mark.slow
@worlds
def test_no_tokens(ranks, world):
    ranks.run(world, steps.check_no_tokens)


@pytest.mark.slow
@worlds
def test_ranks_agree(ranks, world):
    ranks.run(world, steps.check_ranks_agree)


@pytest.mark.slow
def test_torch_compile_makes_one_graph(ranks):
    ranks.run(2, steps.check_compiled)


@pytest.mark.slow
def test_bytes_that_are_sent(ranks):
    ranks.run(2, steps.check_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "ring"}, "method must be one of all_gather, all_to_all, all_reduce, got"),
        ({"interleave": 0}, "kv_shard interleave must be"),
        ({"q": STEP.q[:, :3]}, "q.shape[1] (heads) must equal the geometry's num_heads"),
        ({"kv": STEP.kv[:3]}, "kv.shape[0] (tokens) must equal"),
        ({"sink": torch.zeros(2)}, "sink.shape[0] (heads) must equal"),
        ({"mask": "causal"}, "mask must be a Mask, got str"),
        ({"weights": None}, "weights must be LayerWeights, got NoneType"),
        ({"is_head_sharded": True, "method": "all_gather"}, "method must be all_to_all with"),
        ({"plan": plan_decode(STEP.kv_lens, num_ctas=2)}, "plan must be made for kv_lens"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_refused_call_changes_nothing(ranks, changes, said):
    ranks.run(2, steps.check_refused, changes, said)


def test_a_process_without_a_group():
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(
        RuntimeError, match=r"^merge_over_ranks needs torch\.distributed\.init_proc"
    ):
        merge_over_ranks(out, lse)
    with pytest.raises(RuntimeError, match=r"^context_parallel_decode needs"):
        context_parallel_decode(STEP.q, STEP.kv, STEP.weights, STEP.batch())


@pytest.mark.slow
def test_a_failing_rank_fails_the_test(ranks):
    with pytest.raises(AssertionError, match=r"^rank 1 of 2:(.|\n)*on purpose"):
        ranks.run(2, steps.fail)
    assert ranks.is_usable
    ranks.run(4, steps.check_sum)
