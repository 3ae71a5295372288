"""The number of rows that fit the workspace of a CPU kernel."""

from __future__ import annotations

from mlakit.dispatch import knobs

# malloc returns larger blocks to the system when they are freed, and every page of a new one costs
# a page fault: a gather of 38 MB takes 5 times as long as one into memory that is held
MAX_BLOCK = 24 << 20  # bytes
CACHED_BLOCK = 4 << 20  # bytes: several operations on a block find it in the caches
SMALL = 2**15  # elements: torch runs an operation on at most this many on one thread


def rows_that_fit(bytes_per_row: int, *, at_least: int = 1) -> int:
    """Rows of a scratch buffer within `knobs.workspace_mib`, but never fewer than `at_least`."""
    return max(at_least, (knobs.workspace_mib() << 20) // max(bytes_per_row, 1))


def row_blocks(rows: int, elements: int, bytes_per_row: int) -> list[slice]:
    """Blocks of rows for operations on their elements, each within the workspace.

    elements  of a row, in the largest tensor

    Operations on few elements stay on one thread: beside a busy process each wait for the others
    takes longer than the operation.
    """
    most = SMALL if rows * elements <= 4 * SMALL else CACHED_BLOCK // 4
    fit = rows_that_fit(bytes_per_row)
    return even_slices(rows, min(fit, max(1, most // max(elements, 1))))


def even_slices(count: int, most: int) -> list[slice]:
    """Split range(count) into the fewest slices of at most `most` elements, of equal size."""
    number = -(-count // max(most, 1))
    return [slice(count * i // number, count * (i + 1) // number) for i in range(number)]
