"""Triton's concurrency sanitizer (ConSan) finds what the emulator finds, in Hopper's kernels.

Every kernel runs under it once. What it finds where nothing is wrong is in `EXPLAINED`, and
docs/emulator.md says why. Kernels with a mistake run under both. What was found is in
`gpu_findings.FILE`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pytest
import torch

from tests.paths import ROOT
from tests.tools.emulator import gpu_findings
from tests.tools.emulator.consan_run import RIGHT
from tests.tools.emulator.mistakes import TELLING
from tests.tools.emulator.test_hopper_kernels import SAMPLE
from tests.tools.emulator.test_mistakes import run_telling

TIMEOUT_S = 180
# "FILE:LINE: FUNCTION: block: […], thread: […] Assertion `MESSAGE` failed.", and other quotes
ASSERTION = re.compile(r"(\w+\.py):\d+: .*Assertion [`'\"](.+?)[`'\"] failed")


@dataclass(frozen=True, order=True)
class Finding:
    """A failed assertion of ConSan: the source file that it names, and what it says."""

    file: str
    message: str


@dataclass(frozen=True)
class Report:
    """What ConSan found in a run, whether the results were right, and how long it took."""

    findings: set[Finding]
    is_right: bool
    seconds: float
    output: str


# every kernel, and formats with another order of loads
CONFIGURATIONS = (
    *SAMPLE,
    "hopper-decode-h128-bf16-page1",
    "hopper-decode-h16-fp8_token-page1",
    "hopper-decode-m64-fp8",
    "hopper-sparse-fp8_block128",
)
NAMED = Finding(
    file="m64_fp8_kv.py", message="Buffer being accessed has outstanding writes. Operand: B"
)
EXPLAINED = {
    "hopper-decode-m64-fp8_block128": NAMED,
    "hopper-sparse-fp8_block128": NAMED,
    "hopper-sparse-fp8_block128-extra": NAMED,
    "hopper-sparse-h128-bf16": Finding(
        file="seesaw.py",
        message="Async shared-memory access is missing fence_async_shared. Operand: B",
    ),
}


def findings(output: str) -> set[Finding]:
    """Return what ConSan found, by the output of a process; many threads say the same."""
    return {Finding(file, message) for file, message in ASSERTION.findall(output)}


def run_under_consan(*arguments: str) -> Report:
    """Run `consan_run` in a process of its own: an assertion on the device ends it."""
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip("ConSan takes minutes for a kernel with a Triton before 3.9")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need a Hopper GPU")
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.tools.emulator.consan_run", *arguments],
            cwd=ROOT,
            env={**os.environ, "TRITON_INSTRUMENTATION_MODE": "consan", "TRITON_INTERPRET": "0"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Report(set(), False, TIMEOUT_S, f"no end in {TIMEOUT_S} seconds")
    output = done.stdout + done.stderr
    seconds = round(time.monotonic() - started, 1)
    return Report(findings(output), RIGHT in done.stdout, seconds, output)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_consan_finds_nothing_new(name: str) -> None:
    report = run_under_consan(name)
    gpu_findings.add(
        "kernels under ConSan",
        name,
        findings=[asdict(each) for each in sorted(report.findings)],
        is_right=report.is_right,
        seconds=report.seconds,
    )
    if name in EXPLAINED:
        assert report.findings == {EXPLAINED[name]}, report.output[-2000:]
    else:
        assert report.findings == set(), report.output[-2000:]
        assert report.is_right, report.output[-2000:]


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("name", TELLING)
def test_consan_finds_the_mistakes_that_the_emulator_finds(
    name: str, in_emulator: Callable[..., object]
) -> None:
    outcome = in_emulator(run_telling, name)
    report = run_under_consan("--mistake", name)
    gpu_findings.add(
        "mistakes in the emulator and under ConSan",
        name,
        emulator=outcome.kind,
        consan=[asdict(each) for each in sorted(report.findings)],
        is_right=report.is_right,
        seconds=report.seconds,
    )
    assert outcome.kind == TELLING[name].fault, outcome
    assert report.findings, report.output[-2000:]


def test_findings_are_read_from_the_output() -> None:
    said = (
        "/mlakit/kernels/hopper/sparse/seesaw.py:244: even_warpgroup: block: [1,0,0], thread:"
        " [{},0,0] Assertion `Buffer being accessed has outstanding writes. Operand: B` failed.\n"
    )
    output = said.format(0) + said.format(32) + "RuntimeError: CUDA error: unspecified failure\n"
    message = "Buffer being accessed has outstanding writes. Operand: B"
    assert findings(output) == {Finding("seesaw.py", message)}
    assert findings("AssertionError: 3 of 5 results are wrong") == set()


def test_findings_become_tables(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_findings, "FILE", tmp_path / "new" / "findings.json")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    gpu_findings.add("kernels", "prefill", findings=[{"file": "a.py"}], seconds=3.14159)
    gpu_findings.add("kernels", "prefill", findings=[], seconds=2.0)
    gpu_findings.add("kernels", "decode", findings=[{"file": "a.py"}, {"file": "b.py"}], seconds=1)
    text = gpu_findings.tables(gpu_findings.FILE)
    assert "| file a.py; file b.py |" in text
    assert "| none |" in text
    assert text.count("prefill") == 1
