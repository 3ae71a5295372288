"""The operations that generated code calls, on one CTA.

global_operations  loads, stores and atomics of threads
shared_operations  tiles of shared memory
synchronisation    mbarriers, fences, named barriers, partitions
copies             TMA and cp.async
products           wgmma
tensor_operations  tcgen05
assembly           inline assembly
values             arithmetic that generated code calls by name
"""

from __future__ import annotations

from mlakit.tools.emulator import ptx
from mlakit.tools.emulator.assembly import Assembly
from mlakit.tools.emulator.engines import AsyncTensor
from mlakit.tools.emulator.machine import Machine
from mlakit.tools.emulator.products import Products
from mlakit.tools.emulator.shared_operations import SharedOperations
from mlakit.tools.emulator.tensor_operations import TensorOperations
from mlakit.tools.emulator.values import (
    Divergent,
    astype,
    bitcast,
    fma,
    reduce,
    reshape_last,
    scalar,
    scan,
    signed,
    transpose_last,
    trunc_div,
    trunc_rem,
    unsigned,
    wrap,
)

__all__ = [
    "AsyncTensor",
    "Divergent",
    "Runtime",
    "astype",
    "bitcast",
    "fma",
    "ptx",
    "reduce",
    "reshape_last",
    "scalar",
    "scan",
    "signed",
    "transpose_last",
    "trunc_div",
    "trunc_rem",
    "unsigned",
    "wrap",
]


class Runtime(SharedOperations, Products, TensorOperations, Assembly):
    """All operations of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
