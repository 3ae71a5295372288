"""Mistakes in the order of the seesaw (`m64_bf16`), made in its source: the emulator finds each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import pytest
from triton.runtime.jit import JITFunction

from mlakit.tools.emulator.campaign import SEEDS, SUBJECTS
from mlakit.tools.emulator.harness import Outcome

KERNEL = "mlakit.kernels.hopper.decode.m64_bf16"
LOADS = "mlakit.kernels.hopper.decode.m64_bf16_loads"
LOAD_RIGHT_EVEN = """
    if not IS_LAST:
        load_part(inputs.kv, rows_even, 256, barriers.right_even, smem.right, 0, HALF_BYTES)"""
LOAD_QUERIES = """
            if next_item < scheduler.last_item:
                load_even(inputs, token, first_head, rows, smem, barriers)"""


@dataclass(frozen=True)
class Mistake:
    """Replacements in the source of a function, and a subject of `campaign` that runs it."""

    module: str
    function: str
    replacements: tuple[tuple[str, str], ...]
    subject: str = "decode-m64_bf16"


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
        "decode-m64_bf16-gather",
    ),
    "a part is loaded before it is empty": Mistake(
        LOADS,
        "_gather_part",
        (("    mbarrier.wait(part.empty, phase)\n", ""),),
        "decode-m64_bf16-gather",
    ),
}


@pytest.mark.emulated
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_order_of_the_seesaw_is_found(name, in_emulator):
    outcome = in_emulator(run_mistake, MISTAKES[name])
    assert not outcome.passed


@pytest.mark.emulated
@pytest.mark.parametrize("subject", ["decode-m64_bf16", "decode-m64_bf16-gather"])
def test_the_seesaw_without_a_mistake_passes(subject, in_emulator):
    outcome = in_emulator(run_mistake, Mistake(KERNEL, "_warpgroup", (), subject))
    assert outcome.passed, outcome


def run_mistake(mistake: Mistake) -> Outcome:
    """Run the kernel with a mistake until a seed finds it."""
    function = getattr(import_module(mistake.module), mistake.function)
    subject = SUBJECTS[mistake.subject]
    with mistaken(function, mistake.replacements):
        for seed in SEEDS:
            outcome = subject.attempt(subject.trials[0], mistake.function, seed)
            if not outcome.passed:
                break
    return outcome


@contextmanager
def mistaken(function: JITFunction, replacements: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Change the source of a device function in this scope."""
    original = changed = function.src
    for old, new in replacements:
        assert changed.count(old) == 1, f"the source must have this text once: {old}"
        changed = changed.replace(old, new)
    _change(function, changed)
    try:
        yield
    finally:
        _change(function, original)


def _change(function: JITFunction, source: str) -> None:
    function._unsafe_update_src(source)
    for module in (KERNEL, LOADS):  # callers keep hashes of what they call
        for each in vars(import_module(module)).values():
            if isinstance(each, JITFunction):
                each.hash = None
