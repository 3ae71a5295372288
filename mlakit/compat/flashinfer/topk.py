"""Selection of the largest scores of each row, and the cache rows that they stand for."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from mlakit.dispatch.checks import FLOATS, Dims, UnsupportedError
from mlakit.ops import indexer_topk
from mlakit.ops._checks import INTEGERS


class TopKTieBreak(IntEnum):
    """Which of equal scores at the boundary are taken."""

    NONE = 0
    SMALL = 1
    LARGE = 2


def top_k(
    input: Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[Tensor, Tensor]:
    """The k largest elements of each row of `input` [rows, columns]: values, int64 indices.

    sorted         by value, descending; otherwise in the order of columns
    deterministic, dsa_graph_safe   accepted: results are always deterministic, and can be captured

    −inf is never selected: where fewer than k elements are left, the value is −inf, the index −1.
    """
    dims = Dims("top_k")
    indices = _select(dims, input, k, tie_break).long()
    dims.require(k <= input.shape[1], "k", f"not exceed the {input.shape[1]} columns of input", k)
    values = input.gather(1, indices.clamp_min(0)).masked_fill(indices < 0, -torch.inf)
    if sorted:
        values, order = values.sort(dim=1, descending=True, stable=True)
        indices = indices.gather(1, order)
    return values, indices


def top_k_page_table_transform(
    input: Tensor,
    src_page_table: Tensor,
    lengths: Tensor,
    k: int,
    row_to_batch: Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
    page_table_row_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    out: Tensor | None = None,
    out_raw_indices: Tensor | None = None,
) -> Tensor:
    """The cache rows of the k largest scores of each row, int32 [rows, k]; −1 where none is left.

    input            [rows, columns] scores, of which row i has columns row_starts[i] to
                     row_starts[i] + lengths[i]
    src_page_table   [batch, entries]: row i selects in entries from page_table_row_starts[i] on,
                     or row_starts[i], of request row_to_batch[i], or i
    page_size        scores per entry of the table
    out_raw_indices  [rows, k] int32 to write the selected columns to, counted from row_starts
    """
    dims = Dims("top_k_page_table_transform")
    size = dims.integer("page_size", page_size, 1)
    raw = _select(dims, input, k, tie_break, lengths, row_starts)
    rows = torch.arange(dims["rows"], device=input.device)
    if row_to_batch is None:
        dims.bind("batch", dims["rows"], "the rows of input")
    else:
        rows = dims.match("row_to_batch", row_to_batch, "rows", dtypes=INTEGERS)
    dims.match("src_page_table", src_page_table, "batch", "entries", dtypes=INTEGERS)
    starts = row_starts
    if page_table_row_starts is not None:
        starts = dims.match("page_table_row_starts", page_table_row_starts, "rows", dtypes=INTEGERS)
    elif row_starts is not None:
        dims.require(size == 1, "page_table_row_starts", "be given with row_starts", None)
    for name, result in (("out", out), ("out_raw_indices", out_raw_indices)):
        if result is not None:
            dims.match(name, result, "rows", "k", dtypes=[torch.int32])
            dims.writable(name, result)
    entry = raw.long() // size
    if starts is not None:
        entry = entry + starts[:, None]
    is_listed = (raw >= 0) & (entry < dims["entries"])
    if dims["entries"] == 0:
        selected = torch.full_like(raw, -1)
    else:
        page = src_page_table[rows[:, None].long(), torch.where(is_listed, entry, 0)]
        selected = torch.where(is_listed, page * size + raw % size, -1).int()
    if out_raw_indices is not None:
        out_raw_indices.copy_(raw)
    return selected if out is None else out.copy_(selected)


def top_k_ragged_transform(
    input: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
) -> Tensor:
    """The k largest scores of each row, counted from row_starts, plus offsets [rows]: int32
    [rows, k]; −1 where none is left. `input` and `lengths` as in `top_k_page_table_transform`."""
    dims = Dims("top_k_ragged_transform")
    raw = _select(dims, input, k, tie_break, lengths, row_starts)
    dims.match("offsets", offsets, "rows", dtypes=INTEGERS)
    return torch.where(raw < 0, raw, raw + offsets[:, None].int())


def _select(
    dims: Dims,
    scores: Tensor,
    k: int,
    tie_break: int,
    lengths: Tensor | None = None,
    row_starts: Tensor | None = None,
) -> Tensor:
    """int32 [rows, k] columns of each row, counted from its start; of equal ones the lower."""
    if tie_break == TopKTieBreak.LARGE:
        raise UnsupportedError(f"{dims.op}: tie_break must be NONE or SMALL, got LARGE")
    dims.match("input", scores, "rows", "columns", dtypes=FLOATS)
    dims.bind("k", dims.integer("k", k, 1), "k")
    ends = None
    if lengths is not None:
        ends = dims.match("lengths", lengths, "rows", dtypes=INTEGERS)
    if row_starts is not None and ends is not None:
        ends = ends + dims.match("row_starts", row_starts, "rows", dtypes=INTEGERS)
    return indexer_topk(scores.float(), k, row_starts=row_starts, row_ends=ends)
