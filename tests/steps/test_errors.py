"""Wrong steps, and steps that no kernel takes: refused by name, and nothing was written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.model import masks
from mlakit.model.geometry import RowShape
from mlakit.plan import EvenSplit, plan_context, plan_decode
from mlakit.steps import CachedBatch, StepPlan, plan_step
from mlakit.tools.testing import assert_unchanged, snapshot
from tests.spoiling import COLUMNS_FIRST, Edit, Wrong, WrongCalls, changed, name_of, of, part, rows
from tests.steps.step_oracles import (
    BF16,
    E4M3,
    F32,
    F64,
    FP8_STEPS,
    GEOMETRY,
    KV_LENS,
    PAGE_SIZE,
    Q_LENS,
    STEPS,
    Step,
    decode_branch,
    int32,
    mla_step,
    prefill_branch,
)

pytestmark = pytest.mark.usefixtures("place")
on_cpu = pytest.mark.on_cpu


@pytest.mark.parametrize("op", ["batched_matmul", "mla_prefill", "merge_states"])
@pytest.mark.parametrize("branch", [prefill_branch, mla_step])
def test_a_step_that_has_no_kernel_of_a_later_op_writes_nothing(branch, op, monkeypatch):
    assert_refused_untouched(branch, op, STEPS["bf16"], monkeypatch)


def test_a_decode_without_a_kernel_of_attention_writes_nothing(monkeypatch):
    assert_refused_untouched(decode_branch, "mla_decode", STEPS["bf16"], monkeypatch)


def assert_refused_untouched(
    branch: Callable[..., Tensor], op: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = selection.select

    def refuse(name: str, *arguments: Any) -> Any:
        if name == op:
            raise UnsupportedError(f"{name}: no kernel")
        return select(name, *arguments)

    monkeypatch.setattr(selection, "select", refuse)
    q, kv, weights, batch = step.arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    with pytest.raises(UnsupportedError, match=op):
        branch(q, kv, weights, batch)
    assert_unchanged(before)


STALE = (12, 5, 17, 4, 1, 15)  # KV_LENS of the step before


def bad_page(page: int) -> Edit:
    """A page of cached context, not of new tokens, that is none."""
    return Edit(lambda batch: replace(batch, page_table=changed(batch.page_table, (2, 1), page)))


def other_pool(batch: CachedBatch, row: RowShape) -> CachedBatch:
    return replace(batch, cache=PagedLatentCache.allocate(row, num_pages=30, page_size=PAGE_SIZE))


BOTH: WrongCalls = {
    "q.shape[2] (D_N + D_R) must equal the geometry's qk_head_dim, 24, got 23": {
        "q": part[..., :-1]
    },
    "q.shape[1] (heads) must equal the geometry's num_heads, 3, got 2": {"q": part[:, :2]},
    "q must be bfloat16, got float32": {"q": of(torch.float32)},
    "q must be bfloat16 or float16 or float32, got float8_e4m3fn": {"q": of(E4M3)},
    "kv.shape[0] (tokens) must equal q.shape[0], 22, got 21": {"kv": part[1:]},
    "kv.shape[1] (D_C + D_R) must equal the geometry's row width, 40, got 39": {"kv": part[:, 1:]},
    "q must have a contiguous last axis, got strides (72, 1, 3)": {"q": COLUMNS_FIRST},
    "kv must have a contiguous last axis, got strides (1, 22)": {"kv": COLUMNS_FIRST},
    "weights must be LayerWeights, got UpProjection": {"weights": Edit(lambda t: t.up)},
    "batch must be CachedBatch, got PagedLatentCache": {"batch": Edit(lambda t: t.cache)},
    "layer must be below the cache's 2 layers, got 2": {
        "batch": Edit(lambda b: replace(b, layer=2))
    },
    "cache must be a PagedLatentCache, got Tensor; "
    "PagedLatentCache.wrap(tensor, geometry) makes one": {
        "batch": Edit(lambda b: replace(b, cache=b.cache.payload))
    },
    "cache must have rows like the geometry's, "
    "RowShape(kv_lora_rank=32, qk_rope_head_dim=8, v_width=32), "
    "got RowShape(kv_lora_rank=24, qk_rope_head_dim=16, v_width=24)": {
        "batch": Edit(lambda b: replace(other_pool(b, RowShape(24, 16)), layer=0))
    },
    "page_table[2, 1] must be in [0, 18), got -1": {"batch": bad_page(-1)},
    "page_table[2, 1] must be in [0, 18), got 18": {"batch": bad_page(18)},
    "kv_lens[1] must include the 5 new tokens of the request, got 0": {
        "batch": Edit(lambda b: replace(b, kv_lens=b.kv_lens - b.q_starts.diff()))
    },
    "kv_lens[0] must not exceed the 20 tokens its page table holds, got 52": {
        "batch": Edit(lambda b: replace(b, kv_lens=b.kv_lens + 40))
    },
    "q_starts.shape[0] (batch + 1) must equal one more than the batch, 7, got 6": {
        "batch": Edit(lambda b: replace(b, q_starts=b.q_starts[:-1]))
    },
    "freqs must have a row for position 17 of request 2, got 17 rows": {
        "weights": Edit(lambda t: replace(t, freqs=t.freqs[:17]))
    },
    "out must be bfloat16, got float32": lambda a: {"out": a["q"][..., :24].float()},
    "out.shape[2] (D_V) must equal the geometry's v_head_dim, 24, got 23": lambda a: {
        "out": a["q"][..., :23]
    },
    "out must be writable, got stride 0 on axis 0 (an expanded tensor)": lambda a: {
        "out": a["q"][:1, :, :24].expand(22, 3, 24)
    },
    f"backend must be one of auto, {', '.join(selection.BACKENDS)}, got 'fast'": {
        "backend": "fast"
    },
}
PREFILL: WrongCalls = {
    "mask must be a Mask, got str": {"mask": "causal"},
    "plan must be ContextPlan, got str": {"plan": "x"},
    f"plan must be made for kv_lens {KV_LENS} and q_lens {Q_LENS}, got {STALE} and {Q_LENS}": {
        "plan": plan_context(STALE, Q_LENS)
    },
    "max_context_rows must be None if plan is given, got 4": {
        "plan": plan_context(KV_LENS, Q_LENS),
        "max_context_rows": 4,
    },
    "max_workspace_bytes must be at least 1, got 0": {"max_workspace_bytes": 0},
}
DECODE: WrongCalls = {
    "mask must be a Mask, got NoneType": {"mask": None},
    "plan must be a DecodePlan, its tensors or an EvenSplit, got str": {"plan": "x"},
    "plan must be made for a batch of 6, got 2": {"plan": plan_decode((12, 5), num_ctas=2)},
    "plan must be made for this batch, got another batch size": {
        "plan": plan_decode((12, 5), num_ctas=2).tensors()
    },
    f"plan must be made for kv_lens {KV_LENS}, got {STALE}": {
        "plan": plan_decode(STALE, num_ctas=2)
    },
    "plan must be made for kv_lens[2] = 18 keys, got 9": {
        "plan": plan_decode((12, 5, 9, 4, 1, 15), num_ctas=2, tile=4).tensors()
    },
    "topk_lens must be None without rows, got a tensor": {"topk_lens": int32([1] * 22)},
    "rows.shape[0] (tokens) must equal q.shape[0], 22, got 21": {"rows": int32([[1]] * 21)},
    "topk_lens[0] must not exceed the entries of rows, 1, got 2": {
        "rows": int32([[1]] * 22),
        "topk_lens": int32([2] * 22),
    },
    "mask must be left at its default with rows, got Mask(kind='null', window=0)": {
        "rows": int32([[1]] * 22),
        "mask": masks.NULL,
    },
    "plan must be an EvenSplit with rows, got a DecodePlan": {
        "rows": int32([[1]] * 22),
        "plan": plan_decode(KV_LENS, num_ctas=2),
    },
}
STEP: WrongCalls = {
    "plan must be StepPlan, got str": {"plan": "x"},
    "decode_plan must be a DecodePlan, its tensors or an EvenSplit, got str": {
        "decode_threshold": 12,
        "decode_plan": "x",
    },
    f"decode_plan must be made for kv_lens {KV_LENS}, got {STALE}": {
        "decode_threshold": 12,
        "decode_plan": plan_decode(STALE, num_ctas=2),
    },
    f"plan must be made for kv_lens {KV_LENS} and q_lens {Q_LENS}, "
    f"got {KV_LENS} and (3, 5, 1, 1, 0, 12)": {"plan": plan_step(KV_LENS, (3, 5, 1, 1, 0, 12))},
    "decode_threshold must be None if plan is given, got 4": {
        "plan": plan_step(KV_LENS, Q_LENS),
        "decode_threshold": 4,
    },
    "max_context_rows must be None if plan is given, got 4": {
        "plan": plan_step(KV_LENS, Q_LENS),
        "max_context_rows": 4,
    },
    "decode_plan must be None where a request prefills, got EvenSplit": {
        "decode_plan": EvenSplit(2)
    },
}
FLAT_PLAN = Wrong(
    "plan must be an EvenSplit with rows, got a DecodePlan",
    rows=int32([[1]] * 22),
    plan=plan_decode(KV_LENS, num_ctas=2).tensors(),
)
REFUSALS = [
    *((prefill_branch, wrong) for wrong in rows(BOTH | PREFILL)),
    *((decode_branch, wrong) for wrong in (*rows(BOTH | DECODE), FLAT_PLAN)),
    *((mla_step, wrong) for wrong in rows(BOTH | STEP)),
]


@pytest.mark.parametrize(("branch", "wrong"), REFUSALS, ids=name_of)
@on_cpu
def test_a_wrong_step_is_refused_and_writes_nothing(branch, wrong):
    """Not even q is rotated: the call can be corrected and repeated."""
    q, kv, weights, batch = STEPS["bf16"].arguments()
    arguments = {"q": q, "kv": kv, "weights": weights, "batch": batch}
    arguments["out"] = torch.full((22, 3, 24), 7.0, dtype=BF16)
    arguments |= wrong.of(arguments)
    before = snapshot(q=q, kv=kv, payload=batch.cache.payload, out=arguments["out"])
    with pytest.raises((TypeError, ValueError)) as refusal:
        branch(**arguments)
    op, _, message = str(refusal.value).partition(": ")
    assert message == wrong.message
    assert op in (branch.__name__, "batched_matmul")
    assert_unchanged(before)


@on_cpu
def test_a_prompt_without_angles_is_refused_before_the_other_requests_are_appended():
    q, kv, weights, batch = Step(kv_lens=(3, 20), q_lens=(1, 12)).arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    said = "mla_step: freqs must have a row for position 19 of request 1, got 19 rows"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        mla_step(q, kv, replace(weights, freqs=weights.freqs[:19]), batch)
    assert_unchanged(before)


@pytest.mark.parametrize("decode_threshold", [0, 8, 12])
def test_a_result_that_requires_grad_is_refused_before_anything_is_written(decode_threshold):
    q, kv, weights, batch = STEPS["bf16"].arguments()
    out = torch.zeros(22, 3, 24, dtype=BF16, requires_grad=True)
    before = snapshot(q=q, payload=batch.cache.payload)
    with pytest.raises(UnsupportedError, match=r"^mla_step: out must not require grad"):
        mla_step(q, kv, weights, batch, decode_threshold=decode_threshold, out=out)
    assert_unchanged(before)


@pytest.mark.slow
@pytest.mark.parametrize("branch", [decode_branch, mla_step])
def test_decode_needs_queries_like_the_rows_of_a_float_cache(branch):
    """A prefill branch may read bf16 rows for float32 queries; `mla_decode` may not."""
    step = Step(format="bf16", dtype=F32)
    q, kv, weights, batch = step.arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    with pytest.raises(TypeError, match=f"^{branch.__name__}: q must be bfloat16, got float32$"):
        branch(q, kv, weights, batch)
    assert_unchanged(before)
    step.check_prefill(prefill_branch(q, kv, weights, batch), batch)


@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
def test_values_that_are_the_whole_row_are_refused(branch):
    """A latent result of other columns than the up-projection takes."""
    g = replace(GEOMETRY, v_width=40)
    q, kv, weights, batch = Step(geometry=g).arguments()
    with pytest.raises(ValueError, match="cache must have the latent columns as values"):
        branch(q, kv, weights, batch)


@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
@pytest.mark.parametrize("name", ["q", "kv", "kv_b_proj", "gamma", "freqs", "sink"])
def test_what_requires_grad_is_refused_before_anything_is_written(branch, name):
    step = STEPS["sink"]
    q, kv, weights, batch = step.arguments()
    trained = {
        "q": q,
        "kv": kv,
        "kv_b_proj": weights.up.kv_b_proj.weight,
        "gamma": weights.gamma,
        "freqs": weights.freqs,
        "sink": weights.sink,
    }[name]
    trained.requires_grad_()
    before = snapshot(q=q, payload=batch.cache.payload)
    try:
        with pytest.raises(
            UnsupportedError, match=f"{branch.__name__}: {name} must not require grad"
        ):
            branch(q, kv, weights, batch)
        assert_unchanged(before)
        with torch.no_grad():
            branch(q, kv, weights, batch)
    finally:
        trained.requires_grad_(False)


WRONG_WEIGHTS = {
    "gamma.shape[0] (D_C) must equal the geometry's kv_lora_rank, 32, got 31": {
        "gamma": torch.ones(31)
    },
    "freqs.shape[1] (D_R) must equal the geometry's qk_rope_head_dim, 8, got 6": {
        "freqs": torch.ones(9, 6)
    },
    "gamma must be bfloat16 or float16 or float32, got float64": {
        "gamma": torch.ones(32, dtype=F64)
    },
    "up must be UpProjection, got NoneType": {"up": None},
    "softmax_scale must be finite, got nan": {"softmax_scale": float("nan")},
    "softmax_scale must be a number, got NoneType": {"softmax_scale": None},
    "epsilon must not be negative, got -1.0": {"epsilon": -1.0},
    "rope must be one of interleaved, half, got 'neox'": {"rope": "neox"},
    "sink.shape[0] (heads) must equal the geometry's num_heads, 3, got 2": {"sink": torch.zeros(2)},
    "sink must be float32, got bfloat16": {"sink": torch.zeros(3, dtype=BF16)},
}


@pytest.mark.parametrize("said", WRONG_WEIGHTS)
@on_cpu
def test_weights_of_a_layer_are_checked_when_they_are_made(said):
    with pytest.raises((TypeError, ValueError)) as refusal:
        replace(STEPS["bf16"].weights, **WRONG_WEIGHTS[said])
    assert str(refusal.value) == f"LayerWeights: {said}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((1, 2), (3,)), "plan_context: q_lens must have 2 entries, got 1"),
        (((3, -2), (3, 4)), "plan_context: kv_lens[1] must be at least 0, got -2"),
        (
            ((3, 3), (3, 4)),
            "plan_context: kv_lens[1] must include the 4 new tokens of the request, got 3",
        ),
    ],
)
@on_cpu
def test_plans_of_steps_are_checked(arguments, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        plan_step(*arguments)
    with pytest.raises(ValueError, match="plan_step: decode_threshold must be at least 0, got -1"):
        plan_step((1,), (1,), decode_threshold=-1)
    assert isinstance(plan_step((), ()), StepPlan)


def results_of(step: Step) -> Tensor:
    return torch.empty(step.tokens, GEOMETRY.num_heads, GEOMETRY.v_head_dim, dtype=BF16)


@on_cpu
@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
def test_a_result_that_a_later_op_refuses_writes_nothing(branch):
    q, kv, weights, batch = STEPS["bf16"].arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    out = results_of(STEPS["bf16"])
    with pytest.raises(UnsupportedError, match=f"^{branch.__name__}: out must hold its values in"):
        branch(q, kv, weights, batch, out=torch._neg_view(out))
    with pytest.raises(UnsupportedError, match=f"^{branch.__name__}: out must not be a batch of"):
        torch.func.vmap(lambda out: branch(q, kv, weights, batch, out=out))(out[None])
    with pytest.raises(UnsupportedError, match=f"^{branch.__name__}: out must not require grad"):
        branch(q, kv, weights, batch, out=out.requires_grad_())
    assert_unchanged(before)


OVERWRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], type[Exception], str]] = {
    "expanded": (lambda q: q[:, :1].expand_as(q), ValueError, "q must be writable, got stride 0"),
    "overlapping": (
        lambda q: q.flatten().as_strided(q.shape, (8, 1, 1)),
        ValueError,
        "q must be writable, got shape .* share memory",
    ),
    "negative": (torch._neg_view, UnsupportedError, "q must hold its values in memory"),
}


@on_cpu
@pytest.mark.parametrize("kind", OVERWRITTEN)
@pytest.mark.parametrize(
    ("branch", "options"),
    [(prefill_branch, {}), (mla_step, {"overwrite_q": True, "decode_threshold": 3})],
    ids=["prefill_branch", "mla_step"],
)
def test_queries_that_cannot_be_rotated_in_place_are_refused_first(branch, options, kind):
    change, error, message = OVERWRITTEN[kind]
    q, kv, weights, batch = STEPS["bf16"].arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    with pytest.raises(error, match=f"^{branch.__name__}: {message}"):
        branch(change(q), kv, weights, batch, **options)
    assert_unchanged(before)


@on_cpu
@pytest.mark.parametrize("kind", OVERWRITTEN)
def test_a_step_takes_such_queries_where_it_keeps_them(kind):
    """Some requests decode, others prefill."""
    change = OVERWRITTEN[kind][0]
    found, expected = [], []
    for results, keeps in ((found, True), (expected, False)):
        q, kv, weights, batch = STEPS["bf16"].arguments()
        q = change(q) if keeps else change(q).clone(memory_format=torch.contiguous_format)
        results += [mla_step(q, kv, weights, batch, decode_threshold=3), batch.cache.payload]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02, equal_nan=True)


@on_cpu
@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
def test_scales_of_the_up_projection_that_require_grad_are_refused(branch):
    q, kv, weights, batch = FP8_STEPS["bf16"].arguments()
    scale = weights.up.kv_b_proj.scale
    before = snapshot(q=q, payload=batch.cache.payload)
    matrix = replace(weights.up.kv_b_proj, scale=scale.clone().requires_grad_())
    changed = replace(weights, up=replace(weights.up, kv_b_proj=matrix))
    with pytest.raises(UnsupportedError, match="kv_b_proj_scale must not require grad"):
        branch(q, kv, changed, batch)
    assert_unchanged(before)
