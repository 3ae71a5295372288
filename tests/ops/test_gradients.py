"""Every public op refuses arguments that require gradients, and other transforms of torch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from mlakit import ops
from mlakit.cache import PagedLatentCache
from mlakit.dispatch.checks import UnsupportedError
from mlakit.tools.testing import assert_unchanged, snapshot
from tests.ops.cases import CALLS, Call, decode_call
from tests.ops.every_op import (
    ONE_EACH,
    assert_same_results,
    changed,
    every_call,
    one_of_each,
    with_grad,
)
from tests.steps.step_oracles import STEPS, decode_branch, mla_step, prefill_branch


def float_arguments(call: Call) -> list[tuple[str, Tensor]]:
    """The tensors a backward would ask for; not pools, which are storage."""
    found = [(name, t) for name, t in call.tensors() if t.is_floating_point() and "." not in name]
    return [(name, tensor) for name, tensor in found if "extra" not in name]


@pytest.mark.slow
@every_call
def test_an_input_that_requires_grad_is_refused(name):
    call = CALLS[name]()
    want = CALLS[name]().run()
    if call.function is ops.physical_rows:  # integers have no gradient
        assert not float_arguments(call)
        return
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


# --- forward mode, which torch.no_grad() leaves on ---------------------------------------------


def with_tangent(call: Call, name: str) -> Call:
    """The call with a dual tensor, as in the dual level around it."""
    return changed(call, name, lambda value: fwAD.make_dual(value, torch.ones_like(value)))


def tangent_refusal(call: Call, name: str) -> Any:
    op = call.function.__name__
    return pytest.raises(UnsupportedError, match=re.escape(f"{op}: {name} must not have a tangent"))


@every_call
def test_an_input_with_a_tangent_is_refused(name):
    for argument, _ in float_arguments(CALLS[name]()):
        with fwAD.dual_level():
            dual = with_tangent(CALLS[name](), argument)
            before = snapshot(**dict(dual.tensors()))
            with tangent_refusal(dual, argument):
                dual.run()
            with torch.no_grad(), tangent_refusal(dual, argument):
                dual.run()
            assert_unchanged(before)


@pytest.mark.parametrize("name", [name for name in ONE_EACH if name != "physical-rows"])
def test_forward_mode_through_a_function_is_refused(name):
    call = CALLS[name]()
    for argument, tensor in float_arguments(call):

        def run(value: Tensor, argument: str = argument) -> Tensor:
            results = changed(call, argument, lambda _: value).run()
            return results[0] if results else value

        with tangent_refusal(call, argument):
            torch.func.jvp(run, (tensor,), (torch.ones_like(tensor),))
        with tangent_refusal(call, argument):
            torch.func.jacfwd(run)(tensor)


def test_the_tangent_of_an_outer_function_is_refused():
    call = CALLS["merge"]()
    lse = call.arguments["lses"][0]
    one = (torch.ones_like(lse),)

    def outer(value: Tensor) -> Tensor:
        own = changed(call, "lses[0]", lambda _: value)
        return torch.func.jvp(lambda inner: own.run()[1] + inner, (lse,), one)[1]

    with tangent_refusal(call, "lses[0]"):
        torch.func.jvp(outer, (lse,), one)


@every_call
def test_a_differentiated_function_may_call_an_op_with_constants(name):
    call, want = CALLS[name](), CALLS[name]().run()
    got: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        got.extend(call.run())
        return 2 * x

    assert torch.func.jvp(run, (torch.ones(2),), (torch.ones(2),))[1].tolist() == [2, 2]
    assert_same_results([unwrapped(result) for result in got], want)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that one made in a function of torch.func holds."""
    return torch._C._functorch.get_unwrapped(tensor) if is_wrapped(tensor) else tensor


def is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def test_the_registered_op_refuses_tangents_too():
    call = decode_call()
    op, (q, *flat) = call.packed()
    for run in (op.functional, lambda *given: op.writing(*given, *call.empty_results())):
        with fwAD.dual_level(), tangent_refusal(call, "q"):
            run(fwAD.make_dual(q, q), *flat)
        with tangent_refusal(call, "q"):
            torch.func.jvp(lambda value, run=run: run(value, *flat), (q,), (q,))


def test_inference_mode_has_no_tangents():
    call, want = decode_call(), decode_call().run()
    with fwAD.dual_level():
        dual = with_tangent(call, "q")
        with torch.inference_mode():
            assert_same_results(dual.run(), want)


@pytest.mark.parametrize("entry", ["call", "call_plain"])
def test_no_call_with_a_tangent_is_replayed(entry, monkeypatch):
    """Replay compares shapes, strides and types of tensors, not their tangents."""
    call = decode_call()
    op, (q, *flat) = call.packed()
    replayed: list[object] = []
    monkeypatch.setattr(op._calls, entry, lambda *call: replayed.append(call))
    with fwAD.dual_level(), tangent_refusal(call, "q"):
        if entry == "call":
            with_tangent(call, "q").run()
        else:
            op.functional(fwAD.make_dual(q, q), *flat)
    assert not replayed


@pytest.mark.parametrize("when", ["made", "written", "cached"])
def test_a_cache_with_a_tangent_is_refused(when):
    """Also one whose layer views were cached before."""
    call = decode_call()
    cache = call.arguments["cache"]
    if when == "cached":
        call.run()
    with fwAD.dual_level():
        dual = fwAD.make_dual(cache.payload, torch.ones_like(cache.payload))
        if when == "made":
            call = call.but(cache=PagedLatentCache(cache.codec, dual, None))
        else:
            cache.payload.copy_(dual)
        with tangent_refusal(call, "the payload of layer"):
            call.run()


@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
def test_a_step_with_a_tangent_is_refused(branch):
    q, kv, weights, batch = STEPS["bf16"].arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    with fwAD.dual_level():
        dual = fwAD.make_dual(kv, torch.ones_like(kv))
        with pytest.raises(UnsupportedError, match=f"^{branch.__name__}: kv must not have a tang"):
            branch(q, dual, weights, batch)
    assert_unchanged(before)


# --- other transforms, and tensors whose sign or conjugate is not in memory --------------------


@one_of_each
def test_vmap_is_refused(name):
    call = CALLS[name]()
    argument, tensor = next((name, t) for name, t in call.tensors() if "." not in name)
    op = call.function.__name__
    message = re.escape(f"{op}: {argument} must not be a batch of torch.vmap")
    with pytest.raises(UnsupportedError, match=message):
        torch.func.vmap(lambda value: changed(call, argument, lambda _: value).run())(tensor[None])


@one_of_each
def test_a_negative_view_is_not_written_to(name):
    call = CALLS[name]()
    for keyword, result in zip(call.results, call.empty_results(), strict=True):
        if result.dtype == torch.float8_e4m3fn:
            continue
        message = f"{keyword} must hold its values in memory, got a negative view"
        with pytest.raises(UnsupportedError, match=message):
            call.run(**{keyword: torch._neg_view(result)})


def test_a_negative_view_of_a_cache_is_not_written_to():
    call = CALLS["append-rows"]()
    cache = call.arguments["cache"]
    negative = PagedLatentCache(cache.codec, torch._neg_view(cache.payload), None)
    message = "append_rows: the payload of layer must hold its values in memory, got a negative"
    with pytest.raises(UnsupportedError, match=message):
        call.run(cache=negative)


def test_what_has_no_memory_is_refused_by_name():
    call = decode_call()
    with pytest.raises(UnsupportedError, match=r"mla_decode: q must have memory .*SparseCPU"):
        call.run(q=call.arguments["q"].to_sparse())
