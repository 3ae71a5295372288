"""Every public op as torch.library registers it, its signature and its backends."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import ops
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import Problem
from mlakit.tools.testing import assert_unchanged, snapshot
from mlakit.tools.workloads import CASES
from mlakit.tools.workloads.random_cases import CACHED, UNCACHED
from tests.ops.cases import CALLS, E4M3, strided
from tests.ops.every_op import (
    ONE_EACH,
    OTHER_FORMS,
    assert_same_results,
    assert_same_state,
    every_call,
    interpreted_once,
    one_of_each,
    results_at,
)
from tests.ops.random_cases import PROPERTIES
from tests.paths import ROOT


@pytest.mark.slow
def test_the_calls_here_cover_every_public_function():
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    for names in (CALLS, ONE_EACH):
        assert {CALLS[name]().function.__name__ for name in names} == functions
    assert set(selection.OPS) == functions


def test_every_op_has_a_file_of_tests():
    here = ROOT / "tests/ops"
    assert [op for op in selection.OPS if not (here / f"test_{op}.py").is_file()] == []


def test_every_op_has_random_problems():
    assert {case.op for case in CASES} == {each.spec.op for each in PROPERTIES}
    assert set(CASES) == {*CACHED, *UNCACHED}


@interpreted_once
@every_call
def test_the_calls_here_give_numbers(name, place):
    """A test of two equal results proves nothing about results of poison."""
    for result in results_at(place, CALLS[name]()):
        assert not result.float().isnan().any()
        assert result.float().isfinite().any()


@pytest.fixture
def _allclose_takes_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares before and after with `allclose`, which torch has not for e4m3."""
    allclose = torch.allclose

    def widened(a: Tensor, b: Tensor, **options: Any) -> bool:
        return allclose(*(x.float() if x.dtype == E4M3 else x for x in (a, b)), **options)

    monkeypatch.setattr(torch, "allclose", widened)


@pytest.mark.slow
@every_call
@pytest.mark.usefixtures("_allclose_takes_e4m3")
def test_opcheck(name):
    op, flat = CALLS[name]().packed()
    torch.library.opcheck(op.functional, flat)


@pytest.mark.slow
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
    if op.results:
        assert_same_results(results if isinstance(results, tuple) else (results,), other.run())
    else:
        assert (results, other.run()) == (None, ())
    assert_same_state(call, other)


@pytest.mark.slow
def test_only_what_is_written_is_declared_so():
    for name in ONE_EACH:
        op, _ = CALLS[name]().packed()
        written = [a.name for a in op.functional._schema.arguments if a.is_write]
        caches = {"append": ["layer"], "compress": ["layer", "state"]}.get(name.split("-")[0], [])
        assert written == [each + part for each in caches for part in ("", "_beside")]
        written_out = [a.name for a in op.writing._schema.arguments if a.is_write]
        assert written_out == [*written, *op.results]
        assert not op.writing._schema.returns


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
    select = selection.select

    def note(op: str, problem: Problem, backend: str) -> Any:
        asked.append((op, problem))
        return select(op, problem, backend)

    monkeypatch.setattr(selection, "select", note)
    call.run()
    assert call.function.__name__ in [op for op, _ in asked]
    for op, problem in asked:  # an op may have a kernel of another op beside its own
        facts = {field: getattr(problem, field) for field in problem.__dataclass_fields__}
        for arch in (80, 89, 90, 100, 120):
            on_gpu = Problem(**{**facts, "device": "cuda", "arch": arch})
            assert selection.explain(op, on_gpu)["cpu"] == "needs CPU tensors, got cuda"
            with pytest.raises(UnsupportedError, match="cpu: needs CPU tensors, got cuda"):
                select(op, on_gpu, "cpu")
        assert selection.explain(op, problem)["cpu"] is None
