"""The IR of a launch: a kernel is specialised for its arguments and lowered, without a GPU.

Triton's own code binds and specialises the arguments. A @gluon.jit kernel is lowered to TTGIR,
which has every layout, a @triton.jit kernel to TTIR. Both stop before shared memory is allocated;
tensor memory has been.
The IR of a specialisation is made once per process.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from triton._C.libtriton import ir as triton_ir
from triton._C.libtriton import nvidia
from triton.backends.compiler import GPUTarget, Language
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

# arguments of a binder that Triton's own launcher fills in; which of them exist depends on its
# version
FILLED_IN = {"debug": False, "instrumentation_mode": "", "fpsan_homomorphic_casts": False}

_texts: dict[str, str] = {}
_binders: dict[tuple[JITFunction, int], Any] = {}


@dataclass(frozen=True)
class Lowered:
    """A kernel for certain arguments."""

    text: str  # the IR
    arguments: list[Any]  # those that the IR has: neither constants nor specialised away


def exit_without_leak_reports() -> None:
    """Close stderr before Triton's bindings list the objects that they leaked themselves."""
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


def lower(
    kernel: JITFunction, args: tuple[Any, ...], options: Mapping[str, Any], arch: int
) -> Lowered:
    """Lower `kernel` for a launch with these arguments on a GPU of `arch`."""
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    known = backend.parse_options({"enable_fp_fusion": True}).__dict__
    given = {**options, **{name: each for name, each in FILLED_IN.items() if name in known}}
    bound, specialization, extra = _binder(kernel, arch)(*args, **given)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, given, bound, specialization, extra
    )
    leaves = [leaf for name, type in signature.items() for leaf in _leaves(bound[name], type)]
    hints = sorted(map(str, attributes.items()))
    key = f"{kernel.cache_key} {arch} {signature} {constants} {hints} {parsed}"
    if key not in _texts:
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        _texts[key] = _text(source, target, backend, parsed)
    return Lowered(_texts[key], leaves)


def _binder(kernel: JITFunction, arch: int) -> Any:
    """Return the function that binds the arguments of a launch and specialises them."""
    key = kernel, arch
    if key not in _binders:
        _binders[key] = kernel.create_binder()[-1]
    return _binders[key]


def _leaves(value: Any, type: Any) -> Iterator[Any]:
    """Flatten tuples, and leave out constants."""
    if type == "constexpr":
        return
    if isinstance(type, (tuple, list)):
        for each, its_type in zip(value, type, strict=True):
            yield from _leaves(each, its_type)
    else:
        yield value


def _text(source: Any, target: GPUTarget, backend: Any, options: Any) -> str:
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
            return _with_places(module)
    raise ValueError(f"Triton's stages must include {last}, got {', '.join(stages)}")


def _with_places(module: Any) -> str:
    """Return the IR of a module, in which each allocation of tensor memory has its place.

    Triton's own pass gives the place: two allocations that are not live at once may share columns.
    """
    text = str(module)
    if "ttng.tmem_alloc" not in text:
        return text
    passes = triton_ir.pass_manager(module.context)
    nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(passes)
    passes.run(module, "allocate_tensor_memory")
    return str(module)
