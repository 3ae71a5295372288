"""Compares every result of the demo with its oracle by `testing.assert_matches`, with numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.formats import saturating_cast
from mlakit.tools.testing import ACCUMULATED_ROUNDINGS, STORED_ROUNDINGS, assert_matches


class Result(NamedTuple):
    """A result, the exact one, and that of a naive run in the same precision."""

    actual: Tensor
    exact: Tensor  # float64
    naive: Tensor


@dataclass(frozen=True)
class Check:
    """Results of one stage compared with their oracles: the row that uses most of its tolerance."""

    name: str
    error: float
    tolerance: float
    message: str = ""  # what is wrong; empty if nothing is

    @property
    def passed(self) -> bool:
        return not self.message


def check_results(name: str, *results: Result) -> Check:
    """Compare all rows of all results by `assert_matches`; a value that is not finite fails."""
    error, tolerance = (torch.cat(rows) for rows in zip(*map(row_errors, results), strict=True))
    used = error / tolerance.clamp_min(torch.finfo(torch.float64).tiny)
    # NaN counts as the largest error
    worst = int(used.nan_to_num(nan=torch.inf).argmax())
    message = ""
    try:
        for result in results:
            assert_matches(name, *result)
    except AssertionError as wrong:
        message = str(wrong)
    if not (message or bool(error.isfinite().all())):
        message = f"{name}: the oracle is not finite either, so its inputs are wrong"
    return Check(name, float(error[worst]), float(tolerance[worst]), message)


def row_errors(result: Result) -> tuple[Tensor, Tensor]:
    """(error, tolerance) of every row of 64 columns or more, in the max norm.

        tolerance = max(2 |naive − exact| + |store(exact) − exact|,  2 u |row| + 256 u32 |row|)

    `naive` is rounded to the dtype of `actual`, with unit roundoff u; the last term uses at least
    the median row.
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
