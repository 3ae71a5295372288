"""The lightning indexer: a score for every cached token, and the best of them per query."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, PagedLatentCache, PageTable
from mlakit.dispatch import selection
from mlakit.dispatch.checks import E4M3, FLOATS, Dims, values_visible
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, Use, device_facts
from mlakit.kernels.arguments import LogitsArguments, TopkArguments
from mlakit.model.masks import CAUSAL, Mask
from mlakit.ops._checks import (
    INTEGERS,
    check_kv_lens,
    check_layer,
    check_mask,
    check_page_table,
    check_query_starts,
    check_result,
    check_seen_rows,
    check_stored,
    check_table_pair,
    is_uniformly_strided,
)
from mlakit.ops._library import op

LOGITS = "indexer_logits"
TOPK = "indexer_topk"


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    cache: PagedLatentCache,
    page_table: PageTable,
    kv_lens: Tensor,
    *,
    q_starts: Tensor | None = None,
    layer: int = 0,
    mask: Mask = CAUSAL,
    max_kv_len: int | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Index score of every cached token for every query.

        logits[t, j] = Σ_h weights[t, h] · relu(q[t, h]·key[j])

    q           [tokens, index_heads, D] bf16, fp16, float32 or e4m3; for e4m3 its scale goes
                into `weights`
    weights     [tokens, index_heads] float32 weight of each head in the sum
    cache       index keys, rows of D columns in any format; `PagedLatentCache.wrap_index_keys`
                sees the 132-byte pages of vLLM and DeepGEMM as one
    page_table, kv_lens, q_starts, mask   as in `mla_decode`; no padding after the queries
    max_kv_len  columns of the result, at least every kv_len; None: what the page table can hold.
                Under `masks.compressed_causal` at least kv_len // rate

    Returns float32 [tokens, max_kv_len], −inf where a key is not visible.
    """
    cache_layer = check_layer(LOGITS, cache, layer)
    check_mask(LOGITS, mask)
    arguments = LogitsArguments(
        q=q,
        weights=weights,
        layer=cache_layer,
        page_table=page_table,
        kv_lens=kv_lens,
        q_starts=q_starts,
        mask=mask,
        columns=table_capacity(LOGITS, page_table, cache_layer)
        if max_kv_len is None
        else max_kv_len,
        num_tokens=0,
        backend=backend,
    )
    (logits,) = _logits(arguments, out)
    return logits


