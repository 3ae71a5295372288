"""Random problems kill every mutant of a CPU kernel."""

from __future__ import annotations

import pytest

from tests.ops.mutations import MUTATIONS
from tests.paths import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutant_is_killed(mutation, monkeypatch):
    mutation.assert_killed(monkeypatch)


def test_every_kernel_module_has_a_mutated_line():
    mutated = {each.function.rpartition(".")[2] for each in MUTATIONS}
    kernels = {path.stem for path in (ROOT / "mlakit/kernels/cpu").glob("*.py")}
    assert kernels - mutated == {"__init__", "support", "workspace"}
