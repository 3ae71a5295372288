"""What tests of every public op share: which calls they make, and how results are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from mlakit.tools.testing import assert_same_bits
from tests.conftest import Place
from tests.ops.cases import CALLS, Call

# one call of each op, where the form of its arguments does not matter
ONE_EACH = (
    "decode",
    "append",
    "append-rows",
    "compress",
    "prefill",
    "sparse-extra",
    "logits",
    "topk-ranges",
    "select",
    "physical-rows",
    "merge",
    "quantize",
    "scaled-mm",
    "matmul",
)
OTHER_FORMS = (
    "sparse-apart-e4m3",
    "decode-apart-e4m3",
    "decode-fp8-plan",
    "append-block64-transposed",
    "append-slots",
)
every_call = pytest.mark.parametrize("name", CALLS)
# those left to `thorough` repeat a form of arguments with another format, mask or plan
every_form = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ONE_EACH + OTHER_FORMS else [pytest.mark.thorough])
        for name in CALLS
    ],
)
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


def changed(call: Call, name: str, change: Callable[[Tensor], Tensor]) -> Call:
    """The call with another tensor in the place of one, by its name in `Call.tensors`."""
    argument, _, index = name.partition("[")
    value = call.arguments[argument]
    if not index:
        return call.but(**{argument: change(value)})
    at = int(index.rstrip("]"))
    parts = [change(part) if i == at else part for i, part in enumerate(value)]
    return call.but(**{argument: type(value)(parts)})


def with_grad(call: Call, name: str) -> Call:
    return changed(call, name, lambda value: value.detach().requires_grad_())
