"""Every rule of order and of barriers: a tiny kernel that is right, and the same one broken.

The table names, for each broken kernel, the faults that may be reported: where two rules are
broken, the interleaving decides which of them is met first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from mlakit.tools.emulator.codegen.asynchronous import NAMES_READS

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(in_emulator: Callable[..., Any]) -> Run:
    return lambda *args: in_emulator(_run, *args)


def _run(*args: Any) -> Any:
    from tests.tools.emulator import tiny_runs  # not in the process of the tests

    return tiny_runs.run(*args)


RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tma_copy": lambda x: x[:64],
    "pipeline": lambda x: x.view(4, 64, 64).float().sum(0),
    "product": lambda x: x[:64].float() @ x[:64].float().T,
    "tma_write": lambda x: x[:64],
    "copy_groups": lambda x: x[:64],
    "relayed": lambda x: x[:64],
    "reused_barrier": lambda x: x[:64],
    "handover": lambda x: x[:64],
    "named": lambda x: x[:64],
    "initialised": lambda x: x[:64],
    "outside": lambda x: x[:64],
    "two_loads": lambda x: x[:64] + x[64:128],
    "two_loads_on_one_barrier": lambda x: x[:64] + x[64:128],
    "two_stores": lambda x: x[:64],
    "copied_twice": lambda x: x[:64],
    "two_products": lambda x: x[:64].float() @ x[:64].float().T,
    "ring_of_products": lambda x: sum(each @ each.T for each in x.view(4, 64, 64).float()),
    "joined": lambda x: x[:64],
    "stored_by_another": lambda x: x[:64],
    "given": lambda x: x[:64],
    "two_readers": lambda x: x[:64],
    "copied_for_another": lambda x: x[:64],
    "multiplied_for_another": lambda x: x[:64].float() @ x[:64].float().T,
    "two_phases": lambda x: x[:64],
    "halves": lambda x: x[:64],
    "phase_by_phase": lambda x: x[:64],
    "stages_by_name": lambda x: x.view(4, 64, 64).float().sum(0),
    "life_of_a_barrier": lambda x: x[:64],
}
BROKEN = [
    ("tma_copy", "no wait", "Race"),
    ("tma_copy", "other phase", "Race"),
    ("tma_copy", "no expectation", "Deadlock"),
    ("tma_copy", "one arrival more", "Deadlock"),
    ("tma_copy", "more bytes", "Deadlock"),
    ("tma_copy", "fewer bytes", "BarrierMisuse"),
    ("tma_copy", "nothing waits", "UnfinishedAtExit"),
    ("tma_copy", "generic write before", "MissingFence"),
    ("tma_copy", "unaligned coordinate", "IllegalCopy"),
    ("tma_copy", "overflow", "IllegalCopy"),
    ("pipeline", "no wait for the stage", "Race BarrierMisuse"),
    ("pipeline", "no wait for the tile", "Race Deadlock"),
    ("pipeline", "release before read", "Race"),
    ("pipeline", "no release", "Deadlock"),
    ("pipeline", "no fence", "MissingFence"),
    ("pipeline", "two releases", "Race Deadlock"),
    ("pipeline", "stage out of range", "OutOfBounds"),
    ("product", "no fence", "MissingFence"),
    ("product", "operand overwritten", "Race"),
    ("product", "one left", "UseBeforeWait"),
    ("product", "nothing waits", "UnfinishedAtExit"),
    ("tma_write", "no fence", "MissingFence"),
    ("tma_write", "tile reused", "Race"),
    ("tma_write", "nothing waits", "UnfinishedAtExit"),
    ("tma_write", "read back", "Race"),
    ("copy_groups", "no group", "Race"),
    ("copy_groups", "one group left", "Race"),
    ("copy_groups", "other group", "Race"),
    ("copy_groups", "nothing waits", "UnfinishedAtExit"),
    ("relayed", "only the copies arrive", "Race"),
    ("relayed", "too many copies", "BarrierMisuse"),
    ("reused_barrier", "initialised twice", "BarrierMisuse"),
    ("reused_barrier", "used after its end", "BarrierMisuse"),
    ("reused_barrier", "initialised in a phase", "BarrierMisuse"),
    ("exchange", "no barrier", "Race"),
    ("exchange", "by an arrival alone", "Race"),
    ("handover", "no wait", "Race"),
    ("named", "no wait", "Race"),
    ("named", "no arrival", "Deadlock"),
    ("named", "other count", "BarrierMisuse"),
    ("named", "too few threads", "BarrierMisuse"),
    ("initialised", "initialised by the other", "Race BarrierMisuse"),
    ("initialised", "waits for each other", "Deadlock"),
    ("outside", "address", "OutOfBounds"),
    ("two_loads", "waits for one", "Race"),
    ("two_loads", "waits for the other", "Race"),
    ("two_loads", "loaded again", "Race"),
    ("two_loads", "load over a load", "Race"),
    ("two_loads", "store of a pending load", "Race"),
    ("two_loads", "a few bytes fewer", "Deadlock"),
    ("two_loads", "a few bytes more", "Deadlock"),
    ("two_loads_on_one_barrier", "no wait", "Race"),
    ("two_stores", "one left", "Race"),
    ("copied_twice", "no wait", "Race"),
    ("two_products", "the pending one", "Race"),
    ("two_products", "the pending one by cp.async", "Race"),
    ("two_products", "the pending one by TMA", "Race"),
    ("ring_of_products", "one stage fewer", "Race"),
    ("joined", "no fence", "MissingFence"),
    ("joined", "the load is pending", "Race"),
    ("stored_by_another", "no fence", "MissingFence"),
    ("stored_by_another", "fence after the arrival", "MissingFence"),
    ("stored_by_another", "no wait", "Race MissingFence"),
    ("given", "no wait", "Race"),
    ("two_readers", "one is not waited for", "Race"),
    ("two_readers", "two is not waited for", "Race"),
    ("two_readers", "one arrival too few", "Race"),
    ("copied_for_another", "the other one", "Race"),
    ("multiplied_for_another", "the other one", "Race"),
    ("two_phases", "waits for the first phase", "Race"),
    ("halves", "more than half", "Race"),
    ("phase_by_phase", "one arrival more", "Deadlock"),
    ("phase_by_phase", "one arrival fewer", "Deadlock"),
    ("phase_by_phase", "two arrivals at once", "BarrierMisuse"),
    ("stages_by_name", "one barrier for both", "BarrierMisuse"),
    ("stages_by_name", "no wait for the stage", "Race BarrierMisuse"),
    ("pairs_of_warps", "the other pair", "Race"),
    ("pairs_of_warps", "no barrier", "Race"),
    ("life_of_a_barrier", "awaited before its start", "BarrierMisuse"),
    ("life_of_a_barrier", "reached before its start", "BarrierMisuse"),
    ("life_of_a_barrier", "expects before its start", "BarrierMisuse"),
    ("life_of_a_barrier", "ended before its start", "BarrierMisuse"),
    ("life_of_a_barrier", "copies arrive before its start", "BarrierMisuse"),
    ("life_of_a_barrier", "awaited after its end", "BarrierMisuse"),
    ("life_of_a_barrier", "copies arrive at the end of it", "BarrierMisuse"),
    ("life_of_a_barrier", "invalidated before a wait", "Race BarrierMisuse"),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kernel", RIGHT)
def test_a_kernel_that_is_right_runs(run: Run, kernel: str, seed: int) -> None:
    outcome = run(kernel, "", seed)
    assert not outcome.fault, outcome.message
    assert not outcome.warnings
    expected = RIGHT[kernel](outcome.x)
    torch.testing.assert_close(outcome.out.float(), expected.float(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("kernel", "broken", "faults"), BROKEN)
def test_a_broken_kernel_is_reported(
    run: Run, kernel: str, broken: str, faults: str, seed: int
) -> None:
    outcome = run(kernel, broken, seed)
    assert outcome.fault in faults.split(), outcome.message or "no fault"
    places = ("tiny_", "primitives.py:", "nothing has waited")
    assert any(each in outcome.message for each in places)


@pytest.mark.parametrize(
    ("kernel", "fence"),
    [
        ("pipeline", "fence of the producer"),  # of reads that it has waited for
        ("joined", "fence after the end"),
        ("stored_by_another", "fence of the reader"),
        ("two_products", "by cp.async"),  # to the operand of the one that is complete
        ("two_products", "by TMA"),
    ],
)
def test_a_fence_or_a_wait_on_either_side_is_enough(run: Run, kernel: str, fence: str) -> None:
    outcome = run(kernel, fence)
    assert not outcome.fault, outcome.message


@pytest.mark.parametrize("barrier", ["", "by a named barrier"])
def test_warps_of_a_partition_exchange_behind_a_barrier(run: Run, barrier: str) -> None:
    outcome = run("exchange", barrier)
    assert not outcome.fault, outcome.message
    assert torch.equal(outcome.out.flatten()[:128], outcome.x.flatten()[:128].flip(0))


def test_two_warps_exchange_behind_a_barrier_of_their_own(run: Run) -> None:
    outcome = run("pairs_of_warps", "")
    assert not outcome.fault, outcome.message
    thread = torch.arange(128)
    assert torch.equal(outcome.out.flatten()[:128], outcome.x.flatten()[thread ^ 32])


def test_a_warp_reads_what_it_wrote_itself(run: Run) -> None:
    outcome = run("exchange", "own elements")
    assert not outcome.fault, outcome.message


@pytest.mark.skipif(not NAMES_READS, reason="this Triton has no full wait for TMA stores")
def test_a_tma_store_writes_what_a_full_wait_lets_the_kernel_read(run: Run) -> None:
    outcome = run("tma_write", "waits for the writes")
    assert not outcome.fault, outcome.message
    assert torch.equal(outcome.out, outcome.x[:64])  # 2 x, read back, less x
    assert torch.equal(outcome.tiles[:64], outcome.x[:64] * 2)


def test_without_checks_only_barriers_and_copies_are_checked(run: Run) -> None:
    assert not run("product", "no fence", 0, {"checks": False}).fault
    assert run("tma_copy", "fewer bytes", 0, {"checks": False}).fault == "BarrierMisuse"
