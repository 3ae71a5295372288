"""Operations of a Triton module, as its printed TTGIR has them.

Model      A module has functions, a function has a region, a region has blocks, a block has
           operations, and an operation may have regions (scf.for, tt.reduce, warp_specialize)
Values     keep their SSA names, such as `%acc_12` and `%pair#1`
Types      stay text in an operation; `types` reads them
Locations  are named in an operation; `Module.where` resolves them to lines of Python source

`parser` makes these records, and `codegen` turns them into Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlakit.tools.emulator.scanning import split_top

SSA = re.compile(r"%[A-Za-z0-9_.$-]+(?:#\d+)?")
MAX_FRAMES = 4  # of a location in a message
MAX_NESTING = 12  # of call sites


class Unsupported(NotImplementedError):
    """An operation, instruction, layout or type that the emulator does not know."""


@dataclass
class Block:
    """Operations that run one after the other; the last one says where to go on."""

    label: str  # empty for the first block of a region
    args: list[str] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass
class Region:
    """The body of a function, of a loop, of a branch or of a warp partition."""

    blocks: list[Block] = field(default_factory=list)
    num_warps: int = 0  # of a warp partition

    @property
    def args(self) -> list[str]:
        """Names of the values that the region is entered with."""
        return self.blocks[0].args

    @property
    def ops(self) -> list[Op]:
        """The operations of a region that has one block."""
        if len(self.blocks) != 1:
            raise Unsupported(f"branches between {len(self.blocks)} blocks inside of an operation")
        return self.blocks[0].ops


@dataclass
class Op:
    """One operation.

    text      what is printed between its name and its types
    types     what is printed after the colon: types of operands, then of results
    location  the name of its location, such as `#loc12`
    line      the index of its line in the IR
    inits     (argument, first value) of what a loop carries
    """

    name: str
    results: list[str]
    operands: list[str]
    text: str
    types: str
    location: str
    line: int
    regions: list[Region] = field(default_factory=list)
    inits: list[tuple[str, str]] = field(default_factory=list)

    @property
    def result_type(self) -> str:
        """The type of the first result, or of the operands if results have the same type."""
        text = _without_parentheses(self.types.split("->")[-1].strip())
        return split_top(text.split(" to ")[-1], ",")[0].strip()

    @property
    def source_type(self) -> str:
        """The type of the operand of a conversion: `x to y`, `x -> y`."""
        return self.types.split("->")[0].split(" to ")[0].strip()

    def result_types(self) -> list[str]:
        """The types of all results."""
        text = _without_parentheses(self.types.split("->", 1)[-1].strip())
        return [each.strip() for each in split_top(text, ",")]

    def operand_types(self) -> list[str]:
        """The types of all operands that have one printed."""
        return [each.strip() for each in split_top(self.types.split("->")[0].strip(), ",")]

    def attr(self, name: str, default: str | None = None) -> str | None:
        """Return the text of an attribute in `{...}` or `<{...}>`."""
        found = re.search(rf"[{{,<]\s*{name}\s*=\s*(array<[^>]*>|\"[^\"]*\"|[^,}}]+)", self.text)
        return found.group(1).strip() if found else default

    def int_attr(self, name: str) -> int:
        """Return an attribute such as `axis = 1 : i32`."""
        return int(self._required(name).split(":")[0])

    def array_attr(self, name: str) -> list[int]:
        """Return an attribute such as `order = array<i32: 1, 0>`."""
        return [int(each) for each in re.findall(r"-?\d+", self._required(name).split(":", 1)[-1])]

    def _required(self, name: str) -> str:
        value = self.attr(name)
        if value is None:
            raise Unsupported(f"{self.name} has no attribute {name}: {self.text.strip()}")
        return value


def _without_parentheses(text: str) -> str:
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


@dataclass
class Function:
    """A function: the kernel, or one that was not inlined."""

    name: str
    args: list[tuple[str, str]]  # (name, type)
    body: Region
    is_public: bool


@dataclass
class Module:
    """A module of Triton: its kernel with all that it calls.

    attributes  the text of each alias of a layout, such as `#blocked1`
    locations   the text of each location, such as `#loc12`
    lines       the lines of the IR
    """

    attributes: dict[str, str]
    functions: dict[str, Function]
    locations: dict[str, str]
    num_warps: int
    num_ctas: int
    lines: list[str]

    @property
    def has_pairs(self) -> bool:
        """Do pairs of CTAs issue tcgen05 operations?"""
        head = next((line for line in self.lines if line.startswith("module")), "")
        return '"ttng.two-ctas" = true' in head

    @property
    def kernel(self) -> Function:
        """The function that is launched."""
        return next(each for each in self.functions.values() if each.is_public)

    def where(self, location: str) -> str:
        """Return file:line of a location and of its callers, innermost first."""
        frames = [f"{Path(file).name}:{line}" for file, line in self.frames(location)]
        return " <- ".join(list(dict.fromkeys(frames))[:MAX_FRAMES]) or location

    def frames(self, location: str) -> list[tuple[str, int]]:
        """Return the path and line of a location and of its callers, innermost first."""
        return list(self._frames(location, 0))

    def source_of(self, op: Op) -> str:
        """Name an operation with its source line and its line of the IR, for a message."""
        text = self.lines[op.line].strip()[:200]
        return f"{op.name} at {self.where(op.location)} (IR line {op.line + 1}: {text})"

    def _frames(self, location: str, depth: int) -> Iterator[tuple[str, int]]:
        if depth > MAX_NESTING:
            return
        text = self.locations.get(location, location)
        call = re.match(r"callsite\((.*) at (#loc\d*)\)$", text)
        if call:
            yield from self._frames(call.group(1), depth + 1)
            yield from self._frames(call.group(2), depth + 1)
            return
        file = re.search(r'"([^"]*\.py)":(\d+)', text)
        if file:
            yield file.group(1), int(file.group(2))
            return
        named = re.match(r'"[^"]*"\((#loc\d*)\)', text)
        if named:
            yield from self._frames(named.group(1), depth + 1)
