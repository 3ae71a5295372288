"""Rules every public op keeps: registration, results to write to, gradients, memory, batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import dispatch, ops
from mlakit.cache import PagedLatentCache, select_requests
from mlakit.checks import UnsupportedError
from mlakit.plan import DecodePlan, DecodePlanTensors, plan_decode
from mlakit.specs import Problem
from mlakit.testing import assert_same_bits, assert_unchanged, poison, snapshot
from tests.conftest import Place
from tests.ops import cases
from tests.ops.cases import (
    CALLS,
    E4M3,
    KV_LENS,
    LAYERS,
    Q_LENS,
    SCALE,
    TOKENS,
    Call,
    append_call,
    decode_call,
    int32,
    sparse_call,
    starts,
    strided,
)

# one call of each op, where the form of its arguments does not matter
ONE_EACH = (
    "decode",
    "append",
    "prefill",
    "sparse-extra",
    "logits",
    "topk-ranges",
    "merge",
    "quantize",
    "scaled-mm",
    "matmul",
)
OTHER_FORMS = ("decode-apart-e4m3", "decode-fp8-plan", "append-block64-transposed", "append-slots")
every_call = pytest.mark.parametrize("name", CALLS)
one_of_each = pytest.mark.parametrize("name", ONE_EACH)
interpreted = pytest.mark.interpreted
interpreted_once = pytest.mark.interpreted(name=ONE_EACH)


def assert_same_results(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(f"result {i}", got, want)


def assert_same_state(actual: Call, expected: Call) -> None:
    """Every tensor that one call could reach holds what the other's holds."""
    for (name, got), (_, want) in zip(actual.tensors(), expected.tensors(), strict=True):
        assert_same_bits(name, got, want)


def results_at(place: Place, call: Call, **others: Any) -> list[Tensor]:
    """The results of a call there, brought here."""
    return [result.cpu() for result in call.on(place.device).run(**others)]


def test_the_calls_here_cover_every_public_function():
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    for names in (CALLS, ONE_EACH):
        assert {CALLS[name]().function.__name__ for name in names} == functions
    assert set(dispatch.OPS) == functions


@interpreted
@every_call
def test_the_calls_here_give_numbers(name, place):
    """A test of two equal results proves nothing about results of poison."""
    for result in results_at(place, CALLS[name]()):
        assert not result.float().isnan().any()
        assert result.float().isfinite().any()


# --- torch.library ----------------------------------------------------------------------------


@pytest.fixture
def _allclose_takes_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares before and after with `allclose`, which torch has not for e4m3."""
    allclose = torch.allclose

    def widened(a: Tensor, b: Tensor, **options: Any) -> bool:
        return allclose(*(x.float() if x.dtype == E4M3 else x for x in (a, b)), **options)

    monkeypatch.setattr(torch, "allclose", widened)


@every_call
@pytest.mark.usefixtures("_allclose_takes_e4m3")
def test_opcheck(name):
    op, flat = CALLS[name]().packed()
    torch.library.opcheck(op.functional, flat)


@pytest.mark.parametrize("name", [*ONE_EACH, *OTHER_FORMS])
@pytest.mark.usefixtures("_allclose_takes_e4m3")
def test_opcheck_of_the_form_that_writes(name):
    call = CALLS[name]()
    op, flat = call.packed()
    torch.library.opcheck(op.writing, [*flat, *call.empty_results(strided)])


@every_call
def test_the_registered_op_is_the_function(name, place):
    call, other = (CALLS[name]().on(place.device) for _ in range(2))
    op, flat = call.packed()
    results = op.functional(*flat)
    assert_same_results(results if isinstance(results, tuple) else (results,), other.run())
    assert_same_state(call, other)


def test_only_what_is_written_is_declared_so():
    for name in ONE_EACH:
        op, _ = CALLS[name]().packed()
        written = [a.name for a in op.functional._schema.arguments if a.is_write]
        assert written == (["layer", "layer_scales"] if name == "append" else [])
        written_out = [a.name for a in op.writing._schema.arguments if a.is_write]
        assert written_out == [*written, *op.results]
        assert not op.writing._schema.returns


# --- torch.compile ----------------------------------------------------------------------------


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def _no_inductor_cache() -> Iterator[None]:
    """Its key lacks the vector width: code cached for AVX-512 is wrong where AVX2 is asked for."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


@every_call
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_equals_eager(name):
    call, eager = CALLS[name](), CALLS[name]()
    results = compiled(call.function)(**call.arguments)
    assert_same_results(results if isinstance(results, tuple) else (results,), eager.run())
    assert_same_state(call, eager)


