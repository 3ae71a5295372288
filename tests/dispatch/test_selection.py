"""Which kernel a call gets, and what the error says when there is none."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from functools import partial
from typing import get_type_hints

import pytest
import torch

from mlakit.dispatch import knobs, selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import KernelSpec, Problem, device_facts
from mlakit.kernels.arguments import DecodePlanArguments, SelectBlockArguments
from mlakit.model.geometry import RowShape
from mlakit.model.masks import INTERVAL_TRAITS
from mlakit.ops._library import OPS

CPU = Problem("cpu", dtype="torch.bfloat16", format="bf16", heads=16, page_size=64)
kernel_spec = partial(KernelSpec, mask_traits=INTERVAL_TRAITS)
HOPPER = replace(CPU, device="cuda", arch=90, row=RowShape(512, 64), mask="causal")


def needs_sm90(problem: Problem) -> str | None:
    return None if problem.arch == 90 else f"needs sm_90, got {problem.device} sm_{problem.arch}"


def needs_cuda(problem: Problem) -> str | None:
    return None if problem.device == "cuda" else f"needs CUDA tensors, got {problem.device}"


def needs_cpu(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else f"needs CPU tensors, got {problem.device}"


@pytest.fixture
def three_backends(monkeypatch):
    """One op with a kernel per backend, fastest first, in place of the real ones."""
    predicates = {"hopper": needs_sm90, "triton": needs_cuda, "cpu": needs_cpu}
    specs = tuple(
        kernel_spec(backend, "attend", f"nowhere.{backend}:attend", predicate)
        for backend, predicate in predicates.items()
    )
    monkeypatch.setattr(selection, "SPECS", specs)
    monkeypatch.setattr(selection, "OPS", ("attend",))
    monkeypatch.setattr(selection, "BACKENDS", tuple(predicates))
    selection._select.cache_clear()
    yield
    selection._select.cache_clear()


@pytest.mark.parametrize("op", selection.OPS)
def test_every_op_runs_on_the_cpu(op):
    assert selection.select(op, CPU).backend == "cpu"
    assert selection.select(op, CPU, backend="cpu").op == op
    assert selection.explain(op, CPU)["cpu"] is None


@pytest.mark.parametrize("op", selection.OPS)
def test_no_call_falls_from_the_gpu_to_the_cpu(op):
    assert selection.explain(op, HOPPER)["cpu"] == "needs CPU tensors, got cuda"
    with pytest.raises(UnsupportedError, match=re.escape("cpu: needs CPU tensors, got cuda")):
        selection.select(op, HOPPER, backend="cpu")


@pytest.mark.parametrize("spec", selection.SPECS, ids=str)
def test_launchers_exist_and_are_named_like_their_op(spec):
    module, function = spec.launcher.split(":")
    assert function == spec.op
    assert module.startswith(f"mlakit.kernels.{spec.backend}.")
    launch = spec.launch.func if spec.kernel else spec.launch
    assert inspect.isfunction(launch)
    assert (launch.__name__, launch.__module__) == (spec.op, module)
    assert not spec.kernel or spec.launch.args == (spec.kernel,)
    assert str(spec) == f"{spec.name}-{spec.op}"


# of an op that launches its kernel once per block of query tokens, not once per call
BLOCK_ARGUMENTS = {"indexer_select": SelectBlockArguments}


@pytest.mark.parametrize("spec", selection.SPECS, ids=str)
def test_launchers_take_the_arguments_of_their_op_and_its_results(spec):
    op = OPS[spec.op]
    function = spec.launch.func if spec.kernel else spec.launch
    hints = get_type_hints(function)
    first, *results = inspect.signature(spec.launch).parameters
    assert hints[first] is BLOCK_ARGUMENTS.get(spec.op, op.arguments)
    assert results == op.results
    assert {hints[name] for name in results} <= {torch.Tensor}
    if spec.planner and spec.op not in BLOCK_ARGUMENTS:
        (only,) = inspect.signature(spec.plan).parameters
        planner = spec.plan.func if spec.kernel else spec.plan
        assert get_type_hints(planner)[only] is DecodePlanArguments


def test_kernels_have_names_where_a_backend_has_several():
    names = [(spec.name, spec.op) for spec in selection.SPECS]
    assert len(names) == len(set(names))
    for op in selection.OPS:
        for backend in selection.backends(op):
            kernels = [spec.kernel for spec in selection.specs(op) if spec.backend == backend]
            assert kernels == [""] or all(kernels)


def test_auto_takes_the_first_kernel_without_an_objection(three_backends):
    blackwell = replace(HOPPER, arch=100)
    chosen = [selection.select("attend", p).backend for p in (HOPPER, blackwell, CPU)]
    assert chosen == ["hopper", "triton", "cpu"]


def test_a_backend_asked_for_by_name_is_the_only_candidate(three_backends):
    assert selection.select("attend", HOPPER, backend="triton").backend == "triton"
    with pytest.raises(UnsupportedError) as error:
        selection.select("attend", CPU, backend="triton")
    assert str(error.value).endswith("\n  triton: needs CUDA tensors, got cpu")
    assert "hopper" not in str(error.value)


def test_unsupported_lists_the_reason_of_every_backend(three_backends):
    problem = Problem("mps", dtype="torch.bfloat16", heads=16, row=RowShape(512, 64))
    with pytest.raises(UnsupportedError) as error:
        selection.select("attend", problem)
    assert str(error.value).splitlines() == [
        "attend: no kernel for mps, dtype=torch.bfloat16, heads=16, row=576/512",
        "  hopper: needs sm_90, got mps sm_0",
        "  triton: needs CUDA tensors, got mps",
        "  cpu: needs CPU tensors, got mps",
    ]
    assert isinstance(error.value, NotImplementedError)


def test_explain_gives_every_backends_reason_or_none(three_backends):
    assert selection.explain("attend", HOPPER) == {
        "hopper": None,
        "triton": None,
        "cpu": "needs CPU tensors, got cuda",
    }
    assert list(selection.explain("attend", CPU)) == ["hopper", "triton", "cpu"]


@pytest.fixture
def two_kernels(monkeypatch):
    """An op with two kernels of one backend: the first is slower up to eight heads."""

    def why_slower(problem: Problem) -> str | None:
        return f"is for more than 8 heads, got {problem.heads}" if problem.heads <= 8 else None

    def few_only(problem: Problem) -> str | None:
        return f"needs at most 64 heads, got {problem.heads}" if problem.heads > 64 else None

    specs = (
        kernel_spec("hopper", "attend", "a:b", needs_sm90, kernel="wide", why_slower=why_slower),
        kernel_spec("hopper", "attend", "a:b", few_only, kernel="narrow"),
    )
    monkeypatch.setattr(selection, "SPECS", specs)
    monkeypatch.setattr(selection, "OPS", ("attend",))
    selection._select.cache_clear()
    yield
    selection._select.cache_clear()


def test_auto_passes_over_a_kernel_that_is_slower(two_kernels):
    def chosen(heads: int, backend: str = "auto") -> str:
        return selection.select("attend", replace(HOPPER, heads=heads), backend).kernel

    assert (chosen(16), chosen(8)) == ("wide", "narrow")
    assert (chosen(16, "hopper"), chosen(8, "hopper")) == ("wide", "narrow")
    assert (chosen(16, "hopper:narrow"), chosen(8, "hopper:wide")) == ("narrow", "wide")
    few = replace(HOPPER, heads=8)
    slower = "is for more than 8 heads, got 8"
    assert selection.explain_kernels("attend", few) == {
        "hopper:wide": slower,
        "hopper:narrow": None,
    }
    assert selection.explain_kernels("attend", replace(HOPPER, heads=16)) == {
        "hopper:wide": None,
        "hopper:narrow": "wide is faster",
    }
    assert selection.explain("attend", few)["hopper"] is None


def test_the_only_kernel_that_can_runs_though_another_would_be_faster(two_kernels):
    asked = replace(HOPPER, heads=8, arch=80)
    assert selection.select("attend", asked).kernel == "narrow"
    with pytest.raises(UnsupportedError) as error:
        selection.select("attend", replace(HOPPER, heads=65, arch=80))
    assert str(error.value).splitlines()[1:] == [
        "  hopper:wide: needs sm_90, got cuda sm_80",
        "  hopper:narrow: needs at most 64 heads, got 65",
    ]
    with pytest.raises(UnsupportedError, match=r"\n  hopper:wide: needs sm_90"):
        selection.select("attend", asked, "hopper:wide")


def test_an_unknown_kernel_is_named_with_the_choices(two_kernels):
    message = "attend: kernel of hopper must be one of wide, narrow, got 'tall'"
    with pytest.raises(ValueError, match=re.escape(message)):
        selection.select("attend", HOPPER, "hopper:tall")


def test_unknown_op_and_backend_are_named_with_the_choices(three_backends):
    with pytest.raises(ValueError, match=re.escape("unknown op 'atend'; choose from attend")):
        selection.select("atend", CPU)
    with pytest.raises(ValueError, match=re.escape("unknown op 'atend'; choose from attend")):
        selection.explain("atend", CPU)
    message = "attend: backend must be one of auto, hopper, triton, cpu, got 'cuda'"
    with pytest.raises(ValueError, match=re.escape(message)):
        selection.select("attend", CPU, backend="cuda")


def test_the_knob_says_what_auto_stands_for(three_backends, monkeypatch):
    with knobs.override(backend="triton"):
        assert selection.select("attend", HOPPER).backend == "triton"
        assert selection.select("attend", HOPPER, backend="hopper").backend == "hopper"
        with pytest.raises(UnsupportedError, match="triton: needs CUDA tensors, got cpu"):
            selection.select("attend", CPU)
    assert selection.select("attend", HOPPER).backend == "hopper"
    monkeypatch.setenv("MLAKIT_BACKEND", "triton")
    assert selection.select("attend", HOPPER).backend == "triton"


def test_a_problem_says_only_what_it_knows():
    assert str(Problem("cpu")) == "cpu"
    assert str(HOPPER) == (
        "cuda sm_90, dtype=torch.bfloat16, format=bf16, heads=16, page_size=64, row=576/512, "
        "mask=causal"
    )


def test_device_facts(monkeypatch):
    assert device_facts(torch.device("cpu")) == ("cpu", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 1))
    assert device_facts(torch.device("cuda:1")) == ("cuda", 121)


def test_a_known_backend_without_the_kernel_is_unsupported():
    message = "^merge_states: no kernel for backend 'hopper', only for cpu, triton$"
    with pytest.raises(UnsupportedError, match=message):
        selection.select("merge_states", HOPPER, backend="hopper")
    assert selection.explain("merge_states", HOPPER)["hopper"] == "has no kernel of merge_states"
    assert selection.select("merge_states", HOPPER).backend == "triton"
