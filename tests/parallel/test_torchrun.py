"""The ranks as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.parallel.heads import small_model
from tests.paths import ROOT

TIMEOUT = 300  # seconds; every rank imports torch and transformers


def torchrun(world: int, *arguments: str) -> str:
    """What rank 0 prints."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("world", [2, 4])
def test_torchrun(tmp_path, world):
    """Context parallel decode, and a deepseek_v3 model whose heads transformers shards."""
    small_model("deepseek_v3", first_k_dense_replace=2).save_pretrained(tmp_path)
    assert f"{world} ranks agree" in torchrun(
        world, "-m", "tests.parallel.under_torchrun", str(tmp_path)
    )
