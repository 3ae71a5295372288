"""Other libraries' kernels for the same problems."""

from __future__ import annotations

from mlakit.bench.problems import Problem
from mlakit.bench.suite import Baseline


def baselines(problem: Problem) -> tuple[list[Baseline], list[tuple[str, str]]]:
    """The peers that can take `problem`, and (name, reason) of those that cannot."""
    return [], []
