"""What SGLang's wheel lacks on a machine without CUDA; for tests only.

`packages` makes a folder for PYTHONPATH with
    sgl_kernel          the compiled kernels: names that raise when they are called
    sitecustomize       torchvision without its compiled ops
    an entry point      of `start`, which every process of an engine calls first: it defines the
                        ops of `OPS`, and notes what the process calls
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CALLS = "MLAKIT_TEST_CALLS"  # a folder

SGL_KERNEL = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments, **named):
        raise RuntimeError(f"sgl_kernel.{name} is missing on this machine")

    return missing
"""
SITE = """
import sys, types

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
"""


def is_installed() -> bool:
    """Is SGLang there? If so, this process can import it."""
    if importlib.util.find_spec("sglang") is None:
        return False
    exec(SITE, {})
    return True


def packages(folder: Path) -> Path:
    """Make the folder."""
    info = folder / "mlakit_cpu_shim-0.dist-info"
    points = {"mlakit": "mlakit.integrations.sglang.plugin:register", "mlakit_cpu_shim": START}
    files = {
        folder / "sgl_kernel" / "__init__.py": SGL_KERNEL,
        folder / "sitecustomize.py": SITE,
        info / "METADATA": "Metadata-Version: 2.1\nName: mlakit-cpu-shim\nVersion: 0\n",
        info / "entry_points.txt": "[sglang.srt.plugins]\n"
        + "".join(f"{name} = {point}\n" for name, point in points.items()),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


START = f"{__name__}:start"


def start() -> None:
    """Prepare a process of an engine."""
    define_ops()
    record()


def _init_cpu_threads_env(cpu_ids: str) -> str:
    return f"threads are not bound to {cpu_ids}"


def _initialize(size: int, rank: int) -> None:
    pass


def _shm_allreduce(data: Tensor, reduce_op: int) -> None:
    assert reduce_op == int(dist.ReduceOp.SUM)
    dist.all_reduce(data)


def _shm_allgather(data: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(data) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, data)
    return torch.cat(parts, dim)


# the ops of torch that SGLang calls on every arm64 machine, and on x86 only where it has AMX. The
# ranks of a test are those of one group, and memory that they share is left to torch
OPS: dict[str, Callable[..., Any]] = {
    "init_cpu_threads_env(str cpu_ids) -> str": _init_cpu_threads_env,
    "initialize(int size, int rank) -> ()": _initialize,
    "shm_allreduce(Tensor(a!) data, int reduce_op) -> ()": _shm_allreduce,
    "shm_allgather(Tensor data, int dim) -> Tensor": _shm_allgather,
}


@cache
def define_ops() -> torch.library.Library:
    """Define `OPS` in this process; they exist as long as the library does."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for schema, function in OPS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    return library


def record() -> None:
    """Note the kinds of attention that this process calls, as names of files."""
    folder = os.environ.get(CALLS)
    if not folder:
        return
    from mlakit.integrations import steps

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            kind = name
            if name == "decode":
                kind += "" if arguments[2].q_starts is None else "-several"
            elif len(arguments[0]) != len(arguments[1]):  # more keys than queries
                kind += "-prefix"
            Path(folder, f"{kind}.{os.getpid()}").touch()
            return function(*arguments, **named)

        return call

    for name in ("decode", "prefill"):
        setattr(steps, name, recorded(name, getattr(steps, name)))
