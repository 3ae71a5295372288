"""The functions refuse tensors with derivatives before anything is written."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from mlakit.checks import UnsupportedError
from mlakit.testing import assert_unchanged, snapshot
from tests.compat.modular.calls import WRITERS, Call, name_of
from tests.compat.modular.scaled_calls import SCALED_WRITERS

WRITTEN = ("output", "q_rope_output")  # torch itself refuses to write to those


def float_arguments(call: Call) -> list[str]:
    return [
        name
        for name, value in call.arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name not in WRITTEN
    ]


@pytest.mark.parametrize("make", [*WRITERS, *SCALED_WRITERS], ids=name_of)
def test_an_argument_with_a_derivative_is_refused(make):
    names = float_arguments(make())
    assert names
    for name in names:
        call = make()
        before = snapshot(**call.storages())
        value = call.arguments[name]
        call.arguments[name] = value.clone().requires_grad_()
        with pytest.raises(UnsupportedError, match="must not require grad"):
            call()
        with fwAD.dual_level():
            call.arguments[name] = fwAD.make_dual(value, torch.ones_like(value))
            with pytest.raises(UnsupportedError, match="must not have a tangent"):
                call()
        assert_unchanged(before)


@pytest.mark.parametrize("name", ["q", "output"])
def test_prefill_writes_nothing_where_a_later_op_refuses_a_view(name):
    make = next(make for make in WRITERS if make.__name__ == "prefill")
    call = make()
    before = snapshot(**call.storages())
    call.arguments[name] = torch._neg_view(call.arguments[name])
    message = f"^mla_prefill_branch_fp8: {name} must hold its values in memory"
    with pytest.raises(UnsupportedError, match=message):
        call()
    assert_unchanged(before)
