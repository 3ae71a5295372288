"""Launches of @gluon.jit and @triton.jit kernels that run here, on tensors in host memory.

    with emulating_mlakit(seed=3) as emulation:
        mla_decode(..., backend="hopper")  # CPU tensors

A launch is lowered to IR (`lowering`), and its CTAs run one after the other, those of a cluster at
once (`machine`). A fault of a kernel is raised where the kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from time import perf_counter
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from mlakit.dispatch import private
from mlakit.kernels.launch import SHARED_BYTES, Target, compiling
from mlakit.tools.emulator.clusters import part_of
from mlakit.tools.emulator.codegen import compile_module
from mlakit.tools.emulator.ir import Module
from mlakit.tools.emulator.lowering import lower
from mlakit.tools.emulator.machine import Machine
from mlakit.tools.emulator.memory import GlobalMemory
from mlakit.tools.emulator.parser import parse
from mlakit.tools.emulator.runtime import Runtime
from mlakit.tools.emulator.tma import Descriptor

HOPPER_ARCH = 90
NUM_SMS = 2  # of the emulated GPU: few, so that a CTA has several tiles of little work
SEEDS_APART = 7919  # between the schedulers of two seeds of a launch, so that no two CTAs share one
KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2: "f8E5M2",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.uint8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}

Mutate = Callable[[str, str], str]  # from the name of a kernel and its IR to other IR
Observer = Callable[[str, str], None]  # of a partition or an engine, and what it does


@dataclass(frozen=True)
class Launch:
    """A launch that has run."""

    kernel: str
    ctas: int
    steps: int  # of the scheduler, over all CTAs
    lowering_s: float  # and generating Python
    run_s: float


@dataclass
class Emulation:
    """The settings of emulated launches, and what they did.

    arch      90 for sm_90
    seed      of the schedulers: another seed is another interleaving
    checks    for races, fences and unwritten memory
    exact_fp8  sums of e4m3 products are exact, not rounded as Hopper's tensor cores do
    hardware_sums  16-bit products are added up as Hopper's tensor cores do, to the bit; slower
    mutate    changes the IR of kernels, for mutation tests
    observer  is told every step of every CTA
    sources   the IR of each kernel as it ran, by its name
    warnings  how often each was given
    """

    arch: int = HOPPER_ARCH
    seed: int = 0
    checks: bool = True
    exact_fp8: bool = False
    hardware_sums: bool = False
    mutate: Mutate | None = None
    observer: Observer | None = None
    launches: list[Launch] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def launch(
        self,
        kernel: JITFunction,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        """Run a kernel."""
        started = perf_counter()
        lowered = lower(kernel, args, options, self.arch)
        text, name = lowered.text, kernel.__name__
        if self.mutate is not None:
            text = self.mutate(name, text)
        module, function = _compiled(text)
        self.sources[name] = text
        compiled = perf_counter()
        memory = GlobalMemory()
        names = [argument.lstrip("%") for argument, _ in module.kernel.args]
        values: list[Any] = []
        for each in lowered.arguments:
            values += _values(each, names[len(values)] if len(values) < len(names) else "", memory)
        if len(values) != len(module.kernel.args):
            raise ValueError(f"{name}: the IR must have {len(values)} arguments, got {names}")
        x, y, z = (*grid, 1, 1)[:3]
        extent = (x, y, z)
        ctas = [(x, y, z) for z, y, x in product(*map(range, reversed(extent)))]
        steps = 0
        for index, cta in enumerate(ctas):
            seed = self.seed * SEEDS_APART + index
            machine = Machine(
                memory,
                cta,
                extent,
                seed,
                checks=self.checks,
                exact_fp8=self.exact_fp8,
                hardware_sums=self.hardware_sums,
                num_ctas=module.num_ctas,
            )
            steps += self._run_cta(machine, function, values, module.num_warps)
        run_s = perf_counter() - compiled
        self.launches.append(Launch(name, len(ctas), steps, compiled - started, run_s))

    def _run_cta(self, machine: Machine, function: Any, values: list[Any], num_warps: int) -> int:
        if self.observer is not None:
            self.observer("CTA", f"{machine.program} begins")
            machine.observer = self.observer
        runtime = Runtime(machine)
        machine.run(lambda partition: function(runtime, partition, *values), num_warps)
        for warning, count in machine.warnings.items():
            self.warnings[warning] = self.warnings.get(warning, 0) + count
        return machine.steps


@lru_cache(maxsize=32)  # there are thousands of mutants, each run a few times in a row
def _compiled(text: str) -> tuple[Module, Any]:
    """Return the module of an IR and its kernel as Python."""
    module = parse(text)
    return module, compile_module(module)[0]


def _values(argument: Any, name: str, memory: GlobalMemory) -> list[Any]:
    """Return what a function of the IR takes for an argument, and make its memory known."""
    if isinstance(argument, torch.Tensor):
        _add(argument, memory)
        return [argument.data_ptr()]
    if hasattr(argument, "block_shape"):  # a TMA descriptor, which is followed by its extents
        base, shape, strides = argument.base, list(argument.shape), list(argument.strides)
        _add(base, memory)
        block, layout = list(argument.block_shape), getattr(argument, "layout", None)
        descriptor = Descriptor(
            base.data_ptr(), shape, strides, block, KINDS[base.dtype],
            swizzle=getattr(layout, "swizzle_byte_width", 0), name=name,
            part=part_of(block, getattr(layout, "cga_layout", None) or ()),
        )  # fmt: skip
        return [descriptor, *shape, *strides]
    return [argument]


def _add(tensor: torch.Tensor, memory: GlobalMemory) -> None:
    storage = tensor.untyped_storage()
    memory.add(storage.data_ptr(), storage.nbytes())


class NoDriver:
    """Stands in for CUDA's driver, which is not there."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def emulating(**settings: Any) -> Iterator[Emulation]:
    """Run kernels that are launched in this scope here. `settings` are those of `Emulation`."""
    emulation = Emulation(**settings)

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **given: Any) -> None:
        if callable(grid):
            grid = grid(dict(zip(kernel.arg_names, args, strict=False)))
        emulation.launch(kernel, grid, args, given)

    methods = JITFunction.run, JITFunction.warmup
    with private.driver_replaced_by(NoDriver(emulation.arch)):
        JITFunction.run, JITFunction.warmup = run, run
        try:
            yield emulation
        finally:
            JITFunction.run, JITFunction.warmup = methods


@contextmanager
def emulating_mlakit(num_sms: int = NUM_SMS, **settings: Any) -> Iterator[Emulation]:
    """Let ops of mlakit on CPU tensors select and run the kernels of a GPU with `num_sms` SMs."""
    arch = settings.get("arch", HOPPER_ARCH)
    with (
        compiling(Target(arch, num_sms, SHARED_BYTES[arch])),
        emulating(**settings) as emulation,
    ):
        yield emulation
