"""`flash_mla_with_kvcache`: dense and sparse decoding over a paged cache.

A query of the batch is one token of mlakit's ops. Each KV head is one call of an op, over a strided
view of its cache rows: no cache is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.compat.flash_mla.metadata import FlashMLASchedMeta, check_metadata, set_config
from mlakit.compat.flash_mla.results import Results
from mlakit.compat.flash_mla.rows import row_format, wrap_cache
from mlakit.dispatch.checks import E4M3, FLOATS, Dims, values_visible
from mlakit.model.masks import CAUSAL, NULL
from mlakit.ops import ExtraRows, mla_decode, sparse_mla
from mlakit.ops._checks import INTEGERS
from mlakit.ops._refusals import refuse_grad

NAME = "flash_mla_with_kvcache"


class _SparseRows(NamedTuple):
    """A cache and the indices of the rows that each query attends to, or their argument names."""

    cache: Any
    indices: Any
    topk_length: Any


MAIN = _SparseRows("k_cache", "indices", "topk_length")
EXTRA = _SparseRows("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object = None,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    descale_q: float | Tensor | None = None,
    descale_k: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all tokens of each request, or over the rows in `indices`.

    q              [b, s_q, h_q, d] bf16, fp16, f32, or e4m3 (the result is then bf16)
    k_cache        [num_blocks, page_block_size, h_k, d] in q's dtype, or rows of bytes (uint8,
                   int8, e4m3): 656 for d = 576, 584 or 528 for d = 512, or d e4m3 values
    block_table    [b, max_blocks], dense only; entries past a request's last page are not read
    cache_seqlens  [b] cached tokens, including the queries, dense only
    head_dim_v     number of leading columns of a row that are the value
    tile_scheduler_metadata, num_splits
                   of any version of FlashMLA; accepted, without effect on results
    softmax_scale  d ** -0.5 if None
    causal         a query sees no later token (queries are the newest tokens); dense only
    indices        [b, s_q, topk] rows, block · page_block_size + offset; negative and too large
                   indices are ignored
    attn_sink      [h_q] float32 logit in the denominator of out, not in lse
    extra_k_cache, extra_indices_in_kvcache
                   a second cache, with its own indices
    topk_length, extra_topk_length
                   [b] valid entries of the indices
    out            [b, s_q, h_q, head_dim_v] to write to
    descale_q, descale_k
                   scale of e4m3 queries (dense only) and of e4m3 cache rows, a number or a
                   one-element tensor: value = stored · scale

    Returns out and lse [b, h_q, s_q] float32, the natural log of Σ exp score. For a query that
    attends to no key, out is 0 and lse is +inf.
    """
    dims = Dims(NAME)
    refuse_grad(NAME, q=q, k_cache=k_cache, extra_k_cache=extra_k_cache, out=out)
    check_metadata(dims, tile_scheduler_metadata, num_splits)
    _check_query(dims, q, head_dim_v)
    if attn_sink is not None:
        dims.match("attn_sink", attn_sink, "h_q", dtypes=[torch.float32])
    scale = q.shape[3] ** -0.5
    if softmax_scale is not None:
        scale = dims.finite("softmax_scale", softmax_scale)
    results = Results.of(dims, q, head_dim_v, out)
    call = _Call(
        dims=dims,
        q=q,
        head_dim_v=head_dim_v,
        is_fp8_kvcache=is_fp8_kvcache,
        descale_k=descale_k,
        scale=scale,
        sink=attn_sink,
        results=results,
    )
    extra = _SparseRows(extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    if indices is None:
        sparse_only = {MAIN.topk_length: topk_length, **dict(zip(EXTRA, extra, strict=True))}
        for name, value in sparse_only.items():
            dims.require(value is None, name, "be None without indices", "a tensor")
        call.attend_dense(k_cache, block_table, cache_seqlens, causal, descale_q)
    else:
        dims.require(not causal, "causal", "be False with indices", causal)
        dims.require(descale_q is None, "descale_q", "be None with indices", "a scale")
        call.attend_sparse(_SparseRows(k_cache, indices, topk_length), extra)
    set_config(
        tile_scheduler_metadata,
        FlashMLASchedMeta.Config(
            b=q.shape[0],
            s_q=q.shape[1],
            h_q=q.shape[2],
            page_block_size=k_cache.shape[1],
            h_k=k_cache.shape[2],
            causal=causal,
            is_fp8_kvcache=is_fp8_kvcache,
            topk=None if indices is None else indices.shape[2],
            extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
            extra_topk=(
                None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[2]
            ),
        ),
    )
    return results.finish()


@dataclass(frozen=True, eq=False)
class _Call:
    """The checked arguments that dense and sparse attention share."""

    dims: Dims
    q: Tensor  # [b, s_q, h_q, d]
    head_dim_v: int
    is_fp8_kvcache: bool
    descale_k: float | Tensor | None
    scale: float
    sink: Tensor | None
    results: Results

    def attend_dense(
        self,
        k_cache: Tensor,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        causal: bool,
        descale_q: float | Tensor | None,
    ) -> None:
        pools = self._pools("k_cache", k_cache)
        dims, (b, s_q, h_q, _) = self.dims, self.q.shape
        table = dims.match("block_table", block_table, "b", "max_blocks", dtypes=INTEGERS)
        lengths = dims.match("cache_seqlens", cache_seqlens, "b", dtypes=INTEGERS)
        _check_blocks(dims, table, lengths, pools[0])
        dims.require(h_q % len(pools) == 0, "h_q", f"be a multiple of h_k, {len(pools)}", h_q)
        q_scale = None
        if descale_q is not None:
            dims.require(
                self.q.dtype == E4M3, "descale_q", f"be None for {self.q.dtype} q", descale_q
            )
            q_scale = _one_scale(dims, "descale_q", descale_q, self.q.device).expand(b * s_q)
        if self.q.numel() == 0:
            return
        q = self.q.flatten(0, 1)
        starts = torch.arange(0, (b + 1) * s_q, s_q, dtype=torch.int32, device=q.device)
        group = h_q // len(pools)
        for head, pool in enumerate(pools):
            heads = slice(head * group, (head + 1) * group)
            mla_decode(
                q[:, heads],
                pool,
                table,
                lengths,
                softmax_scale=self.scale,
                q_scale=q_scale,
                q_starts=starts,
                mask=CAUSAL if causal else NULL,
                sink=None if self.sink is None else self.sink[heads],
                out=self.results.out_tokens[:, heads],
                lse=self.results.lse_tokens[:, heads],
            )

    def attend_sparse(self, main: _SparseRows, extra: _SparseRows) -> None:
        pool, rows, topk_lens, _ = self._selected_rows(MAIN, main)
        second = None
        if any(value is not None for value in extra):
            second = self._selected_rows(EXTRA, extra)
            row, main_row = second.cache.row, pool.row
            must = f"have rows like k_cache's, {main_row}"
            self.dims.require(row == main_row, EXTRA.cache, must, row)
        if self.q.numel() == 0:
            return
        sparse_mla(
            self.q.flatten(0, 1),
            pool,
            rows,
            softmax_scale=self.scale,
            topk_lens=topk_lens,
            sink=self.sink,
            extra=second,
            out=self.results.out_tokens,
            lse=self.results.lse_tokens,
        )

    def _selected_rows(self, names: _SparseRows, given: _SparseRows) -> ExtraRows:
        """A cache and its indices, per query token instead of per request."""
        dims, (b, s_q, _, _) = self.dims, self.q.shape
        pools = self._pools(names.cache, dims.tensor(names.cache, given.cache))
        dims.require(len(pools) == 1, f"{names.cache}.shape[2]", "be one KV head", len(pools))
        topk = f"entries of {names.indices}"
        dims.match(names.indices, given.indices, "b", "s_q", topk, dtypes=INTEGERS)
        rows = given.indices.flatten(0, 1)
        topk_lens = None
        if given.topk_length is not None:
            dims.match(names.topk_length, given.topk_length, "b", dtypes=INTEGERS)
            dims.lengths(names.topk_length, given.topk_length, rows.shape[1], f"the {topk}")
            topk_lens = given.topk_length[:, None].expand(b, s_q).flatten()
        return ExtraRows(pools[0], rows, topk_lens)

    def _pools(self, arg: str, cache: Tensor) -> list[PagedLatentCache]:
        """One pool per KV head, in the memory of the cache."""
        dims = self.dims
        axes = ("num_blocks", "page_block_size", "h_k", "row")
        dims.match(arg, cache, *(f"{axis} of {arg}" for axis in axes))
        (format, row), heads = row_format(dims, arg, cache, self.q, self.head_dim_v), cache.shape[2]
        is_uniform = format == "fp8" or cache.dtype in FLOATS
        dims.require(heads >= 1, f"{arg}.shape[2]", "be at least one KV head", heads)
        dims.require(heads == 1 or is_uniform, f"{arg}.shape[2]", f"be 1 for {format} rows", heads)
        # callers of the dense FP8 kernels do not set the flag for an e4m3 cache
        is_fp8 = cache.dtype not in FLOATS
        dims.require(
            bool(self.is_fp8_kvcache) == is_fp8 or format == "fp8",
            "is_fp8_kvcache",
            f"be {is_fp8} for {arg} of {format} rows",
            self.is_fp8_kvcache,
        )
        scale: float | Tensor = 1.0
        if self.descale_k is not None:
            dims.require(format == "fp8", "descale_k", f"be None for {format} rows", "a scale")
            scale = _one_scale(dims, "descale_k", self.descale_k, cache.device)
        return [
            wrap_cache(dims, arg, cache[:, :, head], format, row, scale) for head in range(heads)
        ]


def _check_query(dims: Dims, q: Tensor, head_dim_v: int) -> None:
    dims.match("q", q, "b", "s_q", "h_q", "d", dtypes=(*FLOATS, E4M3))
    dims.rows_contiguous("q", q)
    dims.require(dims["h_q"] >= 1, "q.shape[2]", "be at least one head", dims["h_q"])
    d_v, d = dims.integer("head_dim_v", head_dim_v, 1), dims["d"]
    dims.require(d_v <= d, "head_dim_v", f"not exceed d of q, {d}", d_v)


def _check_blocks(
    dims: Dims, block_table: Tensor, cache_seqlens: Tensor, pool: PagedLatentCache
) -> None:
    """Require that every cached token is in a block of the pool."""
    if not (values_visible(block_table) and values_visible(cache_seqlens)):
        return
    columns = block_table.shape[1]
    room = f"the {columns} blocks of {pool.page_size} in block_table"
    dims.lengths("cache_seqlens", cache_seqlens, columns * pool.page_size, room)
    first = torch.arange(columns, device=block_table.device) * pool.page_size
    missing = (block_table < 0) | (block_table >= pool.num_pages)
    wrong = (missing & (first < cache_seqlens[:, None])).nonzero().tolist()
    if wrong:
        request, column = wrong[0]
        page = int(block_table[request, column])
        dims.fail(f"block_table[{request}, {column}]", f"be in [0, {pool.num_pages})", page)


def _one_scale(dims: Dims, arg: str, scale: float | Tensor, device: torch.device) -> Tensor:
    """The scale of a tensor as [1] float32 on its device."""
    if isinstance(scale, Tensor):
        dims.dtype(arg, scale, torch.float32)
        dims.same_device(arg, scale)
    checked = dims.scale(arg, scale)
    if isinstance(checked, Tensor):
        return checked.reshape(1)
    return torch.full((1,), checked, dtype=torch.float32, device=device)
