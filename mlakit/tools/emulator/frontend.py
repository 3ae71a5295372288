"""Launches of @gluon.jit and @triton.jit kernels on a CPU.

A launch is bound and specialised as Triton does it, compiled to TTGIR (a @triton.jit kernel to TTIR)
for a GPU that need not exist, and interpreted, one CTA after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton._C.libtriton import ir as triton_ir
from triton.backends.compiler import GPUTarget, Language
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from mlakit.tools.emulator.codegen import compile_module
from mlakit.tools.emulator.parser import parse
from mlakit.tools.emulator.machine import Descriptor, GlobalMemory, Machine
from mlakit.tools.emulator.runtime import Runtime

KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.int32: "i32",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.uint8: "i8",
    torch.int8: "i8",
    torch.int64: "i64",
    torch.float64: "f64",
    torch.int16: "i16",
    torch.bool: "i1",
    torch.float8_e5m2: "f8E5M2",
}


@dataclass
class Emulation:
    """What ran, and how."""

    arch: int = 90
    seed: int = 0
    checks: bool = True
    mutate: Callable[[str, str], str] | None = None  # (name of the kernel, its IR) -> other IR
    order: Callable[[list], list] = list  # of CTAs
    launches: list[dict] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # IR by kernel

    def launch(self, kernel: JITFunction, grid: tuple, args: tuple, options: dict) -> None:
        start = time.perf_counter()
        text, leaves = self._compile(kernel, args, options)
        if self.mutate is not None:
            text = self.mutate(kernel.__name__, text)
        if text not in self.compiled:
            module = parse(text)
            self.compiled[text] = (module, *compile_module(module))
        module, function, _, _ = self.compiled[text]
        self.sources[kernel.__name__] = text
        compiled = time.perf_counter()
        memory = GlobalMemory()
        values = [_value(leaf, memory) for leaf in leaves]
        values = [one for each in values for one in each]
        assert len(values) == len(module.kernel.args), (
            f"{len(values)} arguments for {[name for name, _ in module.kernel.args]}"
        )
        full = tuple(grid) + (1,) * (3 - len(grid))
        ctas = [(x, y, z) for z in range(full[2]) for y in range(full[1]) for x in range(full[0])]
        steps = 0
        for i, cta in enumerate(self.order(ctas)):
            machine = Machine(memory, cta, full, self.seed * 7919 + i, checks=self.checks)
            runtime = Runtime(machine)
            machine.run(lambda p: function(runtime, p, *values), module.num_warps)
            steps += machine.steps
            for warning, count in machine.warnings.items():
                self.warnings[warning] = self.warnings.get(warning, 0) + count
        self.launches.append(
            {
                "kernel": kernel.__name__,
                "ctas": len(ctas),
                "steps": steps,
                "compile_s": compiled - start,
                "run_s": time.perf_counter() - compiled,
            }
        )

    def _compile(self, kernel: JITFunction, args: tuple, options: dict) -> tuple[str, list]:
        target = GPUTarget("cuda", self.arch, 32)
        backend = make_backend(target)
        _, _, _, _, binder = _binder(kernel, target)
        known = backend.parse_options({"enable_fp_fusion": True}).__dict__
        more = {"debug": False, "instrumentation_mode": "", "fpsan_homomorphic_casts": False}
        kwargs = options | {name: value for name, value in more.items() if name in known}
        bound, specialization, extra = binder(*args, **kwargs)
        parsed, signature, constexprs, attrs = kernel._pack_args(
            backend, kwargs, bound, specialization, extra
        )
        source = kernel.ASTSource(kernel, signature, constexprs, attrs)
        leaves: list[Any] = []
        for name, type in signature.items():
            _flatten(bound[name], type, leaves)
        key = (
            f"{kernel.__name__} {signature} {constexprs} {sorted(map(str, attrs.items()))} {parsed}"
        )
        if key not in _TEXTS:
            _TEXTS[key] = _ir(source, target, backend, parsed)
        return _TEXTS[key], leaves


_TEXTS: dict[str, str] = {}
_BINDERS: dict[Any, Any] = {}


def _binder(kernel: JITFunction, target: GPUTarget) -> Any:
    key = (kernel, target.arch)
    if key not in _BINDERS:
        _BINDERS[key] = kernel.create_binder()
    return _BINDERS[key]


def _ir(source: Any, target: GPUTarget, backend: Any, options: Any) -> str:
    context = triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    last = "ttgir" if source.language == Language.GLUON else "ttir"
    for name, stage in stages.items():
        module = stage(module, {})
        if name == last:
            return str(module)
    raise AssertionError(last)


def _flatten(value: Any, type: Any, out: list) -> None:
    """The arguments that are left of a launch's: neither constants nor specialised away."""
    if type == "constexpr":
        return
    if isinstance(type, (tuple, list)):
        for one, its in zip(value, type, strict=True):
            _flatten(one, its, out)
    else:
        out.append((value, type))


def _value(leaf: tuple[Any, Any], memory: GlobalMemory) -> list[Any]:
    value, type = leaf
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        memory.add(storage.data_ptr(), storage.nbytes())
        return [value.data_ptr()]
    if hasattr(value, "block_shape"):
        base = value.base
        storage = base.untyped_storage()
        memory.add(storage.data_ptr(), storage.nbytes())
        descriptor = Descriptor(
            base.data_ptr(),
            list(value.shape),
            list(value.strides),
            list(value.block_shape),
            KINDS[base.dtype],
        )
        return [descriptor, *value.shape, *value.strides]
    return [value]


class _NoDriver:
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
    """Kernels that are launched in this scope run here, on tensors in host memory."""
    emulation = Emulation(**settings)
    saved = JITFunction.run
    driver = triton.runtime.driver._active
    triton.runtime.driver.set_active(_NoDriver(emulation.arch))

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        emulation.launch(
            self, grid(dict(zip(self.arg_names, args))) if callable(grid) else grid, args, options
        )
        return None

    def launch(self: JITFunction, *args: Any, grid: Any, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=False, **options)

    warm = JITFunction.warmup
    JITFunction.run, JITFunction.warmup = run, launch
    try:
        yield emulation
    finally:
        JITFunction.run, JITFunction.warmup = saved, warm
        triton.runtime.driver.set_active(driver)


@contextmanager
def emulating_mlakit(num_sms: int = 2, **settings: Any) -> Iterator[Emulation]:
    """Ops of mlakit on CPU tensors select, and run, the kernels of a Hopper GPU of `num_sms` SMs."""
    from mlakit.kernels.triton.launch import SHARED_BYTES, Target, compiling

    arch = settings.get("arch", 90)
    with compiling(Target(arch, num_sms, SHARED_BYTES[arch])), emulating(**settings) as emulation:
        yield emulation
