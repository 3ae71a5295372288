"""`mlakit check --backend blackwell`: what it runs, records and says; a Hopper kernel stands in."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlakit.dispatch import proofs, selection
from mlakit.dispatch.proofs import Facts
from mlakit.dispatch.specs import pretending
from mlakit.kernels.blackwell import support
from mlakit.model.masks import KINDS
from mlakit.tools import check, cli, doctor, prove
from mlakit.tools.compile.configurations import BLACKWELL, HOPPER
from mlakit.tools.prove import Checked, Configuration

FACTS = Facts("NVIDIA H200", 90, "580.65.06", "3.9.0", "0.9.0", "5f1c")
CASES = {name: HOPPER[name] for name in ("hopper-sparse-h128-bf16", "hopper-sparse-extra")}
CASES["hopper-sparse-fp16"] = HOPPER["hopper-sparse-h16-fp16-splits"]
BF16, FP16 = "sparse_mla m64_bf16: bf16", "sparse_mla m64_bf16: fp16"


@pytest.fixture(autouse=True)
def unproved(monkeypatch, tmp_path):
    """A Hopper kernel that needs a proof for each format, with three configurations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proofs, "facts_of", lambda arch: FACTS if arch == 90 else None)
    specs = tuple(
        replace(spec, variant=lambda problem: problem.format)
        if (spec.op, spec.name) == ("sparse_mla", "hopper:m64_bf16")
        else spec
        for spec in selection.SPECS
    )
    monkeypatch.setattr(selection, "SPECS", specs)
    monkeypatch.setattr(prove, "SPECIALISED", {**prove.SPECIALISED, "hopper": ((90,), CASES)})
    forget()
    yield
    forget()


def forget() -> None:
    proofs._read.cache_clear()
    selection._select.cache_clear()