@one_of_each
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_writes_into_given_tensors(name):
    call, eager = CALLS[name](), CALLS[name]()
    given = dict(zip(call.results, call.empty_results(strided), strict=True))
    compiled(call.function)(**call.arguments, **given)
    assert_same_results(list(given.values()), eager.run())
    assert_same_state(call, eager)


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("given_name", ["out", "lse"])
def test_compiled_writes_into_the_one_tensor_given(given_name):
    call = decode_call()
    given = call.empty_results(strided)[["out", "lse"].index(given_name)]
    results = compiled(call.function)(**call.arguments, **{given_name: given})
    want = decode_call().run()
    assert_same_results(results, want)
    assert_same_bits(given_name, given, want[["out", "lse"].index(given_name)])


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_append_in_place():
    call, eager = append_call("fp8_token"), append_call("fp8_token")
    want = eager.run()

    def rotate(arguments: dict[str, Any]) -> Tensor:
        return ops.norm_rope_quant_append(**arguments, q_rope_out=arguments["q_rope"]) * 2

    doubled = compiled(rotate)(call.arguments)
    assert_same_bits("q_rope", call.arguments["q_rope"], want[0])
    assert_same_bits("what follows in the graph", doubled, want[0] * 2)
    assert_same_bits("payload", call.arguments["cache"].payload, eager.arguments["cache"].payload)


def two_layers(arguments: dict[str, Any], scale: float) -> tuple[Tensor, ...]:
    """Append to both layers of a pool and decode from both, as a model does."""
    results = []
    kv, q_starts = arguments["kv"], arguments["q_starts"]
    for layer in range(LAYERS):
        step = {**arguments, "layer": layer, "kv": kv * (layer + 1)}
        q_rope = ops.norm_rope_quant_append(**step)
        q_latent = q_rope.new_ones(*q_rope.shape[:2], cases.ROW.kv_lora_rank)
        results += ops.mla_decode(
            q_latent,
            arguments["cache"],
            arguments["page_table"],
            arguments["kv_lens"],
            q_rope=q_rope,
            q_starts=q_starts,
            layer=layer,
            softmax_scale=scale,
        )
    return tuple(results)


