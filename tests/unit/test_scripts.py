"""The scripts beside the Hopper kernels, as far as they need no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.paths import ROOT

SCRIPTS = ROOT / "scripts"
# what `turns.py` asks of a checkout: here the time of a call is what it says it is
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

            def contest(self):
                return self

            def gate(self):
                assert "IS_WRONG" not in os.environ, "far from the oracle"

            def ours(self):
                return self.us
        """,
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


seesaw_orders = load("seesaw_orders")
clocks = load("clocks")


def test_no_order_of_the_seesaw_is_wrong():
    for seed in range(300):
        seesaw_orders.run(seed)


@pytest.mark.parametrize("mistake", seesaw_orders.MISTAKES.values())
def test_mistakes_in_the_seesaw_are_noticed(mistake):
    assert any(seesaw_orders.is_wrong(seed, mistake) for seed in range(300))


@pytest.fixture
def turns(tmp_path):
    """Runs the script on such a checkout."""
    package = tmp_path / "mlakit" / "bench"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    for name, source in CHECKOUT.items():
        (package / f"{name}.py").write_text(dedent(source))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        filled = [each.format(checkout=tmp_path) for each in arguments]
        command = [sys.executable, SCRIPTS / "turns.py", *filled, "--rounds", "2"]
        environment = {**os.environ, "COLUMNS": "120"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    return run


def test_turns_compare_with_the_first_checkout(turns):
    decodes = ("128q1s4k,16", "128q1s4k,32,fp8,e4m3", "128q1s4k,16,page1")
    done = turns("old={checkout}", "new={checkout},SLOWNESS=0.5", "--decode", *decodes)
    assert done.returncode == 0, done.stderr
    lines = [line.split("│") for line in done.stdout.splitlines() if "128q1s4k" in line]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines]
    assert cells == [
        ["128q1s4k,16", "32.0 (1.000)", "16.0 (0.500)"],
        ["128q1s4k,32,fp8,e4m3", "64.0 (1.000)", "32.0 (0.500)"],
        ["128q1s4k,16,page1", "2048.0 (1.000)", "1024.0 (0.500)"],
    ]


def test_a_wrong_checkout_is_not_timed(turns):
    done = turns("old={checkout}", "new={checkout},IS_WRONG=1", "--decode", "128q1s4k,16")
    assert done.returncode == 1
    assert "far from the oracle" in done.stderr
    assert "new ended before its turn" in done.stderr


def test_a_folder_without_a_checkout_is_named(turns):
    done = turns("old={checkout}/mlakit", "--decode", "128q1s4k,16")
    assert done.returncode == 1
    assert "must be NAME=FOLDER with a checkout of mlakit" in done.stderr


@pytest.mark.parametrize("rows", ["own", *clocks.LOADS])
def test_clocks_are_written_by_a_copy_of_the_kernel(rows, tmp_path):
    clocks.copy_with_clocks(ROOT, tmp_path, rows)
    kernel, loads = ((tmp_path / file).read_text() for file in (clocks.KERNEL, clocks.LOADS_FILE))
    compile(kernel, clocks.KERNEL, "exec")
    compile(loads, clocks.LOADS_FILE, "exec")
    assert kernel.count("_write_clocks(0)") == kernel.count("_write_clocks(2)") == 1
    assert (clocks.LOAD in loads) == (rows == "own")


def test_clocks_say_what_they_do_not_find(tmp_path):
    with pytest.raises(SystemExit, match=r"^--checkout must be a folder with mlakit/"):
        clocks.copy_with_clocks(tmp_path, tmp_path / "copy", "own")
