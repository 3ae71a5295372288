"""References that compute all queries of a request at once.

Each function takes the arguments of the reference with its name and returns the same. On a GPU a
problem takes milliseconds. A query's scores include keys that it does not see, so keys and values
that any query of the request sees must be finite; the others may be NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.model.masks import CAUSAL, Mask
from mlakit.reference.prefill import scaled, scales_of_keys
from mlakit.reference.softmax import attention_weights
from mlakit.reference.sparse import Lengths


@without_autocast
def mla_decode(
    q: Tensor,
    rows: Sequence[Tensor],
    q_lens: Sequence[int],
    *,
    softmax_scale: float,
    v_width: int,
    mask: Mask = CAUSAL,
    sink: Tensor | None = None,
    key_positions: Sequence[Tensor] | None = None,
    query_positions: Sequence[Tensor] | None = None,
    products: Callable[[int, int, Tensor], Tensor] | None = None,
    weights_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA attention: `reference.mla_decode`."""
    out, lse = _empty(q, v_width, dtype)
    token = 0
    for request, (cached, q_len) in enumerate(zip(rows, q_lens, strict=True)):
        visible = _visible(mask, q_len, len(cached), q.device)
        if key_positions is not None and query_positions is not None:
            visible = mask.visible(query_positions[request], key_positions[request])
        own, keys = slice(token, token + q_len), _readable(cached.to(dtype), visible)
        if products is None:
            scores = torch.einsum("qhd,kd->qhk", q[own].to(dtype), keys)
        else:
            scores = q.new_empty(q_len, q.shape[1], len(cached), dtype=dtype)
            for i in range(q_len):
                scores[i] = products(token + i, request, torch.ones_like(visible[i]))
        scores = (scores * softmax_scale).masked_fill(~visible[:, None], -torch.inf)
        weights, lse[own] = attention_weights(scores, sink, weights_dtype)
        out[own] = torch.einsum("qhk,kd->qhd", weights, keys[:, :v_width])
        token += q_len
    return out, lse


@without_autocast
def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    q_starts: Sequence[int],
    kv_starts: Sequence[int],
    *,
    softmax_scale: float,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    keys_per_scale: int = 1,
    mask: Mask = CAUSAL,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    weights_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Expanded MLA attention: `reference.mla_prefill`."""
    k_scale = scales_of_keys(k_scale, kv_starts, keys_per_scale)
    v_scale = scales_of_keys(v_scale, kv_starts, keys_per_scale)
    q, v = scaled(q, q_scale, dtype), scaled(v, v_scale, dtype)
    k_nope = scaled(k_nope, None if k_scale is None else k_scale[:, None], dtype)
    k_rope = scaled(k_rope, k_scale, dtype)
    out, lse = _empty(q, v.shape[-1], dtype)
    for own, rows in zip(_slices(q_starts), _slices(kv_starts), strict=True):
        shared = k_rope[rows, None].expand(-1, q.shape[1], -1)
        keys = torch.cat([k_nope[rows], shared], dim=-1)
        visible = _visible(mask, len(q[own]), len(keys), q.device)
        keys, values = _readable(keys, visible), _readable(v[rows], visible)
        scores = torch.einsum("qhd,khd->qhk", q[own], keys) * softmax_scale
        if alibi_slopes is not None:
            position = torch.arange(len(q[own]), device=q.device) + len(keys) - len(q[own])
            distance = torch.arange(len(keys), device=q.device) - position[:, None]
            scores = scores + alibi_slopes.to(dtype)[:, None] * distance.to(dtype)[:, None]
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        weights, lse[own] = attention_weights(scores, sink, weights_dtype)
        out[own] = torch.einsum("qhk,khd->qhd", weights, values)
    return out, lse


@without_autocast
def sparse_mla(
    q: Tensor,
    pool: Tensor,
    rows: Tensor,
    *,
    softmax_scale: float,
    v_width: int,
    topk_lens: Lengths | None = None,
    sink: Tensor | None = None,
    extra: tuple[Tensor, Tensor, Lengths | None] | None = None,
    weights_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Absorbed MLA attention over selected rows: `reference.sparse_mla`."""
    lists = [(pool, rows, topk_lens)] if extra is None else [(pool, rows, topk_lens), extra]
    parts = [_listed(*each) for each in lists]
    listed, is_valid = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    listed = listed.to(dtype)
    scores = (q.to(dtype) @ listed.mT * softmax_scale).masked_fill(~is_valid[:, None], -torch.inf)
    weights, lse = attention_weights(scores, sink, weights_dtype)
    max_logits = scores.amax(-1) if listed.shape[1] else lse
    return weights @ listed[..., :v_width], lse, max_logits


