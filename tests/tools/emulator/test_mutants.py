"""A Gluon kernel without one of its waits, fences or arrivals: the emulator notices.

The few that it cannot notice are in survivors.toml, each with the reason.
"""

from __future__ import annotations

import pytest

from mlakit.tools.emulator import campaign, mutations
from mlakit.tools.emulator.campaign import SUBJECTS
from tests.tools.emulator.drop_waits import FAMILIES, sample, without
from tests.tools.emulator.survivors import survivors

PARTS = 4  # of the mutants of a kernel, each a test
SAMPLE_SEED = 20261118
SURVIVORS = survivors()


@pytest.mark.emulated
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_mutant_is_caught_unless_it_is_listed(subject, part, in_emulator):
    outcomes = in_emulator(campaign.run_part, subject, part, PARTS)
    survived = {name for name, outcome in outcomes.items() if outcome.passed}
    listed = {name for name in SURVIVORS[subject] if name in outcomes}
    assert survived - listed == set(), "no check catches these"
    assert listed - survived == set(), "these are caught, and need not be listed"


@pytest.mark.emulated
@pytest.mark.parametrize("subject", [name for name, listed in SURVIVORS.items() if listed])
def test_every_listed_survivor_is_a_mutant(subject, in_emulator):
    names = set(in_emulator(campaign.names, subject))
    assert SURVIVORS[subject].keys() - names == set()


@pytest.mark.emulated
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_kernel_has_no_fault_in_the_cases_of_its_mutants(subject, in_emulator):
    """So a wait that is dropped from a kernel shows here if `make mutants` can show it."""
    for outcome in in_emulator(campaign.run_cases, subject):
        assert outcome.passed, str(outcome)


@pytest.mark.emulated
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_of_mutants_without_a_wait_or_fence_is_caught(family, in_emulator):
    for subject, name in in_emulator(sample, family, SAMPLE_SEED):
        outcome = in_emulator(campaign.run_mutant, subject, name)
        assert not outcome.passed, f"no check catches {name}"


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        (3, "    pass\n"),
        (4, "    if x: pass  # why\n"),
        (5, "    y = warpgroup_mma_wait(64, deps=(y,))\n"),
        (6, "    pass\n"),
    ],
)
def test_a_wait_is_dropped_from_a_source(line, changed):
    lines = WAITS.splitlines(keepends=True)
    found = without(WAITS, line)
    assert found == "".join([*lines[: line - 1], changed, *lines[8 if line == 6 else line :]])
    compile(found, "source.py", "exec")
    assert without(WAITS, 9) is None


WAITS = """\
@jit
def kernel(x, y):
    mbarrier.wait(x, 0)
    if x: fence_async_shared()  # why
    y = warpgroup_mma_wait(0, deps=(y,))
    named_wait(
        x, 256,
    )
    mbarrier.arrive(x, count=1)
"""
IR = """\
#loc = loc("{file}":1:0)
module attributes {{"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32}} {{
  tt.func public @kernel(%a: i32 loc(#loc)) attributes {{noinline = false}} {{
    ttng.wait_barrier %a, %a : !ttg.memdesc<1xi64> loc(#loc1)
    ttng.wait_barrier %a, %a : !ttg.memdesc<1xi64> loc(#loc2)
    ttng.fence_async_shared {{bCluster = false}} loc(#loc2)
    %w = ttng.warp_group_dot_wait %a {{pendings = 1 : i32}} : i32 loc(#loc3)
    %m = ttng.tc_gen5_mma %a, %a, %a[], %a, %a, %a[%a], %b[%a] {{is_async}} : i32 loc(#loc3)
    %n = tt.elementwise_inline_asm "bar.sync 1, 128;" {{pack = 1}} -> i32 loc(#loc3)
    ttng.wait_barrier %a, %a : !ttg.memdesc<1xi64> loc(#loc4)
    tt.return loc(#loc)
  }} loc(#loc)
}} loc(#loc)
#loc1 = loc("{file}":3:0)
#loc2 = loc(callsite("{file}":3:0 at #loc5))
#loc3 = loc("{file}":7:0)
#loc4 = loc("{file}":4:0)
#loc5 = loc("{file}":7:0)
"""
SOURCE = """\
@jit
def wait(x):
    first(x)
    second(x)

def kernel(x):
    wait(x)
"""


def test_mutants_are_named_by_functions_and_not_by_lines(tmp_path):
    """A line more at the top of the source changes no name."""
    found = []
    for head in ("", "\n"):
        file = tmp_path / f"source{len(head)}.py"
        file.write_text(head + SOURCE)
        text = IR.format(file=file)
        for line in (7, 4, 3) if head else ():
            text = text.replace(f'{file}":{line}:', f'{file}":{line + 1}:')
        found.append([each.name for each in mutations.mutants("kernel", text)])
    assert found[0] == found[1]
    assert [(each.function, each.operation, each.ordinal) for each in found[0]] == [
        ("wait", "ttng.wait_barrier", 0),
        ("wait", "ttng.wait_barrier", 1),
        ("wait", "ttng.fence_async_shared", 0),
        ("kernel", "ttng.warp_group_dot_wait", 0),
        ("kernel", "ttng.tc_gen5_mma", 0),
        ("kernel", "ttng.tc_gen5_mma", 1),
        ("kernel", "bar.sync", 0),
        ("wait", "ttng.wait_barrier", 2),
    ]


def test_a_mutant_lacks_one_operation(tmp_path):
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    text = IR.format(file=file)
    made = [each.text(text) for each in mutations.mutants("kernel", text)]
    assert [each.count("ttng.wait_barrier") for each in made] == [2, 2, 3, 3, 3, 3, 3, 2]
    assert [each.count("fence_async_shared") for each in made] == [1, 1, 0, 1, 1, 1, 1, 1]
    assert [each.count("pendings = 1 ") for each in made] == [1, 1, 1, 0, 1, 1, 1, 1]
    assert [each.count("bar.sync") for each in made] == [1, 1, 1, 1, 1, 1, 0, 1]
    assert ["%a[%a]" in each for each in made] == [True, True, True, True, False, True, True, True]
    assert ["%b[%a]" in each for each in made] == [True, True, True, True, True, False, True, True]
    assert all(len(each.splitlines()) == len(text.splitlines()) for each in made)


def test_a_survivor_needs_a_reason_and_a_subject(tmp_path):
    file = tmp_path / "survivors.toml"
    entry = 'function = "f"\noperation = "ttng.wait_barrier"\nordinals = [0]\n'
    file.write_text(f'[[indexer]]\n{entry}reason = "who knows"\n')
    with pytest.raises(ValueError, match="a reason must begin with one of"):
        survivors(file)
    file.write_text(f'[[decoder]]\n{entry}reason = "redundant: twice"\n')
    with pytest.raises(ValueError, match="decoder must be one of decode-m64_bf16, "):
        survivors(file)
