"""Compares results with the float64 oracle before they are timed.

mlakit is compared row by row, within the tolerance of `assert_matches`. A peer is compared as
FlashMLA's own tests do, with a looser tolerance: it shows that the peer computes the same function,
not how precisely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit import reference
from mlakit.model.masks import NULL
from mlakit.tools.testing import assert_matches

COSINE_DIFFERENCE = 1e-4
RELATIVE_ERROR = 2e-2  # of the largest element


@dataclass(frozen=True, eq=False)
class Sample:
    """The oracle's results for some rows of the first axis of a call's results."""

    label: str
    rows: slice
    exact: Sequence[Tensor]  # float64, one per result
    naive: Sequence[Tensor]  # the same in float32

    @classmethod
    def of(
        cls, label: str, rows: slice, oracle: Callable[[torch.dtype], Sequence[Tensor]]
    ) -> Sample:
        """The results of `oracle` in float64 and in float32."""
        return cls(label, rows, oracle(torch.float64), oracle(torch.float32))


def token_sample(
    token: int, keys: slice, q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, scale: float
) -> Sample:
    """(out, lse) of a prompt's `token` over its visible `keys`, which its mask has selected."""
    own = slice(token, token + 1)

    def oracle(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return reference.mla_prefill(
            q[own],
            k_nope[keys],
            k_rope[keys],
            v[keys],
            [0, 1],
            [0, keys.stop - keys.start],
            softmax_scale=scale,
            mask=NULL,
            dtype=dtype,
        )

    return Sample.of(f"token {token}", own, oracle)


def assert_correct(
    names: Sequence[str], results: Sequence[Tensor], samples: Iterable[Sample]
) -> None:
    """Assert that the sampled rows of the results match the oracle."""
    for sample in samples:
        compared = zip(names, results, sample.exact, sample.naive, strict=True)
        for name, result, exact, naive in compared:
            assert_matches(f"{name} of {sample.label}", result[sample.rows], exact, naive)


def peer_error(output: object, samples: Iterable[Sample]) -> str | None:
    """What is wrong with a peer's first result; None if it matches the oracle."""
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
        # not `>`: NaN is wrong
        if not bool((cosine <= COSINE_DIFFERENCE) & (error <= RELATIVE_ERROR)):
            return (
                f"is wrong on {sample.label}: cosine difference {float(cosine):.1e}, "
                f"largest error {float(error):.1e} of the largest element"
            )
    return None


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """About `wanted` indices below `count`: both ends, and some evenly between."""
    if count <= wanted:
        return list(range(count))
    return sorted({round(x) for x in torch.linspace(0, count - 1, wanted).tolist()})
