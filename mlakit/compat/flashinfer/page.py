"""Appending latent rows to a paged cache, and the positions to append them at."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache.page_table import token_positions
from mlakit.compat.flashinfer.arguments import split_pool
from mlakit.dispatch.checks import E4M3, Dims, values_visible
from mlakit.ops import append_rows
from mlakit.ops._checks import INTEGERS


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """The tokens of each request [batch], from its pages and the tokens of its last page."""
    return (kv_indptr.diff() - 1).clamp_min(0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The request of each appended token and its position there, int32 [nnz].

    append_indptr  [batch + 1]; tokens after append_indptr[-1] have request −1 and position 0
    seq_lens       [batch] tokens of each request, the appended ones included: its newest
    batch_indices, positions  [nnz] int32 to write to
    """
    dims = Dims("get_batch_indices_positions")
    dims.bind("nnz", dims.integer("nnz", nnz, 0), "nnz")
    dims.match("seq_lens", seq_lens, "batch", dtypes=INTEGERS)
    dims.bind("batch + 1", dims["batch"] + 1, "one more than the batch")
    dims.match("append_indptr", append_indptr, "batch + 1", dtypes=INTEGERS)
    for name, result in (("batch_indices", batch_indices), ("positions", positions)):
        if result is not None:
            dims.match(name, result, "nnz", dtypes=[torch.int32])
            dims.writable(name, result)
    dims.starts("append_indptr", append_indptr, nnz, "nnz", is_padded=True)
    # padding is a request of its own, the last
    starts = torch.cat([append_indptr, append_indptr.new_full((1,), nnz)])
    lengths = torch.cat([seq_lens, seq_lens.new_zeros(1)])
    request, position = token_positions(lengths, starts, nnz)
    is_padding = request == dims["batch"]
    results = []
    for values, of_padding, given in ((request, -1, batch_indices), (position, 0, positions)):
        filled = values.masked_fill(is_padding, of_padding)
        results.append(filled.int() if given is None else given.copy_(filled))
    return results[0], results[1]


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Store rows, normed and rotated already, at positions of their requests.

    append_ckv     [tokens, ckv_dim], append_kpe [tokens, kpe_dim], in the dtype of the caches
    batch_indices  [tokens] the request of each token, positions [tokens]; a token whose request is
                   −1 is not stored
    ckv_cache      [pages, page_size, ckv_dim], kpe_cache [pages, page_size, kpe_dim]
    kv_indices     the pages of all requests, those of request b from kv_indptr[b] on
    kv_last_page_len  [batch]; the positions say where rows go
    """
    dims = Dims("append_paged_mla_kv_cache")
    ckv, kpe = dims.tensor("ckv_cache", ckv_cache), dims.tensor("kpe_cache", kpe_cache)
    pool = split_pool(dims, ckv, kpe)
    dims.match("append_ckv", append_ckv, "tokens", "ckv", dtypes=[ckv.dtype])
    dims.match("append_kpe", append_kpe, "tokens", "kpe", dtypes=[ckv.dtype])
    dims.match("batch_indices", batch_indices, "tokens", dtypes=INTEGERS)
    dims.match("positions", positions, "tokens", dtypes=INTEGERS)
    dims.match("kv_indices", kv_indices, "listed pages", dtypes=INTEGERS)
    dims.match("kv_last_page_len", kv_last_page_len, "batch", dtypes=INTEGERS)
    dims.bind("batch + 1", dims["batch"] + 1, "one more than the batch")
    dims.match("kv_indptr", kv_indptr, "batch + 1", dtypes=INTEGERS)
    if not dims["tokens"]:
        return
    for axis, source in (("batch", "kv_last_page_len"), ("listed pages", "kv_indices")):
        dims.require(dims[axis] >= 1, source, "not be empty for tokens to append", 0)
    size = pool.page_size
    is_stored = batch_indices >= 0
    request = batch_indices.long().clamp(0, dims["batch"] - 1)
    entry = kv_indptr.long()[request] + positions // size
    is_listed = (positions >= 0) & (entry < kv_indptr[request + 1]) & (batch_indices == request)
    if values_visible(positions):
        for token in (is_stored & ~is_listed).nonzero()[:1].flatten().tolist():
            got = f"{int(positions[token])} of request {int(batch_indices[token])}"
            dims.fail(f"positions[{token}]", "lie in the pages of its request", got)
    is_stored &= is_listed
    page = kv_indices[torch.where(is_stored, entry, 0)]
    slots = torch.where(is_stored, page * size + positions % size, -1)
    if ckv.dtype == E4M3:  # stored as they are: the pool's scale is 1
        append_ckv, append_kpe = append_ckv.bfloat16(), append_kpe.bfloat16()
    append_rows(append_ckv, append_kpe if kpe.shape[2] else None, pool, slots)
