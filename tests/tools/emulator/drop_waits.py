"""Drops waits and fences from the source of Gluon kernels: `make emulate` must then fail.

    python -m tests.tools.emulator.drop_waits --seed 3

The seed chooses three for each of Hopper's decode, sparse, prefill, indexer and fp8, and three for
Blackwell, among the mutants that are not in survivors.toml. Each is dropped from a copy of the
tree, where the emulated tests of its topic run until one fails. The exit status is 1 if one does
not.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path
from random import Random
from shutil import copy2
from tempfile import TemporaryDirectory

from mlakit.tools.emulator import campaign
from mlakit.tools.emulator.lowering import exit_without_leak_reports
from mlakit.tools.emulator.mutations import NEVER_PENDING, WGMMA_WAIT, Mutant, Name
from tests.paths import ROOT
from tests.tools.emulator.survivors import survivors

FAMILIES = ("decode", "sparse", "prefill", "indexer", "fp8", "blackwell")
OF_EACH = 3
WAITS_AND_FENCES = (
    "ttng.wait_barrier",
    "ttng.fence_async_shared",
    "ttng.async_tma_store_wait",
    WGMMA_WAIT,
    "bar.sync",
)
# calls whose statement an operation of the IR comes from
DROPPED_CALLS = ("wait", "named_wait", "fence_async_shared", "store_wait")
WGMMA_CALL = "warpgroup_mma_wait"
KERNELS = ROOT / "mlakit" / "kernels"
FOLDER = "tests/tools/emulator"
CASES = f"{FOLDER}/test_mutants.py::test_a_kernel_has_no_fault_in_the_cases_of_its_mutants"


def sample(family: str, seed: int) -> list[tuple[str, Name]]:
    """Draw mutants of a family without a wait or fence, and their subjects; none is a survivor."""
    draw, listed = Random(f"{family} {seed}"), survivors()
    subjects = [name for name in campaign.SUBJECTS if name.startswith(family)]
    draw.shuffle(subjects)
    found = []
    for subject in islice(cycle(subjects), OF_EACH):
        left_out = {*listed[subject], *(name for _, name in found)}
        names = [name for name in campaign.names(subject) if name not in left_out]
        drawn = draw.choice([name for name in names if name.operation in WAITS_AND_FENCES])
        found.append((subject, drawn))
    return found


def without(source: str, line: int) -> str | None:
    """Return a source without the wait or fence on a line; None if there is none."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or node.lineno != line:
            continue
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if name == WGMMA_CALL:
            first = node.args[0]
            text = lines[first.lineno - 1]
            changed = f"{text[: first.col_offset]}{NEVER_PENDING}{text[first.end_col_offset :]}"
            return "".join([*lines[: first.lineno - 1], changed, *lines[first.lineno :]])
        if name in DROPPED_CALLS:
            end = node.end_lineno or line
            rest = lines[end - 1][node.end_col_offset :]
            changed = f"{lines[line - 1][: node.col_offset]}pass{rest}"
            return "".join([*lines[: line - 1], changed, *lines[end:]])
    return None


def drop(mutant: Mutant, tree: Path) -> str:
    """Drop a mutant's operation from the source in a copy of the tree; return its place."""
    for file, line in mutant.frames:  # innermost first: a wrapper has another call than a wait
        path = Path(file)
        if KERNELS in path.parents:
            changed = without(path.read_text(encoding="utf-8"), line)
            if changed is not None:
                place = path.relative_to(ROOT)
                (tree / place).write_text(changed, encoding="utf-8")
                return f"{place}:{line}"
    raise ValueError(f"{mutant.name} has no line with a wait or fence: {mutant.frames}")


def failure(tree: Path, subject: str) -> str:
    """Run the emulated tests of a subject's family in a tree; return the first failure, or ""."""
    first = f"{CASES}[{subject}]"
    return _failure(tree, first) or _failure(
        tree, "-k", f"fault and {subject.split('-')[0]}", FOLDER
    )


def _failure(tree: Path, *selected: str) -> str:
    """Run some of the tests that `make emulate` runs, until one fails."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-x", "--emulate", "-m", "emulated",
            "-p", "no:cacheprovider", *selected,
        ],
        cwd=tree, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tree), "TRITON_INTERPRET": "0", "COLUMNS": "300"},
    )  # fmt: skip
    if done.returncode == 0:
        return ""
    found = re.search(r"^FAILED \S*::(.*)", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pytest ended with {done.returncode} and no failure: {done.stdout}")
    return found.group(1)


def copy_tree(to: Path) -> None:
    """Copy the files that git knows, and those that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            copy2(ROOT / name, to / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    given = parser.parse_args()
    exit_without_leak_reports()
    missed = 0
    for family in given.family or FAMILIES:
        for subject, name in sample(family, given.seed):
            mutant = next(each for each in campaign.SUBJECTS[subject].mutants if each.name == name)
            with TemporaryDirectory() as folder:
                copy_tree(Path(folder))
                place = drop(mutant, Path(folder))
                said = failure(Path(folder), subject)
            missed += not said
            said = said or "NO TEST FAILS"
            sys.stdout.write(f"{subject}: {name}\n  dropped at {place}\n  {said}\n")
            sys.stdout.flush()
    sys.stdout.write(f"seed {given.seed}: {missed} are not noticed\n")
    return 1 if missed else 0


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    sys.exit(main())