@pytest.mark.usefixtures("_fresh_dynamo", "_no_inductor_cache")
@pytest.mark.parametrize(
    ("backend", "format"),
    [
        ("aot_eager", "bf16"),
        ("aot_eager", "fp8_token"),
        ("aot_eager", "fp8_block64"),
        ("inductor", "fp8_token"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_one_graph_writes_two_layers_of_a_pool_and_reads_them(backend, format):
    call, eager = append_call(format), append_call(format)
    before = snapshot(payload=call.arguments["cache"].payload)
    results = compiled(two_layers, backend=backend)(call.arguments, SCALE)
    assert_same_results(results, two_layers(eager.arguments, SCALE))
    assert_same_state(call, eager)
    with pytest.raises(AssertionError, match="written to"):
        assert_unchanged(before)


@pytest.mark.usefixtures("_fresh_dynamo")
def test_other_lengths_do_not_recompile():
    function = compiled(two_layers)
    function(append_call("fp8_token").arguments, SCALE)
    others = {"kv_lens": int32([2, 6, 2, 1, 4]), "q_starts": starts([2, 1, 1, 1, 2])}
    call, eager = append_call("fp8_token").but(**others), append_call("fp8_token").but(**others)
    for each in (call, eager):  # rows that become visible hold no poison
        for stored in (each.arguments["cache"].payload, each.arguments["cache"].scales):
            stored.zero_()
    with torch._dynamo.config.patch(error_on_recompile=True):
        results = function(call.arguments, SCALE)
    assert_same_results(results, two_layers(eager.arguments, SCALE))


@pytest.mark.usefixtures("_fresh_dynamo")
def test_other_batch_sizes_do_not_recompile_with_dynamic_shapes():
    function = compiled(ops.mla_decode, dynamic=True)
    call = decode_call()
    assert_same_results(function(**call.arguments), call.run())
    smaller = of_requests(call, [4, 2, 0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same_results(function(**smaller.arguments), smaller.run())


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_call_is_checked_when_it_runs():
    function = compiled(ops.mla_decode)
    function(**decode_call().arguments)
    wrong = decode_call(kv_lens=int32([5, 6, 10_000, 1, 4]))
    with pytest.raises(ValueError, match=r"mla_decode: kv_lens\[2\] must not exceed .* got 10000"):
        function(**wrong.arguments)


# --- results to write to ----------------------------------------------------------------------


@interpreted_once
@every_call
def test_results_are_written_into_given_tensors(name, place):
    want = CALLS[name]().on(place.device).run()
    call = CALLS[name]().on(place.device)
    given = call.empty_results(strided)
    results = call.run(**dict(zip(call.results, given, strict=True)))
    for result, tensor in zip(results, given, strict=True):
        assert result is tensor
    assert_same_results(given, want)


@pytest.mark.parametrize("name", ["decode", "prefill", "sparse-extra", "merge", "quantize"])
def test_one_result_alone_may_be_given(name, place):
    want = CALLS[name]().on(place.device).run()
    for i, keyword in enumerate(CALLS[name]().results):
        call = CALLS[name]().on(place.device)
        given = call.empty_results(strided)[i]
        results = call.run(**{keyword: given})
        assert results[i] is given
        assert_same_results(results, want)


@interpreted
@every_call
def test_nothing_around_a_given_tensor_is_written(name, place):
    call = CALLS[name]().on(place.device)
    rooms = [poison(like.new_empty(*(n + 2 for n in like.shape))) for like in call.empty_results()]
    inner = [room[(slice(1, -1),) * room.ndim] for room in rooms]
    before = [room.clone() for room in rooms]
    call.run(**dict(zip(call.results, inner, strict=True)))
    for room, old, written in zip(rooms, before, inner, strict=True):
        old[(slice(1, -1),) * room.ndim].copy_(written)
        assert_same_bits("the tensor around a result", room, old)


@interpreted
def test_queries_may_be_rotated_in_place_or_to_e4m3(place):
    want = append_call().on(place.device).run()[0]
    call = append_call().on(place.device)
    result = call.run(q_rope_out=call.arguments["q_rope"])[0]
    assert result is call.arguments["q_rope"]
    assert_same_bits("rotated in place", result, want)
    saturated = torch.empty_like(want, dtype=E4M3)
    append_call().on(place.device).run(q_rope_out=saturated)
    assert_same_bits("e4m3", saturated, want.clamp(-448, 448).to(E4M3))


@interpreted
def test_a_merge_may_write_into_one_of_its_parts(place):
    want = CALLS["merge"]().on(place.device).run()
    call = CALLS["merge"]().on(place.device)
    outs, lses = call.arguments["outs"], call.arguments["lses"]
    assert_same_results(call.run(out=outs[0], lse=lses[0]), want)


@interpreted_once
@every_call
def test_inputs_are_not_written(name, place):
    call = CALLS[name]().on(place.device)
    written = "cache." if name.startswith("append") else "nothing"
    before = snapshot(
        **{each: tensor for each, tensor in call.tensors() if not each.startswith(written)}
    )
    call.run()
    assert_unchanged(before)


# --- gradients --------------------------------------------------------------------------------


def float_arguments(call: Call) -> list[tuple[str, Tensor]]:
    """The tensors a backward would ask for; not pools, which are storage."""
    found = [(name, t) for name, t in call.tensors() if t.is_floating_point() and "." not in name]
    return [(name, tensor) for name, tensor in found if "extra" not in name]


def with_grad(call: Call, name: str) -> Call:
    argument, _, index = name.partition("[")
    value = call.arguments[argument]
    if not index:
        return call.but(**{argument: value.detach().requires_grad_()})
    parts = [part.detach() for part in value]
    parts[int(index.rstrip("]"))].requires_grad_()
    return call.but(**{argument: parts})


@every_call
def test_an_input_that_requires_grad_is_refused(name):
    call = CALLS[name]()
    want = CALLS[name]().run()
    assert float_arguments(call)
    for argument, _ in float_arguments(call):
        trained = with_grad(CALLS[name](), argument)
        before = snapshot(**dict(trained.tensors()))
        message = f"{call.function.__name__}: {argument} must not require grad"
        with pytest.raises(UnsupportedError) as refusal:
            trained.run()
        assert str(refusal.value).startswith(message)
        assert_unchanged(before)
    last = float_arguments(call)[-1][0]
    with torch.no_grad():
        assert_same_results(with_grad(CALLS[name](), last).run(), want)
    with torch.inference_mode():
        assert_same_results(with_grad(CALLS[name](), last).run(), want)


def test_a_cache_that_requires_grad_is_refused():
    call = decode_call()
    cache = call.arguments["cache"]
    trained = PagedLatentCache(cache.codec, cache.payload.requires_grad_(), None)
    with pytest.raises(UnsupportedError, match="mla_decode: the payload of layer must not require"):
        call.run(cache=trained)


def test_a_result_tensor_that_requires_grad_is_refused():
    call = decode_call()
    out = call.empty_results()[0].requires_grad_()
    with pytest.raises(UnsupportedError, match="mla_decode: out must not require grad"):
        call.run(out=out)


def test_the_registered_op_refuses_grad_too():
    op, flat = with_grad(decode_call(), "q").packed()
    with pytest.raises(UnsupportedError, match="mla_decode: q must not require grad"):
        op.functional(*flat)


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiling_refuses_grad_too():
    call = with_grad(decode_call(), "q")
    with torch.no_grad():
        assert_same_results(compiled(call.function)(**call.arguments), decode_call().run())
    with pytest.raises(UnsupportedError, match="mla_decode: q must not require grad"):
        torch.compile(call.function, backend="aot_eager")(**call.arguments)


# --- signatures -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode", "prefill", "sparse"])
def test_softmax_scale_must_be_given_by_name(name):
    call = CALLS[name]()
    parameter = inspect.signature(call.function).parameters["softmax_scale"]
    assert parameter.kind is parameter.KEYWORD_ONLY
    assert parameter.default is parameter.empty
    del call.arguments["softmax_scale"]
    with pytest.raises(TypeError, match="softmax_scale"):
        call.run()


@one_of_each
def test_every_function_takes_a_backend_and_its_results(name):
    call = CALLS[name]()
    parameters = inspect.signature(call.function).parameters
    assert parameters["backend"].default == "auto"
    for keyword in call.results:
        assert parameters[keyword].default is None
        assert parameters[keyword].kind is inspect.Parameter.KEYWORD_ONLY


# --- backends ---------------------------------------------------------------------------------


@every_call
def test_the_cpu_backend_by_name(name):
    assert_same_results(CALLS[name]().run(backend="cpu"), CALLS[name]().run())


@one_of_each
def test_an_unknown_backend_is_refused(name):
    call = CALLS[name]()
    before = snapshot(**dict(call.tensors()))
    message = rf"^{call.function.__name__}: backend must be one of auto, .*cpu.*, got 'cuda'$"
    with pytest.raises(ValueError, match=message):
        call.run(backend="cuda")
    assert_unchanged(before)


@one_of_each
def test_a_gpu_problem_never_falls_to_the_cpu(name, monkeypatch):
    """As the op itself describes the problem, on another device."""
    call = CALLS[name]()
    asked: list[tuple[str, Problem]] = []
    select = dispatch.select

    def note(op: str, problem: Problem, backend: str) -> Any:
        asked.append((op, problem))
        return select(op, problem, backend)

    monkeypatch.setattr(dispatch, "select", note)
    call.run()
    ((op, problem),) = asked
    facts = {field: getattr(problem, field) for field in problem.__dataclass_fields__}
    for arch in (80, 89, 90, 100, 120):
        on_gpu = Problem(**{**facts, "device": "cuda", "arch": arch})
        assert dispatch.explain(op, on_gpu)["cpu"] == "needs CPU tensors, got cuda"
        with pytest.raises(UnsupportedError, match="cpu: needs CPU tensors, got cuda"):
            select(op, on_gpu, "cpu")
    assert dispatch.explain(op, problem)["cpu"] is None


# --- batches ----------------------------------------------------------------------------------

PER_TOKEN = ("q", "q_rope", "q_scale", "kv", "weights", "rows", "topk_lens", "logits")
PER_TOKEN += ("row_starts", "row_ends", "x", "outs", "lses", "slots", "positions")
PER_KEY = ("k_nope", "k_rope", "v")


def tokens_of(lengths: Sequence[int], requests: Sequence[int]) -> Tensor:
    """The rows that belong to some requests of a ragged batch."""
    bounds = starts(lengths).tolist()
    ranges = [torch.arange(bounds[b], bounds[b + 1]) for b in requests]
    return torch.cat([torch.arange(0), *ranges])


def of_requests(call: Call, requests: Sequence[int]) -> Call:
    """A call with only these requests of the batch, in this order; a token may be a request."""
    a = call.arguments
    ragged = a.get("q_starts") is not None
    chosen = tokens_of(Q_LENS, requests) if ragged else torch.tensor(requests, dtype=torch.int64)
    keys = tokens_of(KV_LENS, requests) if "kv_starts" in a else None

    def part(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [part(name, each) for each in value]
        if isinstance(value, ops.ExtraRows):
            return value._replace(rows=value.rows[chosen], topk_lens=value.topk_lens[chosen])
        if isinstance(value, (DecodePlan, DecodePlanTensors)):
            kv_lens = [KV_LENS[b] for b in requests]
            return plan_decode(kv_lens, num_ctas=2, tile=2, fixed_split=4)
        if name in PER_TOKEN and value is not None:
            return value[chosen]
        if name in PER_KEY:
            return value[keys]
        return value

    others = {name: part(name, value) for name, value in a.items()}
    if "kv_lens" in a:
        others["kv_lens"] = a["kv_lens"][torch.tensor(requests, dtype=torch.int64)]
        others["page_table"] = select_requests(a["page_table"], requests)
    if ragged:
        others["q_starts"] = starts([Q_LENS[b] for b in requests])
    if keys is not None:
        others["kv_starts"] = starts([KV_LENS[b] for b in requests])
    return call.but(**others)


# a plan that balances the batch depends on it by design, a product of all rows at once may
INDEPENDENT = [
    name
    for name in CALLS
    if name not in ("decode-fp8-plan", "quantize-batch", "matmul") and "scaled-mm" not in name
]


def batch_of(call: Call) -> int:
    """How many requests a call has, be they ragged or a token each."""
    if {"kv_lens", "kv_starts"} & set(call.arguments):
        return len(KV_LENS)
    return len(call.arguments["x"]) if "x" in call.arguments else TOKENS


def rows_of(call: Call, requests: Sequence[int]) -> Tensor:
    """Where the results of some requests stand in the results of all."""
    if call.arguments.get("q_starts") is None:
        return torch.tensor(requests, dtype=torch.int64)
    return tokens_of(Q_LENS, requests)


def take(call: Call, results: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Rows of every result; the scales of quantised rows stand in columns."""
    if call.function is ops.quantize_fp8:
        q, scales = results
        return [q[rows], scales[:, rows]]
    return [result[rows] for result in results]


def independent(call: Call, place: Place) -> Call:
    """Without a plan a GPU kernel may share the keys of a batch among its workers, if not told."""
    if call.function is ops.mla_decode and not place.on_cpu_backend:
        return call.but(deterministic=True)
    return call


@interpreted_once
@pytest.mark.parametrize("name", INDEPENDENT)
def test_the_order_of_a_batch_does_not_matter(name, place):
    call = independent(CALLS[name](), place)
    order = list(range(batch_of(call)))[::-1]
    there = call.on(place.device)
    permuted = of_requests(independent(CALLS[name](), place), order).on(place.device)
    want = take(call, [each.cpu() for each in there.run()], rows_of(call, order))
    got = take(call, [each.cpu() for each in permuted.run()], torch.arange(len(want[0])))
    assert_same_results(got, want)
    if name.startswith("append"):
        assert_same_bits(
            "payload", permuted.arguments["cache"].payload, there.arguments["cache"].payload
        )


@pytest.mark.interpreted(name=("decode", "prefill", "sparse-extra"))
@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_request_does_not_know_what_else_is_in_the_batch(name, place):
    call = independent(CALLS[name](), place)
    results = results_at(place, call)
    for request in range(batch_of(call)):
        rows = rows_of(call, [request])
        alone = of_requests(independent(CALLS[name](), place), [request])
        got = take(call, results_at(place, alone), torch.arange(len(rows)))
        assert_same_results(got, take(call, results, rows))


@interpreted_once
@every_call
def test_twice_the_same_bits(name, place):
    first, second = (CALLS[name]().on(place.device) for _ in range(2))
    assert_same_results(first.run(), second.run())
    assert_same_state(first, second)


@interpreted
@pytest.mark.parametrize("name", ["decode", "append", "prefill", "logits"])
@pytest.mark.parametrize("requests", [[1], []], ids=["no queries", "no requests"])
def test_a_batch_without_tokens(name, requests, place):
    call = of_requests(CALLS[name](), requests).on(place.device)
    before = snapshot(**dict(call.tensors()))
    for result in call.run():
        assert result.shape[0] == 0
    assert_unchanged(before)


@interpreted
@pytest.mark.parametrize("name", ["sparse", "topk", "merge", "quantize"])
def test_no_tokens(name, place):
    call = of_requests(CALLS[name](), []).on(place.device)
    results = call.run()
    assert results[0].shape[0] == 0
    assert len(results) == len(call.results)


@interpreted
def test_a_list_of_no_rows_attends_nothing(place):
    call = sparse_call().on(place.device)
    out, lse, max_logits = call.run(rows=call.arguments["rows"][:, :0])
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert (max_logits == -torch.inf).all()
