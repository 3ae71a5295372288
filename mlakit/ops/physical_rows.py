"""The cache rows of tokens that are given by their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import PageTable
from mlakit.dispatch import selection
from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.kernels.arguments import PhysicalRowsArguments
from mlakit.ops._checks import INTEGERS, check_padded_starts, check_page_table, check_result
from mlakit.ops._library import op

NAME = "physical_rows"


def physical_rows(
    tokens: Tensor,
    page_table: PageTable,
    page_size: int,
    q_starts: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The rows that `sparse_mla` reads, from the token positions that an indexer listed.

        rows[t, i] = page_table[request of t, tokens[t, i] // page_size] · page_size
                     + tokens[t, i] % page_size

    tokens     [queries, topk] int32 or int64 positions in the query's request
    page_table [batch, max_pages] int32 or int64, or (kv_starts [batch + 1], slots)
    page_size  tokens of a page; a flat table has no use for it
    q_starts   [batch + 1] int32 queries of each request; None means one query each

    Returns rows int32 [queries, topk]. A position that is negative or beyond the table gives −1,
    and so does a negative entry of the table. Queries after q_starts[-1], the padding of a batch,
    get −1 in all entries: `sparse_mla` attends to nothing there.
    """
    arguments = PhysicalRowsArguments(
        tokens=tokens,
        page_table=page_table,
        page_size=page_size,
        q_starts=q_starts,
        backend=backend,
    )
    (rows,) = _physical_rows(arguments, out)
    return rows


def _empty(a: PhysicalRowsArguments) -> tuple[Tensor]:
    return (a.tokens.new_empty(a.tokens.shape, dtype=torch.int32),)


@op(NAME, fake=_empty)
def _physical_rows(a: PhysicalRowsArguments, out: Tensor | None) -> tuple[Tensor]:
    dims = Dims(NAME)
    dims.match("tokens", a.tokens, "queries", "topk", dtypes=INTEGERS)
    dims.rows_contiguous("tokens", a.tokens)
    page_size = dims.integer("page_size", a.page_size, 1)
    batch = dims["queries"]
    if a.q_starts is not None:
        batch = check_padded_starts(dims, a.q_starts, dims["queries"])
    check_page_table(dims, a.page_table, batch, source="the requests of the queries")
    out = check_result(dims, "out", out, "queries", "topk", dtype=torch.int32)
    problem = Problem(*device_facts(a.tokens.device), dtype=str(a.tokens.dtype))
    selection.select(NAME, problem, a.backend).launch(a._replace(page_size=page_size), out)
    return (out,)
