"""Every public op under torch.compile: results as without it, and no recompilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import ops
from mlakit.dispatch.checks import UnsupportedError
from mlakit.tools.testing import assert_same_bits, assert_unchanged, snapshot
from tests.ops import cases
from tests.ops.cases import (
    CALLS,
    LAYERS,
    SCALE,
    Call,
    append_call,
    decode_call,
    int32,
    starts,
    strided,
)
from tests.ops.every_op import (
    assert_same_results,
    assert_same_state,
    every_form,
    one_of_each,
    with_grad,
)
from tests.ops.part_of_batch import of_requests

pytestmark = pytest.mark.slow


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


@every_form
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_equals_eager(name):
    call, eager = CALLS[name](), CALLS[name]()
    results = Call(compiled(call.function), call.arguments).run()
    assert_same_results(results, eager.run())
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
        # 20 seconds of a C++ compiler for code around the ops
        pytest.param("inductor", "fp8_token", marks=pytest.mark.thorough),
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


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiling_refuses_grad_too():
    call = with_grad(decode_call(), "q")
    with torch.no_grad():
        assert_same_results(compiled(call.function)(**call.arguments), decode_call().run())
    with pytest.raises(UnsupportedError, match="mla_decode: q must not require grad"):
        torch.compile(call.function, backend="aot_eager")(**call.arguments)
