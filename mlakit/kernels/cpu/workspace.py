"""How many rows fit the workspace that a CPU kernel may use."""

from __future__ import annotations

from mlakit import knobs
from mlakit.kernels.cpu.workers import num_callers, num_sharers

# malloc returns larger blocks to the system when they are freed, and every page of a new one costs
# a page fault: a gather of 38 MB takes 5 times as long as one into memory that is held
MAX_BLOCK = 24 << 20  # bytes


def rows_that_fit(bytes_per_row: int, *, at_least: int = 1, by_item: bool = True) -> int:
    """Rows of a scratch buffer within `knobs.workspace_mib`, but never fewer than `at_least`.

    by_item  items that run at the same time (`workers.for_each`) have equal shares of it; else the
             call has one buffer for all of torch's threads
    """
    share = (knobs.workspace_mib() << 20) // (num_sharers() if by_item else num_callers())
    return max(at_least, share // max(bytes_per_row, 1))


def even_slices(count: int, most: int) -> list[slice]:
    """As few slices of range(count) as have `most` elements each, of equal size."""
    number = -(-count // max(most, 1))
    return [slice(count * i // number, count * (i + 1) // number) for i in range(number)]
