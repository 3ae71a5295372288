"""Expanded MLA attention over ragged batches.

Maths      s = (q_n·k_n + q_r·k_r) · softmax_scale [+ slope · (key − query)];  out = softmax(s) v
           e4m3 q, k and v are times their scales
Work       few calls of torch's fused attention (`prefill_fused`). What is left takes a query block
           of one request and some heads after the other: key tiles come one after the other, and
           query tiles of the block share each of them. torch shares each operation out among its
           threads
Memory     a key tile is converted to float32 once per query block, with K transposed
Measured   docs/measured.md, CPU
Lineage    own design; ideas: FlashAttention-2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.kernels.arguments import PrefillArguments
from mlakit.kernels.cpu.prefill_fused import Request, attend_request, slices
from mlakit.kernels.cpu.softmax import OnlineSoftmax
from mlakit.kernels.cpu.workspace import rows_that_fit
from mlakit.model.masks import Mask

HEADS = 16  # of a block; up to 4 times as many if it has few queries or keys
QUERY_BLOCK = 512  # queries that share a converted key tile
QUERY_TILE = 128  # queries
KEY_TILE = 512  # keys; with QUERY_TILE 256 kB of scores per head


def mla_prefill(a: PrefillArguments, out: Tensor, lse: Tensor) -> None:
    if a.keys_per_scale > 1:
        a = _with_scales_of_keys(a)
    # inputs are read after the first results are written: by later blocks, and by all blocks of a
    # request whose fused result may be wrong
    results = [each.clone() if _is_in_memory_of(a, each) else each for each in (out, lse)]
    _write(a, *results)
    for given, result in zip((out, lse), results, strict=True):
        if result is not given:
            given.copy_(result)


def _with_scales_of_keys(a: PrefillArguments) -> PrefillArguments:
    """Return the arguments with a scale for each key instead of each block of keys."""
    starts = a.kv_starts.long()
    lengths = starts.diff()
    request = torch.arange(len(lengths), device="cpu").repeat_interleave(lengths)
    kv_start = starts[request]
    key = torch.arange(len(request), device="cpu") - kv_start
    rows = kv_start // a.keys_per_scale + request + key // a.keys_per_scale
    k_scale, v_scale = (None if each is None else each[rows] for each in (a.k_scale, a.v_scale))
    return a._replace(k_scale=k_scale, v_scale=v_scale, keys_per_scale=1)


def _is_in_memory_of(a: PrefillArguments, result: Tensor) -> bool:
    address = result.untyped_storage().data_ptr()
    inputs = (each for each in a if isinstance(each, Tensor))
    return any(each.untyped_storage().data_ptr() == address for each in inputs)


def _write(a: PrefillArguments, out: Tensor, lse: Tensor) -> None:
    if lse.numel() == 0:  # no tokens or no heads
        return
    q_ranges, kv_ranges = pairwise(a.q_starts.tolist()), pairwise(a.kv_starts.tolist())
    requests = [Request(slice(*q), slice(*kv)) for q, kv in zip(q_ranges, kv_ranges, strict=True)]
    for request in requests:
        if attend_request(a, request, out, lse):
            continue
        for block in _blocks(a.q, a.v, request):
            block_out, block_lse = _attend(a, block)
            out[block.rows, block.heads] = block_out.transpose(0, 1)
            lse[block.rows, block.heads] = block_lse.T


class _Scales(NamedTuple):
    """Scales of e4m3 q [queries, heads], k [keys] and v [keys, heads]; None stands for 1."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None


@dataclass(frozen=True)
class _Tiling:
    """Sizes of a block: heads, queries per block, queries per tile, keys per tile."""

    heads: int
    block: int
    queries: int
    keys: int


@dataclass(frozen=True)
class _Block:
    """A query block of one request, for some heads."""

    rows: slice  # of q
    keys: slice  # the request's
    heads: slice
    first_position: int  # of row 0 of q, counted as a query of this request
    tiling: _Tiling


def _blocks(q: Tensor, v: Tensor, request: Request) -> Iterator[_Block]:
    tiling = _tiling(q, v, request.q_len, request.kv_len)
    first_position = request.kv_len - request.rows.stop
    for rows in slices(request.rows.start, request.rows.stop, tiling.block):
        for heads in slices(0, q.shape[1], tiling.heads):
            yield _Block(rows, request.keys, heads, first_position, tiling)


