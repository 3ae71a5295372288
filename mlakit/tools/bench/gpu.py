"""The device of the suites, and hardware baselines: a read, a copy, an empty kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mlakit.tools.bench.report import COPY_SAME_BYTES, EMPTY_KERNEL, READ_SAME_BYTES
from mlakit.tools.bench.suite import Baseline

DEVICE = torch.device("cuda")
CPU = torch.device("cpu")


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Make the tensors of workloads on `device` in this block."""
    global DEVICE
    before, DEVICE = DEVICE, device
    try:
        yield
    finally:
        DEVICE = before


def why_not() -> str | None:
    """Why nothing can be measured on a GPU here."""
    return None if torch.cuda.is_available() else "needs a CUDA device, and torch sees none"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(own: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal numbers on the device."""
    return torch.randn(shape, generator=own, device=DEVICE).to(dtype)


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def read_baseline(num_bytes: int) -> Baseline:
    """A reduction over `num_bytes` bytes: the time to read them."""
    words = torch.ones(max(num_bytes // 4, 1), device=DEVICE)
    return Baseline(READ_SAME_BYTES, words.sum, sets_target=False)


def copy_baseline(num_bytes: int) -> Baseline:
    """A copy that reads half of `num_bytes` bytes and writes the other half."""
    source = torch.ones(max(num_bytes // 8, 1), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return Baseline(COPY_SAME_BYTES, lambda: target.copy_(source), sets_target=False)


def empty_kernel_baseline() -> Baseline:
    """A kernel of one block that returns at once: the cost of a launch."""
    from mlakit.kernels.empty_kernel import launch_empty_kernel  # Triton may be absent

    argument = torch.empty(1, device=DEVICE)
    return Baseline(EMPTY_KERNEL, lambda: launch_empty_kernel(argument), sets_target=False)
