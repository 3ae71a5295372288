"""Kernels that `auto` takes only where a check on this machine has passed.

A kernel of Hopper's is marked unproved in place of one of Blackwell's.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlakit.dispatch import knobs, proofs, selection
from mlakit.dispatch.proofs import Facts, Proof
from mlakit.dispatch.specs import Problem
from mlakit.model.geometry import RowShape

FACTS = Facts("NVIDIA H200", 90, "580.65.06", "3.9.0", "0.9.0", "5f1c")
PROBLEM = Problem(
    "cuda",
    arch=90,
    dtype="torch.bfloat16",
    format="bf16",
    heads=128,
    page_size=64,
    row=RowShape(512, 64),
)
NAME = "sparse_mla m64_bf16: bf16"
ENABLE = "mlakit check --backend hopper enables it"


@pytest.fixture(autouse=True)
def unproved(monkeypatch, tmp_path):
    """A Hopper kernel that needs a proof for each format, on a machine with an H200."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proofs, "facts_of", lambda arch: FACTS if arch == 90 else None)
    specs = tuple(
        replace(spec, variant=lambda problem: problem.format) if is_marked(spec) else spec
        for spec in selection.SPECS
    )
    monkeypatch.setattr(selection, "SPECS", specs)
    forget()
    yield
    forget()


def is_marked(spec: selection.KernelSpec) -> bool:
    return (spec.op, spec.name) == ("sparse_mla", "hopper:m64_bf16")


def forget() -> None:
    proofs._read.cache_clear()
    selection._select.cache_clear()


def chosen(problem: Problem = PROBLEM, backend: str = "auto") -> str:
    return selection.select("sparse_mla", problem, backend).backend


def reason(problem: Problem = PROBLEM) -> str | None:
    return selection.explain("sparse_mla", problem)["hopper"]


def test_without_a_record_another_kernel_serves_and_explain_says_how_to_enable_it():
    assert chosen() == "triton"
    assert reason() == f"has not been checked on this machine (no record): {ENABLE}"
    assert selection.explain_kernels("sparse_mla", PROBLEM)["hopper:m64_bf16"] == reason()


def test_a_kernel_that_is_asked_for_needs_no_proof():
    assert chosen(backend="hopper") == chosen(backend="hopper:m64_bf16") == "hopper"
    with knobs.override(backend="hopper"):
        assert chosen() == "hopper"


def test_a_passed_check_enables_the_configurations_that_it_has():
    proofs.write("hopper", Proof(FACTS, passed=(NAME,)))
    forget()
    assert (chosen(), reason()) == ("hopper", None)
    fp16 = replace(PROBLEM, format="fp16", dtype="torch.float16")
    assert chosen(fp16) == "triton"
    assert (
        reason(fp16)
        == f"has not been checked on this machine (sparse_mla m64_bf16: fp16): {ENABLE}"
    )


def test_a_failed_check_names_the_configuration():
    proofs.write("hopper", Proof(FACTS, passed=("sparse_mla m64_bf16: fp16",), failed=(NAME,)))
    forget()
    assert chosen() == "triton"
    assert reason() == f"has failed its check on this machine ({NAME})"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu", "NVIDIA H100"),
        ("arch", 89),
        ("driver", "580.65.07"),
        ("triton", "3.9.1"),
        ("mlakit", "0.9.1"),
        ("sources", "5f1d"),
    ],
)
def test_a_foreign_record_counts_as_none(field, value):
    path = proofs.write("hopper", Proof(FACTS, passed=(NAME,)))
    record = json.loads(path.read_text())
    record["facts"][field] = value
    path.write_text(json.dumps(record))
    forget()
    assert chosen() == "triton"
    assert reason() == (
        f"has not been checked on this machine (the record has another {field}): {ENABLE}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"passed"',
        '{"facts": {}, "passed": [], "failed": []}',
        '{"facts": null, "passed": [], "failed": []}',
        '{"passed": ["sparse_mla m64_bf16: bf16"], "failed": []}',
    ],
)
def test_an_unreadable_record_counts_as_none(text):
    path = proofs.write("hopper", Proof(FACTS, passed=(NAME,)))
    path.write_text(text)
    forget()
    assert chosen() == "triton"
    assert reason() == f"has not been checked on this machine ({path} cannot be read): {ENABLE}"


