"""The attending halves of the branches: without an append, with lse, sinks and shards.

Steps are float32 throughout, so that two ways to one result differ by float32 rounding only.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import merge_states, norm_rope_quant_append, physical_rows, reference, steps
from mlakit.cache import KVShard
from mlakit.model import masks
from mlakit.plan import EvenSplit, plan_context, plan_decode
from mlakit.steps import CachedBatch
from mlakit.tools.testing import assert_same_bits, assert_unchanged, snapshot
from tests.steps.step_oracles import F32, PAGE_SIZE, STEPS, Step, int32
from tests.transplant import CPU, carried, device_of_calls

pytestmark = pytest.mark.usefixtures("place")
interpreted = pytest.mark.interpreted
STEP = Step(format="fp32", dtype=F32)
SINK = torch.tensor([0.5, -torch.inf, 2.0])
append = carried(norm_rope_quant_append)
decode_attend = carried(steps.decode_attend)
decode_branch = carried(steps.decode_branch)
merge = carried(merge_states)


def prefill_attend(q: Tensor, up: Any, batch: CachedBatch, **options: Any) -> Any:
    """With a plan where the lengths are on a GPU."""
    if device_of_calls() != CPU and "plan" not in options:
        lengths = batch.kv_lens.tolist(), batch.q_starts.diff().tolist()
        options["plan"] = plan_context(*lengths, max_rows=options.pop("max_context_rows", None))
    return carried(steps.prefill_attend)(q, up, batch, **options)


def appended(step: Step, batch: CachedBatch, **options: Any) -> Tensor:
    """The step's queries, rotated; its tokens are in the cache of `batch`."""
    weights, q = step.weights, step.q.clone()
    q_rope = q[..., step.geometry.qk_nope_head_dim :]
    rotated = append(
        q_rope,
        step.kv,
        weights.freqs,
        weights.gamma,
        batch.cache,
        batch.page_table,
        batch.kv_lens,
        batch.q_starts,
        epsilon=weights.epsilon,
        layer=batch.layer,
        rope=weights.rope,
        **options,
    )
    q_rope.copy_(rotated)
    return q


def of_step(step: Step) -> tuple[Tensor, Any, CachedBatch, dict[str, Any]]:
    batch = step.batch()
    q = appended(step, batch)
    return q, step.weights.up, batch, {"softmax_scale": step.weights.softmax_scale}


def assert_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for name, mine, other in zip(("out", "lse"), got, want, strict=True):
        assert mine.isfinite().any(), name
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5)


def exact(step: Step, q: Tensor, batch: CachedBatch, sink: Tensor | None) -> Any:
    """The oracle: expanded attention in float64 over the rows of the cache."""
    g, up = step.geometry, step.weights.up
    rows = torch.cat(step.cached_rows(batch))
    matrix = up.kv_b_proj.weight[0].double()
    expanded = rows[:, : g.kv_lora_rank] @ matrix.T
    k_nope, v = expanded.unflatten(1, (g.num_heads, -1)).split(
        [g.qk_nope_head_dim, g.v_head_dim], dim=-1
    )
    return reference.mla_prefill(
        q,
        k_nope,
        rows[:, g.kv_lora_rank :],
        v,
        batch.q_starts.tolist(),
        [0, *torch.tensor(step.kv_lens).cumsum(0).tolist()],
        softmax_scale=step.weights.softmax_scale,
        sink=sink,
    )


@interpreted
@pytest.mark.parametrize("sink", [None, SINK], ids=["", "sink"])
def test_both_halves_match_the_oracle(sink):
    q, up, batch, options = of_step(STEP)
    before = snapshot(q=q, cache=batch.cache.payload)
    want = tuple(each.float() for each in exact(STEP, q, batch, sink))
    given = {**options, "sink": sink}
    assert_close(decode_attend(q, up, batch, **given), want)
    assert_close(decode_attend(q, up, batch, **given, plan=EvenSplit(3)), want)
    assert_close(prefill_attend(q, up, batch, **given), want)
    assert_close(prefill_attend(q, up, batch, **given, max_context_rows=7), want)
    assert_unchanged(before)


