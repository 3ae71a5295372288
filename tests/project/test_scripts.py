"""The scripts for the Hopper kernels, without a GPU."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
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
        from types import SimpleNamespace

        def Shape(text, heads, **given):
            assert text == "128q1s4k"
            return SimpleNamespace(heads=heads, given=given)
        """,
    "decode": """
        import os
        from dataclasses import dataclass
        import torch

        @dataclass
        class Workload:
            us: float
            dtype: torch.dtype = torch.bfloat16

            def build_case(self):
                return self

            def check(self):
                assert "IS_WRONG" not in os.environ, "far from the oracle"

            def call(self):
                return self.us * self.dtype.itemsize

        FACTORS = {"format": {"bf16": 1, "fp8": 2}, "page_size": {1: 64}, "causal": {False: 2}}

        def of_shape(shape):
            us = float(os.environ.get("SLOWNESS", "1")) * shape.heads
            for name, value in shape.given.items():
                us *= FACTORS[name][value]
            return (Workload(us),)
        """,
}
CHECKOUT |= dict.fromkeys(("prefill", "sparse_decode", "indexer"), "from .decode import of_shape")


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sm_clock = load("sm_clock")
compare_ir = load("compare_ir")
house = load("house")
IR = """\
#loc1 = loc("a.py":3:4)
module {
  tt.func public @scale(%x_ptr: !tt.ptr<f32> loc("x"(#loc1)), %n: i32) attributes {inline = 0} {
    %two = arith.constant 2 : i32 loc(#loc1)
    %total:2 = "tt.reduce"(%n, %two) : (i32, i32) -> (i32, i32) loc(#loc1)
    %sum = arith.addi %total#0, %total#1 : i32 loc(#loc1)
    tt.call @store(%x_ptr, %sum) : (!tt.ptr<f32>, i32) -> () loc(#loc1)
    tt.return loc(#loc1)
  } loc(#loc1)
} loc(#loc1)
"""


@pytest.fixture
def compare_checkouts(tmp_path):
    """Runs the script on two such checkouts, of which the older one has no folder for tools."""
    for folder in ("old/mlakit/tools/bench", "new/mlakit/tools/bench"):
        package = tmp_path / folder
        package.mkdir(parents=True)
        for each in (package, package.parent, tmp_path / folder[:3] / "mlakit"):
            (each / "__init__.py").touch()
        for name, source in CHECKOUT.items():
            (package / f"{name}.py").write_text(dedent(source))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        filled = [each.format(checkout=tmp_path) for each in arguments]
        command = [sys.executable, SCRIPTS / "compare_checkouts.py", *filled, "--rounds", "2"]
        environment = {**os.environ, "COLUMNS": "120"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    return run


@pytest.mark.slow
def test_checkouts_are_compared_with_the_first(compare_checkouts):
    decodes = ("128q1s4k,16", "128q1s4k,32,fp8,e4m3", "128q1s4k,16,page1")
    others = ("--prefill", "128q1s4k,8,full", "--sparse", "128q1s4k,8,fp8", "--indexer")
    done = compare_checkouts(
        *("old={checkout}/old", "new={checkout}/new,SLOWNESS=0.5", "--decode", *decodes),
        *(*others, "128q1s4k,64"),
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("│") for line in done.stdout.splitlines() if "128q1s4k" in line]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines]
    assert cells == [
        ["decode 128q1s4k,16", "32.0 (1.000x)", "16.0 (2.000x)"],
        ["decode 128q1s4k,32,fp8,e4m3", "64.0 (1.000x)", "32.0 (2.000x)"],
        ["decode 128q1s4k,16,page1", "2048.0 (1.000x)", "1024.0 (2.000x)"],
        ["prefill 128q1s4k,8,full", "32.0 (1.000x)", "16.0 (2.000x)"],
        ["sparse 128q1s4k,8,fp8", "32.0 (1.000x)", "16.0 (2.000x)"],
        ["indexer 128q1s4k,64", "128.0 (1.000x)", "64.0 (2.000x)"],
    ]


@pytest.mark.slow
def test_a_wrong_checkout_is_not_timed(compare_checkouts):
    done = compare_checkouts(
        "old={checkout}/old", "new={checkout}/new,IS_WRONG=1", "--decode", "128q1s4k,16"
    )
    assert done.returncode == 1
    assert "far from the oracle" in done.stderr
    assert "new ended early" in done.stderr


