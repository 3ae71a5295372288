"""A backend is its name in `mlakit.dispatch.names.Backend` and a folder in `mlakit/kernels`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlakit.dispatch import selection
from mlakit.dispatch.names import BACKENDS, one_of
from tests.paths import ROOT

SUPPORT = """
from mlakit.dispatch.specs import KernelSpec, Problem


def why_not(problem: Problem) -> str | None:
    return None if problem.arch == 120 else f"needs sm_120, got sm_{problem.arch}"


LAUNCHER = "mlakit.kernels.rubin.decode:mla_decode"
SPECS = (KernelSpec("rubin", "mla_decode", LAUNCHER, why_not, mask_traits=("IS_CAUSAL",)),)
"""
# what a source that has the name in its Literal would give
PROGRAM = """
import json, sys
import mlakit.kernels, mlakit.dispatch.names

mlakit.kernels.__path__.append(sys.argv[1])
mlakit.dispatch.names.BACKENDS = ("auto", "rubin", *mlakit.dispatch.names.BACKENDS[1:])

import torch
from typer.testing import CliRunner

from mlakit import merge_states
from mlakit.dispatch import knobs
from mlakit.tools import cli

said = {}
for command in ("explain mla_decode --arch 120 --json", "explain mla_decode --arch 90 --json",
                "explain merge_states --arch 120 --json", "support", "check --help",
                "check --backend volta"):
    said[command] = CliRunner().invoke(cli.app, command.split(), env={"COLUMNS": "200"}).output
said["knob"] = knobs.backend.meaning
for name, call in {
    "call": lambda: merge_states([torch.zeros(1, 1, 4)], [torch.zeros(1, 1)], backend="volta"),
    "override": lambda: knobs.override(backend="volta").__enter__(),
}.items():
    try:
        call()
    except ValueError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What mlakit says in a process where there is a backend more."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "rubin").mkdir()
    (folder / "rubin" / "support.py").write_text(SUPPORT)
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    outputs: dict[str, str] = json.loads(done.stdout)
    return outputs


@pytest.mark.slow
def test_a_new_backend_is_asked_first_and_explained(said):
    on_rubin = json.loads(said["explain mla_decode --arch 120 --json"])
    assert on_rubin["chosen"] == "rubin"
    on_hopper = json.loads(said["explain mla_decode --arch 90 --json"])
    assert on_hopper["why_not"]["rubin"] == "needs sm_120, got sm_90"
    assert on_hopper["chosen"] == "hopper"
    merge = json.loads(said["explain merge_states --arch 120 --json"])
    assert merge["why_not"]["rubin"] == "has no kernel of merge_states"


def test_a_new_backend_is_in_the_support_table(said):
    (row,) = (line for line in said["support"].splitlines() if "mla_decode" in line)
    assert "rubin" in row


def test_a_new_backend_is_named_by_the_command_line_and_by_errors(said):
    choices = "rubin, blackwell, hopper, triton, cpu"
    assert "rubin, blackwell, hopper, triton or cpu. Default" in said["check --help"]
    assert f"backend must be one of {choices}, got 'volta'" in said["check --backend volta"]
    assert said["call"] == f"merge_states: backend must be one of auto, {choices}, got 'volta'"
    assert said["override"] == f"knob backend must be one of auto, {choices}, got 'volta'"
    assert said["knob"].endswith(": auto, rubin, blackwell, hopper, triton or cpu.")


def test_backends_are_documented():
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    for backend in selection.BACKENDS:
        assert f"\n| `{backend}` | " in page


def test_every_backend_has_a_folder_of_kernels():
    folders = {path.parent.name for path in Path(ROOT, "mlakit", "kernels").glob("*/support.py")}
    assert folders == set(selection.BACKENDS)


@pytest.mark.parametrize(
    ("names", "text"), [(["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")]
)
def test_names_are_listed_in_words(names, text):
    assert one_of(names) == text


def test_auto_is_the_first_name():
    assert ("auto", *selection.BACKENDS) == BACKENDS
