"""docs/data/emulated.json: no configuration has a fault; what changed since is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlakit.dispatch.proofs import hash_of_sources
from mlakit.tools.compile.configurations import BLACKWELL
from mlakit.tools.emulator import record
from mlakit.tools.emulator.harness import Outcome
from tests import gpu_session
from tests.paths import ROOT

FILE = ROOT / "docs" / "data" / "emulated.json"
OUTCOMES = [Outcome(name, seed) for name in ("a", "b") for seed in (0, 1)]


@pytest.mark.skipif(not FILE.exists(), reason="make emulate-all has not recorded a run yet")
def test_no_recorded_run_has_a_fault(record_property):
    recorded = record.read(FILE)
    assert recorded.faults == ()
    assert len(recorded.seeds) >= 5
    record_property(gpu_session.SAY, record.changed_since(recorded, list(BLACKWELL)))


def test_a_record_is_read_as_it_was_written(tmp_path):
    wrong = Outcome("b", 2, "Race", "write of keys[0]")
    made = record.record_of([*OUTCOMES, wrong], hash_of_sources())
    record.write(made, tmp_path / "emulated.json")
    assert record.read(tmp_path / "emulated.json") == made
    assert made.configurations == ("a", "b")
    assert made.seeds == (0, 1, 2)
    assert made.faults == ("b, seed 2: Race: write of keys[0]",)


def test_what_changed_since_is_named():
    made = record.record_of(OUTCOMES, hash_of_sources())
    said = record.changed_since(made, ["a", "b"])
    assert (
        said == f"Emulated: 2 configurations with 2 seeds on {made.date}, and nothing changed since"
    )
    said = record.changed_since(replace(made, sources="5f1c"), ["a", "b", "c"])
    assert said.endswith("changed since: the kernels' sources and 1 configurations, such as c")
