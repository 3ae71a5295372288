"""Random cases and launches for Blackwell are ones that its kernels take: host logic, no GPU."""

from __future__ import annotations

import pytest

from mlakit.dispatch.specs import pretending
from mlakit.kernels.blackwell import support
from mlakit.tools.workloads import DecodeCase, PrefillCase
from mlakit.tools.workloads.random_cases import SeededDraw, random_case
from mlakit.tools.workloads.random_launches import random_launch, selection_of

SEEDS = range(12)


def kernels(cases) -> set[str]:
    with pretending(100, 148):
        selected = [selection_of(case, "cpu", "blackwell") for case in cases]
    assert None not in selected
    return {spec.name for spec, _ in selected}


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """A Triton that can compile the kernels, whichever is installed."""
    monkeypatch.setattr(support, "version", lambda package: "3.9.0")


@pytest.mark.parametrize("kind", [DecodeCase, PrefillCase])
def test_random_cases_are_taken(kind):
    cases = [random_case(SeededDraw(seed), kind, "blackwell") for seed in SEEDS]
    if kind is PrefillCase:
        assert kernels(cases) == {"blackwell"}
    else:
        assert {"fp16", "fp8_block128"} <= {case.format for case in cases}
        small = [case for case in cases if sum(case.kv_lens) < 5000]
        assert kernels(small) <= {"blackwell:n64_bf16", "blackwell:n64_fp8_kv"}


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("mla_decode", {"blackwell:n64_bf16", "blackwell:n64_fp8_kv"}),
        ("sparse_mla", {"blackwell:n64_bf16", "blackwell:n64_fp8_kv"}),
        ("mla_prefill", {"blackwell"}),
    ],
)
def test_random_launches_are_taken(op, expected):
    launches = [random_launch(SeededDraw(seed), op, "blackwell", "cpu") for seed in SEEDS]
    assert kernels(launches) == expected
