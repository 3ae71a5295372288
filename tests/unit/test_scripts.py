"""The scripts for the Hopper kernels, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.paths import ROOT

SCRIPTS = ROOT / "scripts"
# the modules of a checkout that `compare_checkouts.py` imports; a call returns its own time
CHECKOUT = {
    "gpu_timers": """
        class ColdGpu:
            warm_ups = 1

            def __call__(self, call):
                return call() * 1e-6
        """,
    "shapes": """
        class Batch:
            parse = staticmethod(str.upper)
        """,
    "decode": """
        import os
        import torch

        class Decode:
            def __init__(self, batch, heads, format="bf16", page_size=64, dtype=torch.bfloat16):
                assert batch == "128Q1S4K"
                slowness = float(os.environ.get("SLOWNESS", "1")) * 64 / page_size
                self.us = slowness * heads * {"bf16": 1, "fp8": 2}[format] * dtype.itemsize

            def build_case(self):
                return self

            def check(self):
                assert "IS_WRONG" not in os.environ, "far from the oracle"

            def call(self):
                return self.us

            if "IS_OLD" in os.environ:
                contest, gate, ours = build_case, check, call
                del build_case, check, call
        """,
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sm_clock = load("sm_clock")


@pytest.fixture
def compare_checkouts(tmp_path):
    """Runs the script on such a checkout."""
    package = tmp_path / "mlakit" / "bench"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    for name, source in CHECKOUT.items():
        (package / f"{name}.py").write_text(dedent(source))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        filled = [each.format(checkout=tmp_path) for each in arguments]
        command = [sys.executable, SCRIPTS / "compare_checkouts.py", *filled, "--rounds", "2"]
        environment = {**os.environ, "COLUMNS": "120"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    return run


def test_checkouts_are_compared_with_the_first(compare_checkouts):
    decodes = ("128q1s4k,16", "128q1s4k,32,fp8,e4m3", "128q1s4k,16,page1")
    done = compare_checkouts("old={checkout}", "new={checkout},SLOWNESS=0.5", "--decode", *decodes)
    assert done.returncode == 0, done.stderr
    lines = [line.split("│") for line in done.stdout.splitlines() if "128q1s4k" in line]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines]
    assert cells == [
        ["128q1s4k,16", "32.0 (1.000x)", "16.0 (2.000x)"],
        ["128q1s4k,32,fp8,e4m3", "64.0 (1.000x)", "32.0 (2.000x)"],
        ["128q1s4k,16,page1", "2048.0 (1.000x)", "1024.0 (2.000x)"],
    ]


def test_a_wrong_checkout_is_not_timed(compare_checkouts):
    done = compare_checkouts(
        "old={checkout}", "new={checkout},IS_WRONG=1", "--decode", "128q1s4k,16"
    )
    assert done.returncode == 1
    assert "far from the oracle" in done.stderr
    assert "new ended early" in done.stderr


def test_a_checkout_with_the_older_names_is_timed(compare_checkouts):
    done = compare_checkouts("old={checkout},IS_OLD=1", "--decode", "128q1s4k,16")
    assert done.returncode == 0, done.stderr
    assert "32.0 (1.000x)" in done.stdout


def test_a_folder_without_a_checkout_is_named(compare_checkouts):
    done = compare_checkouts("old={checkout}/mlakit", "--decode", "128q1s4k,16")
    assert done.returncode == 1
    assert "must be NAME=FOLDER with a checkout of mlakit" in done.stderr


@pytest.mark.parametrize("rows", ["own", *sm_clock.LOADS])
def test_clocks_are_written_by_a_copy_of_the_kernel(rows, tmp_path):
    sm_clock.copy_with_clocks(ROOT, tmp_path, rows)
    kernel, loads = (
        (tmp_path / file).read_text() for file in (sm_clock.KERNEL, sm_clock.LOADS_FILE)
    )
    compile(kernel, sm_clock.KERNEL, "exec")
    compile(loads, sm_clock.LOADS_FILE, "exec")
    assert kernel.count("_write_clocks(0)") == kernel.count("_write_clocks(2)") == 1
    assert (sm_clock.LOAD in loads) == (rows == "own")


def test_clocks_say_what_they_do_not_find(tmp_path):
    with pytest.raises(SystemExit, match=r"^--checkout must be a folder with mlakit/"):
        sm_clock.copy_with_clocks(tmp_path, tmp_path / "copy", "own")
