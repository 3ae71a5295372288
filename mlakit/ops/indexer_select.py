"""The cache rows that the lightning indexer selects, without holding every score."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, PageTable
from mlakit.dispatch import selection
from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend
from mlakit.kernels import workspace
from mlakit.kernels.arguments import LogitsArguments, SelectArguments, SelectBlockArguments, filled
from mlakit.model.masks import CAUSAL, NULL, Mask
from mlakit.ops._checks import check_layer, check_mask, check_result
from mlakit.ops._library import op
from mlakit.ops.indexer import LOGITS, check_scoring, logits_problem, table_capacity

NAME = "indexer_select"
MAX_SCORE_BYTES = 256 * 2**20
COLUMN_ALIGNMENT = 4  # float32 columns: kernels store 16 bytes at a time
MAX_ROWS = 2**31  # physical rows are int32


def indexer_select(
    q: Tensor,
    weights: Tensor,
    cache: PagedLatentCache,
    page_table: PageTable,
    kv_lens: Tensor,
    k: int,
    *,
    q_starts: Tensor | None = None,
    layer: int = 0,
    mask: Mask = CAUSAL,
    init_tokens: int = 0,
    local_tokens: int = 0,
    max_kv_len: int | None = None,
    max_score_bytes: int = MAX_SCORE_BYTES,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The physical rows of the k best keys of every query, ready for `sparse_mla`.

    q, weights, cache, page_table, kv_lens, q_starts, mask   as in `indexer_logits`
    k                rows to select for each query
    init_tokens      the first keys that a query sees are always selected, whatever their scores: so
                     many of them, and of the last ones `local_tokens` (LongCat's sparse attention).
                     They count among the k; k must be at least the sum
    local_tokens     see `init_tokens`; the query's own key is the last one under a causal mask
    max_kv_len       at least every kv_len; None: what the page table can hold. A decode step scores
                     no key beyond it
    max_score_bytes  scores held at the same time, at least those of one query: longer prompts are
                     scored in blocks of queries, with a causal mask or none
    backend          of the scores and the selection; one that only scores, hopper, leaves the
                     selection to the others

    Returns int32 [tokens, k], page · page_size + offset: what `indexer_topk` selects from
    `indexer_logits`, bit for bit. Rows are in the order of their tokens; among equal scores the
    earlier tokens win; slots left over, all at the end, hold −1.
    """
    cache_layer = check_layer(NAME, cache, layer)
    check_mask(NAME, mask)
    arguments = SelectArguments(
        q=q,
        weights=weights,
        layer=cache_layer,
        page_table=page_table,
        kv_lens=kv_lens,
        q_starts=q_starts,
        mask=mask,
        columns=table_capacity(NAME, page_table, cache_layer) if max_kv_len is None else max_kv_len,
        k=k,
        init_tokens=init_tokens,
        local_tokens=local_tokens,
        max_score_bytes=max_score_bytes,
        backend=backend,
    )
    (rows,) = _select(arguments, out)
    return rows


def _empty(a: SelectArguments) -> tuple[Tensor]:
    return (a.q.new_empty(a.q.shape[0], a.k, dtype=torch.int32),)


@op(NAME, fake=_empty)
def _select(a: SelectArguments, out: Tensor | None) -> tuple[Tensor]:
    dims = Dims(NAME)
    scoring = check_scoring(dims, _scoring(a))
    dims.bind("k", dims.integer("k", a.k, 1), "k")
    check_always_selected(dims, a.k, a.init_tokens, a.local_tokens)
    num_slots = a.layer.num_slots
    dims.require(num_slots <= MAX_ROWS, "cache", f"have at most {MAX_ROWS} rows", num_slots)
    columns = aligned_columns(dims, dims["columns"], a.max_score_bytes)
    blocks = _query_blocks(dims, dims["tokens"], columns, a)
    out = check_result(dims, "out", out, "tokens", "k", dtype=torch.int32)
    problem = logits_problem(a.q, a.layer, a.page_table, a.mask)
    # a backend that only has kernels for scores leaves the selection to others
    scores_only = a.backend in selection.BACKENDS and a.backend not in selection.backends(NAME)
    select = selection.select(NAME, problem, "auto" if scores_only else a.backend)
    score = selection.select(LOGITS, problem, a.backend)

    starts = filled(scoring.q_starts)
    scores = workspace.scratch(
        (len(blocks[0]) if blocks else 0, columns), torch.float32, dims.device
    )
    bounds = [(starts, a.kv_lens)]
    if len(blocks) > 1:
        bounds = select.plan(starts, a.kv_lens, a.mask, blocks)
    for block, (block_starts, block_lens) in zip(blocks, bounds, strict=False):
        tokens = slice(block.start, block.stop)
        logits = scores[: len(block), : dims["columns"]]
        score.launch(
            scoring._replace(
                q=a.q[tokens],
                weights=a.weights[tokens],
                q_starts=block_starts,
                kv_lens=block_lens,
                num_tokens=dims["tokens"],  # every block gets the configuration of the whole
            ),
            logits,
        )
        found = SelectBlockArguments(
            logits,
            block.start,
            a.page_table,
            a.layer.page_size,
            a.kv_lens,
            starts,
            a.mask,
            a.init_tokens,
            a.local_tokens,
        )
        select.launch(found, out[tokens])
    return (out,)


def _scoring(a: SelectArguments) -> LogitsArguments:
    return LogitsArguments(
        q=a.q,
        weights=a.weights,
        layer=a.layer,
        page_table=a.page_table,
        kv_lens=a.kv_lens,
        q_starts=a.q_starts,
        mask=a.mask,
        columns=a.columns,
        num_tokens=0,
        backend=a.backend,
    )


def check_always_selected(dims: Dims, k: int, init_tokens: int, local_tokens: int) -> None:
    """The keys that are always selected fit among the k of a query."""
    least = dims.integer("init_tokens", init_tokens, 0)
    least += dims.integer("local_tokens", local_tokens, 0)
    must = f"be at least init_tokens and local_tokens together, {least}"
    dims.require(k >= least, "k", must, k)


def aligned_columns(dims: Dims, columns: int, max_score_bytes: int) -> int:
    """Columns of the held scores; those of one query must fit `max_score_bytes`."""
    aligned = -(-columns // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    limit = dims.integer("max_score_bytes", max_score_bytes, 1)
    must = f"hold the scores of one query, {4 * aligned} bytes"
    dims.require(limit >= 4 * aligned, "max_score_bytes", must, limit)
    return aligned


def _query_blocks(dims: Dims, tokens: int, columns: int, a: SelectArguments) -> list[range]:
    """Blocks of query tokens, all but the last of one size, whose scores fit `max_score_bytes`."""
    if tokens == 0:
        return []
    limit, row_bytes = a.max_score_bytes, 4 * columns
    num_blocks = -(-tokens // (limit // row_bytes)) if row_bytes else 1
    # a block's queries see keys up to the last one's position, or all keys: else the positions of
    # queries do not follow from the block's lengths
    can_split = a.mask.is_causal or a.mask == NULL
    must = f"hold all scores with the mask {a.mask.kind}, {tokens * row_bytes} bytes"
    dims.require(can_split or num_blocks == 1, "max_score_bytes", must, limit)
    size = -(-tokens // num_blocks)
    return [range(start, min(start + size, tokens)) for start in range(0, tokens, size)]
