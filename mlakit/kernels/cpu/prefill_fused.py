"""`mla_prefill` by few calls of torch's fused attention, each over many heads of one request.

Maths      as `prefill`
Work       one call for the newest keys, with the causal mask; keys before them are seen by all
           queries of a block and take further calls, whose partials are merged. With 16-bit
           products all keys take one call, if they fit
Memory     [V | K] with k_rope repeated for every head: as many heads and keys as fit. Fused
           attention takes V as wide as K: with columns of K, whose result is not used. In float32
           where the CPU has no products of the given type
Limits     causal and null masks without ALiBi, V no wider than K. Other requests, and those whose
           result may be wrong (`fused.is_finite`, `fused.has_scores`), are left to `prefill`
Lineage    own design; ideas: FlashAttention-2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.kernels.arguments import PrefillArguments
from mlakit.kernels.cpu.fused import (
    MIN_KEYS,
    SMALLEST_SCALE,
    Partial,
    attend,
    compute_dtype,
    has_scores,
    is_accurate,
    is_finite,
)
from mlakit.kernels.cpu.merge import merge_partials
from mlakit.kernels.cpu.workspace import MAX_BLOCK, even_slices, rows_that_fit
from mlakit.model.masks import CAUSAL, NULL

MIN_TILE = 16  # queries, keys


class Request(NamedTuple):
    """Rows of q, and of keys and values."""

    rows: slice
    keys: slice

    @property
    def q_len(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def kv_len(self) -> int:
        return int(self.keys.stop - self.keys.start)


class _Tiling(NamedTuple):
    heads: int  # at most
    queries: int
    keys: int  # of those that all queries of a block see


def attend_request(a: PrefillArguments, request: Request, out: Tensor, lse: Tensor) -> bool:
    """Write the result of a request if this way can do it; False if it cannot."""
    if not _is_possible(a, request):
        return False
    dtype = compute_dtype(a.q, a.k_nope, a.k_rope, a.v)
    if a.sink is not None:  # a result of 16 bits, rounded before and after it is scaled, is too far
        dtype = torch.float32
    before = request.kv_len - request.q_len
    if a.mask == CAUSAL:
        few = min(max(MIN_KEYS - before, 0), request.q_len)  # queries that see few keys
    else:
        few = 0 if request.kv_len >= MIN_KEYS else request.q_len
    if dtype != torch.float32 and few < request.q_len:
        if not _attend(a, request, dtype, out, lse):
            return False
        own = lse[request.rows.start + few : request.rows.stop]
        if is_accurate(own):
            first = slice(request.rows.start, request.rows.start + few)
            keys = slice(request.keys.start, request.keys.start + before + few)
            return few == 0 or _attend(a, Request(first, keys), torch.float32, None, lse)
    return _attend(a, request, torch.float32, out, lse)


def _attend(
    a: PrefillArguments, request: Request, dtype: torch.dtype, out: Tensor | None, lse: Tensor
) -> bool:
    """Write the result of a request, multiplied in `dtype`; False if it may be wrong.

    out  None: only lse is written
    """
    tiling = _tiling(a, request, dtype)
    for heads in even_slices(a.q.shape[1], tiling.heads):
        for queries in slices(0, request.q_len, tiling.queries):
            block = _attend_block(
                a, request, heads, queries, tiling.keys, dtype, has_values=out is not None
            )
            if block is None:
                return False
            rows = slice(request.rows.start + queries.start, request.rows.start + queries.stop)
            lse[rows, heads] = block[1].T
            if out is None:
                continue
            out[rows, heads] = block[0].transpose(0, 1)
            if not is_finite(out[rows, heads]):
                return False
    return True


def _is_possible(a: PrefillArguments, request: Request) -> bool:
    return (
        a.mask in (CAUSAL, NULL)
        and a.alibi_slopes is None
        and a.v.shape[2] <= a.q.shape[2]
        and 0 < request.q_len <= request.kv_len
        and abs(a.softmax_scale) >= SMALLEST_SCALE
    )


def _tiling(a: PrefillArguments, request: Request, dtype: torch.dtype) -> _Tiling:
    """All heads, queries and keys if they fit the workspace; else fewer heads, then fewer keys."""
    width, d_v = a.q.shape[2], a.v.shape[2]
    per_key = (width + d_v) * dtype.itemsize
    # converted queries, their result, two partials in float32 and their merge
    per_query = 2 * width * dtype.itemsize + 4 * 4 * d_v
    # as many queries again may come first (`_attend_all_keys`)
    num_queries = request.q_len + min(request.q_len, request.kv_len - request.q_len)
    per_head = request.kv_len * per_key + num_queries * per_query
    most = rows_that_fit(per_head, at_least=0)
    if most > 0:
        most = min(most, max(1, MAX_BLOCK // (request.kv_len * per_key)))
        return _Tiling(most, request.q_len, request.kv_len)
    return _Tiling(
        heads=1,
        queries=rows_that_fit(2 * (per_key + per_query), at_least=MIN_TILE),
        keys=rows_that_fit(2 * per_key, at_least=MIN_TILE),
    )


def _attend_block(
    a: PrefillArguments,
    request: Request,
    heads: slice,
    queries: slice,  # of the request
    key_tile: int,
    dtype: torch.dtype,
    *,
    has_values: bool,  # else keys take their place, and the result is not used
) -> Partial | None:
    """Return (out [heads, queries, D_V], lse [heads, queries]); None if it may be wrong.

    out may also be wrong if it is not finite.
    """
    rows = slice(request.rows.start + queries.start, request.rows.start + queries.stop)
    # copied by head: attention over distant rows takes a sixth longer, the copy a twentieth
    q = a.q[rows, heads].transpose(0, 1).to(dtype).contiguous()
    if a.q_scale is not None:
        q = q * a.q_scale[rows, heads].T[..., None]
    if _is_one_call(a, request, queries, key_tile, dtype):
        return _attend_all_keys(a, request, heads, q, has_values=has_values)
    sink = None if a.sink is None else a.sink[heads, None]
    parts = list(_key_tiles(a, request, queries, key_tile))
    whole: Partial | None = None
    for number, (keys, is_causal) in enumerate(parts):
        k, v = _expanded(a, keys, heads, dtype, has_values=has_values)
        part_out, part_lse = attend(
            q[None], k[None], v[None], a.v.shape[2], a.softmax_scale, is_causal=is_causal
        )
        del k, v  # before the next ones are made
        part = part_out[0], part_lse[0]
        if not has_scores(*part):
            return None
        own_sink = sink if number == len(parts) - 1 else None
        if whole is not None or own_sink is not None:
            part = merge_partials([part] if whole is None else [whole, part], own_sink)
        whole = part
    return whole


def _is_one_call(
    a: PrefillArguments, request: Request, queries: slice, key_tile: int, dtype: torch.dtype
) -> bool:
    """Return whether one call needs all keys: 16-bit partials are rounded once more."""
    before, bias_bytes = request.kv_len - request.q_len, request.q_len * request.kv_len * 2
    return (
        dtype != torch.float32
        and a.mask == CAUSAL
        and before > 0
        and (queries.stop - queries.start, key_tile) == (request.q_len, request.kv_len)
        and (before <= request.q_len or bias_bytes <= MAX_BLOCK)
    )


def _attend_all_keys(
    a: PrefillArguments, request: Request, heads: slice, q: Tensor, *, has_values: bool
) -> Partial | None:
    """Compute `_attend_block` in one call. Up to a third of the scores are computed in vain."""
    before, num_queries, bias = request.kv_len - request.q_len, request.q_len, None
    k, v = _expanded(a, request.keys, heads, q.dtype, has_values=has_values)
    if before <= num_queries:
        # query i sees the keys up to i: some queries come first whose result is not used
        q = torch.cat([q.new_zeros(len(q), before, q.shape[2]), q], 1)
    else:
        last = torch.arange(before, request.kv_len, device="cpu")
        hidden = torch.arange(request.kv_len, device="cpu") > last[:, None]
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device="cpu")
        bias = bias.masked_fill_(hidden, -torch.inf)[None, None]
    out, lse = attend(
        q[None], k[None], v[None], a.v.shape[2], a.softmax_scale, is_causal=bias is None, bias=bias
    )
    part = out[0, :, -num_queries:], lse[0, :, -num_queries:]
    return part if has_scores(*part) else None


def _key_tiles(
    a: PrefillArguments, request: Request, queries: slice, key_tile: int
) -> Iterator[tuple[slice, bool]]:
    """Return (rows of keys, is the mask needed) for a block of queries."""
    first, last = request.keys.start, request.keys.stop
    if a.mask == CAUSAL:
        before = request.kv_len - request.q_len
        own = slice(first + before + queries.start, first + before + queries.stop)
        yield own, True
        last = own.start
    for tile in slices(first, last, key_tile):
        yield tile, False


def _expanded(
    a: PrefillArguments, keys: slice, heads: slice, dtype: torch.dtype, *, has_values: bool
) -> tuple[Tensor, Tensor]:
    """K and V [heads, keys, width], times their scales; V has columns of K beyond its own."""
    k_nope, width = a.k_nope[keys, heads], a.q.shape[2]
    (count, num_heads, d_n), d_v = k_nope.shape, a.v.shape[2] if has_values else 0
    # one block of memory: malloc keeps as much as twice the largest one for the next call
    rows = torch.empty(count, num_heads, d_v + width, dtype=dtype, device="cpu")
    v, k = rows[..., :d_v], rows[..., d_v:]
    k[..., :d_n] = k_nope
    k[..., d_n:] = a.k_rope[keys, None]
    if a.k_scale is not None:
        k *= a.k_scale[keys, None, None]
    if has_values:
        v.copy_(a.v[keys, heads])
        if a.v_scale is not None:
            v *= a.v_scale[keys, heads, None]
    return k.transpose(0, 1), rows[..., :width].transpose(0, 1)


def slices(first: int, last: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, last)) for start in range(first, last, step)]
