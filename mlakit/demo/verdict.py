"""One judgement for everything the demo computes: `testing.assert_matches`, told in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.formats import saturating_cast
from mlakit.testing import ACCUMULATED_ROUNDINGS, STORED_ROUNDINGS, assert_matches


class Result(NamedTuple):
    """A result, what it should be, and what a plain run in its precision makes of it."""

    actual: Tensor
    exact: Tensor  # float64
    naive: Tensor


@dataclass(frozen=True)
class Check:
    """Results of one stage against their oracles; the row nearest to its budget, or past it."""

    name: str
    error: float
    budget: float
    objection: str = ""  # what is wrong, in words; empty if nothing is

    @property
    def passed(self) -> bool:
        return not self.objection


def judge(name: str, *results: Result) -> Check:
    """All rows of all results, by the rule of `assert_matches`; what is not finite never passes."""
    error, budget = (torch.cat(rows) for rows in zip(*map(row_errors, results), strict=True))
    used = error / budget.clamp_min(torch.finfo(torch.float64).tiny)
    # NaN compares with nothing: here it is the worst there is
    worst = int(used.nan_to_num(nan=torch.inf).argmax())
    objection = ""
    try:
        for result in results:
            assert_matches(name, *result)
    except AssertionError as wrong:
        objection = str(wrong)
    if not (objection or bool(error.isfinite().all())):
        objection = f"{name}: the oracle is not finite either, so what it was given is wrong"
    return Check(name, float(error[worst]), float(budget[worst]), objection)


def row_errors(result: Result) -> tuple[Tensor, Tensor]:
    """(error, budget) of every row of 64 columns or more, in the max norm.

        budget = max(2 |naive − exact| + |store(exact) − exact|,  2 u |row| + 256 u32 |row|)

    `naive` is rounded to the dtype of `actual`, whose unit roundoff is u; in the last term a small
    row counts like the typical one.
    """
    actual, exact, naive = result
    dtype = actual.dtype

    def per_row(x: Tensor) -> Tensor:
        return x.double().abs().amax(-1).flatten()

    def lost(x: Tensor) -> Tensor:
        return per_row(saturating_cast(x.double(), dtype).double() - exact)

    size = per_row(exact)
    storing = STORED_ROUNDINGS * torch.finfo(dtype).eps / 2 * size
    summing = ACCUMULATED_ROUNDINGS * torch.finfo(torch.float32).eps / 2
    floor = storing + summing * size.clamp_min(size.median())
    return per_row(actual.double() - exact), torch.maximum(2 * lost(naive) + lost(exact), floor)
