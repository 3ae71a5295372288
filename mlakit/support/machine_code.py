"""Reads from a compiled kernel what it asks of a GPU: from the very cubin that would be run.

The tools are those that Triton finds for itself and that come with it; without one of them nothing
is read and the error names it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from struct import unpack_from
from typing import Any


@dataclass(frozen=True)
class MachineCode:
    """What a kernel asks for.

    A spill is an instruction that reads or writes local memory. Arrays of a kernel's own would lie
    there too, but no kernel here has any.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    is_serialised: bool  # its wgmma wait for each other
    idle_barriers: int  # that are made and used by no one: their memory may be given to data


def machine_code(kernel: Any) -> MachineCode:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _said("cuobjdump", "--dump-resource-usage", str(cubin))
        functions = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
        if not functions:
            raise RuntimeError(f"cuobjdump tells no resource usage: {usage}")
        # there is no local memory to access without a frame, and it takes a second to look for it
        has_frame = any(int(stack) or int(local) for _, stack, local in functions)
        code = _said("nvdisasm", "--print-code", str(cubin)) if has_frame else ""
    return MachineCode(
        max(int(registers) for registers, _, _ in functions),
        len(re.findall(r"\bSTL\b", code)),
        len(re.findall(r"\bLDL\b", code)),
        "wgmma" in kernel.asm["ptx"] and "serializ" in _assembled_again(kernel),
        _count_idle_barriers(kernel.asm["ttgir"]),
    )


def _count_idle_barriers(ttgir: str) -> int:
    """How many allocations of barriers are initialised, and nothing else.

    To the compiler their memory is free from then on. PTX gives it to nothing but a barrier, until
    that is invalidated, which Triton does not do.
    """
    made = re.findall(r"%(\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*i64,", ttgir)
    return sum(_is_idle(barrier, ttgir) for barrier in made)


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


def _said(name: str, *arguments: str) -> str:
    import triton

    tool = getattr(triton.knobs.nvidia, name)  # asked for its path it raises where there is none
    done = subprocess.run([tool.path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} cannot read the kernel: {done.stderr.strip()}")
    return done.stdout


def _assembled_again(kernel: Any) -> str:
    """What the assembler says of a kernel; that wgmma are serialised is to be seen nowhere else.

    It is Triton that calls it, as it did for the cubin: which assembler, and its options, differ
    between versions of Triton, and registers with them.
    """
    import triton
    from triton.backends.compiler import Language
    from triton.compiler.compiler import make_backend

    backend = make_backend(kernel.metadata.target)
    metadata = kernel.metadata._asdict()
    del metadata["num_warps"]  # with those of warp specialisation, and so no longer an option
    stages: dict[str, Any] = {}
    backend.add_stages(stages, backend.parse_options(metadata), Language.TRITON)
    said = StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(said):
        triton.knobs.nvidia.dump_ptxas_log = True
        cubin = stages["cubin"](kernel.asm["ptx"], metadata)
    if _instructions(cubin) != _instructions(kernel.asm["cubin"]):
        raise RuntimeError("assembled again, the kernel is not the one that would be run")
    return said.getvalue()


def _instructions(cubin: bytes) -> list[bytes]:
    """Of each function; what the rest of the file says of sources changes with where they lie."""
    (headers,) = unpack_from("<Q", cubin, 0x28)
    size, count = unpack_from("<2H", cubin, 0x3A)
    sections = [unpack_from("<2I4Q", cubin, headers + size * i) for i in range(count)]
    is_executable = 4
    return [
        cubin[offset : offset + length]
        for _, _, flags, _, offset, length in sections
        if flags & is_executable
    ]
