"""The IR of a launch: a kernel is specialised for its arguments and lowered, without a GPU.

Triton's own code binds and specialises the arguments. A @gluon.jit kernel is lowered to TTGIR,
which has every layout, a @triton.jit kernel to TTIR. Both stop before shared memory is allocated;
tensor memory has been.
The IR of a specialisation is made once per process.
"""

from __future__ import annotations

import atexit
import os
import re
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
            return with_cluster_barriers(_with_places(module))
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


def with_cluster_barriers(text: str) -> str:
    """Return the IR of a kernel with the barriers of the cluster that Triton adds after TTGIR.

    Where CTAs use each other's mbarriers, a fence and a relaxed barrier of the cluster come between
    their initialisation and the first use; a barrier that is there already needs the fence alone.
    Before the kernel returns comes a barrier in each kernel with clusters (Triton's
    ClusterBarrierInsertion).
    """
    count = _NUM_CTAS.search(text)
    if count is None or count.group(1) == "1":
        return text
    lines, out, is_kernel = text.splitlines(), [], False
    begin = next(i for i, line in enumerate(lines) if line.lstrip().startswith("tt.func public"))
    for i, line in enumerate(lines):
        is_kernel = i == begin or (is_kernel and not line.startswith("  }"))
        if is_kernel and line.startswith("    tt.return"):
            out.append("    ttng.cluster_barrier loc(#loc)")
        out.append(line)
    if not any(_crosses(line, int(count.group(1))) for line in lines):
        return "\n".join(out)
    inits = [i for i, line in enumerate(out) if line.startswith("    ttng.init_barrier")]
    for i in range(inits[-1] + 1, len(out)):
        if out[i].startswith("    ttng.cluster_barrier"):
            return "\n".join([*out[:i], _FENCE, *out[i:]])
        if _USE.match(out[i]):
            return "\n".join([*out[:i], _FENCE, _RELAXED, *out[i:]])
    raise ValueError("an mbarrier that is initialised must be used")


def _crosses(line: str, num_ctas: int) -> bool:
    """Does an operation initialise an mbarrier of several CTAs, or use those of other CTAs?"""
    shape = re.search(r"ttng.init_barrier .*memdesc<(\d+)xi64", line)
    if shape:
        return int(shape.group(1)) != num_ctas
    return _CROSSING.search(line) is not None


_NUM_CTAS = re.compile(r'"ttg.num-ctas" = (\d+)')
_CROSSING = re.compile(
    r"ttng\.(async_tma|tc_gen5_mma).*[{,]\s*multicast\b|ttng\.tc_gen5_commit .* descs|"
    r"ttng\.(arrive_barrier|barrier_expect).*(fromCTA|multicastCTA)|"
    r'"ttng.two-ctas" = true|'
    r"ttng\.async_shared_store|ttng\.clc_try_cancel "
)
_USE = re.compile(
    r"    (?:ttng\.(?:(?:arrive|wait|inval)_barrier|barrier_expect|async_tma|tc_gen5)|"
    r"ttg\.warp_specialize|ttg\.async_copy_mbarrier|(?:%\S+(?:, %\S+)* = )?(?:scf\.|tt\.call))"
)
_FENCE = "    ttng.fence_mbarrier_init_release_cluster loc(#loc)"
_RELAXED = "    ttng.cluster_barrier {relaxed = true} loc(#loc)"
