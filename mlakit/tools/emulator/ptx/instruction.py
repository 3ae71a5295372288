"""The table of instructions.

An entry takes an instruction as it is written and returns a function that runs it. What does not
depend on the threads is decided once: types, modifiers, literals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.ptx.threads import Reader, Threads, reader

Execute: TypeAlias = Callable[[Threads], None]


@dataclass(frozen=True)
class Instruction:
    """An instruction as it is written, such as `add.rn.f32 $0, $1, $2`."""

    mnemonic: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        """The part before the first dot."""
        return self.mnemonic.split(".")[0]

    @property
    def kind(self) -> str:
        """The last type of the mnemonic."""
        return self.mnemonic.split(".")[-1]

    def modifiers(self, *known: str) -> set[str]:
        """Return what is between the name and the type; modifiers that are not known raise."""
        found = set(self.mnemonic.split(".")[1:-1])
        if found - set(known):
            raise self.unsupported()
        return found

    def sources(self, *kinds: str) -> list[Reader]:
        """Return readers of the operands after the first, each of its type."""
        if len(self.operands) != len(kinds) + 1:
            raise self.unsupported()
        return [reader(each, kind) for each, kind in zip(self.operands[1:], kinds, strict=True)]

    def unsupported(self) -> Unsupported:
        """Return an error that names the instruction."""
        return Unsupported(f"PTX instruction {self.mnemonic} {', '.join(self.operands)}".rstrip())


Build: TypeAlias = Callable[[Instruction], Execute]
INSTRUCTIONS: dict[str, Build] = {}


def runs(*names: str) -> Callable[[Build], Build]:
    """Enter a function in the table of instructions."""

    def enter(build: Build) -> Build:
        for name in names:
            if name in INSTRUCTIONS:
                raise ValueError(f"two functions run {name}")
            INSTRUCTIONS[name] = build
        return build

    return enter


def build(instruction: Instruction) -> Execute:
    """Return the function that runs an instruction."""
    entry = INSTRUCTIONS.get(instruction.name)
    if entry is None:
        raise instruction.unsupported()
    try:
        return entry(instruction)
    except Unsupported as error:
        raise instruction.unsupported() from error
