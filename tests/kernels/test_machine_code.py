"""What is read from a compiled kernel: each kind of defect is found in a kernel that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from struct import pack, pack_into
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from mlakit.tools.compile import machine_code as module
from mlakit.tools.compile.machine_code import machine_code
from tests.paths import ROOT


@pytest.fixture(scope="module")
def codes() -> dict[str, dict[str, Any]]:
    """What is read of each kernel, by its name. One process reads them all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled_kernels"],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_sound_kernel_has_no_spills_and_no_idle_barriers(codes):
    code = dict(codes["tidy"])
    assert 0 < code.pop("registers") < 64
    assert code == {
        "spill_stores": 0,
        "spill_loads": 0,
        "is_serialised": False,
        "idle_barriers": 0,
        "clashing_barriers": 0,
        "has_amd_fp8": False,
    }


@pytest.mark.parametrize(
    ("compilers", "own", "count"),
    [
        ("bar.sync \t0, 128;\nbarrier.sync \t1;", "@%p1 bar.arrive %r7, 256;", 0),
        ("bar.sync \t0, 128;\nbar.sync \t6, 128;", "@%p1 bar.arrive %r7, 256;", 1),
        ("barrier.cta.sync.aligned 15;\nbar.sync \t9, 64;", "bar.sync %r7, 256;", 2),
        ("bar.sync \t0, 128;\nbar.sync \t6, 128;", "", 0),
    ],
)
def test_named_barriers_that_the_compiler_uses_too_are_counted(compilers, own, count):
    assert module.count_clashing_barriers(f"{compilers}\n{own}\n{compilers}") == count


@pytest.mark.slow
def test_spills_are_counted(codes):
    code = codes["spilling"]
    assert code["registers"] == 64
    # of 128 numbers of a thread half or more have no register
    assert code["spill_stores"] >= 64
    assert code["spill_loads"] >= 64
    assert not code["is_serialised"]


@pytest.mark.slow
def test_products_that_wait_for_each_other_are_seen(codes):
    assert codes["serialised"]["is_serialised"]
    assert not codes["asynchronous"]["is_serialised"]


@pytest.mark.parametrize("name", ["asynchronous", "serialised"])
def test_the_log_of_the_first_assembly_is_enough(name, codes):
    code = dict(codes[f"{name}, first log"])
    log = code.pop("log")
    assert log.count("Compiling entry function '_multiply'") == 1  # no second assembly
    assert code == codes[name]


def test_the_log_of_another_kernel_is_not_read(monkeypatch):
    log = "wgmma.mma_async instructions are serialized in function '_multiply'"
    kernel = SimpleNamespace(metadata=SimpleNamespace(name="_other"))
    monkeypatch.setattr(module, "_second_log", lambda kernel: "second")
    assert module._log_of(kernel, log) == "second"
    kernel.metadata.name = "_multiply"
    assert module._log_of(kernel, log) == log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("all-barriers-used", 0), ("one-barrier-idle", 1), ("barriers-idle", 2)]
)
def test_unused_barriers_are_counted(name, count, codes):
    assert codes[name]["idle_barriers"] == count


@pytest.mark.slow
def test_what_is_assembler_log_must_be_the_machine_code(codes):
    assert "the second assembly differs from the cubin" in codes["mixed-up"]["error"]


def elf(*sections: tuple[int, bytes]) -> bytes:
    """An ELF file of sections (flags, bytes); headers are 64 bytes long."""
    contents = b"".join(content for _, content in sections)
    file = bytearray(64)
    pack_into("<Q", file, 0x28, 64 + len(contents))
    pack_into("<2H", file, 0x3A, 64, len(sections))
    file += contents
    at = 64
    for flags, content in sections:
        file += pack("<2I4Q", 0, 1, flags, 0, at, len(content)).ljust(64, b"\0")
        at += len(content)
    return bytes(file)


def test_only_instructions_are_compared():
    code = (6, b"instructions")
    same = elf((0, b"source.py, 2001"), code), elf(code, (0, b"source.py, 2017"))
    assert module._instructions(same[0]) == module._instructions(same[1]) == [b"instructions"]
    assert module._instructions(elf((6, b"others"), code)) == [b"others", b"instructions"]


def test_a_kernel_that_cannot_be_read_is_an_error():
    kernel = SimpleNamespace(asm={"cubin": b"no machine code", "ptx": "", "ttgir": ""})
    with pytest.raises(RuntimeError, match="cuobjdump cannot read the kernel: "):
        machine_code(kernel)


AMD_CODE = """
\tscratch_store_dwordx4 off, v[2:5], off
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
\tscratch_load_dword v1, off, off offset:16
\tscratch_load_dword v2, off, off offset:20
    .vgpr_count:     120
"""


def test_the_assembly_of_amd_is_read():
    code = machine_code(SimpleNamespace(asm={"amdgcn": AMD_CODE}))
    assert (code.registers, code.spill_stores, code.spill_loads) == (120, 1, 2)
    assert not code.has_amd_fp8


@pytest.mark.parametrize(
    "instruction", ["v_cvt_pk_fp8_f32 v1, v2, v3", "v_cvt_f32_bf8 v1, v2", "v_mfma_f32_fp8_fp8 v1"]
)
def test_instructions_for_8_bit_floats_are_seen(instruction):
    code = machine_code(SimpleNamespace(asm={"amdgcn": f"{AMD_CODE}\t{instruction}\n"}))
    assert code.has_amd_fp8


def test_an_assembly_without_registers_is_an_error():
    with pytest.raises(RuntimeError, match=r"the assembly has no \.vgpr_count"):
        machine_code(SimpleNamespace(asm={"amdgcn": "s_endpgm"}))


@pytest.mark.parametrize("tool", ["cuobjdump", "nvdisasm"])
def test_a_tool_that_is_not_there_is_named(monkeypatch, tool):
    knob = vars(type(triton.knobs.nvidia))[tool]
    monkeypatch.setattr(knob, "default_path", "/nowhere")
    with pytest.raises(RuntimeError, match=f"Cannot find {tool}"):
        module._output_of(tool, "kernel.cubin")


@pytest.mark.parametrize("said", ["", "Resource usage: none"])
def test_a_kernel_without_a_resource_report_is_an_error(monkeypatch, said):
    monkeypatch.setattr(module, "_output_of", lambda name, *arguments: said)
    kernel = SimpleNamespace(asm={"cubin": b"", "ptx": "", "ttgir": ""})
    with pytest.raises(RuntimeError, match="cuobjdump printed no resource usage"):
        machine_code(kernel)


def test_every_function_of_a_kernel_counts(monkeypatch):
    said = {
        "cuobjdump": "Function a:\n REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:8\n"
        "Function b:\n REG:90 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:8\n",
        "nvdisasm": "STL.64 [R1], R2 ;\nLDL R5, [R1+0xc] ;\n@P0 LDL.LU R6, [R1] ;\nSTG [R1], R2 ;",
    }
    monkeypatch.setattr(module, "_output_of", lambda name, *arguments: said[name])
    code = machine_code(SimpleNamespace(asm={"cubin": b"", "ptx": "", "ttgir": ""}))
    assert (code.registers, code.spill_stores, code.spill_loads) == (90, 1, 2)
