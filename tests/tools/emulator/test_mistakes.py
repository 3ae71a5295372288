"""A wait or fence that is missing in the source of a kernel: the emulator finds each.

The same mistakes run on a GPU under ConSan (`test_consan`).
"""

from __future__ import annotations

import pytest

from mlakit.tools.emulator.harness import SEEDS, Outcome, run_trial
from tests.tools.emulator.mistakes import TELLING


@pytest.mark.parametrize("name", TELLING)
def test_a_mistake_is_in_the_source_as_it_is(name):
    with TELLING[name].mistake.made():
        pass


@pytest.mark.emulated
@pytest.mark.parametrize("name", TELLING)
def test_a_telling_mistake_is_found(name, in_emulator):
    outcome = in_emulator(run_telling, name)
    assert outcome.kind == TELLING[name].fault, outcome


def run_telling(name: str) -> Outcome:
    """Run a mistake until a seed finds it."""
    telling = TELLING[name]
    trial = telling.case.trial("cpu")
    with telling.mistake.made():
        for seed in SEEDS:
            outcome = run_trial(trial, name, seed)
            if not outcome.passed:
                break
    return outcome
