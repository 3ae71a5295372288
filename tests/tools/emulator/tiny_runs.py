"""Runs of tiny kernels in the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from mlakit.tools.emulator.faults import Fault
from mlakit.tools.emulator.frontend import emulating
from tests.tools.emulator import tiny_copies, tiny_kernels, tiny_partitions, tiny_warps
from tests.tools.emulator.tiny_kernels import SMEM

MODULES = (tiny_kernels, tiny_copies, tiny_partitions, tiny_warps)
KERNELS = {
    name: each
    for module in MODULES
    for name, each in vars(module).items()
    if isinstance(each, JITFunction)
}
WRITES_TILES = ("tma_write", "two_stores", "joined", "stored_by_another")


@dataclass(frozen=True)
class Outcome:
    """What came of a launch: the class of its fault and the message, or "" and the results."""

    fault: str
    message: str
    x: torch.Tensor
    out: torch.Tensor
    tiles: torch.Tensor
    warnings: dict[str, int]


def run(kernel: str, broken: str, seed: int = 0, settings: dict[str, Any] | None = None) -> Outcome:
    """Launch a tiny kernel over random tiles."""
    generator = torch.Generator().manual_seed(1)
    storage = torch.randn(8 * 64, 64, generator=generator).div(8).half()
    x, behind = storage[:256], storage[256:]
    # kernels that write tiles do so behind x; the others read x
    described = behind if kernel in WRITES_TILES else x
    tiles = TensorDescriptor(described, list(described.shape), [64, 1], [64, 64], SMEM.value)
    out = torch.zeros(64, 64, dtype=torch.float16)
    fault = message = ""
    with emulating(seed=seed, **(settings or {})) as emulation:
        try:
            KERNELS[kernel][(1,)](tiles, x, out, BREAK=broken, num_warps=4)
        except Fault as found:
            fault, message = type(found).__name__, str(found)
    return Outcome(fault, message, x.clone(), out, behind.clone(), dict(emulation.warnings))
