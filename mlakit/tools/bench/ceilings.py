"""The roofline ceilings of this GPU, measured in the same run as the workloads.

Read   bandwidth of the fastest of several reductions over 4 GB
Copy   bandwidth of a copy of 2 GB, counting reads and writes
Peak   FLOP/s of a square matmul of random numbers in bf16 and e4m3, the better of 4096 and 8192
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.tools.bench.measure import Call, Spread, Timer, time_interleaved

READ_BYTES = 4 << 30
MATMUL_SIZES = (4096, 8192)
BUDGET_S = 1.0
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Ceilings:
    """GB/s and TFLOP/s; `fp8_tflops` is None on a GPU without FP8 matmuls."""

    read_gb_s: float
    copy_gb_s: float
    bf16_tflops: float
    fp8_tflops: float | None

    def roofline_us(self, flops: int, num_bytes: int, *, products: str, traffic: str) -> float:
        """The minimum time for so many FLOPs and bytes.

        products  "bf16" or "fp8"; traffic  "read" or "copy"
        """
        peak = self.bf16_tflops
        if products == "fp8" and self.fp8_tflops is not None:
            peak = self.fp8_tflops
        bandwidth = self.read_gb_s if traffic == "read" else self.copy_gb_s
        return max(flops / peak / 1e6, num_bytes / bandwidth / 1e3)

    def __str__(self) -> str:
        fp8 = "none" if self.fp8_tflops is None else f"{self.fp8_tflops:.0f} TFLOP/s"
        return (
            f"Ceilings: read {self.read_gb_s:.0f} GB/s, copy {self.copy_gb_s:.0f} GB/s, "
            f"bf16 {self.bf16_tflops:.0f} TFLOP/s, fp8 {fp8}"
        )


def measure(timer: Timer, after_one: Callable[[], None] = lambda: None) -> Ceilings:
    """Takes some seconds; calls `after_one` after each of the `STEPS`."""
    found = []
    for step in STEPS:
        found.append(step(timer))
        after_one()
        torch.cuda.empty_cache()
    read, copy, bf16, fp8 = found
    assert read is not None
    assert copy is not None
    assert bf16 is not None
    return Ceilings(read, copy, bf16, fp8)


def _read_gb_s(timer: Timer) -> float:
    words = torch.ones(READ_BYTES // 4, device=DEVICE)
    by_row = words.view(-1, 1 << 14)
    reductions: dict[str, Call] = {
        "sum": words.sum,
        "rows": lambda: by_row.sum(-1),
        "largest": words.amax,
    }
    return READ_BYTES / _fastest_s(timer, reductions) / 1e9


def _copy_gb_s(timer: Timer) -> float:
    source = torch.ones(READ_BYTES // 8, dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return READ_BYTES / _fastest_s(timer, {"copy": lambda: target.copy_(source)}) / 1e9


def _bf16_tflops(timer: Timer) -> float:
    def product(size: int) -> Call:
        a, b = (torch.randn(size, size, device=DEVICE).to(torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return _peak_tflops(timer, product)


def _fp8_tflops(timer: Timer) -> float | None:
    if torch.cuda.get_device_capability() < (8, 9):
        return None
    one = torch.ones((), device=DEVICE)

    def product(size: int) -> Call:
        def operand() -> Tensor:
            return torch.randn(size, size, device=DEVICE).to(torch.float8_e4m3fn)

        a, b = operand(), operand().t()
        return lambda: torch._scaled_mm(
            a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return _peak_tflops(timer, product)


def _peak_tflops(timer: Timer, product: Callable[[int], Call]) -> float:
    return max(
        2 * size**3 / _fastest_s(timer, {"product": product(size)}) / 1e12 for size in MATMUL_SIZES
    )


def _fastest_s(timer: Timer, calls: dict[str, Call]) -> float:
    times = time_interleaved(calls, budget_s=BUDGET_S, timer=timer)
    return min(Spread.of(seconds).p50 for seconds in times.values())


STEPS: tuple[Callable[[Timer], float | None], ...] = (
    _read_gb_s,
    _copy_gb_s,
    _bf16_tflops,
    _fp8_tflops,
)
