"""vLLM's tensors into mlakit's ops. Nothing here imports vLLM.

kv_cache     [blocks, block_size, row], blocks at any distance: 16-bit or float32 rows, e4m3 rows
             with one scale for the layer (fp8), or 656 bytes (fp8_ds_mla)
slots        [tokens] int64, block · block_size + offset; −1: the token is not stored
block_table  [requests, max_blocks] int32; entries past a request's last block are anything
seq_lens     [requests] int32, this step's tokens included; 0 for the padding of a CUDA graph
query_start_loc  [requests + 1] int32; rows of queries after the last one are padding
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mlakit
from mlakit import KVShard, PagedLatentCache, UnsupportedError
from mlakit.dispatch.checks import Dims
from mlakit.formats import Format
from mlakit.integrations import steps
from mlakit.integrations.steps import DecodeBatch
from mlakit.parallel.select import best_of_rank, best_of_ranks, own_positions

FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3")
PACKED_CACHE_DTYPE, PACKED_BYTES = "fp8_ds_mla", 656
CACHE_DTYPES = ("auto", "float16", "bfloat16", *FP8_CACHE_DTYPES, PACKED_CACHE_DTYPE)


def format_of(kv_cache_dtype: str, dtype: torch.dtype) -> Format:
    """The format of cache rows by vLLM's name; `auto` stands for the dtype of the model."""
    if kv_cache_dtype == PACKED_CACHE_DTYPE:
        return "fp8_block128"
    return "fp8" if kv_cache_dtype in FP8_CACHE_DTYPES else mlakit.format_of_dtype(dtype)


def update_cache(kv_c: Tensor, k_pe: Tensor, pool: PagedLatentCache, slots: Tensor) -> None:
    """Store this step's tokens: what vLLM's `concat_and_cache_mla` does, byte for byte.

    kv_c [tokens, D_C] normed, k_pe [tokens, 1, D_R] rotated. There may be more tokens than slots.
    """
    slots = slots.flatten()[: kv_c.shape[0]]
    stored = slots.shape[0]
    k_rope = k_pe.squeeze(1)[:stored] if pool.row.qk_rope_head_dim else None
    mlakit.append_rows(kv_c[:stored], k_rope, pool, slots)


def decode_batch(
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    num_tokens: int,
    *,
    global_seq_lens: Tensor | None = None,
    shard: KVShard | None = None,
    is_batch_invariant: bool = False,
    num_splits: int | None = None,
) -> DecodeBatch:
    """Return the batch that all layers of a decode step share.

    max_query_len  of a request; vLLM gives less for the block of a draft that is not causal
    num_tokens     of all requests, the padding of a CUDA graph included
    num_splits     parts that batch-invariant decode cuts the keys of a request in

    With one query per request, all keys of a rank are visible, so that their number is enough. With
    drafts, a query sees the keys up to its own position: that needs the global lengths and the
    shard, where the cache is split over the ranks of a context-parallel group.
    """
    made = DecodeBatch(
        block_table, seq_lens, is_batch_invariant=is_batch_invariant, num_splits=num_splits
    )
    if max_query_len <= 1 and num_tokens == seq_lens.shape[0]:
        return made
    made.q_starts = query_start_loc
    if shard is not None and shard.world > 1:
        if global_seq_lens is None:
            raise ValueError("decode_batch: global_seq_lens must be given for a shard, got None")
        made.kv_lens, made.shard = global_seq_lens, shard
    return made


