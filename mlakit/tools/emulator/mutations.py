"""Mutants of a kernel: its IR without one operation that synchronises.

A mutant that no check catches means that the operation is redundant, that the input does not reach
it, or that the emulator does not model what it is for. Mutants are named by the Python functions
that the operation comes from and by its number among its like there, so that a name outlives edits
elsewhere.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mlakit.tools.emulator.ir import Module
from mlakit.tools.emulator.parser import parse

DROPPED = (
    "ttng.wait_barrier",
    "ttng.arrive_barrier",
    "ttng.fence_async_shared",
    "ttng.barrier_expect",
    "ttng.async_tma_store_wait",
    "ttng.async_copy_mbarrier_arrive",
    "ttng.tc_gen5_commit",
)
WGMMA_WAIT = "ttng.warp_group_dot_wait"
TENSOR_PRODUCT = "ttng.tc_gen5_mma"  # which may commit to barriers
INLINE_ASSEMBLY = "tt.elementwise_inline_asm"
NEVER_PENDING = 64  # wgmmas: a wait for all but so many waits for none


@dataclass(frozen=True, order=True)
class Name:
    """The name of a mutant, without line numbers.

    function   the functions that the operation was inlined through, outermost first
    operation  its name in the IR, or the instruction of inline assembly
    ordinal    its number among the same operations of the same function, from 0
    """

    kernel: str
    function: str
    operation: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.kernel}: {self.operation} {self.ordinal} of {self.function}"


@dataclass(frozen=True)
class Mutant:
    """A kernel's IR without the operation of `name`."""

    name: Name
    frames: tuple[tuple[str, int], ...]  # files and lines of the operation and its callers
    line: int  # of the IR
    replacement: str  # for that line; "" drops it

    def text(self, original: str) -> str:
        """Return the IR of the mutant."""
        lines = original.splitlines()
        lines[self.line] = self.replacement
        return "\n".join(lines)


def mutants(kernel: str, text: str) -> list[Mutant]:
    """Return the mutants of a kernel's IR, in the order of its operations."""
    module = parse(text)
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for line, source in enumerate(text.splitlines()):
        for operation, replacement in _without_operation(source):
            location = source.rsplit("loc(", 1)[-1].rstrip(")")
            function = _function(module, location).removeprefix(f"{kernel} > ")
            name = Name(kernel, function, operation, seen[function, operation])
            seen[function, operation] += 1
            found.append(Mutant(name, tuple(module.frames(location)), line, replacement))
    return found


def _without_operation(line: str) -> Iterator[tuple[str, str]]:
    """Yield an operation of a line that synchronises, and the line without it."""
    found = re.match(r"\s*(?:(%\S+)(?::\d+)? = )?([a-z_0-9]+\.[a-z_0-9.]+)", line)
    if found is None:
        return
    result, operation = found.groups()
    if operation in DROPPED:
        yield operation, ""
    elif operation == WGMMA_WAIT:
        yield operation, re.sub(r"pendings = \d+", f"pendings = {NEVER_PENDING}", line)
    elif operation == TENSOR_PRODUCT:
        for barrier in re.finditer(r", %[^\s\[,]+\[%[^\s\],]+\]", line):
            yield operation, line[: barrier.start()] + line[barrier.end() :]
    elif operation == INLINE_ASSEMBLY:
        instruction = re.search(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|arrive)", line)
        if instruction is not None:
            yield instruction.group(), f"{result} = arith.constant 0 : i32 loc(#loc)"


def _function(module: Module, location: str) -> str:
    """Return the functions of a location, outermost first, without repeats in a row."""
    names: list[str] = []
    for file, line in reversed(module.frames(location)):
        name = _function_at(file, line)
        if not names or names[-1] != name:
            names.append(name)
    return " > ".join(names)


def _function_at(file: str, line: int) -> str:
    around = [each for each in _functions(file) if each[0] <= line <= each[1]]
    return max(around)[2] if around else Path(file).stem


@lru_cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """Return the first line, the last line and the name of each function of a source file."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inner = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef):
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                yield first, child.end_lineno or child.lineno, f"{prefix}{child.name}"
            yield from visit(child, inner)

    return tuple(visit(ast.parse(Path(file).read_text(encoding="utf-8")), ""))
