"""The tokens that the lightning indexer selects in one step, from vLLM's metadata.

Nothing here imports vLLM.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from mlakit import KVShard, PagedLatentCache
from mlakit.cache import token_positions
from mlakit.integrations.steps import starts_of
from mlakit.integrations.vllm import calls
from mlakit.parallel.select import local_counts

INDEX_PAGE = 64  # tokens of a block of index keys


class Ranks(NamedTuple):
    """The ranks that share the keys of each request: this one's tokens, and the process group."""

    shard: KVShard
    group: Any


class Limits(NamedTuple):
    """The limits of any step of an engine."""

    max_model_len: int
    decode_tokens: int  # queries of requests that decode, drafts included
    prefill_tokens: int
    logits_bytes: int  # scores of a chunk of prefill


def workspace_bytes(q: torch.Tensor, k: int, limits: Limits) -> int:
    """Return the most memory that the selection of one layer takes in a step, in bytes.

    q  [any, index_heads, D] on the GPU; k keys are selected of each query
    """
    from mlakit.kernels import launch
    from mlakit.precompile.allocation import allocated_bytes

    _, heads, width = q.shape

    def select(tokens: int, columns: int) -> None:
        pages = torch.empty(2, INDEX_PAGE, width + 4, dtype=torch.uint8, device="cpu")
        ints = torch.empty(1 + -(-columns // INDEX_PAGE), dtype=torch.int32, device="cpu")
        calls.select_tokens(
            torch.empty(tokens, heads, width, dtype=q.dtype, device="cpu"),
            torch.empty(tokens, heads, dtype=torch.float32, device="cpu"),
            PagedLatentCache.wrap_index_keys(pages),
            ints[1:].view(1, -1),
            ints[:1],
            ints[:2] if tokens > 1 else None,
            columns,
            torch.empty(tokens, k, dtype=torch.int32, device="cpu"),
        )

    shapes = {(limits.decode_tokens, limits.max_model_len)}
    tokens = limits.prefill_tokens
    while tokens:
        columns = limits.logits_bytes // (4 * tokens)
        shapes.add((tokens, max(min(columns, limits.max_model_len), 1)))
        tokens //= 2
    target = launch.target(q.device)
    return max(allocated_bytes(partial(select, *shape), target) for shape in shapes)


def select_step(
    q: torch.Tensor,
    keys: torch.Tensor | None,
    weights: torch.Tensor,
    topk_tokens: torch.Tensor,
    pool: PagedLatentCache,
    metadata: Any,
    *,
    max_model_len: int,
    power_of_two_scales: bool,
    is_unused: bool = False,
    ranks: Ranks | None = None,
) -> None:
    """Append keys, and write the selection of every token of a step to `topk_tokens`.

    metadata  vLLM's DeepseekV32IndexerMetadata: decode requests first, then chunks of prefill
    is_unused no layer reads the selection
    ranks     that share the keys; the selection is the same on all of them
    """
    if keys is not None:
        calls.append_index_keys(
            keys, pool, metadata.slot_mapping, power_of_two_scales=power_of_two_scales
        )
    if is_unused and not _is_capturing(q):
        return
    if metadata.num_decodes:
        _select_decode(q, weights, topk_tokens, pool, metadata, max_model_len, ranks)
    if metadata.num_prefills:
        for chunk in metadata.prefill.chunks:
            _select_chunk(q, weights, topk_tokens, pool, chunk, ranks)


def _select_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    topk_tokens: torch.Tensor,
    pool: PagedLatentCache,
    metadata: Any,
    max_model_len: int,
    ranks: Ranks | None,
) -> None:
    requests, tokens = metadata.num_decodes, metadata.num_decode_tokens
    if tokens == requests:
        table = getattr(metadata, "block_table", None)
        table = metadata.decode.block_table if table is None else table  # vLLM before 0.32
        table, lens, q_starts = table[:requests], metadata.seq_lens[:requests], None
    else:
        found = getattr(metadata, "mlakit_drafts", None)
        if found is None:  # the first layer makes it for all, inside of a CUDA graph
            found = metadata.mlakit_drafts = _drafts(metadata)
        table, lens, q_starts = found
    # a graph is replayed with longer requests than those it was captured with
    longest = max_model_len if _is_capturing(q) else metadata.max_seq_len
    if ranks is not None:
        found = getattr(metadata, "mlakit_local", None)
        if found is None:  # for all layers
            found = _local(lens, q_starts, tokens, ranks.shard)
            metadata.mlakit_local = found
        local_lens, visible = found
        calls.select_tokens_of_ranks(
            q[:tokens],
            weights[:tokens],
            pool,
            table,
            local_lens,
            q_starts,
            visible,
            ranks.shard.local_count(longest),
            topk_tokens[:tokens],
            *ranks,
        )
        return
    calls.select_tokens(
        q[:tokens],
        weights[:tokens],
        pool,
        table,
        lens,
        q_starts,
        longest,
        topk_tokens[:tokens],
    )


def _drafts(metadata: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (block_table, kv_lens, q_starts) of decode requests with several queries."""
    requests, tokens, decode = metadata.num_decodes, metadata.num_decode_tokens, metadata.decode
    table = getattr(metadata, "block_table", None)
    if table is not None:
        q_lens = decode.per_req_decode_lens
    elif decode.decode_lens.shape[0] == requests:  # vLLM before 0.32
        table, q_lens = decode.block_table, decode.decode_lens
    else:  # there, for its own kernels, it has made a request of every token
        lens = decode.seq_lens if decode.global_seq_lens is None else decode.global_seq_lens
        # the padding of a CUDA graph has lengths below 0
        return decode.block_table[:tokens], lens.reshape(-1)[:tokens].clamp(min=0), None
    return table[:requests], metadata.seq_lens[:requests], starts_of(q_lens[:requests])


def _local(
    seq_lens: torch.Tensor, q_starts: torch.Tensor | None, tokens: int, shard: KVShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys on this rank [requests], and those that a query sees [tokens], int32."""
    lens = local_counts(seq_lens, shard).int()
    if q_starts is None:
        return lens, lens
    _, positions = token_positions(seq_lens, q_starts, tokens)
    return lens, local_counts(positions + 1, shard).int()


def _select_chunk(
    q: torch.Tensor,
    weights: torch.Tensor,
    topk_tokens: torch.Tensor,
    pool: PagedLatentCache,
    chunk: Any,
    ranks: Ranks | None,
) -> None:
    tokens = slice(chunk.token_start, chunk.token_end)
    requests = getattr(chunk, "mlakit_requests", None)
    if requests is None:  # for all layers
        # columns are those of this rank's keys where ranks share them
        kv_starts = chunk.cu_seq_lens if ranks is None else chunk.local_cu_seq_lens
        requests = calls.chunk_requests(chunk.cu_seqlen_ks, chunk.cu_seqlen_ke, kv_starts)
        chunk.mlakit_requests = requests
    q_starts, kv_lens = requests
    if ranks is not None:
        calls.select_tokens_of_ranks(
            q[tokens],
            weights[tokens],
            pool,
            chunk.block_table,
            kv_lens,
            q_starts,
            chunk.cu_seqlen_ke - chunk.cu_seqlen_ks,
            ranks.shard.local_count(chunk.total_seq_lens),
            topk_tokens[tokens],
            *ranks,
        )
        return
    calls.select_tokens(
        q[tokens],
        weights[tokens],
        pool,
        chunk.block_table,
        kv_lens,
        q_starts,
        chunk.total_seq_lens,
        topk_tokens[tokens],
    )


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
