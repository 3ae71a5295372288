"""Programs of inline assembly: statements, guards, labels and branches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.ptx.instruction import Execute, Instruction, build
from mlakit.tools.emulator.ptx.threads import Reader, Threads, reader
from mlakit.tools.emulator.scanning import split_top

# hints that change no value, and what orders kernels that run one after the other here
IGNORED = ("griddepcontrol", "prefetch", "cp.async.bulk.prefetch")


@dataclass(frozen=True)
class Statement:
    """A statement: a label, or an instruction with its guard, which may begin with `!`."""

    label: str = ""
    guard: str = ""
    mnemonic: str = ""
    operands: tuple[str, ...] = ()


def statements(text: str) -> list[Statement]:
    """Split assembly into statements; declarations of registers are left out."""
    text = re.sub(r"\\([0-9A-Fa-f]{2})", lambda found: chr(int(found.group(1), 16)), text)
    text = re.sub(r"//[^\n]*", "", text).replace("\n", " ").strip()
    if text.startswith("{"):
        text = text[1 : text.rindex("}")]
    found: list[Statement] = []
    for each in split_top(text, ";"):
        line = each.strip()
        label = re.match(r"(\w+):\s*", line)
        if label:
            found.append(Statement(label=label.group(1)))
            line = line[label.end() :]
        if not line or line.startswith((".reg", ".pragma")):
            continue
        guard = ""
        if line.startswith("@"):
            guard, line = line[1:].split(None, 1)
        mnemonic, _, rest = line.partition(" ")
        operands = tuple(one.strip() for one in split_top(rest, ",") if one.strip())
        found.append(Statement(guard=guard, mnemonic=mnemonic, operands=operands))
    return found


@dataclass(frozen=True)
class Step:
    """A statement that is ready to run: exactly one of the first three is set."""

    label: str = ""
    branch: str = ""
    execute: Execute | None = None
    guard: Reader | None = None


class Program:
    """Inline assembly that is ready to run."""

    def __init__(self, text: str) -> None:
        listed = statements(text)
        labels = {each.label: i for i, each in enumerate(listed) if each.label}
        self.steps: list[Step] = []
        for i, each in enumerate(listed):
            if each.label:
                self.steps.append(Step(label=each.label))
                continue
            if each.mnemonic.startswith(IGNORED):
                continue
            guard = reader(each.guard, "pred") if each.guard else None
            if each.mnemonic in ("bra", "bra.uni"):
                target = each.operands[0]
                if labels.get(target, -1) <= i:
                    raise Unsupported(f"PTX branch to {target}, which does not follow it")
                self.steps.append(Step(branch=target, guard=guard))
            else:
                execute = build(Instruction(each.mnemonic, each.operands))
                self.steps.append(Step(execute=execute, guard=guard))

    def run(self, threads: Threads) -> None:
        """Run the program on threads."""
        with np.errstate(all="ignore"):
            for step in self.steps:
                _run_step(step, threads)


def _run_step(step: Step, threads: Threads) -> None:
    if step.label:
        if step.label in threads.waiting:
            threads.set_active(threads.active | threads.waiting.pop(step.label))
        return
    outer = threads.active
    if step.guard is not None:
        threads.set_active(outer & step.guard(threads))
    if step.branch:
        _branch(step, threads, outer)
        return
    if step.execute is not None and (threads.is_every_active or threads.active.any()):
        step.execute(threads)
    if step.guard is not None:
        threads.set_active(outer)


def _branch(step: Step, threads: Threads, outer: Array) -> None:
    """Let the active threads wait at the label, and go on with the others."""
    leaving = threads.active
    before = threads.waiting.get(step.branch)
    threads.waiting[step.branch] = leaving if before is None else before | leaving
    threads.set_active(outer & ~leaving)


@lru_cache(maxsize=1024)
def compile_program(text: str) -> Program:
    """Read assembly; an instruction that is not known raises `Unsupported`."""
    return Program(text)