@pytest.mark.parametrize("name", STEPS)
def test_decode_attend_is_the_branch_without_its_append(name):
    step = STEPS[name]
    q, up, batch, options = of_step(step)
    out, lse = decode_attend(q, up, batch, **options, sink=step.weights.sink)
    other = step.batch()
    want = decode_branch(step.q.clone(), step.kv, step.weights, other)
    assert_same_bits("out", out, want)
    assert_same_bits("cache", batch.cache.payload, other.cache.payload)
    assert lse.shape == out.shape[:2]


@pytest.mark.parametrize("mask", [masks.NULL, masks.sliding_window_causal(4)], ids=str)
def test_masks(mask):
    q, up, batch, options = of_step(STEP)
    got = decode_attend(q, up, batch, mask=mask, **options)
    assert_close(got, prefill_attend(q, up, batch, mask=mask, **options))


def test_listed_rows():
    """All rows that a query sees are the attention without a list."""
    q, up, batch, options = of_step(STEP)
    positions = reference.append_positions(STEP.kv_lens, STEP.q_lens)
    longest = max(STEP.kv_lens)
    listed = torch.arange(longest).expand(len(q), longest).clone()
    listed[listed > torch.tensor(positions)[:, None]] = -1
    rows = carried(physical_rows)(listed, batch.page_table, PAGE_SIZE, batch.q_starts)
    got = decode_attend(q, up, batch, rows=rows, sink=SINK, **options)
    assert_close(got, decode_attend(q, up, batch, sink=SINK, **options))


@interpreted
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4)])
def test_shards_merge_to_the_whole(world, interleave):
    """Every rank appends its tokens, attends to them; the sink joins the merge."""
    q, up, batch, options = of_step(STEP)
    want = decode_attend(q, up, batch, sink=SINK, **options)
    parts = []
    for rank in range(world):
        shard = KVShard(rank, world, interleave)
        local = STEP.shard(shard)
        mine = appended(STEP, local, kv_shard=shard)
        assert_same_bits("queries", mine, q)
        lens = [shard.local_count(n) for n in STEP.kv_lens]
        plan = plan_decode(lens, num_ctas=3, tile=2) if rank else None
        parts.append(decode_attend(mine, up, local, kv_shard=shard, plan=plan, **options))
    outs, lses = zip(*parts, strict=True)
    assert_close(merge(list(outs), list(lses), sink=SINK), want)


WRONG = [
    ({"up": 3}, "TypeError: up must be UpProjection, got int"),
    ({"batch": None}, "TypeError: batch must be CachedBatch, got NoneType"),
    ({"q": torch.zeros(22, 3, 20)}, "ValueError: q.shape[2] (D_N + D_R) must equal the geometry's"),
    ({"sink": torch.zeros(4)}, "ValueError: sink.shape[0] (heads) must equal the geometry's"),
    ({"softmax_scale": float("nan")}, "ValueError: softmax_scale must be finite, got nan"),
    ({"mask": "causal"}, "TypeError: mask must be a Mask, got str"),
]


@pytest.mark.on_cpu
@pytest.mark.parametrize("function", ["decode_attend", "prefill_attend"])
@pytest.mark.parametrize(("others", "error"), WRONG, ids=[error for _, error in WRONG])
def test_wrong_calls(others, error, function):
    q, up, batch, options = of_step(STEP)
    arguments = {"q": q, "up": up, "batch": batch, **options, **others}
    kind, _, said = error.partition(": ")
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{function}: {said}")) as refusal:
        getattr(steps, function)(**arguments)
    assert type(refusal.value).__name__ == kind


@pytest.mark.on_cpu
def test_wrong_shards_and_plans():
    q, up, batch, options = of_step(STEP)
    rows = torch.zeros(len(q), 2, dtype=torch.int32)
    for others, said in (
        ({"kv_shard": (2, 2, 1)}, "kv_shard rank must be below world, 2, got 2"),
        ({"kv_shard": (0, 2, 1), "rows": rows}, "kv_shard must be None with rows"),
        ({"plan": plan_decode([3] * 6, num_ctas=2)}, "plan must be made for kv_lens"),
        ({"topk_lens": int32([1] * len(q))}, "topk_lens must be None without rows"),
    ):
        with pytest.raises(ValueError, match=f"^decode_attend: {re.escape(said)}"):
            steps.decode_attend(q, up, batch, **options, **others)
