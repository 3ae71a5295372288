"""A kind of mask that kernels do not know is refused by each of them, and never runs as another."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import pytest

from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import Problem, pretending
from mlakit.model.masks import KINDS, Mask
from mlakit.ops._library import OPS
from tests.ops.cases import CALLS

MASKED = {name: make for name, make in CALLS.items() if "mask" in make().arguments}


class WiderTraits(NamedTuple):
    """The traits of today's masks, and one more."""

    IS_CAUSAL: bool = False
    IS_SLIDING: bool = False
    IS_CHUNKED: bool = False
    IS_COMPRESSED: bool = False
    IS_MADE_UP: bool = False

    has_window = False


@pytest.fixture
def made_up(monkeypatch) -> Mask:
    monkeypatch.setitem(KINDS, "made_up", WiderTraits(IS_CAUSAL=True, IS_MADE_UP=True))
    return Mask("made_up")


def test_the_ops_that_take_a_mask_are_called():
    assert {MASKED[name]().function.__name__ for name in MASKED} >= {
        name for name, op in OPS.items() if "mask" in op.arguments._fields
    }


@pytest.mark.parametrize("spec", selection.SPECS, ids=str)
def test_each_kernel_refuses_it(spec, made_up, monkeypatch):
    monkeypatch.setitem(vars(spec), "predicate", lambda problem: None)
    assert spec.why_not(Problem("cuda", 90, mask="null")) is None
    refusal = spec.why_not(Problem("cuda", 90, mask=made_up.kind))
    assert refusal == f"needs a mask of {' or '.join(spec.masks)}, got made_up"
    assert made_up.kind not in spec.masks


@pytest.mark.parametrize("backend", ["cpu", "triton", "auto"])
@pytest.mark.parametrize("name", MASKED)
def test_each_op_refuses_it_before_anything_is_launched(name, backend, made_up):
    call = MASKED[name]().but(mask=made_up, backend=backend)
    place = nullcontext() if backend == "cpu" else pretending(90)
    with (
        place,
        pytest.raises(UnsupportedError, match=r"needs a mask of null or causal.*, got made_up"),
    ):
        call.run()
