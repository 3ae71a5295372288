"""Where Triton puts what a kernel allocates in shared memory, which it decides after TTGIR."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

from triton._C.libtriton import ir, nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from mlakit.tools.emulator.dtypes import element_size
from mlakit.tools.emulator.frontend import HOPPER_ARCH

PTX_VERSION = 83  # of those that have Hopper's instructions, any
TILE = re.compile(r"local_alloc .*allocation\.offset = (\d+) .*memdesc<((?:\d+x)+)([a-z]\w*)")
SCRATCH = re.compile(r"allocation\.offset = (\d+)")


def shared_by_two(text: str, arch: int = HOPPER_ARCH) -> list[str]:
    """Return the allocations of a kernel's IR that lie over each other, or over scratch memory."""
    tiles, scratch = [], []
    for line in _allocated(text, arch).splitlines():
        tile = TILE.search(line)
        if tile:
            size = element_size(tile.group(3))
            for each in tile.group(2).split("x")[:-1]:
                size *= int(each)
            tiles.append((int(tile.group(1)), int(tile.group(1)) + size))
        else:
            scratch += [int(each) for each in SCRATCH.findall(line)]
    assert tiles, "a kernel without shared memory"
    pairs = [f"{a} and {b}" for a, b in combinations(sorted(tiles), 2) if b[0] < a[1]]
    return pairs + [f"{a} and {at}" for a in tiles for at in scratch if a[0] <= at < a[1]]


def _allocated(text: str, arch: int) -> str:
    backend = make_backend(GPUTarget("cuda", arch, 32))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ttgir")
        file.write_text(text, encoding="utf-8")
        module = ir.parse_mlir_module(str(file), context)
    module.context = context
    passes = ir.pass_manager(context)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(passes, arch, PTX_VERSION)
    passes.run(module, "allocate")
    return str(module)
