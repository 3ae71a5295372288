"""Runs on a GPU as the emulator has them: with its few SMs, so with the same kernels and splits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from mlakit import knobs
from mlakit.kernels.triton import launch
from mlakit.replay import workspace
from mlakit.specs import pretending
from mlakit.support.configurations import HOPPER_ARCH
from mlakit.tools.emulator.frontend import NUM_SMS
from mlakit.workloads.case import Trial


@contextmanager
def few_sms() -> Iterator[None]:
    """Let kernels on the GPU have as many CTAs as those of the emulator."""
    few = launch.Target(HOPPER_ARCH, NUM_SMS, launch.SHARED_BYTES[HOPPER_ARCH])
    with pytest.MonkeyPatch.context() as patch, knobs.override(replay=False):
        patch.setattr(launch, "_target_of", lambda kind, index: few)
        yield


def call(trial: Trial, selects_for: int = NUM_SMS) -> tuple[Tensor, ...]:
    """Call a trial's op with the kernel that a GPU with so many SMs selects."""
    with pretending(HOPPER_ARCH, selects_for):
        return tuple(trial.call("hopper"))


@contextmanager
def partials() -> Iterator[list[Tensor]]:
    """Yield the float32 scratch of calls in this scope: partial results. Unwritten it is NaN."""
    found: list[Tensor] = []
    scratch = workspace.scratch

    def keep(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        given = scratch(shape, dtype, device)
        if dtype == torch.float32 and given.numel():
            found.append(given.fill_(torch.nan))
        return given

    with pytest.MonkeyPatch.context() as patch, knobs.override(replay=False):
        patch.setattr(workspace, "scratch", keep)
        yield found
