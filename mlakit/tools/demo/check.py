"""A stage of the demo: results compared with the float64 oracle by `testing.assert_matches`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from mlakit.tools.testing import assert_matches, assert_same_bits

T = TypeVar("T")


@dataclass
class Stage:
    """One line of the table. `error` is the worst of a row, relative to its largest element."""

    name: str
    tokens: int = 0
    seconds: float = 0.0
    error: float = 0.0
    message: str = ""  # what is wrong; empty if nothing is

    def timed(self, tokens: int, device: torch.device, call: Callable[[], T]) -> T:
        """The result of a call on so many tokens, whose time is added."""
        _finish(device)
        start = perf_counter()
        result = call()
        _finish(device)
        self.seconds += perf_counter() - start
        self.tokens += tokens
        return result

    def check(self, actual: Tensor, exact: Tensor, naive: Tensor) -> None:
        """Compare all rows; `naive` is the oracle in the precision of the kernels."""
        actual = actual.cpu()
        size = exact.abs().amax(-1).clamp_min(torch.finfo(torch.float64).tiny)
        errors = (actual.double() - exact).abs().amax(-1) / size
        self.error = max(self.error, float(errors.nan_to_num(nan=torch.inf).max()))
        try:
            assert_matches(self.name, actual, exact, naive)
            if not exact.isfinite().all():
                raise AssertionError(f"{self.name}: the oracle is not finite: wrong inputs")
        except AssertionError as wrong:
            self.message = self.message or str(wrong)

    def check_same(self, actual: Tensor, expected: Tensor) -> None:
        try:
            assert_same_bits(self.name, actual.cpu(), expected)
        except AssertionError as wrong:
            self.message = self.message or str(wrong)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
