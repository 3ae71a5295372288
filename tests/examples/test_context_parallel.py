"""examples/context_parallel.py under torchrun: the ranks agree with one process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

TIMEOUT = 300  # seconds; every rank imports torch


# tests/parallel runs 4 ranks, too
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_torchrun(world):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    sizes = ["--heads", "4", "--lengths", "70", "5", "1", "--interleave", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "examples/context_parallel.py", *sizes],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{world} ranks, gloo on cpu; 85 tokens" in done.stdout
    assert "one process agrees" in done.stdout
