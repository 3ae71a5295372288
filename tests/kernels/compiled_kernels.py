"""Kernels with one known defect each, compiled for sm_90: prints what `machine_code` reads of them.

Run by `test_machine_code` in a process of its own: in that of the tests kernels are interpreted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.device.primitives import alloc_barrier, alloc_barriers
from mlakit.kernels.launch import SHARED_BYTES, Target, compiling, launch
from mlakit.tools.compile.machine_code import assembler_log, machine_code


@triton.jit
def _normalise(x, COLUMNS: tl.constexpr):
    """All columns are needed twice: they stay in registers, or are spilled."""
    column = tl.arange(0, COLUMNS)
    values = tl.load(x + column)
    tl.store(x + column, values / tl.sum(values, 0))


@gluon.jit
def _multiply(out):
    """Two products under way at once; with too few registers for the sums they cannot be."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    first = gl.zeros([64, 64], gl.float32, LAYOUT)
    second = gl.zeros([64, 64], gl.float32, LAYOUT)
    for _ in range(8):
        first = warpgroup_mma(a, b, first, is_async=True)
        second = warpgroup_mma(b, a, second, is_async=True)
        first, second = warpgroup_mma_wait(0, deps=(first, second))
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(out + row * 64 + column, first + second)


@gluon.jit
def _arrive(USES_ONE: gl.constexpr, USES_SEVERAL: gl.constexpr):
    one = alloc_barrier()
    several = alloc_barriers(2, 1)
    if USES_ONE:
        mbarrier.arrive(one, count=1)
    if USES_SEVERAL:
        mbarrier.arrive(several.index(1), count=1)


NAMES = (
    "tidy",
    "spilling",
    "asynchronous",
    "serialised",
    "all-barriers-used",
    "one-barrier-idle",
    "barriers-idle",
)


def _compiled(name: str) -> Any:
    x = torch.empty(4096)
    with compiling(Target(90, 132, SHARED_BYTES[90])) as compilation:
        if name == "tidy":
            launch(_normalise, (1,), x, COLUMNS=512, num_warps=4)
        elif name == "spilling":
            launch(_normalise, (1,), x, COLUMNS=4096, num_warps=1, maxnreg=64)
        elif name == "asynchronous":
            launch(_multiply, (1,), x, num_warps=4)
        elif name == "serialised":
            launch(_multiply, (1,), x, num_warps=4, maxnreg=64)
        elif name == "all-barriers-used":
            launch(_arrive, (1,), USES_ONE=True, USES_SEVERAL=True, num_warps=4)
        elif name == "one-barrier-idle":
            launch(_arrive, (1,), USES_ONE=False, USES_SEVERAL=True, num_warps=4)
        elif name == "barriers-idle":
            launch(_arrive, (1,), USES_ONE=False, USES_SEVERAL=False, num_warps=4)
        else:
            raise ValueError(f"no kernel is called {name}")
    return compilation.kernels[0]


def _read(name: str, name_of_code: str) -> dict[str, Any]:
    """Of a kernel whose machine code may be another's; it is assembled again for its log."""
    kernel = _compiled(name)
    kernel.asm["cubin"] = _compiled(name_of_code).asm["cubin"]
    try:
        return asdict(machine_code(kernel))
    except RuntimeError as error:
        return {"error": str(error)}


def _read_once(name: str) -> dict[str, Any]:
    """Of a kernel that Triton's cache does not have, with the log of its one assembly."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        _multiply.device_caches.clear()
        with assembler_log() as log:
            kernel = _compiled(name)
        code = machine_code(kernel, log.getvalue())
    return {**asdict(code), "log": log.getvalue()}


if __name__ == "__main__":
    codes = {name: _read(name, name) for name in NAMES}
    for name in ("asynchronous", "serialised"):
        codes[f"{name}, first log"] = _read_once(name)
    codes["mixed-up"] = _read("asynchronous", "serialised")
    json.dump(codes, sys.stdout)
