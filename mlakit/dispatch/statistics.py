"""Counts of what a process has called and compiled so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mlakit import launch_cache
from mlakit.dispatch import private
from mlakit.dispatch.selection import Choice, choices
from mlakit.launch_cache import OpStats


@dataclass(frozen=True)
class Stats:
    """Counts of what a process has called and compiled so far; `str` makes a report of them."""

    kernels: dict[str, dict[str, Choice]]  # by op and kernel: why it was chosen the first time
    calls: dict[str, OpStats]  # by op: replayed on a GPU, or run in full, and why
    compiled: Counter[str]  # how often each kernel was compiled
    loaded: Counter[str]  # how often each kernel was loaded from Triton's cache on disk

    @property
    def fallbacks(self) -> dict[str, dict[str, Choice]]:
        """Those of `kernels` for which a faster one refused a problem."""
        found = {
            op: {name: choice for name, choice in kernels.items() if choice.why_not}
            for op, kernels in self.kernels.items()
        }
        return {op: kernels for op, kernels in found.items() if kernels}

    def __str__(self) -> str:
        lines = [
            f"{op} runs {name} for {choice}"
            for op, kernels in self.kernels.items()
            for name, choice in kernels.items()
        ]
        for op, each in self.calls.items():
            reasons = "".join(f", {count} in full: {why}" for why, count in each.refused.items())
            lines.append(f"{op}: {each.hits} calls replayed, {each.misses} recorded{reasons}")
        for verb, counts in (("compiled", self.compiled), ("loaded", self.loaded)):
            if counts:
                lines.append(f"kernels {verb}: {', '.join(f'{n} {k}' for k, n in counts.items())}")
        return "\n".join(lines)


def stats() -> Stats:
    """Return the kernels that this process has chosen and why, its calls and compilations.

    `mlakit.launch_cache.reset_stats()` sets calls and compilations to zero.
    """
    counts = Counter(private.KERNEL_COUNTS.compiled), Counter(private.KERNEL_COUNTS.loaded)
    return Stats(choices(), launch_cache.stats(), *counts)
