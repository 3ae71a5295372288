"""The launch of every portable kernel, and the GPU that it runs on.

A launcher picks its configuration by `target(device)` and starts kernels with `launch`. Inside
`compiling(target)` the target is a GPU that need not exist: `launch` compiles kernels for it from
CPU tensors and collects them, and nothing runs. `launching_into` gives launches to another kind of
`Compilation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from mlakit.dispatch import knobs, private
from mlakit.dispatch.architectures import arch_name, has_fp8, is_amd
from mlakit.dispatch.specs import arch_of, pretending
from mlakit.kernels import workspace

if knobs.interpreted():
    from mlakit.kernels.interpreter import repair

    repair()
private.count_compilations()
private.hash_callees_first()
private.describe_constants_in_tuples()


@dataclass(frozen=True)
class Target:
    """The properties of a GPU that configurations depend on."""

    arch: int  # 90 for sm_90, 0x942 for gfx942
    num_sms: int
    shared_bytes: int  # per block

    @property
    def has_fp8(self) -> bool:
        """Whether e4m3 conversions are instructions; otherwise they are integer arithmetic."""
        return has_fp8(self.arch)

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel can begin while the one before it ends (PDL)."""
        return self.arch >= 90 and not is_amd(self.arch) and not knobs.interpreted()


# shared memory per block, "Technical Specifications per Compute Capability" of the CUDA manual
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 120: 101_376}
SHARED_BYTES |= dict.fromkeys((90, 100, 103), 232_448)
# local data share of a workgroup, by the instruction set manuals of CDNA 3, CDNA 4 and RDNA 3
AMD_SHARED_BYTES = {0x942: 65_536, 0x950: 163_840, 0x1100: 65_536}
FIRST_OF_32_LANES = 0x1000  # RDNA; CDNA has 64 lanes per warp
NVIDIA_OPTIONS = ("maxnreg", "launch_pdl")  # of a launch; Triton refuses them elsewhere
INTERPRETED = Target(arch=90, num_sms=3, shared_bytes=232_448)  # few SMs, so that tests split work


@dataclass(frozen=True)
class Compilation:
    """The kernels that launchers started, compiled for `target`."""

    target: Target
    kernels: list[Any] = field(default_factory=list)

    @property
    def device(self) -> int:
        """The number of the device, by which Triton keeps compiled kernels in a process."""
        return self.target.arch

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Compile a kernel that a launcher started."""
        self.kernels.append(kernel.warmup(*args, grid=grid, **options))


_COMPILATION: ContextVar[Compilation | None] = ContextVar("mlakit_compilation", default=None)


def target(device: torch.device) -> Target:
    """The GPU that kernels over tensors on `device` run on."""
    compilation = _COMPILATION.get()
    if compilation is not None:
        return compilation.target
    return _target_of(device.type, device.index)


@lru_cache(maxsize=64)
def _target_of(kind: str, index: int | None) -> Target:
    if kind != "cuda":
        return INTERPRETED
    device = torch.device(kind, index)
    arch, facts = arch_of(device), torch.cuda.get_device_properties(device)
    shared = AMD_SHARED_BYTES[arch] if is_amd(arch) else facts.shared_memory_per_block_optin
    return Target(arch, facts.multi_processor_count, shared)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start `kernel`; an empty grid starts nothing."""
    compilation = _COMPILATION.get()
    # asked for: Triton 3.9 warns where a kernel leaves it open, and 3.10 will not fuse
    options["enable_fp_fusion"] = True
    if torch.version.hip is not None or (compilation and is_amd(compilation.target.arch)):
        options = {name: each for name, each in options.items() if name not in NVIDIA_OPTIONS}
    if compilation is not None:
        compilation.launch(kernel, grid, args, options)
    elif 0 not in grid:
        compiled = kernel[grid](*args, **options)
        recorder = workspace.recorder()
        if recorder is not None:
            named = dict(zip(kernel.arg_names, args, strict=False)) | options
            recorder.add_launch(compiled, grid, tuple(named[name] for name in kernel.arg_names))


@contextmanager
def compiling(target: Target) -> Iterator[Compilation]:
    """Compile kernels that are launched in this scope for `target` instead of running them."""
    compilation = Compilation(target)
    with launching_into(compilation):
        yield compilation


@contextmanager
def launching_into(compilation: Compilation) -> Iterator[None]:
    """Give kernels that are launched in this scope to `compilation` instead of running them.

    Ops on CPU tensors select the kernels that they select on a GPU such as its target.
    """
    target = compilation.target
    token = _COMPILATION.set(compilation)
    stand_in = _NoDriver(target.arch, compilation.device)
    try:
        with private.driver_replaced_by(stand_in), pretending(target.arch, target.num_sms):
            yield
    finally:
        _COMPILATION.reset(token)


class _NoDriver:
    """Stands in for the driver of CUDA or ROCm where kernels are compiled and not run."""

    def __init__(self, arch: int, device: int) -> None:
        self.device = device
        self.target = GPUTarget("cuda", arch, 32)
        if is_amd(arch):
            lanes = 64 if arch < FIRST_OF_32_LANES else 32
            self.target = GPUTarget("hip", arch_name(arch), lanes)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
