"""The memory that a call of ops takes on a GPU, found without a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlakit.kernels import workspace
from mlakit.kernels.launch import Compilation, Target
from mlakit.precompile.listing import launching


@dataclass(frozen=True)
class NoLaunch(Compilation):
    """Drops the kernels that launchers start."""

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        return None


class Tally:
    """A `workspace.Recorder` that adds up the bytes of results and scratch."""

    def __init__(self) -> None:
        self.bytes = 0

    def add_result(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.bytes += tensor.nbytes
        return tensor

    add_scratch = add_result

    def add_constant(self, tensor: Tensor) -> None:
        return None

    def add_launch(self, kernel: object, grid: object, arguments: object) -> None:
        return None

    def add_library_call(self, function: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        return None


def allocated_bytes(call: Callable[[], object], target: Target) -> int:
    """Return the bytes of the results and the scratch of all ops in `call`.

    call  takes CPU tensors, whose values are never read
    """
    tally = Tally()
    with launching(NoLaunch(target)), workspace.recording(tally):
        call()
    return tally.bytes
