"""The suite `fp8`: block-scaled e4m3 matmul on a GPU, against DeepGEMM's, torch's and bf16.

Groups  128 columns of an activation, 128 × 128 of a weight
Bytes   both matrices, their scales and the product once
Check   the first and the last rows against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit import reference
from mlakit.ops import quantize_fp8, scaled_mm_fp8
from mlakit.tools.bench import correctness, gpu
from mlakit.tools.bench.problems import ScaledMatmul
from mlakit.tools.bench.shapes import Shape, product_sizes
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload

GROUP = 128
E4M3 = torch.float8_e4m3fn
BF16_MATMUL = "bf16 matmul"
HOPPER_KERNEL = "mlakit, backend=hopper"  # which `auto` takes only where it is proved
FEW_ROWS = 32
CHECKED_ROWS = 4  # at each end


@dataclass(frozen=True)
class ScaledProduct(Workload):
    """An activation [m, k] times a weight [n, k]."""

    m: int
    n: int
    k: int

    op = "scaled_mm_fp8"
    products = "fp8"
    target_baseline = BF16_MATMUL

    @property
    def min_speedup(self) -> float | None:
        """Few rows are bound by bytes: FP8 weights take no longer than bf16 ones."""
        return 1.0 if self.m <= FEW_ROWS else None

    @property
    def name(self) -> str:
        return f"scaled-mm-{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        groups = -(-self.k // GROUP)
        scales = 4 * groups * (self.m + -(-self.n // GROUP))
        return (self.m + self.n) * self.k + scales + 2 * self.m * self.n

    @property
    def small(self) -> Workload:
        return replace(self, m=min(self.m, 16), n=256, k=512)

    def build_case(self) -> BenchmarkCase:
        generator = gpu.generator()
        wide = gpu.normal(generator, self.m, self.k)
        a, a_scale = quantize_fp8(wide, GROUP)
        b = gpu.normal(generator, self.n, self.k, dtype=E4M3)
        blocks = (-(-self.n // GROUP), -(-self.k // GROUP))
        b_scale = 0.5 + torch.rand(blocks, generator=generator, device=gpu.DEVICE)

        def call() -> Tensor:
            return scaled_mm_fp8(a, a_scale, b, b_scale)

        def samples() -> Iterator[correctness.Sample]:
            ends = {(0, min(CHECKED_ROWS, self.m)), (max(self.m - CHECKED_ROWS, 0), self.m)}
            for own in (slice(*each) for each in sorted(ends)):
                exact, naive = (
                    reference.scaled_mm_fp8(
                        a[own], a_scale[:, own], b, b_scale, n_group=GROUP, k_group=GROUP, dtype=d
                    )
                    for d in (torch.float64, torch.float32)
                )
                yield correctness.Sample(f"rows {own.start} to {own.stop}", own, [exact], [naive])

        weight = b.to(torch.bfloat16)
        # scales of one row of `a` are contiguous in memory
        by_row = a_scale[:, : self.m].t()
        # torch takes no padding after the rows' scales of a group
        operands = (a, a_scale[:, : self.m].contiguous().t(), b.t(), b_scale.t())
        return BenchmarkCase(
            call,
            [Baseline(BF16_MATMUL, lambda: torch.mm(wide, weight.t()), sets_target=False)],
            check=lambda: correctness.assert_correct(("out",), [call()], samples()),
            problem=ScaledMatmul(a, by_row, b, b_scale),
            peers=[
                Baseline("torch scaled_mm", lambda: _by_torch(*operands), sets_target=False),
                Baseline(
                    HOPPER_KERNEL,
                    lambda: scaled_mm_fp8(a, a_scale, b, b_scale, backend="hopper"),
                    sets_target=False,
                ),
            ],
            peer_error=lambda output: correctness.peer_error(output, samples()),
        )


def _by_torch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """torch's block-scaled matmul; some versions lack it, and it does not take every size."""
    by = torch.nn.functional.ScalingType
    result: Tensor = torch.nn.functional.scaled_mm(
        a, b, a_scale, by.BlockWise1x128, b_scale, by.BlockWise128x128
    )
    return result


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    shape.accept("fp8")
    return (ScaledProduct(*product_sizes(shape.text)),)


# the up-projection of a prompt; the projections around attention in decode and in prefill
WORKLOADS: tuple[Workload, ...] = (
    ScaledProduct(4096, 32768, 512),
    ScaledProduct(128, 24576, 1536),
    ScaledProduct(128, 7168, 16384),
    ScaledProduct(4096, 7168, 16384),
    ScaledProduct(4096, 4096, 4096),
    *(
        ScaledProduct(m, n, k)
        for m in (1, 16, 30)
        for n, k in ((7168, 16384), (24576, 1536), (1536, 7168), (576, 7168), (7168, 2048))
    ),
)