def indexer_topk(
    logits: Tensor,
    k: int,
    *,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The columns of the k largest logits of every row, int32 [tokens, k].

    logits      [tokens, columns] float32: those of `indexer_logits`
    k           columns to select for each row
    row_starts  [tokens] int32: a row's first column, and what its result counts from; None: 0
    row_ends    [tokens] int32: one past its last column; None: all columns

    Columns come in their own order, as a gather likes them; of equal logits the lower columns are
    taken. −inf is never selected. NaN ranks above every number, so that it is seen. Slots that are
    left over stand at the end and hold −1.
    """
    arguments = TopkArguments(
        logits=logits, k=k, row_starts=row_starts, row_ends=row_ends, backend=backend
    )
    (selected,) = _topk(arguments, out)
    return selected


def table_capacity(op: str, page_table: PageTable, layer: CacheLayer) -> int:
    """The most tokens that a request of this page table can have."""
    dims = Dims(op)
    if isinstance(page_table, tuple):
        check_table_pair(dims, page_table)
        return dims.match("page_table[1]", page_table[-1], "slots").shape[0]
    table = dims.match("page_table", page_table, "batch", "max_pages")
    return table.shape[1] * layer.page_size


def _empty_logits(a: LogitsArguments) -> tuple[Tensor]:
    return (a.q.new_empty(a.q.shape[0], a.columns, dtype=torch.float32),)


@op(LOGITS, fake=_empty_logits)
def _logits(a: LogitsArguments, out: Tensor | None) -> tuple[Tensor]:
    dims = Dims(LOGITS)
    a = check_scoring(dims, a)
    out = check_result(dims, "out", out, "tokens", "columns", dtype=torch.float32)
    selection.select(LOGITS, logits_problem(a.q, a.layer, a.page_table, a.mask), a.backend).launch(
        a, out
    )
    return (out,)


def check_scoring(dims: Dims, a: LogitsArguments) -> LogitsArguments:
    """Check and complete the arguments of scoring; bind tokens and columns."""
    dims.bind("D", a.layer.codec.row.width, "the row width of the cache")
    dims.match("q", a.q, "tokens", "index_heads", "D", dtypes=(*FLOATS, E4M3))
    dims.rows_contiguous("q", a.q)
    dims.match("weights", a.weights, "tokens", "index_heads", dtypes=[torch.float32])
    check_stored(dims, a.layer)
    lengths = check_kv_lens(dims, a.kv_lens)
    starts = check_query_starts(dims, a.q_starts, dims["tokens"], dims["batch"])
    check_page_table(dims, a.page_table, dims["batch"])
    columns = dims.integer("max_kv_len", a.columns, 0)
    if lengths is not None:
        for request, length in enumerate(lengths):
            must = f"not exceed max_kv_len, {columns}"
            dims.require(a.mask.num_keys(length) <= columns, f"kv_lens[{request}]", must, length)
        check_seen_rows(dims, a.page_table, a.layer, a.mask, starts, lengths)
    dims.bind("columns", columns, "max_kv_len")
    return a._replace(q_starts=starts)


def logits_problem(q: Tensor, layer: CacheLayer, page_table: PageTable, mask: Mask) -> Problem:
    """Describe a call to dispatch."""
    return Problem(
        *device_facts(q.device),
        dtype=str(q.dtype),
        format=layer.codec.name,
        heads=q.shape[1],
        page_size=layer.page_size,
        row=layer.codec.row,
        mask=mask.kind,
        uses=tuple(_uses(q, layer, page_table)),
    )


def _uses(q: Tensor, layer: CacheLayer, page_table: PageTable) -> Iterator[Use]:
    """Yield the uses of a call that few kernels take."""
    if isinstance(page_table, tuple):
        yield Use.FLAT_PAGE_TABLE
    if not is_uniformly_strided(layer.payload):
        yield Use.UNALIGNED_CACHE
    if layer.scales is not None and not _are_packed(layer.scales):
        yield Use.UNALIGNED_SCALES
    is_repeated = q.shape[0] > 1 and q.stride(0) == 0
    if q.shape[0] > 0 and (is_repeated or not is_uniformly_strided(q)):
        yield Use.UNALIGNED_QUERY


def _are_packed(scales: Tensor) -> bool:
    """Return whether TMA can copy the scales [pages, page_size, 1] of a page at once.

    Those of a page must be contiguous, every page must begin at a multiple of 16 bytes, and all of
    them must lie within 2**31 numbers.
    """
    pages, page_size, _ = scales.shape
    if page_size > 1 and scales.stride(1) != 1:
        return False
    pitch = scales.stride(0) if pages > 1 else 0
    is_aligned = scales.data_ptr() % 16 == 0 and pitch * scales.element_size() % 16 == 0
    return is_aligned and pages * pitch < 2**31


def _empty_topk(a: TopkArguments) -> tuple[Tensor]:
    return (a.logits.new_empty(a.logits.shape[0], a.k, dtype=torch.int32),)


@op(TOPK, fake=_empty_topk)
def _topk(a: TopkArguments, out: Tensor | None) -> tuple[Tensor]:
    dims = Dims(TOPK)
    dims.match("logits", a.logits, "tokens", "columns", dtypes=[torch.float32])
    dims.rows_contiguous("logits", a.logits)
    dims.bind("k", dims.integer("k", a.k, 1), "k")
    for name, bounds in (("row_starts", a.row_starts), ("row_ends", a.row_ends)):
        if bounds is not None:
            dims.match(name, bounds, "tokens", dtypes=INTEGERS)
            if values_visible(bounds):
                dims.lengths(name, bounds, dims["columns"], "the columns of logits")
    out = check_result(dims, "out", out, "tokens", "k", dtype=torch.int32)
    problem = Problem(*device_facts(a.logits.device), dtype=str(a.logits.dtype))
    selection.select(TOPK, problem, a.backend).launch(a, out)
    return (out,)
