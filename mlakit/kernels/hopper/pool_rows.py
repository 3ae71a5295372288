"""The rows of a cache as one matrix, which TMA can address."""

from __future__ import annotations

from torch import Tensor


def pool_rows(pool: Tensor) -> tuple[Tensor, int]:
    """Return [pages, page_size, columns] as (rows of one stride, rows from a page to the next)."""
    num_pages, page_size, columns = pool.shape
    distance = pool.stride(0) if page_size == 1 < num_pages else pool.stride(1)
    page_rows = pool.stride(0) // distance if num_pages > 1 else page_size
    rows = (num_pages - 1) * page_rows + page_size if num_pages else 0
    return pool.as_strided((rows, columns), (distance, 1)), page_rows
