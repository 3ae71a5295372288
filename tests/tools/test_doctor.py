"""`mlakit doctor`: what it says of this machine, and that it notices what is broken."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import pretending
from mlakit.tools import check, cli, doctor
from mlakit.tools.bench import gpu, peers
from tests.kernel_launchers import replace_launcher


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["doctor", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "needs a card")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_it_says_what_works_and_why_not():
    code, output = invoke("--seconds", "0.1")
    assert code == 0, output
    assert f"torch {torch.__version__}" in " ".join(output.split())
    assert "torch sees no CUDA device." in output
    assert re.search(r"hopper +no: ", output)
    assert re.search(r"triton +no: needs a card", output)
    assert re.search(
        r"cpu +works: 14 of 14 ops correct in .* s, then [1-9]\d* random calls", output
    )
    assert re.search(r"flash_mla +no: needs a card", output)
    assert re.search(r"eager +yes: torch", output)
    assert output.rstrip().endswith("All available backends work.")


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_json_has_everything():
    code, output = invoke("--seconds", "0", "--json")
    said = json.loads(output)
    assert (code, said["passed"]) == (0, True)
    assert said["environment"]["torch"] == torch.__version__
    assert set(said["packages"]) == set(doctor.OPTIONAL)
    assert said["origins"] == {"eager": f"torch {torch.__version__}"}
    assert set(said["peers"]) == {peer.name for peer in peers.PEERS}
    by_name = {each["backend"]: each for each in said["backends"]}
    assert set(by_name) == set(selection.BACKENDS)
    assert (by_name["triton"]["works"], by_name["triton"]["why_not"]) == (False, "needs a card")
    assert {each["op"] for each in by_name["cpu"]["ops"]} == set(selection.OPS)
    assert all(each["error"] is None for each in by_name["cpu"]["ops"])
    assert by_name["cpu"]["random"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_a_broken_op_is_noticed(monkeypatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no [memory]")

    replace_launcher(monkeypatch, "indexer_topk", lambda launch: broken, backend="cpu")
    code, output = invoke()
    assert code == 1
    assert re.search(r"cpu +wrong results, see below", output)
    assert "cpu indexer_topk: python -c" in output
    assert "RuntimeError: no [memory]" in output
    assert output.rstrip().endswith("Some results are wrong.")
    assert json.loads(invoke("--json")[1])["passed"] is False


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_what_only_random_calls_show_is_noticed(monkeypatch):
    failure = doctor.check.Failure(
        "mla_decode", "cpu", 7, "out: wrong", "mlakit check …", "python …"
    )
    monkeypatch.setattr(
        doctor.check,
        "run",
        lambda settings: doctor.check.Outcome(settings, {}, 0.0, failure),
    )
    code, output = invoke()
    assert code == 1
    assert "mla_decode is wrong on cpu, seed 7" in output
    assert "Repeat: mlakit check …" in output


@pytest.mark.slow
def test_settings_that_are_not_defaults_are_shown(monkeypatch):
    monkeypatch.setattr(doctor, "_backend_health", lambda *_: doctor.BackendHealth("x", "y", "no"))
    assert doctor.examine(0).settings == {}
    monkeypatch.setenv("MLAKIT_WORKSPACE_MIB", "16")
    monkeypatch.setenv("MLAKIT_CHECK_VALUES", "maybe")
    settings = doctor.examine(0).settings
    assert settings["MLAKIT_WORKSPACE_MIB"] == 16
    assert "must be one of 1, 0" in settings["MLAKIT_CHECK_VALUES"]
    monkeypatch.delenv("MLAKIT_CHECK_VALUES")
    assert "MLAKIT_WORKSPACE_MIB=16" in invoke()[1]


def test_why_a_backend_does_not_work(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor.why_not("triton") == "needs Triton, which is not installed"
    monkeypatch.setattr(doctor, "find_spec", lambda name: "a spec")
    assert doctor.why_not("triton") is None
    assert doctor.why_not("cpu") is None
    monkeypatch.setattr(selection, "SPECS", ())
    assert doctor.why_not("triton") == "this version has no kernels for it"


def test_a_refusal_is_no_error(monkeypatch):
    def refuse(*_: object) -> None:
        raise UnsupportedError("merge_states: no kernel for cpu\n  cpu: not here")

    monkeypatch.setattr(selection, "select", refuse)
    result = check.run_case(check.KINDS["merge_states"](), "cpu", "cpu")
    assert (result.unsupported, result.error) == ("not here", None)


def test_a_backend_that_takes_nothing_here_does_not_count_as_working(monkeypatch):
    reason = "needs sm_90, got sm_80"
    monkeypatch.setattr(doctor, "why_not", lambda backend: None)
    refused = lambda case, *_: check.CaseResult(case.op, 0.0, reason)  # noqa: E731
    monkeypatch.setattr(check, "run_case", refused)
    health = doctor._backend_health("hopper", 1.0)
    ops = ["mla_prefill", "mla_decode", "sparse_mla", "indexer_logits", "scaled_mm_fp8"]
    assert [each.op for each in health.ops] == ops
    assert health.random is None
    assert health.as_json()["works"] is False
    assert doctor._backend_line(health) == f"no: {reason}"


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("op", ["mla_decode", "sparse_mla", "indexer_logits"])
def test_every_backend_takes_the_case_of_the_doctor(op, backend, monkeypatch):
    launches = []
    for spec in selection.specs(op):
        if spec.backend == backend:
            watched = lambda *args, **kwargs: launches.append(args)  # noqa: E731
            monkeypatch.setitem(spec.__dict__, "launch", watched)
    with pretending(90):
        doctor.WIDE_CASES[op].trial("cpu").call(backend)
    assert len(launches) == 1


@pytest.mark.gpu
@pytest.mark.long
def test_every_backend_with_kernels_works_on_the_gpu():
    code, output = invoke("--seconds", "5", "--json")
    said = json.loads(output)
    assert code == 0, output
    works = {each["backend"] for each in said["backends"] if each["works"]}
    on_hopper = {"hopper"} if torch.cuda.get_device_capability() == (9, 0) else set()
    assert works == {"cpu", "triton"} | on_hopper
    assert said["environment"]["gpu"]
