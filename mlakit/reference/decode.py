"""Reference of decode: absorbed (multi-query) MLA attention over cache rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.model.masks import CAUSAL, Mask
from mlakit.reference.requests import empty_results, readable_rows, visible_keys
from mlakit.reference.softmax import attention_weights


@without_autocast
def mla_decode(
    q: Tensor,  # [tokens, heads, width]: absorbed latent part, then rotated part
    rows: Sequence[Tensor],  # per request [kv_len, width], dequantised, in order
    q_lens: Sequence[int],
    *,
    softmax_scale: float,
    v_width: int,
    mask: Mask = CAUSAL,
    sink: Tensor | None = None,  # [heads]
    key_positions: Sequence[Tensor] | None = None,  # per request int [kv_len]
    query_positions: Sequence[Tensor] | None = None,  # per request int [q_len]
    products: Callable[[int, int, Tensor], Tensor] | None = None,
    weights_dtype: torch.dtype | None = None,  # round the softmax weights to this dtype
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA attention, one request and one query token at a time.

        score[h, j] = q[h]·row[j] · softmax_scale
        out[h]      = Σ_j softmax_j(score[h]) row[j, :v_width]     lse[h] = log Σ_j exp score[h, j]

    The last q_len rows of a request are its own queries: query i is at position kv_len − q_len + i,
    row j at position j. If `rows` are one context-parallel rank's rows, the caller gives both
    positions. `products(token, request, seen)` replaces q·row: it returns [heads, n] for the n rows
    that the boolean mask `seen` selects.

    Returns out [tokens, heads, v_width] and lse [tokens, heads].
    """
    if (key_positions is None) != (query_positions is None):
        raise ValueError("mla_decode: key_positions and query_positions must be given together")
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, v_width, dtype=dtype, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=dtype, device=q.device)
    token = 0
    for request, (cached, q_len) in enumerate(zip(rows, q_lens, strict=True)):
        keys = torch.arange(cached.shape[0], device=q.device)
        queries = torch.arange(q_len, device=q.device) + cached.shape[0] - q_len
        if key_positions is not None and query_positions is not None:
            keys, queries = key_positions[request], query_positions[request]
        for seen in mask.visible(queries, keys):
            attended = cached[seen].to(dtype)
            if products is None:
                score = q[token].to(dtype) @ attended.T
            else:
                score = products(token, request, seen).to(dtype)
            weights, lse[token] = attention_weights(score * softmax_scale, sink, weights_dtype)
            out[token] = weights @ attended[:, :v_width]
            token += 1
    return out, lse


@without_autocast
def mla_decode_batched(
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
    """`mla_decode` of all queries of a request at once."""
    out, lse = empty_results(q, v_width, dtype)
    token = 0
    for request, (cached, q_len) in enumerate(zip(rows, q_lens, strict=True)):
        visible = visible_keys(mask, q_len, len(cached), q.device)
        if key_positions is not None and query_positions is not None:
            visible = mask.visible(query_positions[request], key_positions[request])
        own, keys = slice(token, token + q_len), readable_rows(cached.to(dtype), visible)
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
