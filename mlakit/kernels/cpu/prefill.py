"""Expanded MLA attention over ragged batches.

Maths      s = (q_n·k_n + q_r·k_r) · softmax_scale [+ slope · (key − query)];  out = softmax(s) v
Work       one request at a time, in tiles of queries and keys that fit the workspace
Memory     the shared rope part of K is read as it is, never repeated per head
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mlakit.kernels.cpu.softmax import OnlineSoftmax
from mlakit.kernels.cpu.workspace import rows_that_fit
from mlakit.masks import Mask

QUERY_TILE = 128


def mla_prefill(
    q: Tensor,  # [tokens, heads, D_N + D_R]
    k_nope: Tensor,  # [keys, heads, D_N]
    k_rope: Tensor,  # [keys, D_R]
    v: Tensor,  # [keys, heads, D_V]
    q_starts: Tensor,  # [batch + 1]
    kv_starts: Tensor,  # [batch + 1]
    *,
    softmax_scale: float,
    mask: Mask,
    alibi_slopes: Tensor | None,  # [heads] float32
    sink: Tensor | None,  # [heads] float32
    out: Tensor,  # [tokens, heads, D_V]
    lse: Tensor,  # [tokens, heads] float32
) -> None:
    q_ranges, kv_ranges = pairwise(q_starts.tolist()), pairwise(kv_starts.tolist())
    for (q_first, q_last), (kv_first, kv_last) in zip(q_ranges, kv_ranges, strict=True):
        num_keys = kv_last - kv_first
        keys = slice(kv_first, kv_last)
        for first in range(q_first, q_last, QUERY_TILE):
            rows = slice(first, min(first + QUERY_TILE, q_last))
            positions = torch.arange(rows.start, rows.stop) - q_last + num_keys
            tile_out, tile_lse = _attend(
                q[rows],
                k_nope[keys],
                k_rope[keys],
                v[keys],
                positions,
                softmax_scale=softmax_scale,
                mask=mask,
                alibi_slopes=alibi_slopes,
                sink=sink,
            )
            out[rows] = tile_out.transpose(0, 1).to(out.dtype)
            lse[rows] = tile_lse.T


def _attend(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    positions: Tensor,  # [queries] int64
    *,
    softmax_scale: float,
    mask: Mask,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out [heads, queries, D_V], lse [heads, queries]) of one tile of queries."""
    num_queries, heads, _ = q.shape
    d_n, d_v, num_keys = k_nope.shape[2], v.shape[2], k_nope.shape[0]
    q_nope, q_rope = q.float().transpose(0, 1).split([d_n, k_rope.shape[1]], dim=-1)
    first = mask.interval(int(positions[0]), num_keys)[0]
    last = mask.interval(int(positions[-1]), num_keys)[1]
    softmax = OnlineSoftmax.over(heads, num_queries, v_width=d_v)
    tile = rows_that_fit(4 * heads * (d_n + d_v + 3 * num_queries), at_least=16)
    for start in range(first, last, tile):
        block = slice(start, min(start + tile, last))
        keys = torch.arange(block.start, block.stop)
        scores = q_nope @ k_nope[block].float().permute(1, 2, 0)
        scores += q_rope @ k_rope[block].float().T
        scores *= softmax_scale
        if alibi_slopes is not None:
            scores += alibi_slopes[:, None, None] * (keys - positions[:, None])
        visible = mask.visible(positions, keys)
        softmax.add(
            scores, v[block].float().transpose(0, 1), None if bool(visible.all()) else visible
        )
    return softmax.finish(None if sink is None else sink[:, None])
