"""The memory of one GPU that is left for the cache, as vLLM divides it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from mlakit.tools.memory.gpus import GIB, gpu_bytes

UTILISATION = 0.9  # vLLM's --gpu-memory-utilization; the serve line has it
RESERVE_GIB = 4.0  # activations, CUDA graphs and NCCL: an assumption; vLLM measures them


@dataclass(frozen=True)
class Room:
    """A GPU: memory in bytes, the share that the engine may take, and what is not cache."""

    gpu_bytes: int
    utilisation: float
    reserve_bytes: int

    @classmethod
    def of(
        cls, gpu: str, utilisation: float = UTILISATION, reserve_gib: float = RESERVE_GIB
    ) -> Room:
        """Raises ValueError for wrong arguments."""
        if not 0.0 < utilisation <= 1.0:
            raise ValueError(f"utilisation must be above 0 and at most 1, got {utilisation}")
        if not (isfinite(reserve_gib) and reserve_gib >= 0.0):
            raise ValueError(f"reserve must be at least 0 GiB, got {reserve_gib}")
        return cls(gpu_bytes(gpu), utilisation, int(reserve_gib * GIB))

    def cache_bytes(self, weight_bytes: int) -> int:
        """For the cache beside weights; at most 0 if the weights do not fit."""
        return int(self.gpu_bytes * self.utilisation) - self.reserve_bytes - weight_bytes
