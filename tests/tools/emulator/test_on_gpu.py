"""The emulator computes what a GPU computes: the same launches, with the same inputs, on both.

Sums of products agree to the bit (`reference.hopper_fp8_mma`). The GPU's exp2 and log2 are off by
up to 2**-22, and Triton's reductions add up in another order. So float32 results agree to two units
in the last place, 16-bit results to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.dispatch import knobs
from mlakit.dispatch.specs import pretending
from mlakit.kernels import launch
from mlakit.tools.compile.configurations import HOPPER, HOPPER_ARCH
from mlakit.tools.emulator import harness
from mlakit.tools.emulator.frontend import NUM_SMS, emulating_mlakit

CONFIGURATIONS = 30
ALLOWED_UNITS = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 2.0}
# those with several splits, with every loader and every format are spread over the list
NAMES = [list(HOPPER)[i * len(HOPPER) // CONFIGURATIONS] for i in range(CONFIGURATIONS)]


@contextmanager
def few_sms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels on the GPU have as many CTAs as those of the emulator, and so the same splits."""
    shared = launch.SHARED_BYTES[HOPPER_ARCH]
    few = launch.Target(HOPPER_ARCH, NUM_SMS, shared)
    with monkeypatch.context() as patch, knobs.override(launch_cache=False):
        patch.setattr(launch, "_target_of", lambda kind, index: few)
        yield


def results(name: str, device: str) -> tuple[Tensor, ...]:
    """Run a configuration as the emulator's tests do, and return its results on the CPU."""
    chosen = harness.configuration(name)
    trial = replace(chosen.case, seed=0).trial(device)
    with pretending(HOPPER_ARCH, chosen.selects_for):
        given = trial.call("hopper")
    return tuple(each.cpu() for each in given)


def units(got: Tensor, want: Tensor) -> float:
    """Return the largest difference in units in the last place.

    They are those of the largest number of a row for 16-bit results, and those of the largest
    number of all rows for float32 ones: scores, whose sums these are, are as large in every row.
    """
    same = (got == want) | (got.isnan() & want.isnan())
    both = torch.stack([got.double(), want.double()])
    sizes = both.nan_to_num(0, 0, 0).abs().amax(0)
    sizes = sizes.amax() if got.dtype == torch.float32 else sizes.amax(-1, keepdim=True)
    unit = torch.finfo(got.dtype).eps * 2.0 ** sizes.clamp(min=2.0**-100).log2().floor()
    apart = torch.where(same, 0.0, (both[0] - both[1]).abs() / unit)
    return float(apart.max()) if apart.numel() else 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_same_results(name: str, monkeypatch: Any, record_property: Any) -> None:
    with few_sms(monkeypatch):
        on_gpu = results(name, "cuda")
    with emulating_mlakit(seed=0, hardware_sums=True):
        emulated = results(name, "cpu")
    apart = [units(*both) for both in zip(on_gpu, emulated, strict=True)]
    kinds = [str(each.dtype).removeprefix("torch.") for each in on_gpu]
    said = ", ".join(f"{each:.2f} of {kind}" for each, kind in zip(apart, kinds, strict=True))
    record_property("terminal", f"{name}: units in the last place: {said}")
    allowed = [ALLOWED_UNITS[each.dtype] for each in on_gpu]
    assert all(a <= b for a, b in zip(apart, allowed, strict=True)), said


@pytest.mark.parametrize("change", [partial(torch.mul, other=1.02), torch.zeros_like])
def test_other_results_are_told_apart(change: Any) -> None:
    given = torch.randn(4, 64).bfloat16()
    assert units(given, given) == 0
    assert units(change(given), given) > 1
