"""The suite `fp8`: the block-scaled e4m3 product on a GPU, against torch's and against bf16.

Groups  128 columns of an activation, 128 × 128 of a weight
Bytes   both matrices, their scales and the product once
Gate    the first and the last rows against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit import reference
from mlakit.bench import gate, gpu
from mlakit.bench.shapes import Shape, product_sizes
from mlakit.bench.suite import Baseline, Contest, Workload
from mlakit.ops import quantize_fp8, scaled_mm_fp8

GROUP = 128
E4M3 = torch.float8_e4m3fn
JUDGED = 4  # of the first and of the last rows


@dataclass(frozen=True)
class ScaledProduct(Workload):
    """An activation [m, k] with a weight [n, k]."""

    m: int
    n: int
    k: int

    op = "scaled_mm_fp8"
    products = "fp8"

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
    def limit(self) -> float | None:
        return None

    @property
    def small(self) -> Workload:
        return replace(self, m=min(self.m, 16), n=256, k=512)

    def contest(self) -> Contest:
        generator = gpu.generator()
        wide = gpu.normal(generator, self.m, self.k)
        a, a_scale = quantize_fp8(wide, GROUP)
        b = gpu.normal(generator, self.n, self.k, dtype=E4M3)
        blocks = (-(-self.n // GROUP), -(-self.k // GROUP))
        b_scale = 0.5 + torch.rand(blocks, generator=generator, device=gpu.DEVICE)

        def ours() -> Tensor:
            return scaled_mm_fp8(a, a_scale, b, b_scale)

        def samples() -> Iterator[gate.Sample]:
            ends = {(0, min(JUDGED, self.m)), (max(self.m - JUDGED, 0), self.m)}
            for own in (slice(*each) for each in sorted(ends)):
                exact, naive = (
                    reference.scaled_mm_fp8(
                        a[own], a_scale[:, own], b, b_scale, n_group=GROUP, k_group=GROUP, dtype=d
                    )
                    for d in (torch.float64, torch.float32)
                )
                yield gate.Sample(f"rows {own.start} to {own.stop}", own, [exact], [naive])

        weight = b.to(torch.bfloat16)
        # the scales of a row of `a` side by side, as they lie in memory
        operands = (a, a_scale[:, : self.m].t(), b.t(), b_scale.t())
        return Contest(
            ours,
            [Baseline("bf16 matmul", lambda: torch.mm(wide, weight.t()), is_limit=False)],
            gate=lambda: gate.hold(("out",), [ours()], samples()),
            peers=[Baseline("torch scaled_mm", lambda: _by_torch(*operands), is_limit=False)],
            peer_fault=lambda output: gate.fault(output, samples()),
        )


def _by_torch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """torch's block-scaled product; not every torch has it, nor takes every size."""
    by = torch.nn.functional.ScalingType
    result: Tensor = torch.nn.functional.scaled_mm(
        a, b, a_scale, by.BlockWise1x128, b_scale, by.BlockWise128x128
    )
    return result


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    shape.accept("fp8")
    return (ScaledProduct(*product_sizes(shape.text)),)


# the up-projection of a prompt, the projections around attention in a batch and in a prompt
WORKLOADS: tuple[Workload, ...] = (
    ScaledProduct(4096, 32768, 512),
    ScaledProduct(128, 24576, 1536),
    ScaledProduct(128, 7168, 16384),
    ScaledProduct(4096, 7168, 16384),
    ScaledProduct(4096, 4096, 4096),
    ScaledProduct(1, 7168, 16384),
    ScaledProduct(30, 7168, 16384),
)
