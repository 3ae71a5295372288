"""The writer of generated Python: variables, constants, and the table of operations.

`OPERATIONS` has a function for each operation that the emulator knows. Such a function returns the
Python expression of the operation's results, or writes lines itself and returns None. The modules
of this package fill the table, each with the operations of one topic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes
from mlakit.tools.emulator.ir import Block, Module, Op, Region, Unsupported
from mlakit.tools.emulator.types import Type, Types

# what a fault is reported at: operations on memory and on barriers, and inline assembly
REPORTED = (
    "ttng.", "ttg.async", "ttg.local", "tt.load", "tt.store", "tt.elementwise", "tt.atomic"
)  # fmt: skip


class Emitter:
    """State of the translation of one module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.types = Types(module.attributes)
        self.lines: list[str] = []
        self.depth = 0
        self.variables: dict[str, str] = {}  # SSA name -> Python name, in one function
        self.constants: dict[str, Any] = {}  # Python name -> value
        self.constant_names: dict[str, str] = {}  # key of a value -> Python name
        self.functions: dict[str, str] = {}  # name of a function -> Python name
        self.blocks: dict[str, Block] = {}  # label -> block, in one function
        self.targets: list[str] = []  # variables that take what the current region yields
        self.scalars_are_arrays = False  # in the combination of a reduction
        self.used: Counter[str] = Counter()  # operations

    # ---------------------------------------------------------- text

    def write(self, line: str) -> None:
        """Write a line at the current indentation."""
        self.lines.append("  " * self.depth + line)

    @contextmanager
    def indented(self, head: str) -> Iterator[None]:
        """Write the head of a compound statement; what is written in the scope is its body."""
        self.write(head)
        self.depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.write("pass")
        self.depth -= 1

    def assign(self, targets: list[str], values: list[str]) -> None:
        """Assign in parallel: loop variables may be swapped."""
        if targets:
            self.write(f"{', '.join(targets)} = {', '.join(values)}")

    def assign_tokens(self, results: list[str]) -> None:
        """Define results that only order operations in the IR."""
        self.assign([self.variable(each) for each in results], ["None"] * len(results))

    # ---------------------------------------------------------- names

    def variable(self, value: str) -> str:
        """Return the Python name of an SSA value."""
        if value not in self.variables:
            self.variables[value] = f"v{len(self.variables)}"
        return self.variables[value]

    def operands(self, op: Op) -> list[str]:
        """Return the Python names of an operation's operands."""
        return [self.variable(each) for each in op.operands]

    def results(self, op: Op) -> list[str]:
        """Return the Python names of an operation's results."""
        return [self.variable(each) for each in op.results]

    def constant(self, value: Any, key: str) -> str:
        """Return the name of a value of the compiler's; equal keys share one."""
        if key not in self.constant_names:
            name = f"c{len(self.constants)}"
            self.constant_names[key] = name
            self.constants[name] = value
        return self.constant_names[key]

    def type(self, text: str) -> Type:
        """Read a type."""
        return self.types.parse(text)

    def type_constant(self, text: str) -> str:
        """Return the name of a type as a constant."""
        type = self.type(text)
        return self.constant(type, f"type {type}")

    def kind(self, text: str) -> tuple[str, bool]:
        """Return the kind of a type's elements, and whether values of it are arrays."""
        type = self.type(text)
        return type.kind, type.is_tensor or self.scalars_are_arrays

    # ---------------------------------------------------------- operations

    def region(self, region: Region, targets: list[str]) -> None:
        """Write the operations of a region; `targets` take what it yields."""
        outer, self.targets = self.targets, targets
        for op in region.ops:
            self.op(op)
        self.targets = outer

    def op(self, op: Op) -> None:
        """Write an operation."""
        self.used[op.name] += 1
        emit = OPERATIONS.get(op.name)
        if emit is None:
            raise Unsupported(f"the emulator does not know {self.module.source_of(op)}")
        if op.name.startswith(REPORTED):
            self.write(f"p.where = {f'{self.module.where(op.location)} ({op.name})'!r}")
        try:
            expression = emit(self, op)
        except Unsupported as error:
            if op.name in str(error):
                raise
            raise Unsupported(f"{error}, in {self.module.source_of(op)}") from error
        if expression is None:
            return
        if op.results:
            self.write(f"{', '.join(self.results(op))} = {expression}")
        else:
            self.write(expression)


Emit = Callable[[Emitter, Op], "str | None"]
OPERATIONS: dict[str, Emit] = {}


def emits(*names: str) -> Callable[[Emit], Emit]:
    """Enter a function in the table of operations."""

    def enter(emit: Emit) -> Emit:
        for name in names:
            if name in OPERATIONS:
                raise ValueError(f"two functions emit {name}")
            OPERATIONS[name] = emit
        return emit

    return enter


def optional(operands: list[str], default: str) -> str:
    """Return the first of the operands that may be left out, or what stands for it."""
    return operands[0] if operands else default


def numpy_name(kind: str) -> str:
    """Return the name of the numpy type of values, as generated code spells it."""
    return f"np.{np.dtype(dtypes.value_dtype(kind)).name}"


def rounded(expression: str, kind: str) -> str:
    """Round an expression to a narrow float; others are exact in their numpy type."""
    return f"rounded({expression}, {kind!r})" if kind in dtypes.NARROW else expression


@emits(
    "llvm.intr.assume",
    "tt.assert",
    "tt.grid_dependency_launch_dependents",
    "tt.grid_dependency_wait",
    "tt.print",
    "ttg.local_dealloc",
    "ttg.warp_return",
    "ttg.warp_yield",
)
def ignored(emitter: Emitter, op: Op) -> None:
    """Write nothing: warps of a partition are in step, clusters run one after the other."""
