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

from mlakit.tools.emulator.assembly import Assembly
from mlakit.tools.emulator.machine import Machine
from mlakit.tools.emulator.products import Products
from mlakit.tools.emulator.shared_operations import SharedOperations
from mlakit.tools.emulator.tensor_operations import TensorOperations


class Runtime(SharedOperations, Products, TensorOperations, Assembly):
    """All operations of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
