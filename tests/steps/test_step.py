"""Mixed batches: which requests are decoded and which prefilled, and that it changes no result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from mlakit import steps
from mlakit.cache import select_requests
from mlakit.plan import EvenSplit, plan_context
from mlakit.steps import CachedBatch, plan_step
from mlakit.steps import step as mixed
from mlakit.tools.testing import assert_matches, assert_same_bits
from tests.steps.step_oracles import (
    FP8_STEPS,
    KV_LENS,
    LAYER,
    Q_LENS,
    STEPS,
    Step,
    decode_branch,
    int32,
    mla_step,
    prefill_branch,
)

pytestmark = pytest.mark.usefixtures("place")
interpreted = pytest.mark.interpreted
on_cpu = pytest.mark.on_cpu


class Spy:
    """How many queries of how many requests each op of attention was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded: list[list[int]] = []
        self.prefilled: list[list[int]] = []
        for branch, name, seen in (
            (steps.decode, "mla_decode", self.decoded),
            (steps.prefill, "mla_prefill", self.prefilled),
        ):
            monkeypatch.setattr(branch, name, self._noting(getattr(branch, name), seen))

    @staticmethod
    def _noting(op: Callable[..., Any], seen: list[list[int]]) -> Callable[..., Any]:
        def noting(*arguments: Any, **options: Any) -> Any:
            q_starts = options["q_starts"] if "q_starts" in options else arguments[4]
            seen.append(q_starts.diff().tolist())
            return op(*arguments, **options)

        return noting


def alone(step: Step, batch: CachedBatch, request: int) -> tuple[slice, CachedBatch]:
    """(its tokens, batch of one) of a request of the step."""
    first, last = list(pairwise(accumulate(step.q_lens, initial=0)))[request]
    part = CachedBatch(
        batch.cache,
        select_requests(batch.page_table, [request]),
        batch.kv_lens[request : request + 1],
        int32([0, last - first]),
        LAYER,
    )
    return slice(first, last), part


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [STEPS["bf16"], STEPS["fp8_block128-flat"], FP8_STEPS["fp8_token"]],
    ids=["bf16", "flat", "fp8"],
)
@pytest.mark.parametrize("decode_threshold", [0, 1, 3, 12])
def test_each_request_of_a_step_gets_what_its_branch_gives_it_alone(step, decode_threshold):
    q, kv, weights, batch = step.arguments()
    out = mla_step(q, kv, weights, batch, decode_threshold=decode_threshold, max_context_rows=4)
    assert_same_bits("q", q, step.q)
    apart_q, apart_kv, _, apart = step.arguments()
    for request, new in enumerate(step.q_lens):
        tokens, part = alone(step, apart, request)
        branch = decode_branch if new <= decode_threshold else prefill_branch
        want = branch(apart_q[tokens], apart_kv[tokens], weights, part)
        # equal up to the roundings of a product of other rows, or of another cut of the context
        assert_matches(f"request {request}", out[tokens], want.double(), want)
    assert_same_bits("payload", batch.cache.payload, apart.cache.payload)
    step.check_appended(batch)


@pytest.mark.slow
@pytest.mark.parametrize("decode_threshold", [0, 3, 12])
@interpreted(decode_threshold=[3])
def test_a_step_meets_the_oracle(decode_threshold):
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    out = mla_step(q, kv, weights, batch, decode_threshold=decode_threshold)
    step.check_step(out, batch, decode_threshold)


def test_one_long_prompt_does_not_send_the_others_to_prefill(monkeypatch):
    step = STEPS["bf16"]  # new tokens: 3, 5, 1, 0, 1, 12
    spy = Spy(monkeypatch)
    mla_step(*step.arguments())
    assert spy.decoded == [[3, 5, 1, 1]]
    assert {tuple(each) for each in spy.prefilled} == {(12,)}


def test_a_step_of_short_requests_only_decodes(monkeypatch):
    step = replace(STEPS["bf16"], q_lens=(1, 1, 0, 2, 1, 8))
    spy = Spy(monkeypatch)
    mla_step(*step.arguments())
    assert spy.prefilled == []
    assert spy.decoded == [[1, 1, 0, 2, 1, 8]]


@pytest.mark.slow
def test_a_step_of_long_requests_only_prefills(monkeypatch):
    step = replace(STEPS["bf16"], kv_lens=(18, 0, 27, 4, 0, 14), q_lens=(9, 0, 10, 0, 0, 11))
    spy = Spy(monkeypatch)
    q, kv, weights, batch = step.arguments()
    out = mla_step(q, kv, weights, batch)
    assert spy.decoded == []
    assert {tuple(each) for each in spy.prefilled} == {(9, 10, 11)}
    step.check_prefill(out, batch)


@on_cpu
def test_a_plan_of_a_step_gives_the_branch_of_each_request():
    plan = plan_step(KV_LENS, Q_LENS, decode_threshold=3, max_context_rows=4)
    assert plan.decode == (0, 2, 4)
    assert plan.prefill == (1, 5)
    assert plan.context == plan_context([5, 15], [5, 12], max_rows=4)
    assert plan_step(KV_LENS, Q_LENS).prefill == (5,)


@pytest.mark.slow
def test_a_step_follows_its_plan(monkeypatch):
    step = STEPS["bf16"]
    spy = Spy(monkeypatch)
    plan = plan_step(step.kv_lens, step.q_lens, decode_threshold=1, max_context_rows=5)
    out = mla_step(*step.arguments(), plan=plan)
    assert spy.decoded == [[1, 1]]
    assert len(spy.prefilled) == 1 + len(plan.context.chunks) > 2
    assert_same_bits(
        "out", out, mla_step(*step.arguments(), decode_threshold=1, max_context_rows=5)
    )


def test_a_step_takes_a_plan_of_its_decode(monkeypatch):
    step = replace(STEPS["bf16"], q_lens=(1, 1, 0, 2, 1, 8))
    q, kv, weights, batch = step.arguments()
    given = []
    decode = mixed.decode_branch

    def note(*arguments, plan, **options):
        given.append(plan)
        return decode(*arguments, plan=plan, **options)

    monkeypatch.setattr(mixed, "decode_branch", note)
    split = EvenSplit(2)
    out = mla_step(q, kv, weights, batch, decode_plan=split)
    assert given == [split]
    step.check_step(out, batch, 8)


@pytest.mark.parametrize("decode_threshold", [0, 3], ids=["all prefill", "mixed"])
def test_a_step_may_rotate_q_in_place(decode_threshold):
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    out = mla_step(q, kv, weights, batch, decode_threshold=decode_threshold, overwrite_q=True)
    step.check_step(out, batch, decode_threshold)
    d_n = step.geometry.qk_nope_head_dim
    assert_same_bits("q_nope", q[..., :d_n].contiguous(), step.q[..., :d_n].contiguous())
