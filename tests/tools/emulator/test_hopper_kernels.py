"""Hopper's kernels in the emulator: right results and no fault, in more than one interleaving."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlakit.support.compilation import NUM_SMS
from mlakit.support.configurations import HOPPER, HOPPER_ARCH
from mlakit.support.samples import OF_HOPPER
from mlakit.tools.emulator import harness
from tests.kernels.selection import selected_kernel

# configurations whose kernel another one of the sample has, too
LEFT_OUT = (
    "hopper-decode-h128-bf16-page1",
    "hopper-decode-h16-fp8_token-page1",
    "hopper-prefill-256-256",
)
CUT = [name for name, case in HOPPER.items() if harness.configuration(name).case != case]
SAMPLE = [name for name in OF_HOPPER if name not in LEFT_OUT]


def selected(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """Name the kernel that a configuration selects in the emulator."""
    chosen = harness.configuration(name)
    return selected_kernel(monkeypatch, chosen.case, HOPPER_ARCH, num_sms=chosen.selects_for)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_kernel_has_no_fault(name, in_emulator):
    outcome, shared = in_emulator(emulate_and_allocate, name)
    assert outcome.passed, str(outcome)
    # the emulator has a memory of its own for each allocation
    assert shared == [], "Triton gives two allocations the same memory"


def emulate_and_allocate(name: str) -> tuple[harness.Outcome, list[str]]:
    """Run a configuration; return which allocations of its Gluon kernels share memory, too."""
    from tests.tools.emulator.allocations import shared_by_two  # not in the process of the tests

    found: list[str] = []

    def allocate(kernel: str, text: str) -> str:
        if "warp_specialize" in text:
            found.extend(f"{kernel}: {each}" for each in shared_by_two(text))
        return text

    return harness.emulate(name, 0, mutate=allocate), found


@pytest.mark.emulated
@pytest.mark.parametrize("name", HOPPER)
def test_no_configuration_has_a_fault_with_any_seed(name, in_emulator):
    """Both seeds in one test, so that the IR is made once."""
    for seed in harness.SEEDS:
        outcome = in_emulator(harness.emulate, name, seed)
        assert outcome.passed, str(outcome)


@pytest.mark.parametrize("name", CUT)
def test_less_work_selects_the_same_kernel(name, monkeypatch):
    """A configuration is cut for the emulator, not exchanged for another one."""
    whole = selected_kernel(monkeypatch, HOPPER[name], HOPPER_ARCH, num_sms=NUM_SMS[HOPPER_ARCH])
    assert selected(monkeypatch, name) == whole


def test_the_sample_has_every_kernel(monkeypatch):
    def kernels(names: Sequence[str]) -> set[str]:
        return {selected(monkeypatch, name) for name in names}

    assert kernels(SAMPLE) == kernels(OF_HOPPER)


def test_an_unknown_configuration_is_named():
    with pytest.raises(ValueError, match=r"^NAME must be a configuration.*got 'hopper-encode'$"):
        harness.configuration("hopper-encode")


def test_interpreted_kernels_cannot_be_emulated(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        harness.emulate("hopper-indexer-h32-q1", 0)
