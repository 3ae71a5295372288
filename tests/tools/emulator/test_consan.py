"""Triton's concurrency sanitizer (ConSan) finds nothing new in Hopper's kernels.

What it finds where nothing is wrong is in `EXPLAINED`, and docs/emulator.md says why.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from tests.paths import ROOT
from tests.tools.emulator.consan_run import RIGHT

TIMEOUT_S = 180
# "FILE:LINE: FUNCTION: block: […], thread: […] Assertion `MESSAGE` failed.", and other quotes
ASSERTION = re.compile(r"(\w+\.py):\d+: .*Assertion [`'\"](.+?)[`'\"] failed")


@dataclass(frozen=True)
class Finding:
    """A failed assertion of ConSan: the source file that it names, and what it says."""

    file: str
    message: str


CLEAN = (
    "hopper-decode-h128-bf16",
    "hopper-decode-h16-bf16",
    "hopper-decode-m64-fp8",
    "hopper-decode-m64-fp8-e4m3-q",
    "hopper-decode-h16-fp8_block128",
    "hopper-sparse-h16-fp8_block128",
    "hopper-prefill-192-128",
    "hopper-prefill-fp8",
    "hopper-indexer-h64-q1",
)
EXPLAINED = {
    "hopper-sparse-fp8_block128": Finding(
        file="fp8_m64.py",
        message="Buffer being accessed has outstanding writes. Operand: B",
    ),
    "hopper-sparse-h128-bf16": Finding(
        file="seesaw.py",
        message="Async shared-memory access is missing fence_async_shared. Operand: B",
    ),
}


def findings(output: str) -> set[Finding]:
    """Return what ConSan found, by the output of a process; many threads say the same."""
    return {Finding(file, message) for file, message in ASSERTION.findall(output)}


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("name", [*CLEAN, *EXPLAINED])
def test_consan_finds_nothing_new(name: str) -> None:
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip("ConSan takes minutes for a kernel with a Triton before 3.9")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need a Hopper GPU")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.tools.emulator.consan_run", name],
        cwd=ROOT,
        env={**os.environ, "TRITON_INSTRUMENTATION_MODE": "consan", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    output = done.stdout + done.stderr
    if name in EXPLAINED:
        assert findings(output) == {EXPLAINED[name]}, output[-2000:]
    else:
        assert findings(output) == set(), output[-2000:]
        assert RIGHT in done.stdout, output[-2000:]


def test_findings_are_read_from_the_output() -> None:
    said = (
        "/mlakit/kernels/hopper/sparse/seesaw.py:244: even_warpgroup: block: [1,0,0], thread:"
        " [{},0,0] Assertion `Buffer being accessed has outstanding writes. Operand: B` failed.\n"
    )
    output = said.format(0) + said.format(32) + "RuntimeError: CUDA error: unspecified failure\n"
    message = "Buffer being accessed has outstanding writes. Operand: B"
    assert findings(output) == {Finding("seesaw.py", message)}
    assert findings("AssertionError: 3 of 5 results are wrong") == set()
