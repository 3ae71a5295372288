"""`mla_prefill` by few calls of torch's fused attention, each over many heads of one request.

Maths      as `prefill`
Work       one call for the newest keys, with the causal mask; keys before them are seen by all
           queries of a block and take further calls, whose partials are merged
Memory     K with k_rope repeated for every head, and V padded to its width: as many heads and keys
           as fit. In float32 where the CPU has no products of the given type
Limits     causal and null masks without ALiBi, V no wider than K. Other requests, and those whose
           result may be wrong (`fused.is_certain`), are left to `prefill`
Lineage    own design; ideas: FlashAttention-2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.arguments import PrefillArguments
from mlakit.kernels.cpu.fused import (
    MIN_KEYS,
    SMALLEST_SCALE,
    Partial,
    attend,
    compute_dtype,
    is_accurate,
    is_certain,
)
from mlakit.kernels.cpu.merge import merge_partials
from mlakit.kernels.cpu.workspace import MAX_BLOCK, even_slices, rows_that_fit

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
    before = request.kv_len - request.q_len
    if a.mask.kind == "causal":
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
            return few == 0 or _attend(a, Request(first, keys), torch.float32, out, lse)
    return _attend(a, request, torch.float32, out, lse)


def _attend(
    a: PrefillArguments, request: Request, dtype: torch.dtype, out: Tensor, lse: Tensor
) -> bool:
    """Write the result of a request, multiplied in `dtype`; False if it may be wrong."""
    tiling = _tiling(a, request, dtype)
    for heads in even_slices(a.q.shape[1], tiling.heads):
        for queries in _slices(0, request.q_len, tiling.queries):
            block = _attend_block(a, request, heads, queries, tiling.keys, dtype)
            if block is None:
                return False
            rows = slice(request.rows.start + queries.start, request.rows.start + queries.stop)
            out[rows, heads] = block[0].transpose(0, 1).to(out.dtype)
            lse[rows, heads] = block[1].T
    return True


def _is_possible(a: PrefillArguments, request: Request) -> bool:
    return (
        a.mask.kind in ("causal", "null")
        and a.alibi_slopes is None
        and a.v.shape[2] <= a.q.shape[2]
        and 0 < request.q_len <= request.kv_len
        and abs(a.softmax_scale) >= SMALLEST_SCALE
    )


def _tiling(a: PrefillArguments, request: Request, dtype: torch.dtype) -> _Tiling:
    """All heads, queries and keys if they fit the workspace; else fewer heads, then fewer keys."""
    width, d_v = a.q.shape[2], a.v.shape[2]
    per_key = 2 * width * dtype.itemsize
    # converted queries, their result, two partials in float32 and their merge
    per_query = 2 * width * dtype.itemsize + 4 * 4 * d_v
    per_head = request.kv_len * per_key + request.q_len * per_query
    most = rows_that_fit(per_head, at_least=0, by_item=False)
    if most > 0:
        most = min(most, max(1, MAX_BLOCK // (request.kv_len * per_key)))
        return _Tiling(most, request.q_len, request.kv_len)
    return _Tiling(
        heads=1,
        queries=rows_that_fit(2 * (per_key + per_query), at_least=MIN_TILE, by_item=False),
        keys=rows_that_fit(2 * per_key, at_least=MIN_TILE, by_item=False),
    )


def _attend_block(
    a: PrefillArguments,
    request: Request,
    heads: slice,
    queries: slice,  # of the request
    key_tile: int,
    dtype: torch.dtype,
) -> Partial | None:
    """(out [heads, queries, D_V], lse [heads, queries]); None if it may be wrong."""
    rows = slice(request.rows.start + queries.start, request.rows.start + queries.stop)
    q = a.q[rows, heads].to(dtype)
    if a.q_scale is not None:
        q *= a.q_scale[rows, heads, None]
    q, sink = q.transpose(0, 1), None if a.sink is None else a.sink[heads, None]
    parts = list(_key_tiles(a, request, queries, key_tile))
    whole: Partial | None = None
    for number, (keys, is_causal) in enumerate(parts):
        k, v = _expanded(a, keys, heads, dtype)
        part_out, part_lse = attend(
            q[None], k[None], v[None], a.v.shape[2], a.softmax_scale, is_causal=is_causal
        )
        part = part_out[0], part_lse[0]
        if not is_certain(*part):
            return None
        own_sink = sink if number == len(parts) - 1 else None
        if whole is not None or own_sink is not None:
            part = merge_partials([part] if whole is None else [whole, part], own_sink)
        whole = part
    return whole


def _key_tiles(
    a: PrefillArguments, request: Request, queries: slice, key_tile: int
) -> Iterator[tuple[slice, bool]]:
    """(rows of keys, is the mask needed) for a block of queries."""
    first, last = request.keys.start, request.keys.stop
    if a.mask.kind == "causal":
        before = request.kv_len - request.q_len
        own = slice(first + before + queries.start, first + before + queries.stop)
        yield own, True
        last = own.start
    for tile in _slices(first, last, key_tile):
        yield tile, False


def _expanded(
    a: PrefillArguments, keys: slice, heads: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V [heads, keys, width], times their scales; V is padded with zeros."""
    k_nope, v, width = a.k_nope[keys, heads], a.v[keys, heads], a.q.shape[2]
    (count, num_heads, d_n), d_v = k_nope.shape, v.shape[2]
    # one block of memory: malloc keeps as much as twice the largest one for the next call
    k, values = torch.empty(2, num_heads, count, width, dtype=dtype, device="cpu")
    k[..., :d_n] = k_nope.transpose(0, 1)
    k[..., d_n:] = a.k_rope[keys]
    if a.k_scale is not None:
        k *= a.k_scale[keys, None]
    values[..., :d_v] = v.transpose(0, 1)
    values[..., d_v:] = 0
    if a.v_scale is not None:
        values *= a.v_scale[keys, heads].T[..., None]
    return k, values


def _slices(first: int, last: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, last)) for start in range(first, last, step)]
