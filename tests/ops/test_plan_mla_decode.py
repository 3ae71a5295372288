"""Plans that the kernel makes for later calls: results as without one, layer after layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import PagedLatentCache, RowShape, ops
from mlakit.dispatch import selection
from mlakit.model import masks
from mlakit.ops import decode
from mlakit.ops._checks import check_kv_lens
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.plan import DecodePlanTensors, EvenSplit
from mlakit.tools.testing import assert_matches, assert_same_bits, poison
from tests.conftest import Place
from tests.ops.cases import HEADS, ROW, Call, flat_table, int32, make_cache, normal, starts

Q_LENS = (1, 2, 0, 1, 1)  # two queries have more rows than a partial made for one on average
KV_LENS = (400, 130, 64, 0, 65)
interpreted = pytest.mark.interpreted
# options that a plan and its calls have in common
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "null": {"mask": masks.NULL},
    "window": {"mask": masks.sliding_window_causal(100)},
    "chunked": {"mask": masks.chunked_causal(96)},
    "shard": {"kv_shard": (1, 2, 16)},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def call_of(options: dict[str, Any], *, flat: bool = False) -> Call:
    """float32 throughout: results that differ, differ in the order of float32 sums."""
    generator = torch.Generator().manual_seed(1)
    cache, table = make_cache(generator, KV_LENS, format="fp32", room=[max(KV_LENS)] * len(KV_LENS))
    arguments = {
        "q": normal(generator, sum(Q_LENS), HEADS, ROW.width, dtype=torch.float32),
        "cache": cache,
        "page_table": flat_table(table, KV_LENS) if flat else table,
        "kv_lens": int32(KV_LENS),
        "q_starts": starts(Q_LENS),
        "softmax_scale": 0.2,
    }
    return Call(ops.mla_decode, {**arguments, **options})


def plan_of(call: Call, **others: Any) -> DecodePlanTensors:
    a = call.arguments
    shared = ("cache", "page_table", "kv_lens", "q_starts", "mask", "kv_shard")
    arguments = {name: a[name] for name in shared if name in a}
    return plan_mla_decode(**arguments, heads=HEADS, num_tokens=len(a["q"]), **others)


def assert_equal_but_for_rounding(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for name, mine, other in zip(("out", "lse"), got, want, strict=True):
        assert_matches(name, mine, other.double(), other)


@pytest.mark.slow
@interpreted(options=[OPTIONS[name] for name in ("causal", "window", "shard")])
@every_option
def test_a_plan_serves_every_layer(options, place: Place):
    call = call_of(options).on(place.device)
    plan = plan_of(call)
    for layer in (0, 1):
        results = call.run(plan=plan, layer=layer)
        assert results[0].isfinite().all()
        assert_equal_but_for_rounding(results, call.run(layer=layer))
        # cut elsewhere
        assert_equal_but_for_rounding(results, call.run(layer=layer, deterministic=True))


@interpreted
@pytest.mark.parametrize("flat", [False, True], ids=["paged", "flat"])
def test_a_plan_is_for_one_query_each_by_default(flat, place: Place):
    call = call_of({}, flat=flat)
    call = call.but(q_starts=None).on(place.device)
    a = call.arguments
    plan = plan_mla_decode(a["cache"], a["page_table"], a["kv_lens"], heads=HEADS)
    assert_equal_but_for_rounding(call.run(plan=plan), call.run())


@interpreted
def test_the_scratch_of_a_plan_is_two_partials_a_worker_at_most(place: Place):
    plan = plan_of(call_of({}).on(place.device))
    num_ctas = plan.cta_starts.shape[0] - 1
    assert plan.max_partials <= 2 * num_ctas
    assert plan.partial_starts[-1] <= plan.max_partials
    if not place.on_cpu_backend:
        assert plan.partial_starts[-1] > 0  # or nothing here is cut
        assert all(slot < plan.max_partials for *_, slot in plan.host_items())


@pytest.mark.slow
def test_plans_of_one_backend_serve_another():
    call = call_of({})
    want = call.run()
    for maker in ("cpu", "triton"):
        plan = plan_of(call, backend=maker)
        for user in ("cpu", "triton"):
            assert_equal_but_for_rounding(call.run(plan=plan, backend=user), want)


@pytest.mark.slow
def test_plans_of_other_heads_and_rows_serve_too():
    """A request with more rows than the plan's partials have room for is not split."""
    call = call_of({})
    plan = plan_of(call, backend="triton")
    for slot_rows in (16, 48, 1024):
        results = call.run(plan=plan._replace(slot_rows=slot_rows), backend="triton")
        assert_equal_but_for_rounding(results, call.run())


