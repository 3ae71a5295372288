"""Random problems of every op, as hypothesis draws them, and a kernel's way through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mlakit.checks import UnsupportedError
from mlakit.formats import FORMATS
from mlakit.specs import KernelSpec
from mlakit.workloads import Case
from mlakit.workloads.draw import CACHED, UNCACHED, Draw


class HypothesisDraw(Draw):
    """Choices that hypothesis makes, and simplifies where one fails."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        super().__init__()
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


@st.composite
def cached_cases(draw: Callable[..., Any], case: type[Case], format: str) -> Case:
    return CACHED[case](HypothesisDraw(draw), format)


@st.composite
def uncached_cases(draw: Callable[..., Any], case: type[Case]) -> Case:
    return UNCACHED[case](HypothesisDraw(draw))


def any_case(case: type[Case], formats: Sequence[str] = FORMATS) -> st.SearchStrategy[Any]:
    if case in UNCACHED:
        return uncached_cases(case)
    return st.sampled_from(formats).flatmap(lambda format: cached_cases(case, format))


class Exploration:
    """Random cases for one kernel; those it refuses are passed over, and counted."""

    def __init__(self, spec: KernelSpec, device: torch.device | str) -> None:
        self.spec, self.device = spec, device
        self.num_taken = 0
        self.refusal = f"{spec} was given nothing"

    def run(self, case: Case) -> None:
        try:
            case.run(self.device, self.spec.name)
        except UnsupportedError as refusal:
            self.refusal = str(refusal)
        else:
            self.num_taken += 1

    def over(
        self, strategy: st.SearchStrategy[Any], *, examples_of: str | None, **options: Any
    ) -> None:
        """Explore `strategy`; always the same examples for one name, others without one."""
        if torch.device(self.device).type == "cuda":
            # every step of simplifying a failed case compiles kernels: minutes, where the case
            # as it was drawn says enough
            options["phases"] = (Phase.explicit, Phase.generate)

        @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), **options)
        @given(strategy)
        def explore(case: Case) -> None:
            self.run(case)

        if examples_of is not None:
            seed(crc32(examples_of.encode()))(explore)
        explore()
