"""Counters of the calls on a GPU that were replayed and of the reasons why others were not, and of
the kernels that were compiled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from mlakit.dispatch.private import KERNEL_COUNTS


@dataclass
class OpStats:
    """Calls of one op on a GPU. Threads may lose a count; no result depends on one."""

    hits: int = 0  # recorded launches were started again
    misses: int = 0  # ran in full: the first of their kind, and those that were recorded
    refused: Counter[str] = field(default_factory=Counter)  # ran in full, by reason

    @property
    def calls(self) -> int:
        """All of them."""
        return self.hits + self.misses + self.refused.total()


_STATS: dict[str, OpStats] = {}


def stats_of(op: str) -> OpStats:
    """The counters of one op, for the layer that counts."""
    return _STATS.setdefault(op, OpStats())


def stats() -> dict[str, OpStats]:
    """A copy of the counters of every op that was called on a GPU."""
    return {
        op: replace(each, refused=Counter(each.refused))
        for op, each in sorted(_STATS.items())
        if each.calls
    }


def reset_stats() -> None:
    """Set every counter to zero."""
    KERNEL_COUNTS.compiled.clear()
    KERNEL_COUNTS.loaded.clear()
    for each in _STATS.values():
        each.hits = each.misses = 0
        each.refused.clear()
