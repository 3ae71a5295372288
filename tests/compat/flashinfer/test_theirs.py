"""FlashInfer's own test files, from a checkout of FlashInfer 0.6.18 in FLASHINFER_SOURCE.

Only a sample runs here. `run_theirs.py` runs the other parts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.flashinfer import run_theirs
from tests.paths import ROOT

SOURCE = os.environ.get("FLASHINFER_SOURCE", "")
RUNNER = Path(run_theirs.__file__)
# with so many tests apart
FILES = {
    "tests/attention/test_deepseek_mla.py": 211,
    "tests/attention/test_mla_page.py": 1,
}


def run(path: Path, part: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUNNER), str(path), part],
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE, reason="FLASHINFER_SOURCE names no checkout of FlashInfer")
@pytest.mark.parametrize(("file", "every"), FILES.items())
def test_their_tests_pass(file, every):
    done = run(Path(SOURCE) / file, f"0/{every}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) >= 10


@pytest.mark.slow
def test_the_runner_finds_a_failure_and_runs_one_part(tmp_path):
    path = tmp_path / "test_small.py"
    path.write_text(
        """
import pytest
import flashinfer
from flashinfer.jit import build_jit_specs
from flashinfer.jit.attention import gen_batch_mla_module
from flashinfer.utils import has_flashinfer_jit_cache, is_sm90a_supported
from tests.test_helpers.test_helpers import clear_cuda_cache

@pytest.mark.parametrize("kv_len", range(6))
def test_it(kv_len):
    clear_cuda_cache(None)
    assert flashinfer.__version__ == "0.6.18" and has_flashinfer_jit_cache()
    build_jit_specs([gen_batch_mla_module("fa3", 512, 64)], verbose=False)
    assert kv_len != 4
""",
        encoding="utf-8",
    )
    failed = run(path, "0/2")
    assert failed.returncode == 1
    assert "1 failed, 2 passed" in failed.stdout
