"""What GPU suites measure against besides other libraries: the card itself."""

from __future__ import annotations

import torch

from mlakit.bench.report import COPYING, NOTHING, READING
from mlakit.bench.suite import Baseline

DEVICE = torch.device("cuda")


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


def reading(num_bytes: int) -> Baseline:
    """A reduction over so many bytes: the time in which they can be read at all."""
    words = torch.ones(max(num_bytes // 4, 1), device=DEVICE)
    return Baseline(READING, words.sum, is_limit=False)


def copying(num_bytes: int) -> Baseline:
    """A copy that reads half of so many bytes and writes as many."""
    source = torch.ones(max(num_bytes // 8, 1), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return Baseline(COPYING, lambda: target.copy_(source), is_limit=False)


def launching_nothing() -> Baseline:
    """A kernel of one block that returns at once, timed like the others."""
    from mlakit.kernels.triton.nothing import do_nothing  # Triton is not everywhere

    argument = torch.empty(1, device=DEVICE)
    return Baseline(NOTHING, lambda: do_nothing(argument), is_limit=False)
