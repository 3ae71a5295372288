"""How many rows fit the workspace that a CPU kernel may use."""

from __future__ import annotations

from mlakit import knobs
from mlakit.kernels.cpu.workers import num_sharers


def rows_that_fit(bytes_per_row: int, *, at_least: int = 1) -> int:
    """Rows of a scratch buffer within `knobs.workspace_mib`, but never fewer than `at_least`.

    Items that run at the same time (`workers.for_each`) have equal shares of it.
    """
    share = (knobs.workspace_mib() << 20) // num_sharers()
    return max(at_least, share // max(bytes_per_row, 1))