@without_autocast
def indexer_logits(
    q: Tensor,
    weights: Tensor,
    keys: Sequence[Tensor],
    q_lens: Sequence[int],
    *,
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Index score of every visible key: `reference.indexer_logits`."""
    longest = max(map(len, keys), default=0)
    logits = torch.full((len(q), longest), -torch.inf, dtype=dtype, device=q.device)
    token = 0
    for request, q_len in zip(keys, q_lens, strict=True):
        own = slice(token, token + q_len)
        visible = _visible(mask, q_len, len(request), q.device)
        rows = _readable(request.to(dtype), visible)
        dots = torch.einsum("qhd,kd->qhk", q[own].to(dtype), rows).relu()
        scores = torch.einsum("qh,qhk->qk", weights[own].to(dtype), dots)
        logits[own, : len(request)] = scores.masked_fill(~visible, -torch.inf)
        token += q_len
    return logits


@without_autocast
def indexer_topk(
    logits: Tensor,
    k: int,
    *,
    row_starts: Sequence[int] | Tensor | None = None,
    row_ends: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The columns of the k largest logits of every row: `reference.indexer_topk`."""
    tokens, columns = logits.shape
    column = torch.arange(columns, device=logits.device)
    first = logits.new_zeros(tokens, 1, dtype=torch.int64)
    if row_starts is not None:
        first = torch.as_tensor(row_starts, dtype=torch.int64, device=logits.device)[:, None]
        logits = logits.masked_fill(column < first, -torch.inf)
    if row_ends is not None:
        last = torch.as_tensor(row_ends, dtype=torch.int64, device=logits.device)[:, None]
        logits = logits.masked_fill(column >= last, -torch.inf)
    # a stable sort keeps equal logits in the order of columns, and puts NaN first
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    found = ordered[:, :k] != -torch.inf
    best = torch.where(found, order[:, :k], columns).sort(dim=1).values
    selected = logits.new_full((tokens, k), -1, dtype=torch.int32)
    selected[:, : best.shape[1]] = torch.where(best < columns, best - first, -1).int()
    return selected


@without_autocast
def indexer_select(
    q: Tensor,
    weights: Tensor,
    keys: Sequence[Tensor],
    slots: Sequence[Tensor],
    q_lens: Sequence[int],
    k: int,
    *,
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The physical rows of the k best visible keys: `reference.indexer_select`."""
    logits = indexer_logits(q, weights, keys, q_lens, mask=mask, dtype=dtype)
    selected = indexer_topk(logits, k)
    token = 0
    for own, q_len in zip(slots, q_lens, strict=True):
        columns = selected[token : token + q_len]
        if len(own):
            rows = own[columns.clamp_min(0).long()].to(columns)
            selected[token : token + q_len] = torch.where(columns >= 0, rows, -1)
        token += q_len
    return selected


def _empty(q: Tensor, v_width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, v_width] and lse [tokens, heads] of queries that see no key."""
    out = q.new_zeros(*q.shape[:2], v_width, dtype=dtype)
    return out, q.new_full(q.shape[:2], -torch.inf, dtype=dtype)


def _slices(starts: Sequence[int]) -> list[slice]:
    return [slice(first, last) for first, last in pairwise(starts)]


def _visible(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """bool [q_len, kv_len]: the keys that the newest queries of a request see."""
    position = torch.arange(q_len, device=device) + kv_len - q_len
    return mask.visible(position, torch.arange(kv_len, device=device))


def _readable(rows: Tensor, visible: Tensor) -> Tensor:
    """`rows` [keys, ...], 0 where no query sees a key."""
    unseen = ~visible.any(0)
    return rows.masked_fill(unseen.view(-1, *[1] * (rows.ndim - 1)), 0.0)


def _listed(pool: Tensor, rows: Tensor, lens: Lengths | None) -> tuple[Tensor, Tensor]:
    """([tokens, topk, width] the listed rows, 0 for invalid entries; bool [tokens, topk])."""
    slots = rows.long()
    is_valid = (slots >= 0) & (slots < len(pool))
    if lens is not None:
        ends = torch.as_tensor(lens, dtype=torch.int64, device=pool.device)[:, None]
        is_valid &= torch.arange(slots.shape[1], device=pool.device) < ends
    if not len(pool):
        return pool.new_zeros(*slots.shape, pool.shape[1]), is_valid
    listed = pool[torch.where(is_valid, slots, 0)]
    return listed.masked_fill(~is_valid[..., None], 0.0), is_valid
