"""Devices, seeds, and poison in every uninitialised tensor."""

from __future__ import annotations

import pytest
import torch

from mlakit import knobs


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # the workers of xdist already fill the cores
    if config.option.markexpr.strip() == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError("-m gpu needs a CUDA device, and torch sees none")
    # torch.empty then holds NaN, the largest integer or 0xFF: reading what was never written shows
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for warning in ("does not have a deterministic implementation", "is not deterministic because"):
        config.addinivalue_line("filterwarnings", f"ignore:.*{warning}:UserWarning")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `device` runs on the CPU and, marked `gpu`, on CUDA."""
    if "device" not in metafunc.fixturenames:
        return
    cuda = pytest.param("cuda", marks=pytest.mark.gpu)
    marked = metafunc.definition.get_closest_marker("gpu") is not None
    metafunc.parametrize("device", [cuda] if marked else ["cpu", cuda], indirect=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    """Seeded, on the CPU: tests draw there and move, so every device sees the same numbers."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _no_knobs_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in knobs.REGISTRY.values():
        monkeypatch.delenv(knob.variable, raising=False)
