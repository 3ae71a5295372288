"""Mistakes in the order of the seesaw (`m64_bf16`), made in its source: the emulator finds each."""

from __future__ import annotations

import pytest

from mlakit.tools.emulator.campaign import SEEDS, SUBJECTS
from mlakit.tools.emulator.harness import Outcome
from tests.tools.emulator.mistakes import Mistake

KERNEL = "decode.m64_bf16"
LOADS = "decode.m64_bf16_loads"
GATHERED = "decode-m64_bf16-gather"
LOAD_RIGHT_EVEN = """
    if not IS_LAST:
        load_part(inputs.kv, rows_even, 256, barriers.right_even, smem.right, 0, HALF_BYTES)"""
LOAD_QUERIES = """
            if next_item < scheduler.last_item:
                load_even(inputs, token, first_head, rows, smem, barriers)"""


MISTAKES = {
    "both warpgroups share one smem tile of rope queries": Mistake(
        KERNEL,
        "_warpgroup",
        (("own_probs = smem.p_even if IS_EVEN else smem.p_odd", "own_probs = smem.p_even"),),
    ),
    "the right half of an even block is reloaded before its PV product": Mistake(
        KERNEL,
        "_odd_pair",
        (
            (LOAD_RIGHT_EVEN, ""),
            (
                "mbarrier.arrive(barriers.p_odd, count=1)",
                f"mbarrier.arrive(barriers.p_odd, count=1){LOAD_RIGHT_EVEN}",
            ),
        ),
    ),
    "the next tile's queries are loaded before the other warpgroup finishes this tile": Mistake(
        KERNEL,
        "_warpgroup",
        (
            (LOAD_QUERIES, ""),
            (
                "mbarrier.arrive(barriers.sum_even, count=1)",
                f"mbarrier.arrive(barriers.sum_even, count=1){LOAD_QUERIES}",
            ),
        ),
    ),
    "the second block of a pair is loaded before the first": Mistake(
        LOADS,
        "gather_producer",
        (
            (
                "rows = rows_of_block(inputs, keys, lookup, block)",
                "other = block + 1 - 2 * i\n"
                "                found = lookup_block(inputs, keys, other)\n"
                "                rows = rows_of_block(inputs, keys, found, other)",
            ),
            *((f"{part}[i]", f"{part}[1 - i]") for part in ("rope", "left", "right")),
            *((f"{part}.index(i)", f"{part}.index(1 - i)") for part in ("rope", "left", "right")),
        ),
    ),
    "a part is loaded before it is empty": Mistake(
        LOADS,
        "_gather_part",
        (("    mbarrier.wait(part.empty, phase)\n", ""),),
    ),
}


@pytest.mark.emulated
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_order_of_the_seesaw_is_found(name, in_emulator):
    mistake = MISTAKES[name]
    subject = GATHERED if mistake.module == LOADS else "decode-m64_bf16"
    outcome = in_emulator(run_mistake, mistake, subject)
    assert not outcome.passed


def run_mistake(mistake: Mistake, subject: str) -> Outcome:
    """Run the kernel with a mistake until a seed finds it."""
    with mistake.made():
        for seed in SEEDS:
            outcome = SUBJECTS[subject].attempt(SUBJECTS[subject].trials[0], subject, seed)
            if not outcome.passed:
                break
    return outcome
