"""The lightning indexer's selection over keys that the ranks of a group share by tokens.

A key of the k best of a request is among the k best of its rank: each rank selects k of its own
keys, the ranks gather the scores, and every rank selects the k best of all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from mlakit.cache import KVShard, PagedLatentCache, PageTable, token_positions
from mlakit.dispatch import selection
from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import NULL
from mlakit.ops import indexer_logits, indexer_topk, physical_rows
from mlakit.parallel.context import ContextGroup
from mlakit.parallel.groups import gather_over_ranks
from mlakit.steps import CachedBatch, IndexInputs

NO_TOKEN = torch.iinfo(torch.int32).max  # sorts after all tokens


def select_over_ranks(
    index: IndexInputs,
    batch: CachedBatch,
    k: int,
    ranks: ContextGroup,
    *,
    columns: int,
    max_score_bytes: int,
    out: Tensor | None,
    backend: Backend,
) -> Tensor:
    """Return this rank's rows of the k best keys of all ranks, per query: int32 [tokens, k].

    columns  at least the cached tokens of every request on this rank

    Rows are in the order of their tokens, then −1. Among equal scores the earlier tokens win, as in
    `indexer_select`.
    """
    shard = ranks.shard
    _, positions = token_positions(batch.kv_lens, batch.q_starts, len(index.q))
    tokens_per_block = max(max_score_bytes // (4 * max(columns, 1)), 1)
    scores = index.weights.new_empty(len(index.q), k)
    selected = torch.empty_like(scores, dtype=torch.int32)
    for first in range(0, len(index.q), tokens_per_block):
        block = slice(first, min(first + tokens_per_block, len(index.q)))
        scores[block], selected[block] = best_of_rank(
            index.q[block],
            index.weights[block],
            index.cache,
            batch.page_table,
            local_counts(batch.kv_lens, shard).int(),
            batch.q_starts.clamp(block.start, block.stop) - block.start,
            local_counts(positions[block] + 1, shard).int(),
            k,
            columns=columns,
            layer=index.layer,
            always=_always_selected(index, positions[block], columns, shard),
            backend=backend,
        )
    chosen = best_of_ranks(scores, selected, shard, ranks.group, backend)
    local = own_positions(chosen, shard)
    local = local.masked_fill(local < 0, NO_TOKEN).sort(dim=1).values
    local = local.masked_fill(local == NO_TOKEN, -1)
    return physical_rows(
        local, batch.page_table, batch.cache.page_size, batch.q_starts, out=out, backend="auto"
    )


def best_of_rank(
    q: Tensor,
    weights: Tensor,
    cache: PagedLatentCache,
    page_table: PageTable,
    lens: Tensor,
    q_starts: Tensor | None,
    visible: Tensor,
    k: int,
    *,
    columns: int,
    layer: int = 0,
    always: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Return (scores, their numbers on this rank) [tokens, k] of the best keys of this rank.

    lens      [requests] int32 keys on this rank
    visible   [tokens] int32 keys on this rank that a query sees
    columns   at least the keys of every request on this rank
    always    bool [tokens, columns] keys that are always selected where they are visible

    Where a rank has fewer keys, scores are −inf and numbers −1.
    """
    logits = indexer_logits(
        q,
        weights,
        cache,
        page_table,
        lens,
        q_starts=q_starts,
        layer=layer,
        mask=NULL,  # a query's own position says nothing about local keys: row_ends below
        max_kv_len=columns,
        backend=backend,
    )
    if always is not None:
        logits.masked_fill_(always, torch.inf)
    best = indexer_topk(logits, k, row_ends=visible, backend=_topk_backend(backend))
    return _gathered(logits, best).masked_fill(best < 0, -torch.inf), best


def _always_selected(
    index: IndexInputs, positions: Tensor, columns: int, shard: KVShard
) -> Tensor | None:
    """Whether each key of this rank is always selected, bool [tokens, columns]; None: none is."""
    if not (index.init_tokens or index.local_tokens):
        return None
    key = global_positions(torch.arange(columns, device=positions.device), shard)
    is_local = key > positions[:, None] - index.local_tokens
    return (key < index.init_tokens) | is_local


def best_of_ranks(
    scores: Tensor,
    selected: Tensor,
    shard: KVShard,
    group: dist.ProcessGroup | None,
    backend: Backend = "auto",
) -> Tensor:
    """Positions int32 [tokens, k] of the best scores of all ranks, in order, then −1.

    scores, selected  what `best_of_rank` returns on this rank
    """
    positions = global_positions(selected, shard)
    world, (tokens, k) = shard.world, scores.shape
    if world > 1 and scores.numel() > 0:
        mine = torch.stack([scores.view(torch.int32), positions])[None]
        received = mine.new_empty(world, *mine.shape[1:])
        gather_over_ranks(received, mine, group)
        by_rank = received.permute(1, 2, 0, 3).reshape(2, tokens, world * k)
        # `indexer_topk` prefers the lower columns, so columns are in the order of positions
        positions, order = by_rank[1].sort(dim=1)
        scores = by_rank[0].gather(1, order).view(torch.float32)
    columns = indexer_topk(scores, k, backend=_topk_backend(backend))
    return _gathered(positions, columns).masked_fill(columns < 0, -1)


def _gathered(values: Tensor, columns: Tensor) -> Tensor:
    """values[t, columns[t, i]]; any value for a negative column."""
    if values.shape[1] == 0:
        return values.new_zeros(columns.shape)
    return values.gather(1, columns.clamp(min=0).long())


def own_positions(chosen: Tensor, shard: KVShard) -> Tensor:
    """The numbers on this rank of tokens at positions `chosen`; −1 for those of other ranks."""
    is_own = (chosen >= 0) & (shard.owner(chosen) == shard.rank)
    return shard.local_position(chosen).masked_fill(~is_own, -1)


def global_positions(local: Tensor, shard: KVShard) -> Tensor:
    """The positions in their requests of tokens that are counted on their rank."""
    period = shard.interleave * shard.world
    start = shard.rank * shard.interleave
    return local // shard.interleave * period + start + local % shard.interleave


def local_counts(num_tokens: Tensor, shard: KVShard) -> Tensor:
    """`KVShard.local_count` of every entry."""
    period = shard.interleave * shard.world
    rest = num_tokens % period - shard.rank * shard.interleave
    return num_tokens // period * shard.interleave + rest.clamp(0, shard.interleave)


def _topk_backend(backend: Backend) -> Backend:
    """A backend that only has kernels for scores leaves the selection to others."""
    return backend if backend == "auto" or backend in selection.backends("indexer_topk") else "auto"
