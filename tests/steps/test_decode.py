"""The branch that absorbs the up-projection, dense and sparse, by the oracle of `step_oracles`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import reference, steps
from mlakit.cache import request_slots
from mlakit.model.masks import CAUSAL, Mask
from mlakit.plan import EvenSplit, plan_decode
from mlakit.steps.weights import HeadMatrices
from mlakit.tools.testing import assert_matches, assert_same_bits
from tests.steps.step_oracles import (
    F32,
    F64,
    FP8_STEPS,
    PAGE_SIZE,
    STEPS,
    Step,
    decode_branch,
    every_mask,
    every_step,
    int32,
)
from tests.transplant import Transplant

pytestmark = pytest.mark.usefixtures("place")
interpreted = pytest.mark.interpreted


@pytest.mark.slow
@every_step
@interpreted(step=[STEPS["fp8_token-half"], STEPS["nope"]])
def test_decode_is_prefill(step):
    """The same oracle, in the expanded form, checks the absorbed form."""
    q, kv, weights, batch = step.arguments()
    out = decode_branch(q, kv, weights, batch)
    step.check_decode(out, batch)
    step.check_appended(batch)
    assert_same_bits("q", q, step.q)


@pytest.mark.slow
@every_mask
def test_decode_under_every_mask(mask):
    step = STEPS["fp8_token-half"]
    q, kv, weights, batch = step.arguments()
    step.check_decode(decode_branch(q, kv, weights, batch, mask=mask), batch, mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        EvenSplit(3),
        plan_decode(STEPS["bf16"].kv_lens, num_ctas=5, tile=2),
        plan_decode(STEPS["bf16"].kv_lens, num_ctas=5, tile=2).tensors(),
    ],
    ids=["even", "planned", "planned-tensors"],
)
def test_decode_follows_a_plan(plan):
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    step.check_decode(decode_branch(q, kv, weights, batch, plan=plan), batch)


@pytest.mark.slow
@pytest.mark.parametrize("step", FP8_STEPS.values(), ids=list(FP8_STEPS))
@interpreted(step=[FP8_STEPS["crossed-blocks"]])
def test_decode_with_fp8_weights(step, monkeypatch):
    """In two stages: the result of attention is quantised, so what follows depends on its bits."""
    entered = []
    apply = HeadMatrices.apply

    def note(of: HeadMatrices, x: Tensor, **options: Any) -> Tensor:
        entered.append(x.clone().cpu())
        return apply(of, x, **options)

    monkeypatch.setattr(HeadMatrices, "apply", note)
    q, kv, weights, batch = step.arguments()
    out = decode_branch(q, kv, weights, batch)
    q_nope, latent = entered
    assert_same_bits("q_nope", q_nope, step.q[..., : step.geometry.qk_nope_head_dim])
    exact, naive = (
        reference.mla_decode(
            step.absorbed(dtype),
            step.cached_rows(batch),
            step.q_lens,
            softmax_scale=weights.softmax_scale,
            v_width=step.geometry.kv_lora_rank,
            dtype=dtype,
        )[0]
        for dtype in (F64, F32)
    )
    assert_matches("latent result", latent, exact, naive)
    assert_matches("out", out, step.projected(latent, F64), step.projected(latent, F32))
    step.check_appended(batch)


def listed_rows(step: Step, mask: Mask, keep: Callable[[int], bool]) -> list[list[int]]:
    """For every query token, the positions of its request that it sees and `keep` lets through."""
    lists = []
    for kv_len, new in zip(step.kv_lens, step.q_lens, strict=True):
        for position in range(kv_len - new, kv_len):
            lists.append([key for key in range(*mask.interval(position, kv_len)) if keep(key)])
    return lists


def physical(step: Step, lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(rows, topk_lens): garbage after each list's end."""
    requests = [b for b, new in enumerate(step.q_lens) for _ in range(new)]
    rows = torch.full((step.tokens, max(map(len, lists)) + 1), 3, dtype=torch.int32)
    for token, (request, keys) in enumerate(zip(requests, lists, strict=True)):
        slots = request_slots(step.table, PAGE_SIZE, request, 0, step.kv_lens[request])
        rows[token, : len(keys)] = slots[torch.tensor(keys, dtype=torch.int64)].int()
    return rows, int32([len(keys) for keys in lists])


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
@pytest.mark.parametrize("plan", [None, EvenSplit(2)], ids=["whole", "split"])
@interpreted(format=["fp8_token"], plan=[None])
def test_sparse_decode(format, plan):
    step = Step(format=format)
    lists = listed_rows(step, CAUSAL, lambda key: key % 3 != 1)
    rows, lens = physical(step, lists)
    q, kv, weights, batch = step.arguments()
    out = decode_branch(q, kv, weights, batch, rows=rows, topk_lens=lens, plan=plan)
    step.check_appended(batch)
    step.check_sparse(out, batch, lists)


@pytest.mark.slow
def test_sparse_decode_over_all_rows_is_dense_decode():
    step = STEPS["bf16"]
    rows, lens = physical(step, listed_rows(step, CAUSAL, lambda key: True))
    q, kv, weights, batch = step.arguments()
    step.check_decode(decode_branch(q, kv, weights, batch, rows=rows, topk_lens=lens), batch)


def test_sparse_decode_does_not_look_at_the_pages_of_the_context():
    """The lists say where the rows are."""
    step = Step(kv_lens=(9,), q_lens=(1,))
    rows, lens = physical(step, listed_rows(step, CAUSAL, lambda key: True))
    q, kv, weights, batch = step.arguments()
    want = decode_branch(q, kv, weights, batch, rows=rows, topk_lens=lens)
    q, kv, weights, batch = step.arguments()
    assert isinstance(batch.page_table, Tensor)
    batch.page_table[0, :2] = -1
    assert_same_bits("out", decode_branch(q, kv, weights, batch, rows=rows, topk_lens=lens), want)


@pytest.mark.slow
@pytest.mark.parametrize("step", [STEPS["bf16"], FP8_STEPS["fp8_token"]], ids=["bf16", "fp8"])
def test_decode_compiles_into_one_graph(step, place):
    there = Transplant(place.device)
    want_arguments, arguments = there.moved(step.arguments()), there.moved(step.arguments())
    torch._dynamo.reset()
    out = torch.compile(steps.decode_branch, fullgraph=True, backend="aot_eager")(*arguments)
    assert_same_bits("out", out, steps.decode_branch(*want_arguments))
    assert_same_bits("payload", arguments[3].cache.payload, want_arguments[3].cache.payload)
    torch._dynamo.reset()
