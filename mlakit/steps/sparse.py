"""`sparse_step`: append, select the best cached tokens by their index keys, attend to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.cache import UNSHARDED, CacheLayer, KVShard, PagedLatentCache
from mlakit.dispatch import private, selection
from mlakit.dispatch.checks import E4M3, FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.reprs import shapes_repr
from mlakit.model.masks import CAUSAL, Mask
from mlakit.ops import indexer_select, norm_rope_quant_append, sparse_mla
from mlakit.ops._checks import check_layer, check_result, check_seen_rows
from mlakit.ops._refusals import refuse_grad, refuse_results
from mlakit.ops.indexer import logits_problem, table_capacity
from mlakit.ops.indexer_select import (
    MAX_SCORE_BYTES,
    aligned_columns,
    check_always_selected,
)
from mlakit.plan import EvenSplit
from mlakit.steps.batch import CachedBatch, LayerWeights, append_tokens
from mlakit.steps.checks import (
    StepLengths,
    check_out,
    check_step,
    product_ops,
    select_kernels,
)
from mlakit.steps.decode import absorb, check_absorbed_attention
from mlakit.steps.pools import PooledKeys, append_pools, check_pools, rows_of_pools
from mlakit.steps.side_stream import MAX_SIDE_TOKENS, SideStreams


@dataclass(frozen=True, eq=False)
class IndexInputs:
    """The lightning indexer's inputs for the new tokens of a step, and its cache of keys.

    The caller prepares them as its model does. In DeepSeek-V3.2 q and keys are projected, the keys
    pass a LayerNorm, and the first 64 columns of both are rotated (pairs (p, p + 32)). Both may be
    multiplied by a Hadamard matrix, which leaves the scores as they are. Weights are scaled by
    1 / sqrt(index_heads · D). The step quantises and appends the keys.
    """

    q: Tensor  # [tokens, index_heads, D]; of e4m3 the scale goes into `weights`
    keys: Tensor  # [tokens, D], not quantised
    weights: Tensor  # [tokens, index_heads] float32
    cache: PagedLatentCache  # of keys, its pages numbered by the page table of the latent cache
    layer: int = 0
    power_of_two_scales: bool = True  # of the appended keys, as in DeepSeek-V3.2
    init_tokens: int = 0  # always selected, as in `indexer_select`
    local_tokens: int = 0
    pools: PooledKeys | None = None  # the cache has a key for several tokens

    __repr__ = shapes_repr


def sparse_step(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    index: IndexInputs,
    k: int,
    *,
    max_kv_len: int | None = None,
    max_score_bytes: int = MAX_SCORE_BYTES,
    plan: EvenSplit | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """One causal step of DeepSeek-V3.2: each query attends to the k cached tokens it scores best.

        rows = top-k of Σ_h weights[h] · relu(index.q[h]·key)
        out  = (softmax([q_nope W_UK | q_rope]·row · scale) c) W_UVᵀ  over these rows

    Latents and index keys of the new tokens are appended first; a query may select its own token.

    q                [tokens, heads, D_N + D_R], not modified
    kv               [tokens, D_C + D_R] raw latents
    index            the indexer's inputs, prepared by the caller, and its cache of keys
    k                cached tokens per query; a query that sees fewer attends to all it sees. Where
                     keys are pooled, those of k / n pools of n tokens, and of the tail
    max_kv_len, max_score_bytes   as in `indexer_select`
    plan             how many splits a list of rows is attended in, as in `sparse_mla`
    rows             [tokens, k] int32: where the selected rows go, for layers that share them
                     (`rows` of `decode_branch`); `PooledKeys.listed` columns where keys are pooled

    Returns out [tokens, heads, D_V] in q's dtype; 0 for a query that sees no key. On a GPU the step
    does not synchronise and can be captured in a CUDA graph.
    """
    dims = Dims("sparse_step")
    lengths = check_step(dims, q, kv, weights, batch, CAUSAL, is_padded=False)
    check_absorbed_attention(dims, q, batch, lengths, None, None, CAUSAL, None)
    if not (plan is None or isinstance(plan, EvenSplit)):
        raise TypeError(f"{dims.op}: plan must be an EvenSplit, got {type(plan).__name__}")
    keys = check_index(dims, index, batch, lengths, k, max_kv_len, max_score_bytes)
    dims.bind("k", k if index.pools is None else index.pools.listed(k), "k")
    if rows is not None:
        refuse_results(dims.op, rows=rows)
        rows = check_result(dims, "rows", rows, "tokens", "k", dtype=torch.int32)
    out = check_out(dims, out, q.dtype)
    select_kernels((*product_ops(weights), "sparse_mla"), q, weights, batch, CAUSAL, backend)
    mask = CAUSAL if index.pools is None else index.pools.mask
    select_index_kernels(index, keys, batch, backend, mask)
    side_streams = SideStreams(q.device, is_worthwhile=len(q) <= MAX_SIDE_TOKENS)
    with side_streams.stream():  # the selection needs neither the absorbed queries nor the latents
        append_index_keys(index, weights, batch, backend=backend)
        per_key = 1 if index.pools is None else index.pools.size
        selected = indexer_select(
            index.q,
            index.weights,
            index.cache,
            batch.page_table,
            batch.kv_lens,
            k // per_key,
            q_starts=batch.q_starts,
            layer=index.layer,
            mask=mask,
            init_tokens=index.init_tokens,
            local_tokens=index.local_tokens,
            max_kv_len=None if max_kv_len is None else max_kv_len // per_key,
            max_score_bytes=max_score_bytes,
            out=rows if index.pools is None else None,
            backend=backend,
        )
        if index.pools is None:
            rows = selected
        else:
            rows = selected.new_empty(len(q), dims["k"]) if rows is None else rows
            rows_of_pools(selected, index.pools, batch, rows)
    absorbed, q_rope, rotated = absorb(q, weights, backend)
    append_tokens(q_rope, kv, weights, batch, q_rope_out=rotated, backend=backend)
    side_streams.join()
    attended, _, _ = sparse_mla(
        absorbed,
        batch.cache,
        rows,
        layer=batch.layer,
        softmax_scale=weights.softmax_scale,
        sink=weights.sink,
        plan=plan,
        backend=backend,
    )
    return weights.up.w_uv.apply(attended, out=out, backend=backend)


def append_index_keys(
    index: IndexInputs,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    kv_shard: KVShard | None = None,
    backend: Backend,
) -> None:
    """Quantise the keys of the new tokens, or of those of a shard, and append them to the cache."""
    if index.pools is not None:
        assert kv_shard is None
        scales = {"power_of_two_scales": index.power_of_two_scales}
        append_pools(
            index.keys, index.pools, index.cache, index.layer, batch, **scales, backend=backend
        )
        return
    norm_rope_quant_append(
        index.keys.new_empty(index.keys.shape[0], 1, 0),
        index.keys,
        weights.freqs[:, :0],  # the keys are rotated already
        None,
        index.cache,
        batch.page_table,
        batch.kv_lens,
        batch.q_starts,
        epsilon=0.0,
        layer=index.layer,
        power_of_two_scales=index.power_of_two_scales,
        kv_shard=kv_shard,
        backend=backend,
    )


def check_index(
    dims: Dims,
    index: IndexInputs,
    batch: CachedBatch,
    lengths: StepLengths | None,
    k: int,
    max_kv_len: int | None,
    max_score_bytes: int,
    shard: KVShard = UNSHARDED,
) -> CacheLayer:
    """Check what the append of index keys and `indexer_select` would refuse after a write.

    shard  the tokens that the cache holds
    """
    dims.instance("index", index, IndexInputs)
    check_always_selected(dims, dims.integer("k", k, 1), index.init_tokens, index.local_tokens)
    layer = check_layer(dims.op, index.cache, index.layer, owner="index.")
    row = layer.codec.row
    rope = f"rows with {row.qk_rope_head_dim} rope columns"
    dims.require(row.qk_rope_head_dim == 0, "index.cache", "have rows of one kind of column", rope)
    dims.bind("D", row.width, "the row width of index.cache")
    dims.match("index.q", index.q, "tokens", "index_heads", "D", dtypes=(*FLOATS, E4M3))
    dims.rows_contiguous("index.q", index.q)
    dims.match("index.keys", index.keys, "tokens", "D", dtypes=FLOATS)
    dims.rows_contiguous("index.keys", index.keys)
    dims.match("index.weights", index.weights, "tokens", "index_heads", dtypes=[torch.float32])
    dims.same_device("index.cache", layer.payload)
    layer.check_writable(dims, "index.cache")
    pages, pools = batch.cache.page_size, index.pools
    if pools is not None:
        check_pools(dims, pools, row.width, index.layer, k, batch)
        always = index.init_tokens + index.local_tokens
        dims.require(always == 0, "init_tokens", "be 0 where keys are pooled", always)
    tokens = layer.page_size * (1 if pools is None else pools.size)
    must = f"have pages of {pages} tokens, like the latent cache: both share the page table"
    dims.require(tokens == pages, "index.cache", must, tokens)
    given = {"index.q": index.q, "index.keys": index.keys, "index.weights": index.weights}
    refuse_grad(dims.op, **given, **{"index.cache": layer})
    columns = table_capacity(dims.op, batch.page_table, layer)
    if max_kv_len is not None:
        columns = shard.local_count(dims.integer("max_kv_len", max_kv_len, 0))
        columns = columns if pools is None else columns // pools.size
    mask = CAUSAL if pools is None else pools.mask
    if lengths is not None:
        if shard.world == 1 or max_kv_len is not None:
            per_key = 1 if pools is None else pools.size
            limit = (columns + 1) * per_key - 1 if max_kv_len is None else max_kv_len
            dims.lengths("kv_lens", batch.kv_lens, limit, "max_kv_len")
        check_seen_rows(
            dims, batch.page_table, layer, mask, batch.q_starts, list(lengths.kv_lens), shard
        )
    aligned_columns(dims, columns, max_score_bytes)
    return layer


def select_index_kernels(
    index: IndexInputs,
    keys: CacheLayer,
    batch: CachedBatch,
    backend: Backend,
    mask: Mask = CAUSAL,
) -> None:
    """Select the kernel of the scores, so that an unsupported step fails before a write.

    Not where tensors have no addresses: under torch.compile and in transforms of torch.func.
    """
    if torch.compiler.is_compiling() or private.is_transformed():
        return
    problem = logits_problem(index.q, keys, batch.page_table, mask)
    selection.select("indexer_logits", problem, backend)
