"""Every public op refuses arguments that require gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlakit import ops
from mlakit.cache import PagedLatentCache
from mlakit.checks import UnsupportedError
from mlakit.testing import assert_unchanged, snapshot
from tests.ops.cases import CALLS, Call, decode_call
from tests.ops.every_op import assert_same_results, every_call, with_grad


def float_arguments(call: Call) -> list[tuple[str, Tensor]]:
    """The tensors a backward would ask for; not pools, which are storage."""
    found = [(name, t) for name, t in call.tensors() if t.is_floating_point() and "." not in name]
    return [(name, tensor) for name, tensor in found if "extra" not in name]


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