def test_no_workload_is_an_error(compare_checkouts):
    done = compare_checkouts("old={checkout}/old")
    assert done.returncode == 2
    assert "name at least one workload: --decode, --prefill" in done.stderr


@pytest.mark.slow
def test_a_folder_without_a_checkout_is_named(compare_checkouts):
    done = compare_checkouts("old={checkout}/old/mlakit", "--decode", "128q1s4k,16")
    assert done.returncode == 1
    assert "must be NAME=FOLDER with a checkout of mlakit" in done.stderr


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "changes",
    [
        {"a.py": "moved.py", ":3:4": ":5:6"},
        {"%x_ptr": "%pointer", "%total": "%both", "@scale": "@other", "@store": '@"b.store"'},
        {'%x_ptr: !tt.ptr<f32> loc("x"(#loc1)), %n: i32': "%n: i32, %x_ptr: !tt.ptr<f32>"},
    ],
    ids=["moved", "renamed", "arguments in another order"],
)
def test_ir_that_differs_in_names_is_equal(changes):
    changed = IR
    for old, new in changes.items():
        assert old in changed
        changed = changed.replace(old, new)
    assert compare_ir.normalised(changed) == compare_ir.normalised(IR)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("constant 2", "constant 3"),
        ("%total#0, %total#1", "%total#1, %total#0"),
        ("!tt.ptr<f32> loc", "!tt.ptr<f16> loc"),
        ("tt.call @store(%x_ptr", "tt.call @scale(%x_ptr"),
        ("%n, %two)", "%two, %n)"),
    ],
)
def test_ir_of_another_computation_differs(old, new):
    assert old in IR
    assert compare_ir.normalised(IR.replace(old, new)) != compare_ir.normalised(IR)


def test_isolated_regions_may_share_names():
    same = "partition0(%a: i32) {\n  use %a\n}\npartition1(%a: i32) {\n  use %a\n}"
    first, second = same.split("partition1")
    other = f"{first}partition1{second.replace('%a', '%b')}"
    assert compare_ir.numbered(same) == compare_ir.numbered(other)
    assert compare_ir.numbered(same) != compare_ir.numbered(other.replace("use %b", "use %c"))


def test_kernels_that_differ_are_listed(tmp_path, capsys):
    for name, text in (("before", "a"), ("after", "b")):
        with gzip.open(tmp_path / name, "wt") as file:
            json.dump({"decode on 90": {"same 0": "x", "kernel 1": text}}, file)
    assert compare_ir.diff(tmp_path / "before", tmp_path / "after") == 1
    shown = capsys.readouterr().out
    assert "decode on 90: kernel 1\n" in shown
    assert "1 checks, 2 kernels, 1 differ" in shown
    assert compare_ir.diff(tmp_path / "after", tmp_path / "after") == 0


def test_sentences_of_a_page_are_told_from_code_and_tables():
    page = """# Title

One sentence. `Another` one
that goes on.

| a table. Not prose. |
```python
code = "A string. Another."
```
- An item
- Two items. Of two sentences.
"""
    assert list(house.sentences(page)) == [
        (3, "One sentence."),
        (3, "`Another` one that goes on."),
        (10, "- An item"),
        (11, "- Two items."),
        (11, "Of two sentences."),
    ]


@pytest.mark.slow
def test_the_house_is_counted():
    counts, places = house.survey()
    assert counts["lines of mlakit/"] > counts["lines of mlakit/ without tools"] > 10_000
    assert counts["words of prose in docs/ and README.md"] > 10_000
    assert len(places) == 3


def test_kernels_and_fragments_are_told_from_others():
    source = """
@gluon.jit
def decode_kernel(a, b, *, C):
    "Of a kernel."

def launch_kernel(a):
    "Start it."
"""
    tree = ast.parse(source)
    assert [each.name for each in ast.walk(tree) if house.is_kernel(each)] == ["decode_kernel"]
    texts = [text for _, text in house.documented(tree)]
    assert [text for text in texts if text.startswith(house.FRAGMENTS)] == ["Of a kernel."]