@pytest.mark.parametrize("names", ["sparse_mla m64_bf16: bf16", 7, [7], None])
def test_a_record_without_lists_of_names_counts_as_none(names):
    path = proofs.write("hopper", Proof(FACTS, passed=(NAME,)))
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "passed": names}))
    forget()
    assert chosen() == "triton"
    assert "cannot be read" in str(reason())


def test_a_machine_without_such_a_gpu_has_no_proof(monkeypatch):
    proofs.write("hopper", Proof(FACTS, passed=(NAME,)))
    monkeypatch.setattr(proofs, "facts_of", lambda arch: None)
    forget()
    assert chosen() == "triton"
    assert "(no such GPU, or several kinds)" in str(reason())


def test_a_record_is_read_once(monkeypatch):
    path = proofs.write("hopper", Proof(FACTS, passed=(NAME,)))
    forget()
    assert chosen() == "hopper"
    path.unlink()
    selection._select.cache_clear()
    assert chosen() == "hopper"


def test_a_knob_leaves_proved_kernels_out(monkeypatch):
    proofs.write("hopper", Proof(FACTS, passed=(NAME,)))
    forget()
    assert chosen() == "hopper"
    with knobs.override(proved_kernels=False):
        assert chosen() == "triton"
        assert reason() == "MLAKIT_PROVED_KERNELS turns it off"
        assert chosen(backend="hopper") == "hopper"
    assert chosen() == "hopper"
    monkeypatch.setenv("MLAKIT_PROVED_KERNELS", "0")
    assert chosen() == "triton"


def test_recorded_calls_know_whether_proved_kernels_are_left_out():
    usual = knobs.for_launch_cache()
    with knobs.override(proved_kernels=False):
        assert knobs.for_launch_cache() != usual
    with knobs.override(proved_kernels=True):
        assert knobs.for_launch_cache() == usual


def test_facts_of_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(proofs.torch.cuda, "is_available", lambda: False)
    assert proofs.facts_of(100) is None


@pytest.mark.parametrize(("names", "expected"), [({"B200"}, "B200"), ({"B200", "GB200"}, None)])
def test_facts_are_those_of_the_gpus_of_an_architecture(names, expected, monkeypatch, tmp_path):
    monkeypatch.undo()
    gpus = [*sorted(names), "RTX 6000"]
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release"
    )
    monkeypatch.setattr(proofs, "DRIVER_FILE", version)
    monkeypatch.setattr(proofs.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(proofs.torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(proofs.torch.cuda, "get_device_name", lambda device: gpus[device.index])
    monkeypatch.setattr(
        proofs, "arch_of", lambda device: 120 if gpus[device.index] == "RTX 6000" else 100
    )
    facts = proofs.facts_of(100)
    assert (None if facts is None else facts.gpu) == expected
    if facts is not None:
        assert (facts.driver, facts.arch, len(facts.sources)) == ("580.65.06", 100, 64)


def test_the_hash_covers_every_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(proofs, "KERNELS", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    before = proofs.hash_of_sources()
    (tmp_path / "b.py").write_text("")
    after = proofs.hash_of_sources()
    (tmp_path / "a.py").write_text("x = 2\n")
    assert len({before, after, proofs.hash_of_sources()}) == 3


def test_every_kernel_of_blackwell_needs_a_proof():
    specs = [spec for spec in selection.SPECS if spec.backend == "blackwell"]
    assert specs
    assert all(spec.variant is not None for spec in specs)
    problem = replace(PROBLEM, arch=100, head_widths=(128, 64, 128))
    masked = {spec: replace(problem, mask="causal" if spec.mask_traits else "") for spec in specs}
    assert [proofs.configuration(*each) for each in masked.items()] == [
        "mla_decode n64_bf16: bf16 576/512, causal, 64 heads",
        "mla_decode n64_fp8_kv: bf16 576/512, causal, 64 heads",
        "sparse_mla m128_bf16: bf16 576/512",
        "sparse_mla n64_bf16: bf16 576/512, 64 heads",
        "sparse_mla n64_fp8_kv: bf16 576/512, 64 heads",
        "mla_prefill: bfloat16 192/128, causal",
        "indexer_logits: causal, 64 heads",
    ]
