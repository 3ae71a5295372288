"""Operations to Python: a generator per function and per warp partition.

Values      a value of the IR is a variable; scalars are Python integers and numpy floats, tensors
            are arrays, tiles of shared memory are `MemDesc` records
Effects     generated code calls the runtime `rt` with the partition `p` that runs it
Scheduling  it yields where another partition or an asynchronous engine may run
Faults      `p.where` has the source line of the operation that runs, for reports

    emitter            variables, constants, and the table of operations
    control_flow       functions, loops, branches, warp partitions
    arithmetic         arith and math
    shapes             shapes, layouts, pointers, program ids
    reductions         reductions, scans and maps
    memory             global and shared memory
    asynchronous       mbarriers, TMA, cp.async, wgmma
    tensor_memory      tcgen05
    inline_assembly    PTX
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes, overflow, values
from mlakit.tools.emulator.codegen import (
    arithmetic,
    asynchronous,
    control_flow,
    inline_assembly,
    memory,
    reductions,
    shapes,
    tensor_memory,
)
from mlakit.tools.emulator.codegen.emitter import OPERATIONS, Emitter
from mlakit.tools.emulator.engines import AsyncTensor
from mlakit.tools.emulator.ir import Module, Unsupported

__all__ = ["OPERATIONS", "Emitter", "Unsupported", "compile_module"]

# importing a topic enters its operations in the table
TOPICS = (
    arithmetic, asynchronous, control_flow, inline_assembly, memory, reductions, shapes,
    tensor_memory,
)  # fmt: skip
# functions of `values` that generated code calls by name
CALLED = (
    "astype", "bitcast", "fma", "reduce", "reshape_last", "scalar", "scan", "signed",
    "transpose_last", "trunc_div", "trunc_rem", "unsigned",
)  # fmt: skip


def compile_module(module: Module) -> tuple[Callable[..., Any], Emitter, str]:
    """Return the kernel as a generator function, the emitter that wrote it, and the source."""
    emitter = Emitter(module)
    for i, name in enumerate(module.functions):
        emitter.functions[name] = f"f{i}"
    for each in module.functions.values():
        control_flow.function(emitter, each)
    source = "\n".join(emitter.lines)
    scope: dict[str, Any] = {
        "np": np,
        "value": _usable,
        "rounded": dtypes.rounded,
        "wrap": overflow.wrap,
        **{name: getattr(values, name) for name in CALLED},
        **emitter.constants,
    }
    exec(compile(source, f"<{module.kernel.name}>", "exec"), scope)
    return scope[emitter.functions[module.kernel.name]], emitter, source


def _usable(value: Any) -> Any:
    """Return a value that may be used: the result of a pending wgmma is a fault."""
    if isinstance(value, AsyncTensor):
        value.used()
    return value
