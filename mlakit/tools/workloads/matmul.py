"""Cases of `batched_matmul`."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from mlakit.dispatch.knobs import Backend
from mlakit.formats import saturating_cast
from mlakit.ops import batched_matmul
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads.case import Case, Results, Trial, assert_given
from mlakit.tools.workloads.inputs import DTYPES, Inputs


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchedMatmulCase(Case):
    """One call of `batched_matmul`: a [batch, M, K] times b [batch, N, K]ᵀ.

    a_batch_second, b_transposed  a laid out as [M, batch, K], b as [batch, K, N]
    out_dtype                     of a result the caller gives; "": in a's dtype, made by the op
    out_batch_second              that result laid out as [M, batch, N]
    """

    op = "batched_matmul"

    batch: int = 3
    m: int = 5
    n: int = 8
    k: int = 16
    dtype: str = "bf16"
    out_dtype: str = ""
    a_batch_second: bool = False
    b_transposed: bool = False
    out_batch_second: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded)
        # rows of all magnitudes: swapped rows are noticed, and the largest saturate e4m3
        a_values = (
            inputs.normal(self.batch, self.m, self.k) * inputs.uniform(0, 9, self.m, 1).exp2()
        )
        b_values = inputs.normal(self.batch, self.n, self.k) / sqrt(max(self.k, 1))
        a = _place_swapped(inputs, "a", a_values, self.dtype, (0, 1), self.a_batch_second)
        b = _place_swapped(inputs, "b", b_values, self.dtype, (1, 2), self.b_transposed)
        out = None
        if self.out_dtype:
            shape = [self.batch, self.m, self.n]
            if self.out_batch_second:
                shape[0], shape[1] = shape[1], shape[0]
            out = inputs.result("out", shape, DTYPES[self.out_dtype])
            out = out.transpose(0, 1) if self.out_batch_second else out

        def call(backend: Backend) -> Results:
            return (batched_matmul(a, b, out=out, backend=backend),)

        def check(results: Results) -> None:
            result = results[0].cpu()
            assert_given("out", results[0], out)
            left, right = a.cpu(), b.cpu()
            exact = left.double() @ right.double().mT
            naive = left.float() @ right.float().mT
            assert_matches("out", result, exact, saturating_cast(naive, result.dtype))

        return Trial(inputs, call, check)


def _place_swapped(
    inputs: Inputs, name: str, values: Tensor, dtype: str, axes: tuple[int, int], swapped: bool
) -> Tensor:
    """`values`, stored with two axes swapped if `swapped`."""
    if not swapped:
        return inputs.place(name, values, dtype)
    return inputs.place(name, values.transpose(*axes), dtype).transpose(*axes)