def sparse(
    q: Tensor | tuple[Tensor, Tensor],
    pool: PagedLatentCache,
    topk_tokens: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    softmax_scale: float,
    sink: Tensor | None = None,
    shard: KVShard | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of tokens that each attend to their own selection, prefill and decode alike.

    topk_tokens  [tokens, k] int32 positions in the token's request, −1 where there are fewer
    shard        the tokens of each request that are in this rank's cache: others do not count
    """
    q_latent, q_rope = q if isinstance(q, tuple) else (q, None)
    if shard is not None:
        topk_tokens = own_positions(topk_tokens, shard)
    rows = mlakit.physical_rows(topk_tokens, block_table, pool.page_size, query_start_loc)
    out, lse, _ = mlakit.sparse_mla(
        q_latent, pool, rows, q_rope=q_rope, softmax_scale=softmax_scale, sink=sink
    )
    return out, lse


def check_sinks(backend: str, sinks: Tensor, heads: int, context_ranks: int) -> None:
    """Check the sinks of a sparse layer, one for each of its heads.

    context_ranks  that share the tokens of each request: each attends with the heads of all of
                   them, whose sinks it has not
    """
    Dims(backend, heads=heads).match("sinks", sinks, "heads", dtypes=[torch.float32])
    if context_ranks > 1:
        raise UnsupportedError(
            f"{backend}: sinks need a decode context parallel size of 1, got {context_ranks}"
        )


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    kv_starts: Tensor,
    nope_width: int,
    softmax_scale: float,
    *,
    is_causal: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [tokens, heads, D_V], lse [heads, tokens] as a view) of expanded attention.

    The arguments are those of `steps.prefill`.
    """
    result, lse = steps.prefill(
        q, k, v, q_starts, kv_starts, nope_width, softmax_scale, is_causal=is_causal, out=out
    )
    return result, lse.T


def append_index_keys(
    keys: Tensor, pool: PagedLatentCache, slots: Tensor, *, power_of_two_scales: bool
) -> None:
    """Store the index keys [tokens, D] of this step; there may be more of them than slots."""
    slots = slots.flatten()[: keys.shape[0]]
    mlakit.append_rows(
        keys[: slots.shape[0]], None, pool, slots, power_of_two_scales=power_of_two_scales
    )


def select_tokens(
    q: Tensor,
    weights: Tensor,
    pool: PagedLatentCache,
    block_table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor | None,
    max_kv_len: int,
    out: Tensor,
) -> None:
    """Write the positions of every query's best keys to `out` [tokens, k] int32, −1 at the end.

    q [tokens, index_heads, D] e4m3, weights [tokens, index_heads] float32 with q's scale in them
    """
    logits = mlakit.indexer_logits(
        q,
        weights,
        pool,
        block_table,
        kv_lens,
        q_starts=q_starts,
        max_kv_len=min(max_kv_len, block_table.shape[1] * pool.page_size),
    )
    mlakit.indexer_topk(logits, out.shape[1], out=out)


def select_tokens_of_ranks(
    q: Tensor,
    weights: Tensor,
    pool: PagedLatentCache,
    block_table: Tensor,
    kv_lens: Tensor,
    q_starts: Tensor | None,
    visible: Tensor,
    max_kv_len: int,
    out: Tensor,
    shard: KVShard,
    group: Any,
) -> None:
    """`select_tokens` where every rank of a group caches some keys of each request.

    kv_lens, max_kv_len  [requests] int32 keys on this rank, and a bound of them
    visible              [tokens] int32 keys on this rank that a query sees
    out                  [tokens, k] int32 positions in the request, the same on all ranks
    """
    scores, selected = best_of_rank(
        q,
        weights,
        pool,
        block_table,
        kv_lens,
        q_starts,
        visible,
        out.shape[1],
        columns=min(max_kv_len, block_table.shape[1] * pool.page_size),
    )
    out.copy_(best_of_ranks(scores, selected, shard, group))


def chunk_requests(
    row_starts: Tensor, row_ends: Tensor, kv_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (q_starts [requests + 1], kv_lens [requests]) of a chunk of prefill queries.

    vLLM describes it by the columns [row_starts, row_ends) that every query sees among the keys of
    all requests, request after request from kv_starts on. The queries of a chunk may begin and end
    within a request; kv_lens end with the last key that its last query in the chunk sees, and are 0
    for requests without a query in it.
    """
    q_starts = torch.searchsorted(row_starts, kv_starts.to(row_starts.dtype), out_int32=True)
    # a rank may have no key of the last request: its queries begin where the keys end
    q_starts[-1:] = row_starts.shape[0]
    lengths = row_ends - row_starts
    last = (q_starts[1:] - 1).clamp(min=0).long()
    kv_lens = torch.where(q_starts.diff() > 0, lengths[last], 0)
    return q_starts, kv_lens.to(torch.int32)
