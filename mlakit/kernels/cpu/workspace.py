"""How much of a long axis fits the scratch memory a CPU kernel may use."""

from __future__ import annotations

from mlakit import knobs


def rows_that_fit(bytes_per_row: int, *, at_least: int = 1) -> int:
    """Rows of a scratch buffer within `knobs.workspace_mib`, but never fewer than `at_least`."""
    return max(at_least, (knobs.workspace_mib() << 20) // max(bytes_per_row, 1))