def _tiling(q: Tensor, v: Tensor, q_len: int, kv_len: int) -> _Tiling:
    """Half of the workspace is for a query block with its state, half for a key tile."""
    width, d_v = q.shape[2], v.shape[2]
    bytes_per_query = 4 * (width + 4 * d_v)  # of each head
    fullness = min(q_len, QUERY_BLOCK) * min(kv_len, KEY_TILE) / (QUERY_BLOCK * KEY_TILE)
    heads = min(int(HEADS / max(fullness, 1 / 4)), q.shape[1])
    heads = min(heads, rows_that_fit(2 * min(q_len, QUERY_BLOCK) * bytes_per_query))
    block = min(QUERY_BLOCK, rows_that_fit(2 * heads * bytes_per_query))
    queries = min(QUERY_TILE, block)
    bytes_per_key = 4 * (width + 2 * d_v + 2 * queries)
    return _Tiling(
        heads=heads,
        block=block,
        queries=queries,
        keys=min(KEY_TILE, rows_that_fit(2 * heads * bytes_per_key, at_least=16)),
    )


def _attend(a: PrefillArguments, block: _Block) -> tuple[Tensor, Tensor]:
    """Return (out [heads, queries, D_V], lse [heads, queries]) of one query block."""
    rows, all_keys, own, tiling = block.rows, block.keys, block.heads, block.tiling
    q, k_nope, k_rope, v = a.q[rows, own], a.k_nope[all_keys, own], a.k_rope[all_keys], a.v
    v = v[all_keys, own]
    scales = _Scales(
        None if a.q_scale is None else a.q_scale[rows, own],
        None if a.k_scale is None else a.k_scale[all_keys],
        None if a.v_scale is None else a.v_scale[all_keys, own],
    )
    alibi_slopes = None if a.alibi_slopes is None else a.alibi_slopes[own]
    mask, positions = a.mask, torch.arange(rows.start, rows.stop, device="cpu")
    positions += block.first_position
    (num_queries, heads, width), d_v, num_keys = q.shape, v.shape[2], v.shape[0]
    scaled = (
        torch.empty(heads, num_queries, width, dtype=torch.float32, device="cpu")
        .copy_(q.transpose(0, 1))
        .mul_(a.softmax_scale)
    )
    if scales.q is not None:
        scaled *= scales.q.T[..., None]
    state = OnlineSoftmax.over(heads, num_queries, v_width=d_v)
    first, last = _seen(mask, positions, num_keys)[0]
    for start in range(first, last, tiling.keys):
        stop = min(start + tiling.keys, last)
        tile = slice(start, stop)
        k, values = _to_float32(k_nope[tile], k_rope[tile], v[tile])
        if scales.k is not None:
            k *= scales.k[tile]
        if scales.v is not None:
            values *= scales.v[tile].T[..., None]
        for rows in slices(0, num_queries, tiling.queries):
            by_any, by_all = _seen(mask, positions[rows], num_keys)
            low, high = max(start, by_any[0]), min(stop, by_any[1])
            if low >= high:
                continue
            some, keys = slice(low - start, high - start), torch.arange(low, high, device="cpu")
            scores = scaled[:, rows] @ k[:, :, some]
            if alibi_slopes is not None:
                distance = (keys - positions[rows, None]).float()
                scores.addcmul_(alibi_slopes[:, None, None], distance)
            is_full = by_all[0] <= low and high <= by_all[1]
            visible = None if is_full else mask.visible(positions[rows], keys)
            state[:, rows].add(scores, values[:, some], visible)
    return state.finish(None if a.sink is None else a.sink[own, None])


def _seen(mask: Mask, positions: Tensor, num_keys: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The keys that any of the queries at `positions` sees, and the keys that all of them see.

    Both ends of an interval grow with the position, so the first and the last query decide.
    """
    first, common_last = mask.interval(int(positions[0]), num_keys)
    common_first, last = mask.interval(int(positions[-1]), num_keys)
    return (first, last), (common_first, common_last)


def _to_float32(k_nope: Tensor, k_rope: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (K [heads, D_N + D_R, keys], V [heads, keys, D_V]) float32.

    Neither is transposed in a matmul: with K [keys, D_N + D_R] it would take up to twice as long.
    """
    keys, heads, d_n = k_nope.shape
    k = torch.empty(heads, d_n + k_rope.shape[1], keys, dtype=torch.float32, device="cpu")
    k[:, :d_n] = k_nope.permute(1, 2, 0)
    k[:, d_n:] = k_rope.T
    values = torch.empty(heads, keys, v.shape[2], dtype=torch.float32, device="cpu")
    return k, values.copy_(v.transpose(0, 1))
