"""Holding results to the oracle before they are timed.

mlakit is judged row by row, with the budget of `assert_matches`. A peer is judged as FlashMLA
judges itself, more loosely: it shows that the peer computes the same thing, not how well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.testing import assert_matches

COSINE_DIFFERENCE = 1e-4
RELATIVE_ERROR = 2e-2  # of the largest element


@dataclass(frozen=True, eq=False)
class Sample:
    """What the oracle gives for some rows of the first axis of a call's results."""

    label: str
    rows: slice
    exact: Sequence[Tensor]  # float64, one for each result that is judged
    naive: Sequence[Tensor]  # the same in float32


def hold(names: Sequence[str], results: Sequence[Tensor], samples: Iterable[Sample]) -> None:
    """Assert that the results are what the oracle gives, up to their precision."""
    for sample in samples:
        judged = zip(names, results, sample.exact, sample.naive, strict=True)
        for name, result, exact, naive in judged:
            assert_matches(f"{name} of {sample.label}", result[sample.rows], exact, naive)


def fault(output: object, samples: Iterable[Sample]) -> str | None:
    """What is wrong with a peer's first result; None if it computes what the oracle does."""
    if not isinstance(output, Tensor):
        return f"returned {type(output).__name__}, not a tensor"
    for sample in samples:
        exact = sample.exact[0]
        if output.ndim < exact.ndim or output.shape[1 - exact.ndim :] != exact.shape[1:]:
            return f"returned shape {tuple(output.shape)}, want [..., {tuple(exact.shape[1:])}]"
        got = output.reshape(-1, *exact.shape[1:])[sample.rows].double()
        if got.shape != exact.shape:
            return f"returned shape {tuple(output.shape)}, too few rows"
        cosine = 1 - 2 * (got * exact).sum() / (got.square() + exact.square()).sum()
        error = (got - exact).abs().amax() / exact.abs().amax()
        # not `>`: what became NaN is wrong
        if not bool((cosine <= COSINE_DIFFERENCE) & (error <= RELATIVE_ERROR)):
            return (
                f"is wrong on {sample.label}: cosine difference {float(cosine):.1e}, "
                f"largest error {float(error):.1e} of the largest element"
            )
    return None


def spread_out(count: int, wanted: int) -> list[int]:
    """About `wanted` of `count` places: both ends, and some evenly between."""
    if count <= wanted:
        return list(range(count))
    return sorted({round(x) for x in torch.linspace(0, count - 1, wanted).tolist()})