@interpreted
def test_a_plan_is_refilled_in_place(place: Place):
    """As an engine does that plans outside of its CUDA graph: the calls keep their tensors."""
    call = call_of({}).on(place.device)
    plan = plan_of(call)
    later = [8, 129, 1, 0, 60]
    stale = [tensor.clone() for tensor in plan[:3]]
    other = call.but(kv_lens=int32(later).to(place.device))
    refilled = plan_of(other, out=plan)
    assert all(mine is old for mine, old in zip(refilled[:4], plan[:4], strict=True))
    assert refilled[4:] == plan[4:]
    assert any((mine != old).any() for mine, old in zip(plan[:3], stale, strict=True))
    assert_equal_but_for_rounding(other.run(plan=refilled), other.run())
    for mine, new in zip(refilled[1:3], plan_of(other)[1:3], strict=True):
        assert_same_bits("offsets", mine, new)


@interpreted
@pytest.mark.parametrize("change", ["batch", "tokens"])
def test_a_plan_of_other_sizes_is_not_refilled(change, place: Place):
    call = call_of({}).on(place.device)
    plan = plan_of(call)
    before = [tensor.clone() for tensor in plan[:4]]
    a = call.arguments
    sizes = {"heads": HEADS, "num_tokens": len(a["q"]) + 1, "q_starts": a["q_starts"]}
    if change == "batch":
        sizes = {"heads": HEADS, "num_tokens": 3, "q_starts": a["q_starts"][:4]}
    batch = len(sizes["q_starts"]) - 1
    with pytest.raises(ValueError, match=r"^plan_mla_decode: out must be a plan of as many "):
        plan_mla_decode(
            a["cache"], a["page_table"][:batch], a["kv_lens"][:batch], out=plan, **sizes
        )
    for tensor, old in zip(plan[:4], before, strict=True):
        assert_same_bits("plan", tensor, old)


