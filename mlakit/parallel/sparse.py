"""`context_parallel_sparse_step`: DeepSeek Sparse Attention over a cache shared by tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import CAUSAL, NULL
from mlakit.ops import sparse_mla
from mlakit.ops._checks import check_result
from mlakit.ops.indexer import table_capacity
from mlakit.ops.indexer_select import MAX_SCORE_BYTES
from mlakit.parallel.context import ContextGroup
from mlakit.parallel.merge import MergeMethod
from mlakit.parallel.select import select_over_ranks
from mlakit.plan import EvenSplit
from mlakit.steps import CachedBatch, IndexInputs, LayerWeights
from mlakit.steps.batch import append_tokens
from mlakit.steps.checks import check_step, select_kernels
from mlakit.steps.decode import absorb, check_absorbed_attention
from mlakit.steps.sparse import append_index_keys, check_index, select_index_kernels

NAME = "context_parallel_sparse_step"


def context_parallel_sparse_step(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    index: IndexInputs,
    k: int,
    group: dist.ProcessGroup | None = None,
    *,
    interleave: int = 1,
    method: MergeMethod | None = None,
    is_head_sharded: bool = False,
    max_kv_len: int | None = None,
    max_score_bytes: int = MAX_SCORE_BYTES,
    plan: EvenSplit | None = None,
    rows: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`sparse_step` over caches that the ranks of `group` share by tokens.

    The k cached tokens of a query are the best of all ranks, ties included. Each rank scores its
    own index keys, and the ranks gather their k best scores. A rank attends to those of the best k
    that it caches.

    q, kv, batch, interleave, method, is_head_sharded   as in `context_parallel_decode`
    index       as in `sparse_step`, with the queries, keys and weights of all index heads; its
                cache holds this rank's tokens, in the pages of the batch's page table
    k, max_kv_len, plan   as in `sparse_step`; max_kv_len is that of whole requests
    max_score_bytes       scores that a rank holds at the same time
    rows        [tokens, k] int32: where this rank's selected rows go, −1 after the last, for layers
                that share them (`rows` of `context_parallel_decode`)

    Returns out [tokens, heads, D_V] in q's dtype, as `context_parallel_decode` does. A refused call
    changes nothing.
    """
    dims = Dims(NAME)
    ranks = ContextGroup.checked(dims, group, interleave, method, is_head_sharded=is_head_sharded)
    shard = ranks.shard
    lengths = check_step(dims, q, kv, weights, batch, CAUSAL, shard=shard, is_padded=False)
    check_absorbed_attention(dims, q, batch, lengths, None, None, CAUSAL, None, shard)
    if not (plan is None or isinstance(plan, EvenSplit)):
        raise TypeError(f"{dims.op}: plan must be an EvenSplit, got {type(plan).__name__}")
    if isinstance(index, IndexInputs) and index.pools is not None:
        dims.fail("index.pools", "be None: ranks do not share pools of tokens", "PooledKeys")
    keys = check_index(dims, index, batch, lengths, k, max_kv_len, max_score_bytes, shard)
    dims.bind("k", k, "k")
    if rows is not None:
        rows = check_result(dims, "rows", rows, "tokens", "k", dtype=torch.int32)
    heads = ranks.attending_heads(dims)
    select_kernels(("sparse_mla",), q, weights, batch, CAUSAL, backend, heads=heads)
    select_index_kernels(index, keys, batch, backend, NULL)
    absorbed, q_rope, rotated = absorb(q, weights, backend)
    append_tokens(q_rope, kv, weights, batch, q_rope_out=rotated, kv_shard=shard, backend=backend)
    append_index_keys(index, weights, batch, kv_shard=shard, backend=backend)
    capacity = table_capacity(dims.op, batch.page_table, keys)
    selected = select_over_ranks(
        index,
        batch,
        k,
        ranks,
        columns=capacity if max_kv_len is None else shard.local_count(max_kv_len),
        max_score_bytes=max_score_bytes,
        out=rows,
        backend=backend,
    )
    topk_lens = (selected >= 0).sum(1, dtype=torch.int32)

    def attend(absorbed: Tensor) -> tuple[Tensor, Tensor]:
        latents, lse, _ = sparse_mla(
            absorbed,
            batch.cache,
            selected,
            topk_lens=topk_lens,
            layer=batch.layer,
            softmax_scale=weights.softmax_scale,
            plan=plan,
            backend=backend,
        )
        return latents, lse

    return ranks.attend(absorbed, attend, weights, backend)
