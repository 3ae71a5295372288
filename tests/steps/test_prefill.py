"""The branch that expands the cached latents, by the oracle of `step_oracles`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from mlakit.compat.modular import CausalMask, NullMask
from mlakit.model import masks
from mlakit.model.masks import CAUSAL
from mlakit.plan import plan_context
from mlakit.steps import context
from mlakit.steps.weights import UpProjection
from mlakit.tools.testing import assert_matches, assert_same_bits
from tests.steps.step_oracles import (
    BF16,
    E4M3,
    F32,
    F64,
    FP8_STEPS,
    GEOMETRY,
    STEPS,
    Step,
    every_mask,
    every_step,
    prefill_branch,
)

pytestmark = pytest.mark.usefixtures("place")
interpreted = pytest.mark.interpreted


@pytest.mark.slow
@every_step
@interpreted(step=[STEPS["fp8_block128-flat"]])
def test_prefill(step):
    q, kv, weights, batch = step.arguments()
    out = prefill_branch(q, kv, weights, batch)
    step.check_prefill(out, batch)
    step.check_appended(batch)


@pytest.mark.slow
@pytest.mark.parametrize("step", FP8_STEPS.values(), ids=list(FP8_STEPS))
@interpreted(step=[FP8_STEPS["crossed-blocks"]])
def test_prefill_with_fp8_weights(step):
    q, kv, weights, batch = step.arguments()
    out = prefill_branch(q, kv, weights, batch)
    step.check_prefill(out, batch)
    step.check_appended(batch)


@pytest.mark.slow
def test_prefill_rotates_q_in_place_and_nothing_else_of_it():
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    prefill_branch(q, kv, weights, batch)
    assert_matches("q", q, step.rotated(F64), step.rotated(BF16))
    d_n = step.geometry.qk_nope_head_dim
    assert_same_bits("q_nope", q[..., :d_n].contiguous(), step.q[..., :d_n].contiguous())
    assert_same_bits("kv", kv, step.kv)


@pytest.mark.slow
@every_mask
@pytest.mark.parametrize("max_rows", [None, 1, 3, 7, 64])
@interpreted(mask=[CAUSAL], max_rows=[7])
def test_prefill_in_chunks_of_context(mask, max_rows):
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    out = prefill_branch(q, kv, weights, batch, mask=mask, max_context_rows=max_rows)
    step.check_prefill(out, batch, mask, max_rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [FP8_STEPS["fp8_token"], STEPS["fp8_block64-fp32"]],
    ids=["fp8-weights-fp8_token", "fp8_block64-fp32"],
)
def test_prefill_in_chunks_of_a_quantised_context(step):
    q, kv, weights, batch = step.arguments()
    step.check_prefill(prefill_branch(q, kv, weights, batch, max_context_rows=2), batch, max_rows=2)


@pytest.mark.slow
def test_many_chunks_lose_no_more_than_one():
    """Partial results are rounded once each and their sum once, however often it is merged."""
    step = Step(kv_lens=(302,), q_lens=(2,))
    q, kv, weights, batch = step.arguments()
    many = prefill_branch(q, kv, weights, batch, max_context_rows=1)
    step.check_prefill(many, batch, max_rows=1)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [CAUSAL, CausalMask(), NullMask()], ids=["own", "MAX", "null"])
@pytest.mark.parametrize("max_rows", [1, 3, 7, 64, None])
def test_prefill_expands_no_more_context_at_once_than_asked(mask, max_rows, monkeypatch):
    step = STEPS["bf16"]
    expanded = []
    expand = UpProjection.expand

    def note(up: UpProjection, latent: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        expanded.append(len(latent))
        return expand(up, latent, **options)

    monkeypatch.setattr(UpProjection, "expand", note)
    q, kv, weights, batch = step.arguments()
    prefill_branch(q, kv, weights, batch, mask=mask, max_context_rows=max_rows)
    new, *context = expanded
    attended = sum(n for n, queries in zip(step.before, step.q_lens, strict=True) if queries)
    assert new == step.tokens
    assert max(context) <= (max_rows or attended)
    assert sum(context) == attended  # every row once


WIDE = replace(GEOMETRY, num_heads=4)
LONG = {"kv_lens": (400, 7, 140), "q_lens": (3, 0, 140)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        Step(**LONG, geometry=WIDE, dtype=F32, format="fp32"),
        Step(**LONG, geometry=WIDE, format="fp8_block128"),
        Step(
            **LONG,
            geometry=replace(WIDE, qk_nope_head_dim=32, v_head_dim=32),
            weights_dtype=E4M3,
        ),
        Step(kv_lens=(600,), q_lens=(4,), geometry=WIDE, dtype=F32, format="fp32"),
    ],
    ids=["fp32", "fp8-rows", "fp8-weights", "one-request"],
)
def test_prefill_in_parts_that_fit_a_workspace(step, monkeypatch):
    """A buffer for 256 keys of as few heads as can be separated, and for 128 keys of all heads."""
    monkeypatch.setattr(context, "MIN_TILES", 1)
    g, parts = step.geometry, []
    expand = UpProjection.expand

    def note(up: UpProjection, latent: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        k_nope, v = expand(up, latent, **options)
        parts.append(tuple(k_nope.shape[:2]))
        return k_nope, v

    monkeypatch.setattr(UpProjection, "expand", note)
    q, kv, weights, batch = step.arguments()
    group = weights.up.head_group
    row = group * (g.qk_nope_head_dim + g.v_head_dim) + g.row.width
    room = context.NUM_BUFFERS * 256 * row * q.element_size()
    out = prefill_branch(q, kv, weights, batch, max_workspace_bytes=room)
    step.check_prefill(out, batch, max_rows=256)
    attended = sum(n for n, queries in zip(step.before, step.q_lens, strict=True) if queries)
    assert max(rows for rows, _ in parts if rows != step.tokens) <= 256
    assert {heads for rows, heads in parts if rows > 128} <= {group}
    keys = (attended + step.tokens) * g.num_heads
    assert sum(rows * heads for rows, heads in parts) == keys  # each row and head once
    assert len(parts) > attended // 256 * (g.num_heads // group) > 0


def test_a_window_expands_only_the_keys_it_shows(monkeypatch):
    step = Step(kv_lens=(42,), q_lens=(2,))
    expanded = []
    expand = UpProjection.expand
    monkeypatch.setattr(
        UpProjection,
        "expand",
        lambda up, latent, **options: expanded.append(len(latent)) or expand(up, latent, **options),
    )
    q, kv, weights, batch = step.arguments()
    prefill_branch(q, kv, weights, batch, mask=masks.sliding_window_causal(3), max_context_rows=1)
    assert expanded == [2 + 3 - 1]


@pytest.mark.slow
def test_prefill_follows_a_plan():
    step = STEPS["fp32"]
    plan = plan_context(step.kv_lens, step.q_lens, max_rows=5)
    assert len(plan.chunks) > 2
    q, kv, weights, batch = step.arguments()
    planned = prefill_branch(q, kv, weights, batch, plan=plan)
    q, kv, weights, batch = step.arguments()
    assert_same_bits("out", planned, prefill_branch(q, kv, weights, batch, max_context_rows=5))