def test_what_is_no_plan_is_not_refilled():
    with pytest.raises(TypeError, match="out must be a plan of plan_mla_decode, got EvenSplit"):
        plan_of(call_of({}), out=EvenSplit(2))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_a_graph_sees_a_plan_that_was_refilled_outside(backend, format):
    generator = torch.Generator("cuda").manual_seed(0)
    row, num_pages = RowShape(512, 64), 96
    cache = PagedLatentCache.allocate(row, format, num_pages=num_pages, page_size=64, device="cuda")
    rows = torch.randn(num_pages * 64, row.width, generator=generator, device="cuda")
    cache.layer(0).write(torch.arange(len(rows), device="cuda"), rows)
    table = torch.arange(num_pages, dtype=torch.int32, device="cuda").view(3, -1)
    kv_lens = int32([2000, 5, 300]).cuda()
    q = torch.randn(3, 128, row.width, generator=generator, device="cuda").bfloat16()
    arguments = (cache, table, kv_lens)
    plan = plan_mla_decode(*arguments, heads=128, backend=backend)
    options = {"softmax_scale": 0.05, "backend": backend}
    ops.mla_decode(q, *arguments, plan=plan, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ops.mla_decode(q, *arguments, plan=plan, **options)
    for lengths in ([1, 2048, 0], [700, 700, 2048]):
        kv_lens.copy_(int32(lengths))
        plan_mla_decode(*arguments, heads=128, backend=backend, out=plan)
        graph.replay()
        fresh = plan_mla_decode(*arguments, heads=128, backend=backend)
        for got, want in zip(
            results, ops.mla_decode(q, *arguments, plan=fresh, **options), strict=True
        ):
            assert_same_bits("result", got, want)


def test_every_decode_kernel_has_a_planner():
    for spec in selection.specs("mla_decode"):
        assert spec.planner.endswith(":plan_mla_decode")
        assert callable(spec.plan)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(
    ("which", "kv_len", "said"),
    [(0, 300, "300 keys, got 4"), (1, 200, "200 keys, got 1"), (3, 400, "400 keys, got")],
)
def test_a_plan_of_other_lengths_is_refused_where_they_are_visible(backend, which, kv_len, said):
    call = call_of({})
    plan = plan_of(call, backend=backend)
    lengths = list(KV_LENS)
    lengths[which] = kv_len
    with pytest.raises(ValueError, match=rf"^mla_decode: plan must be made for kv_lens.* = {said}"):
        call.run(plan=plan, kv_lens=int32(lengths))


@pytest.mark.parametrize("are_visible", [True, False])
def test_a_plan_of_another_batch_is_refused_whether_lengths_are_visible_or_not(
    are_visible, monkeypatch
):
    if not are_visible:
        monkeypatch.setattr(decode, "check_kv_lens", unread)
    call = call_of({})
    plan = plan_of(call)
    tokens = sum(Q_LENS)
    with pytest.raises(ValueError, match=f"plan must be made for {tokens} query tokens, got 4"):
        call.run(plan=plan._replace(num_tokens=4))
    with pytest.raises(ValueError, match="plan must be made for this batch"):
        call.run(plan=plan._replace(partial_starts=plan.partial_starts[:-1]))


def unread(dims, kv_lens):
    check_kv_lens(dims, kv_lens)


@pytest.mark.slow
def test_a_plan_of_a_window_is_refused_for_a_wider_one():
    call = call_of(OPTIONS["window"])
    plan = plan_of(call, backend="triton")
    with pytest.raises(ValueError, match="plan must be made for kv_lens"):
        call.run(plan=plan, mask=masks.CAUSAL)


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ({"num_tokens": None}, "ValueError: num_tokens must be given with q_starts, got None"),
        ({"num_tokens": -1}, "ValueError: num_tokens must be at least 0, got -1"),
        (
            {"num_tokens": 4},
            "ValueError: q_starts[-1] must not exceed the number of query tokens, 4, got 5",
        ),
        (
            {"num_tokens": 6, "q_starts": None},
            "ValueError: q_starts must be given for 6 query tokens of 5 requests, got None",
        ),
        ({"heads": 0}, "ValueError: heads must be at least 1, got 0"),
        ({"heads": 2.5}, "TypeError: heads must be an integer, got float"),
        ({"mask": "causal"}, "TypeError: mask must be a Mask, got str"),
        ({"kv_shard": (2, 2, 1)}, "ValueError: kv_shard rank must be below world, 2, got 2"),
        ({"kv_lens": int32(KV_LENS[:4])}, "ValueError: page_table.shape[0]"),
    ],
    ids=str,
)
def test_plan_mla_decode_refuses(others, error):
    a = call_of({}).arguments
    names = ("cache", "page_table", "kv_lens", "q_starts")
    arguments = {name: a[name] for name in names} | {"heads": HEADS, "num_tokens": len(a["q"])}
    with pytest.raises((TypeError, ValueError)) as refusal:
        plan_mla_decode(**arguments | others)
    kind, said = error.split(": ", 1)
    assert type(refusal.value).__name__ == kind
    assert str(refusal.value).startswith(f"plan_mla_decode: {said}")


def test_on_the_cpu_a_plan_has_the_lengths_of_the_shard():
    call = call_of({"kv_shard": (1, 2, 16)})
    plan = plan_of(call, backend="cpu")
    counts = {0: 192, 1: 64, 2: 32, 3: 0, 4: 32}
    assert plan.host_items() == [(request, 0, count, -1) for request, count in counts.items()]


@pytest.mark.gpu
@every_option
def test_a_graph_plans_anew_at_every_replay(options):
    others = {"kv_lens": (20, 400, 0, 64, 130), "q_starts": (0, 1, 2, 2, 4, 5)}
    call = call_of(options).on("cuda")
    changed = {name: int32(values).cuda() for name, values in others.items()}
    # pages of the longest request for all of them: any lengths then have rows
    table = call.arguments["page_table"]
    call = call.but(page_table=table[:1].expand(len(KV_LENS), -1).contiguous())
    want = [result.clone() for layer in (0, 1) for result in call.run(layer=layer, **changed)]

    def step() -> list[Tensor]:
        plan = plan_of(call)
        return [result for layer in (0, 1) for result in call.run(plan=plan, layer=layer)]

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for result in results:
        poison(result)
    for name, values in changed.items():
        call.arguments[name].copy_(values)
    graph.replay()
    for i, (got, expected) in enumerate(zip(results, want, strict=True)):
        assert_same_bits(f"result {i}", got.cpu(), expected.cpu())


@pytest.mark.gpu
def test_planning_does_not_wait_for_the_gpu():
    call = call_of({}).on("cuda")
    call.run(plan=plan_of(call))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run(plan=plan_of(call))
    finally:
        torch.cuda.set_sync_debug_mode("default")
