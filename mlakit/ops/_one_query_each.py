"""`q_starts` of calls without one: 0, 1, 2, …, made once for a device and not for every call."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.kernels import workspace

MIN_SIZE = 1024

# tensors by size, a power of two; never freed, because a stream may still be reading
_MADE: dict[tuple[torch.device, int], Counts] = {}


class Counts:
    """A tensor 0, 1, 2, … on a GPU, which the current stream may still be writing."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.values = _count(size, device)
        self._made: torch.cuda.Event | None = torch.cuda.Event()
        self._made.record(torch.cuda.current_stream(device))

    def is_made(self) -> bool:
        """Return whether every stream may read the tensor; not known (False) during a capture."""
        if self._made is None:
            return True
        if torch.cuda.is_current_stream_capturing() or not self._made.query():
            return False
        self._made = None
        return True


def one_query_each(batch: int, device: torch.device) -> Tensor:
    """Return 0, 1, …, batch as int32."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return _count(batch + 1, device)
    key = (device, 1 << max(batch, MIN_SIZE).bit_length())
    if key not in _MADE and not torch.cuda.is_current_stream_capturing():
        _MADE[key] = Counts(key[1], device)
    elif key in _MADE and _MADE[key].is_made():
        return workspace.constant(_MADE[key].values)[: batch + 1]
    return _count(batch + 1, device)


def _count(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)
