"""Architectures by number and by name, and the GPUs of a ROCm build of torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mlakit.dispatch import selection
from mlakit.dispatch.architectures import AMD, amd_arch, arch_name, has_fp8, is_amd
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.kernels import launch

GPU = torch.device("cuda", 0)


@pytest.fixture
def rocm(monkeypatch):
    """rocm(name): torch is built for ROCm, and its GPU has this name."""

    def pretend(name: str) -> None:
        gpu = SimpleNamespace(gcnArchName=name, multi_processor_count=304)
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)

    return pretend


@pytest.mark.parametrize(
    ("name", "arch"),
    [("gfx942", 0x942), ("gfx942:sramecc+:xnack-", 0x942), ("GFX90A", 0x90A), ("gfx1100", 0x1100)],
)
def test_an_architecture_of_amd_has_a_number(name, arch):
    assert amd_arch(name) == arch
    assert arch_name(arch) == name.lower().partition(":")[0]
    assert is_amd(arch)
    assert not has_fp8(arch)


@pytest.mark.parametrize(
    "name", ["", "gfx", "sm_90", "90", "gfx94", "gfx94200", "mi300x", "gfxabcg"]
)
def test_other_names_are_not_amd(name):
    assert amd_arch(name) is None


@pytest.mark.parametrize("arch", [80, 90, 100, 121])
def test_compute_capabilities_are_not_amd(arch):
    assert not is_amd(arch)
    assert arch_name(arch) == f"sm_{arch}"
    assert has_fp8(arch) == (arch >= 89)


@pytest.mark.parametrize("arch", AMD)
def test_a_rocm_build_selects_the_portable_kernels(arch, rocm):
    rocm(f"{arch_name(arch)}:sramecc+:xnack-")
    assert device_facts(GPU) == ("cuda", arch)
    for op in selection.OPS:
        assert selection.select(op, Problem("cuda", arch)).backend == "triton"
    launch._target_of.cache_clear()
    try:
        target = launch.target(GPU)
    finally:
        launch._target_of.cache_clear()
    assert (target.arch, target.num_sms) == (arch, 304)
    assert target.shared_bytes == launch.AMD_SHARED_BYTES[arch]
    assert not target.has_fp8
    assert not target.has_pdl


def test_another_gpu_of_amd_is_refused_by_name():
    why = selection.explain("mla_decode", Problem("cuda", 0x90A))
    assert why["triton"] == "needs gfx942, gfx950 or gfx1100 of AMD's, got gfx90a"
    assert why["hopper"] == "needs sm_90, got gfx90a"


def test_a_gpu_without_a_name_of_amd_is_an_error(rocm):
    rocm("unknown")
    with pytest.raises(RuntimeError, match="architecture must be named as gfx942, got 'unknown'"):
        device_facts(GPU)


def test_options_of_nvidia_are_left_out_on_rocm(rocm):
    rocm("gfx942")
    given = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: given.update(options)

    launch.launch(Kernel(), (1,), num_warps=4, maxnreg=128, launch_pdl=True)
    assert given == {"num_warps": 4, "enable_fp_fusion": True}
