"""What both branches and the step made of them promise: where they write, when they wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mlakit import steps
from mlakit.ops import _checks
from mlakit.plan import plan_context
from mlakit.steps import CachedBatch, LayerWeights, plan_step
from mlakit.tools.testing import assert_same_bits, assert_unchanged, poison, snapshot
from tests.steps.step_oracles import (
    BF16,
    FP8_STEPS,
    GEOMETRY,
    KV_LENS,
    Q_LENS,
    STEPS,
    Step,
    decode_branch,
    int32,
    mla_step,
    prefill_branch,
)
from tests.transplant import calls_may_not_wait

pytestmark = pytest.mark.usefixtures("place")
interpreted = pytest.mark.interpreted
on_cpu = pytest.mark.on_cpu


@pytest.mark.slow
@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
def test_results_are_written_into_a_given_tensor(branch):
    step = STEPS["bf16"]
    want = branch(*step.arguments())
    room = poison(torch.empty(step.tokens, step.geometry.num_heads, 30, dtype=BF16))
    around = room.clone()
    out = room[..., 2:26]
    assert branch(*step.arguments(), out=out) is out
    assert_same_bits("out", out, want)
    around[..., 2:26] = want
    assert_same_bits("what surrounds it", room, around)


@pytest.mark.slow
@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
def test_twice_the_same_bits(branch):
    step = STEPS["fp8_token-half"]
    assert_same_bits("out", branch(*step.arguments()), branch(*step.arguments()))


@pytest.mark.gpu
@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
@pytest.mark.parametrize(
    "step", [STEPS["fp8_block128-flat"], FP8_STEPS["fp8_token"]], ids=["flat", "fp8"]
)
def test_no_branch_waits_for_the_gpu(step, branch):
    branch(*step.arguments())  # compiles
    with calls_may_not_wait():
        branch(*step.arguments())


@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
@pytest.mark.parametrize("q_lens", [(0, 0), ()], ids=["no queries", "no requests"])
@interpreted
def test_a_step_without_tokens_writes_nothing(branch, q_lens):
    step = Step(kv_lens=(5, 0)[: len(q_lens)], q_lens=q_lens)
    if not q_lens:
        step = replace(step, kv_lens=(), q_lens=())
    q, kv, weights, batch = empty_arguments(step)
    before = snapshot(payload=batch.cache.payload)
    out = branch(q, kv, weights, batch)
    assert out.shape == (0, GEOMETRY.num_heads, GEOMETRY.v_head_dim)
    assert_unchanged(before)


def empty_arguments(step: Step) -> tuple[Tensor, Tensor, LayerWeights, CachedBatch]:
    if step.q_lens:
        return step.arguments()
    donor = Step()
    batch = donor.batch()
    assert isinstance(batch.page_table, Tensor)
    nothing = replace(
        batch, page_table=batch.page_table[:0], kv_lens=batch.kv_lens[:0], q_starts=int32([0])
    )
    return donor.q[:0], donor.kv[:0], donor.weights, nothing


# --- lengths that are not on the host ---------------------------------------------------------


@pytest.fixture
def _lengths_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the lengths could not be read without waiting."""
    monkeypatch.setattr(steps.checks, "values_visible", lambda tensor: False)
    monkeypatch.setattr(_checks, "values_visible", lambda tensor: False)


@pytest.mark.usefixtures("_lengths_on_a_gpu")
@pytest.mark.parametrize(
    ("branch", "maker"), [(prefill_branch, "plan_context"), (mla_step, "plan_step")]
)
@on_cpu
def test_without_lengths_on_the_host_a_plan_must_be_given(branch, maker):
    q, kv, weights, batch = STEPS["bf16"].arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    message = rf"plan must be given if lengths are not on the host \({maker}\), got None"
    with pytest.raises(ValueError, match=message):
        branch(q, kv, weights, batch)
    assert_unchanged(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_lengths_on_a_gpu")
@on_cpu
def test_with_plans_lengths_need_not_be_on_the_host():
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    plan = plan_context(step.kv_lens, step.q_lens, max_rows=6)
    step.check_prefill(prefill_branch(q, kv, weights, batch, plan=plan), batch, max_rows=6)
    q, kv, weights, batch = step.arguments()
    step.check_decode(decode_branch(q, kv, weights, batch), batch)
    step_plan = plan_step(step.kv_lens, step.q_lens)
    assert_same_bits(
        "out",
        mla_step(*step.arguments(), plan=step_plan),
        mla_step(*step.arguments(), plan=step_plan),
    )


@pytest.mark.usefixtures("_lengths_on_a_gpu")
@on_cpu
def test_what_can_be_seen_of_a_stale_plan_is_seen():
    step = STEPS["bf16"]
    with pytest.raises(ValueError, match="plan must be made for a batch of 6, got 5"):
        prefill_branch(*step.arguments(), plan=plan_context(KV_LENS[1:], Q_LENS[1:]))
    with pytest.raises(ValueError, match="plan must be made for 22 new tokens at most, got 23"):
        mla_step(*step.arguments(), plan=plan_step((12, 5, 18, 4, 2, 15), (3, 5, 1, 0, 2, 12)))