@pytest.fixture
def here(monkeypatch):
    """A GPU whose configurations are right but for those in the list."""
    wrong: list[str] = []

    def checked(backend: str, configuration: Configuration) -> Checked:
        name, proof, _ = configuration
        return Checked(name, proof, 1.0, "out is wrong" if name in wrong else "")

    def known(backend: str) -> list[Configuration]:
        with pretending(90, 132):
            return real(backend, "cpu")

    real = prove.configurations
    monkeypatch.setattr(prove, "this_gpu", lambda backend: FACTS)
    monkeypatch.setattr(prove, "configurations", known)
    monkeypatch.setattr(prove, "check_configuration", checked)
    return wrong


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["check", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def chosen(format: str) -> str:
    case = replace(CASES["hopper-sparse-h128-bf16"], format=format, dtype=format)
    with pretending(90, 132):
        selected = prove.selection_of(case, "cpu", "auto")
    assert selected is not None
    return selected[0].backend


def test_a_passed_check_lets_auto_take_what_it_proves(here):
    assert chosen("bf16") == chosen("fp16") == "triton"
    code, output = invoke("--backend", "hopper")
    assert code == 0
    assert f"auto takes on this machine:\n  {BF16}; fp16\n" in output
    assert "3 configurations in " in output
    forget()
    assert chosen("bf16") == chosen("fp16") == "hopper"


def test_a_quick_check_proves_the_first_configuration_of_a_kernel(here):
    code, output = invoke("--backend", "hopper", "--quick", "--json")
    said = json.loads(output)
    assert (code, said["passed"]) == (0, True)
    assert [each["name"] for each in said["checked"]] == ["hopper-sparse-h128-bf16"]
    forget()
    assert (chosen("bf16"), chosen("fp16")) == ("hopper", "triton")


def test_a_failed_configuration_is_named_and_proves_nothing(here):
    here.append("hopper-sparse-extra")
    code, output = invoke("--backend", "hopper", "--jobs", "2")
    assert code == 1
    assert f"hopper-sparse-extra is wrong ({BF16}):\nout is wrong" in output
    assert f"auto takes on this machine:\n  {FP16}\nauto leaves out:\n  {BF16}\n" in output
    forget()
    assert (chosen("bf16"), chosen("fp16")) == ("triton", "hopper")
    record = json.loads(proofs.path_of("hopper", 90).read_text())
    assert (record["passed"], record["failed"]) == ([FP16], [BF16])


def test_other_options_make_it_a_random_check(here, monkeypatch):
    asked = []
    monkeypatch.setattr(check, "run_with_progress", lambda settings: asked.append(settings))
    monkeypatch.setattr(prove, "run_with_progress", lambda *_, **__: pytest.fail("it proves"))
    with pytest.raises(AttributeError):  # of the outcome that is none
        CliRunner().invoke(
            cli.app, ["check", "--backend", "hopper", "--count", "1"], catch_exceptions=False
        )
    assert asked[0].count == 1
    for arguments in (("--quick",), ("--backend", "hopper", "--quick", "--seed", "3")):
        code, output = invoke(*arguments)
        assert code == 2
        assert "--quick needs --backend blackwell" in output


def test_a_machine_without_such_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(prove.torch.cuda, "is_available", lambda: False)
    code, output = invoke("--backend", "blackwell", "--quick")
    assert code == 2
    assert "backend blackwell needs a GPU of sm_100 or sm_103, and this machine has none" in output
    assert not proofs.path_of("blackwell", 100).exists()


def test_a_refusal_is_no_failed_check():
    with pretending(80), pytest.raises(ValueError, match="checked here: needs sm_90, got sm_80"):
        prove.configurations("hopper", "cpu")
    assert not proofs.path_of("hopper", 90).exists()


def fail(backend: str, configuration: Configuration) -> None:
    raise AssertionError(f"{configuration.name} on {backend} is wrong")


def die(backend: str, configuration: Configuration) -> None:
    os._exit(1)


def hang(backend: str, configuration: Configuration) -> None:
    time.sleep(1000)


def succeed(backend: str, configuration: Configuration) -> None:
    Path(os.environ["XDG_CACHE_HOME"], configuration.name).touch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "limit_s", "error"),
    [
        (succeed, 300.0, ""),
        (fail, 300.0, "some on hopper is wrong"),
        (die, 300.0, "its process has died"),
        (hang, 0.1, "it has not ended after 0.1 s"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_configuration_has_a_process_of_its_own(body, limit_s, error, tmp_path):
    some = Configuration("some", BF16, CASES["hopper-sparse-extra"])
    checked = prove.check_configuration("hopper", some, body=body, limit_s=limit_s)
    assert (checked.name, checked.proof, checked.error) == ("some", BF16, error)
    assert (tmp_path / "some").exists() == (body is succeed)


def test_configurations_run_with_little_work_with_more_and_with_other_code():
    cases = list(prove.cases_of(BLACKWELL["blackwell-sparse-extra"]))
    assert {case.seed for case in cases} == set(prove.SEEDS)
    assert {(case.num_tokens, case.num_splits) for case in cases} == {(2, 0), (300, 0), (2, 3)}
    assert all(case.extra_format == "bf16" for case in cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse-h64-bf16", "decode-h64-bf16", "prefill-192-128"])
def test_all_cases_of_a_configuration_run_the_kernel_that_it_proves(name, monkeypatch):
    """A check also runs cases with more work and with other code."""
    monkeypatch.setattr(prove, "SEEDS", (0,))
    monkeypatch.setattr(support, "version", lambda package: "3.9.0")
    case = BLACKWELL[f"blackwell-{name}"]
    small = {"oracle": "loop", **dict.fromkeys(("num_tokens", "num_pages"), 9)}
    found = set()
    with pretending(100, 148):
        for each in prove.cases_of(case):
            fields = {key: value for key, value in small.items() if hasattr(each, key)}
            selected = prove.selection_of(replace(each, **fields), "cpu", "blackwell")
            assert selected is not None
            found.add(proofs.configuration(*selected))
    assert len(found) == 1
    assert "" not in found


def test_a_case_that_proves_something_else_is_refused(monkeypatch):
    monkeypatch.setattr(prove, "selection_of", lambda case, device, backend: None)
    with pytest.raises(AssertionError, match="proves None"):
        prove.run_configuration("hopper", Configuration("some", BF16, next(iter(CASES.values()))))


def test_other_heads_masks_and_second_caches_are_proved_each(monkeypatch):
    """A variant is what a kernel is compiled for; see test_proved_variants for all of them."""
    monkeypatch.setattr(support, "version", lambda package: "3.9.0")
    names = ("sparse-h128-bf16", "sparse-h64-bf16", "prefill-192-128")
    cases = {name: BLACKWELL[f"blackwell-{name}"] for name in names}
    monkeypatch.setattr(prove, "SPECIALISED", {"blackwell": ((100,), cases)})
    with pretending(100, 148):
        known = prove.configurations("blackwell", "cpu")
        for each in known:
            assert (
                proofs.configuration(*prove.selection_of(each.case, "cpu", "blackwell"))
                == each.proof
            )
    rows = "bf16 576/512"
    assert {each.proof for each in known} == {
        f"sparse_mla m128_bf16: {rows}",
        f"sparse_mla m128_bf16: {rows}, second cache",
        *(f"sparse_mla n64_bf16: {rows}, {heads} heads" for heads in (16, 32, 64)),
        *(f"sparse_mla n64_bf16: {rows}, second cache, {heads} heads" for heads in (16, 32, 64)),
        *(
            f"mla_prefill: bfloat16 192/128, {mask}"
            for mask, traits in KINDS.items()
            if not traits.IS_COMPRESSED
        ),
    }
    assert [each.name for each in prove.quick(known)] == list(names)


def test_the_first_configuration_is_that_of_most_models():
    assert next(iter(BLACKWELL.values())).row.width == 576


@pytest.mark.parametrize(("is_quick", "count"), [(True, 1), (False, 3)])
def test_the_progress_bar_has_as_many_steps_as_configurations(is_quick, count, here):
    counts, done = [], []
    prove.run("hopper", is_quick=is_quick, jobs=1, before_all=counts.append, after_each=done.append)
    assert (counts, len(done)) == ([count], count)


def test_the_doctor_offers_the_check(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(doctor, "arch_of", lambda device: 90)
    kernels = "small_m_bf16, small_m_fp4_kv, scaled_mm_fp8, m64_bf16, mla_prefill"
    needed = f"auto leaves out what needs a check of {kernels}"
    why = f"{needed} (no record): run mlakit check --backend hopper"
    assert doctor._offer("hopper") == why
    assert doctor._offer("triton") == ""
    health = doctor.BackendHealth("hopper", "cuda", None, (check.CaseResult("a", 1.0),), offer=why)
    assert doctor._backend_line(health) == f"works: 1 of 1 ops correct in 1.0 s; {why}"
    proofs.write("hopper", proofs.Proof(FACTS, passed=(BF16,)))
    assert doctor._offer("hopper") == ""
