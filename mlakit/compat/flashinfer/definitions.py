"""Functions with the arguments of FlashInfer-Bench's definitions of MLA and DSA, results last.

`scripts/flashinfer_bench.py` writes solutions in its format, which call them. No cache is copied,
and no value is read on the host.
"""

from __future__ import annotations

from torch import Tensor

from mlakit.cache import PagedLatentCache, PageTable
from mlakit.compat.dense_prefill import attend
from mlakit.compat.flashinfer.arguments import LOG2_E, page_table_of, split_pool
from mlakit.dispatch.checks import Dims
from mlakit.ops import indexer_select, mla_decode, sparse_mla


def mla_paged_decode_ps1(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Decode one token of each request over pages of one token."""
    table, lengths = (kv_indptr, kv_indices), kv_indptr.diff()
    _attend(q_nope, q_pe, ckv_cache, kpe_cache, table, lengths, None, sm_scale, output, lse)


def mla_paged_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Decode one token of each request."""
    table = page_table_of(kv_indptr[:-1], kv_indices, len(kv_indices))
    lengths = _lengths(kv_indptr, kv_last_page_len, ckv_cache.shape[1])
    _attend(q_nope, q_pe, ckv_cache, kpe_cache, table, lengths, None, sm_scale, output, lse)


def mla_paged_prefill_causal_ps1(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Attend with the newest tokens of each request, over pages of one token."""
    table, lengths = (kv_indptr, kv_indices), kv_indptr.diff()
    _attend(q_nope, q_pe, ckv_cache, kpe_cache, table, lengths, qo_indptr, sm_scale, output, lse)


def mla_paged_prefill_causal(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Attend with the newest tokens of each request."""
    table = page_table_of(kv_indptr[:-1], kv_indices, len(kv_indices))
    lengths = _lengths(kv_indptr, kv_last_page_len, ckv_cache.shape[1])
    _attend(q_nope, q_pe, ckv_cache, kpe_cache, table, lengths, qo_indptr, sm_scale, output, lse)


def mla_ragged_prefill_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Attend with the newest tokens of each request over expanded keys and values."""
    starts = {"qo_indptr": qo_indptr}, {"kv_indptr": kv_indptr}
    dims = Dims("mla_ragged_prefill_causal")
    attend(dims, q, k, v, *starts, {"sm_scale": float(sm_scale)}, True, output, lse)
    lse.mul_(LOG2_E)


def dsa_sparse_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    sparse_indices: Tensor,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Attend with each token over the rows in its list; −1 does not count."""
    pool = split_pool(Dims("dsa_sparse_attention"), ckv_cache, kpe_cache)
    scale = float(sm_scale)
    sparse_mla(q_nope, pool, sparse_indices, softmax_scale=scale, q_rope=q_pe, out=output, lse=lse)
    lse.mul_(LOG2_E)


def dsa_topk_indexer(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
) -> None:
    """Select the rows with the best index scores of each request; −1 where none is left."""
    keys = PagedLatentCache.wrap_index_keys(k_index_cache_fp8)
    topk = topk_indices.shape[1]
    indexer_select(q_index_fp8, weights, keys, block_table, seq_lens, topk, out=topk_indices)


def _lengths(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """The tokens of each request; a request without pages has none, whatever its last page."""
    pages = kv_indptr.diff()
    return ((pages - 1) * page_size + kv_last_page_len).masked_fill(pages == 0, 0)


def _attend(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    page_table: PageTable,
    kv_lens: Tensor,
    q_starts: Tensor | None,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    pool = split_pool(Dims("mla_paged"), ckv_cache, kpe_cache)
    mla_decode(
        q_nope,
        pool,
        page_table,
        kv_lens,
        softmax_scale=float(sm_scale),
        q_rope=q_pe,
        q_starts=q_starts,
        out=output,
        lse=lse,
    )
    lse.mul_(LOG2_E)
