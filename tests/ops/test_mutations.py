"""The list of mutations fits the kernels as they are; `scripts/mutate.py` runs them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

SCRIPT = ROOT / "scripts" / "mutate.py"


def load_script():
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutate = load_script()


@pytest.mark.parametrize("mutation", mutate.MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_of_its_kernel(mutation, tmp_path):
    target = tmp_path / mutation.file
    target.parent.mkdir(parents=True)
    original = (mutate.ROOT / mutation.file).read_text()
    target.write_text(original)
    mutation.apply(tmp_path)
    assert target.read_text() != original
    compile(target.read_text(), mutation.file, "exec")


def test_text_that_is_not_there_once_is_an_error(tmp_path):
    (tmp_path / "kernel.py").write_text("a + a")
    mutation = mutate.Mutation("twice", "kernel.py", "a", "b", "op")
    with pytest.raises(ValueError, match=r"^twice: kernel.py must hold .* once, got 2 times$"):
        mutation.apply(tmp_path)


def test_every_kernel_module_is_mutated():
    mutated = {Path(mutation.file).stem for mutation in mutate.MUTATIONS}
    kernels = {path.stem for path in (mutate.ROOT / "mlakit/kernels/cpu").glob("*.py")}
    assert kernels - mutated == {"__init__", "support", "workspace"}
