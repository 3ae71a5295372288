"""Reference of the lightning indexer: which tokens sparse attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.model.masks import CAUSAL, Mask
from mlakit.reference.requests import readable_rows, visible_keys


@without_autocast
def indexer_logits(
    q: Tensor,  # [tokens, index_heads, D]
    weights: Tensor,  # [tokens, index_heads], with all scales folded in
    keys: Sequence[Tensor],  # per request [kv_len, D], dequantised
    q_lens: Sequence[int],
    *,
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Index score of every visible key, one query token at a time.

        logits[t, j] = Σ_h weights[t, h] · relu(q[t, h]·key[j])

    relu is applied before the weight, which may be negative. The queries are the newest tokens of
    their request, as in `mla_decode`. Returns [tokens, longest kv_len], -inf for masked keys.
    """
    longest = max((request.shape[0] for request in keys), default=0)
    logits = torch.full((q.shape[0], longest), -torch.inf, dtype=dtype, device=q.device)
    token = 0
    for request, q_len in zip(keys, q_lens, strict=True):
        kv_len = request.shape[0]
        for position in range(kv_len - q_len, kv_len):
            first, last = mask.interval(position, kv_len)
            dots = q[token].to(dtype) @ request[first:last].to(dtype).T
            logits[token, first:last] = weights[token].to(dtype) @ dots.relu()
            token += 1
    return logits


@without_autocast
def indexer_topk(
    logits: Tensor,  # [tokens, columns]
    k: int,
    *,
    row_starts: Sequence[int] | Tensor | None = None,  # [tokens]
    row_ends: Sequence[int] | Tensor | None = None,  # [tokens]
) -> Tensor:
    """The columns of the k largest logits of every row, int32 [tokens, k].

    Row t selects among the columns row_starts[t]:row_ends[t], and its results are relative to
    row_starts[t], in ascending order. Ties go to the lower column. NaN ranks above every number, so
    that it is not hidden. -inf is never selected; unused entries are -1.
    """
    tokens, columns = logits.shape
    selected = torch.full((tokens, k), -1, dtype=torch.int32, device=logits.device)
    for token in range(tokens):
        start = 0 if row_starts is None else int(row_starts[token])
        end = columns if row_ends is None else int(row_ends[token])
        row = logits[token, start:end].tolist()
        candidates = [column for column, logit in enumerate(row) if logit != -inf]
        best = sorted(candidates, key=lambda column: _rank(row[column]))[:k]
        selected[token, : len(best)] = torch.tensor(
            sorted(best), dtype=torch.int32, device=logits.device
        )
    return selected


@without_autocast
def indexer_select(
    q: Tensor,  # [tokens, index_heads, D]
    weights: Tensor,  # [tokens, index_heads], with all scales folded in
    keys: Sequence[Tensor],  # per request [kv_len, D], dequantised
    slots: Sequence[Tensor],  # per request [kv_len]: the physical row of each token
    q_lens: Sequence[int],
    k: int,
    *,
    mask: Mask = CAUSAL,
    init_tokens: int = 0,
    local_tokens: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The physical rows of the k best visible keys of every query, int32 [tokens, k].

        rows[t, i] = slots[request of t][topk(logits[t])[i]]

    `indexer_topk` of `indexer_logits`: in the order of tokens, unused entries are -1. The first
    `init_tokens` and the last `local_tokens` keys that a query sees have the score +inf, as in
    LongCat's sparse attention: written from the class Indexer of mlx-vlm's
    `mlx_vlm/models/longcat_flash_sparse/language.py` (pull request 2063).
    """
    logits = indexer_logits(q, weights, keys, q_lens, mask=mask, dtype=dtype)
    token = 0
    for request, q_len in zip(keys, q_lens, strict=True):
        kv_len = request.shape[0]
        for position in range(kv_len - q_len, kv_len):
            seen = list(range(*mask.interval(position, kv_len)))
            always = seen[:init_tokens] + seen[max(len(seen) - local_tokens, 0) :]
            logits[token, always] = inf
            token += 1
    rows = indexer_topk(logits, k)
    token = 0
    for own, q_len in zip(slots, q_lens, strict=True):
        for row in rows[token : token + q_len]:
            found = row >= 0
            row[found] = own[row[found].long()].to(row)
        token += q_len
    return rows


def _rank(logit: float) -> tuple[bool, float]:
    """Sort key, best first; `sorted` is stable, so ties keep their order."""
    return (False, 0.0) if isnan(logit) else (True, -logit)


@without_autocast
def indexer_logits_batched(
    q: Tensor,
    weights: Tensor,
    keys: Sequence[Tensor],
    q_lens: Sequence[int],
    *,
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`indexer_logits` of all queries of a request at once."""
    longest = max(map(len, keys), default=0)
    logits = torch.full((len(q), longest), -torch.inf, dtype=dtype, device=q.device)
    token = 0
    for request, q_len in zip(keys, q_lens, strict=True):
        own = slice(token, token + q_len)
        visible = visible_keys(mask, q_len, len(request), q.device)
        rows = readable_rows(request.to(dtype), visible)
        dots = torch.einsum("qhd,kd->qhk", q[own].to(dtype), rows).relu()
        scores = torch.einsum("qh,qhk->qk", weights[own].to(dtype), dots)
        logits[own, : len(request)] = scores.masked_fill(~visible, -torch.inf)
        token += q_len
    return logits


@without_autocast
def indexer_topk_batched(
    logits: Tensor,
    k: int,
    *,
    row_starts: Sequence[int] | Tensor | None = None,
    row_ends: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """`indexer_topk` of all rows at once."""
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
def indexer_select_batched(
    q: Tensor,
    weights: Tensor,
    keys: Sequence[Tensor],
    slots: Sequence[Tensor],
    q_lens: Sequence[int],
    k: int,
    *,
    mask: Mask = CAUSAL,
    init_tokens: int = 0,
    local_tokens: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`indexer_select` of all queries of a request at once."""
    logits = indexer_logits_batched(q, weights, keys, q_lens, mask=mask, dtype=dtype)
    token = 0
    for request, q_len in zip(keys, q_lens, strict=True):
        visible = visible_keys(mask, q_len, len(request), q.device)
        rank = visible.cumsum(1)
        is_local = rank > visible.sum(1, keepdim=True) - local_tokens
        always = visible & ((rank <= init_tokens) | is_local)
        logits[token : token + q_len, : len(request)].masked_fill_(always, inf)
        token += q_len
    selected = indexer_topk_batched(logits, k)
    token = 0
    for own, q_len in zip(slots, q_lens, strict=True):
        columns = selected[token : token + q_len]
        if len(own):
            rows = own[columns.clamp_min(0).long()].to(columns)
            selected[token : token + q_len] = torch.where(columns >= 0, rows, -1)
        token += q_len
    return selected
