"""Cases of `quantize_fp8` and `scaled_mm_fp8`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from mlakit import reference
from mlakit.dispatch.knobs import Backend
from mlakit.formats import saturating_cast
from mlakit.ops import quantize_fp8, scaled_mm_fp8
from mlakit.tools.testing import assert_matches, assert_same_bits
from mlakit.tools.workloads.case import BatchedCase, Case, Results, Trial, assert_given
from mlakit.tools.workloads.inputs import DTYPES, Inputs

E4M3 = torch.float8_e4m3fn
SCALE_ALIGNMENT = 4


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizeCase(Case):
    """One call of `quantize_fp8`, exact to the bit. Some groups are all 0 or subnormal.

    batch          size of a leading axis, 0 for none
    scale_ub       None: no bound; half of the groups reach beyond 30
    given_results  pass tensors for both results
    """

    op = "quantize_fp8"

    batch: int = 0
    m: int = 5
    k: int = 40
    group: int = 16
    dtype: str = "bf16"
    scale_ub: float | None = None
    given_results: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded)
        batch, groups = max(self.batch, 1), -(-self.k // self.group)
        size = inputs.uniform(0, 8, batch, self.m, groups).exp2()
        kinds = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1e-42], dtype=torch.float32, device="cpu")
        size *= kinds[inputs.integers(0, len(kinds), batch, self.m, groups)]
        by_column = size.repeat_interleave(self.group, -1)[..., : self.k]
        values = inputs.normal(batch, self.m, self.k) * by_column
        x = inputs.place("x", values if self.batch else values[0], self.dtype)
        given = {}
        if self.given_results:
            padded_m = -(-self.m // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
            scales = (*x.shape[:-2], groups, padded_m)
            given["out"] = inputs.result("out", x.shape, E4M3)
            given["scales"] = inputs.result("scales", scales, torch.float32)
        bound = inf if self.scale_ub is None else self.scale_ub

        def call(backend: Backend) -> Results:
            return quantize_fp8(x, self.group, scale_ub=bound, backend=backend, **given)

        def check(results: Results) -> None:
            matrices = x.cpu() if self.batch else x.cpu()[None]
            expected = [
                reference.quantize_fp8(each, self.group, scale_ub=bound) for each in matrices
            ]
            for i, (name, given_name) in enumerate((("q", "out"), ("scales", "scales"))):
                want = torch.stack([pair[i] for pair in expected])
                assert_given(name, results[i], given.get(given_name))
                assert_same_bits(name, results[i].cpu(), want if self.batch else want[0])

        return Trial(inputs, call, check)


@dataclass(frozen=True, kw_only=True, repr=False)
class ScaledMatmulCase(BatchedCase):
    """One call of `scaled_mm_fp8`: a [M, K] times b [N, K]ᵀ.

    batch          size of a leading axis, 0 for none
    spare_columns  of a_scale beyond M: poison
    out_dtype      e4m3 saturates
    given_results  pass out=
    """

    op = "scaled_mm_fp8"

    batch: int = 0
    m: int = 5
    n: int = 24
    k: int = 40
    n_group: int = 16
    k_group: int = 16
    spare_columns: int = 3
    out_dtype: str = "bf16"
    given_results: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = self.inputs(device)
        leading = (self.batch,) if self.batch else ()
        n_groups, k_groups = -(-self.n // self.n_group), -(-self.k // self.k_group)
        a = inputs.place("a", 4 * inputs.normal(*leading, self.m, self.k), E4M3)
        b = inputs.place("b", 4 * inputs.normal(*leading, self.n, self.k), E4M3)
        # rows of all magnitudes: the largest saturate e4m3
        a_size = inputs.uniform(-4, 4, *leading, 1, self.m + self.spare_columns).exp2()
        a_size = a_size * inputs.uniform(0.5, 2, *leading, k_groups, self.m + self.spare_columns)
        a_size[..., self.m :] = torch.nan
        a_scale = inputs.place("a_scale", a_size)
        b_scale = inputs.place(
            "b_scale", inputs.uniform(-3, 1, *leading, n_groups, k_groups).exp2()
        )
        dtype = DTYPES[self.out_dtype]
        out = (
            inputs.result("out", (*leading, self.m, self.n), dtype) if self.given_results else None
        )

        def call(backend: Backend) -> Results:
            product = scaled_mm_fp8(
                a,
                a_scale,
                b,
                b_scale,
                n_group=self.n_group,
                k_group=self.k_group,
                out_dtype=dtype,
                out=out,
                backend=backend,
            )
            return (product,)

        def check(results: Results) -> None:
            assert_given("out", results[0], out)
            operands = tuple(t.to(inputs.drawn_on) for t in (a, a_scale, b, b_scale))
            exact = self._oracle(operands, torch.float64)
            naive = saturating_cast(self._oracle(operands, torch.float32), dtype)
            assert_matches("out", results[0].to(inputs.drawn_on), exact, naive)

        return Trial(inputs, call, check, self.calls, ("out",))

    def _oracle(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
            groups = {"n_group": self.n_group, "k_group": self.k_group}
            return reference.scaled_mm_fp8(a, a_scale, b, b_scale, dtype=dtype, **groups)

        if not self.batch:
            return product(*operands)
        return torch.stack([product(*each) for each in zip(*operands, strict=True)])
