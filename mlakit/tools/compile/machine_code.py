"""Reads the resources of a compiled kernel from its cubin, or from AMD's assembly text.

The tools (cuobjdump, nvdisasm) are those that come with Triton; if one is missing, the error names
it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from struct import unpack_from
from typing import Any


@dataclass(frozen=True)
class MachineCode:
    """The resources of a kernel.

    A spill is an instruction that reads or writes local memory. Local arrays would use it too, but
    no kernel here has any.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    is_serialised: bool  # its wgmmas are serialised
    idle_barriers: int  # initialised and never used: the compiler may reuse their memory
    clashing_barriers: int  # named barriers that both the compiler and the kernel use
    has_amd_fp8: bool = False  # instructions of AMD's for 8-bit floats


@contextmanager
def assembler_log() -> Iterator[StringIO]:
    """The assembler's log of the kernels that are compiled in this scope."""
    import triton

    log = StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        yield log


def machine_code(kernel: Any, log: str = "") -> MachineCode:
    """log  `assembler_log` of the scope in which the kernel was compiled; without it, or if the
    kernel came from Triton's cache, the kernel is assembled again
    """
    if "amdgcn" in kernel.asm:
        return _amd_machine_code(kernel.asm["amdgcn"])
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _output_of("cuobjdump", "--dump-resource-usage", str(cubin))
        functions = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
        if not functions:
            raise RuntimeError(f"cuobjdump printed no resource usage: {usage}")
        # without a stack frame there is no local memory; disassembling takes a second
        has_frame = any(int(stack) or int(local) for _, stack, local in functions)
        code = _output_of("nvdisasm", "--print-code", str(cubin)) if has_frame else ""
    return MachineCode(
        max(int(registers) for registers, _, _ in functions),
        len(re.findall(r"\bSTL\b", code)),
        len(re.findall(r"\bLDL\b", code)),
        "wgmma" in kernel.asm["ptx"] and "serializ" in _log_of(kernel, log),
        _count_idle_barriers(kernel.asm["ttgir"]),
        count_clashing_barriers(kernel.asm["ptx"]),
    )


def write_code(kernel: Any, folder: Path, number: int) -> None:
    """Write what a kernel was compiled to: IR, PTX, the binary, and NVIDIA's machine code."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number}-{kernel.metadata.name}"
    for stage, content in kernel.asm.items():
        if isinstance(content, bytes):
            path.with_suffix(f".{stage}").write_bytes(content)
        elif isinstance(content, str):
            path.with_suffix(f".{stage}").write_text(content, "utf-8")
    if "cubin" in kernel.asm:
        code = _output_of("nvdisasm", "--print-code", str(path.with_suffix(".cubin")))
        path.with_suffix(".sass").write_text(code, "utf-8")


def _amd_machine_code(assembly: str) -> MachineCode:
    """Scalar registers are spilled to lanes of vector registers: only scratch memory counts."""
    registers = re.findall(r"^ *\.vgpr_count: +(\d+)$", assembly, re.MULTILINE)
    if not registers:
        raise RuntimeError("the assembly has no .vgpr_count")
    return MachineCode(
        max(map(int, registers)),
        len(re.findall(r"^\s+scratch_store_", assembly, re.MULTILINE)),
        len(re.findall(r"^\s+scratch_load_", assembly, re.MULTILINE)),
        is_serialised=False,
        idle_barriers=0,
        clashing_barriers=0,
        has_amd_fp8=re.search(r"^\s+v_\w*(fp8|bf8)", assembly, re.MULTILINE) is not None,
    )


def _count_idle_barriers(ttgir: str) -> int:
    """The number of barrier allocations that are initialised and never used.

    The compiler reuses their memory. PTX forbids any other use of it until the barrier is
    invalidated, which Triton does not do.
    """
    made = re.findall(r"%(\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*i64,", ttgir)
    return sum(_is_idle(barrier, ttgir) for barrier in made)


def count_clashing_barriers(ptx: str) -> int:
    """The number of named barriers of the compiler that a kernel's own code may mean, too.

    The compiler writes numbers of its barriers out. Those of kernels (`primitives.named_arrive`),
    from NAMED_FIRST on, are in registers. That the compiler's stay below is nowhere promised.
    """
    used = re.findall(r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|arrive)(?:\.aligned)?\s+(%?\w+)", ptx)
    if not any(barrier.startswith("%") for barrier in used):
        return 0
    from mlakit.kernels.hopper.device.named_barriers import NAMED_FIRST

    return len({each for each in used if each.isdecimal() and int(each) >= NAMED_FIRST})


def _is_idle(barrier: str, ttgir: str) -> bool:
    uses = re.findall(rf"^(?!\s*%{barrier} = ).*%{barrier}(?!\w).*$", ttgir, re.MULTILINE)
    for use in uses:
        element = re.match(rf"\s*%(\S+) = ttg\.memdesc_index %{barrier}\[", use)
        if element is None:
            is_idle = use.lstrip().startswith("ttng.init_barrier")
        else:
            is_idle = _is_idle(element[1], ttgir)
        if not is_idle:
            return False
    return True


def _output_of(name: str, *arguments: str) -> str:
    import triton

    tool = getattr(triton.knobs.nvidia, name)  # its `path` raises if the tool is missing
    done = subprocess.run([tool.path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} cannot read the kernel: {done.stderr.strip()}")
    return done.stdout


def _log_of(kernel: Any, log: str) -> str:
    """The assembler's log of a kernel: only it shows that wgmmas are serialised."""
    if f"'{kernel.metadata.name}'" in log:
        return "\n".join(line for line in log.splitlines() if kernel.metadata.name in line)
    return _second_log(kernel)


def _second_log(kernel: Any) -> str:
    """Triton runs the assembler again, as it did for the cubin: the assembler and its options
    depend on the version of Triton, and the registers on them.
    """
    from triton.backends.compiler import Language
    from triton.compiler.compiler import make_backend

    backend = make_backend(kernel.metadata.target)
    metadata = kernel.metadata._asdict()
    del metadata["num_warps"]  # it includes the warp-specialised warps, so it is no valid option
    stages: dict[str, Any] = {}
    backend.add_stages(stages, backend.parse_options(metadata), Language.TRITON)
    with assembler_log() as log:
        cubin = stages["cubin"](kernel.asm["ptx"], metadata)
    if _instructions(cubin) != _instructions(kernel.asm["cubin"]):
        raise RuntimeError("the second assembly differs from the cubin")
    return log.getvalue()


def _instructions(cubin: bytes) -> list[bytes]:
    """The code of each function; other sections of the file contain source paths."""
    (headers,) = unpack_from("<Q", cubin, 0x28)
    size, count = unpack_from("<2H", cubin, 0x3A)
    sections = [unpack_from("<2I4Q", cubin, headers + size * i) for i in range(count)]
    is_executable = 4
    return [
        cubin[offset : offset + length]
        for _, _, flags, _, offset, length in sections
        if flags & is_executable
    ]
