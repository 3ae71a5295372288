"""Reference of dense prefill: expanded (multi-head) MLA attention over a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.model.masks import CAUSAL, Mask
from mlakit.reference.requests import empty_results, readable_rows, visible_keys
from mlakit.reference.softmax import attention_weights


@without_autocast
def mla_prefill(
    q: Tensor,  # [tokens, heads, D_N + D_R]
    k_nope: Tensor,  # [keys, heads, D_N]
    k_rope: Tensor,  # [keys, D_R], shared by all heads
    v: Tensor,  # [keys, heads, D_V]
    q_starts: Sequence[int],
    kv_starts: Sequence[int],
    *,
    softmax_scale: float,
    q_scale: Tensor | None = None,  # [tokens, heads], multiplies q
    k_scale: Tensor | None = None,  # [keys], multiplies k_nope and k_rope
    v_scale: Tensor | None = None,  # [keys, heads], multiplies v
    keys_per_scale: int = 1,  # n: k_scale and v_scale have one for each n keys of a request
    mask: Mask = CAUSAL,
    alibi_slopes: Tensor | None = None,  # [heads]
    sink: Tensor | None = None,  # [heads]
    weights_dtype: torch.dtype | None = None,  # round the softmax weights to this dtype
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Expanded MLA attention, one request and one query token at a time.

        score[h, j] = (q[h, :D_N]·k_nope[j, h] + q[h, D_N:]·k_rope[j]) · softmax_scale
                      + alibi_slopes[h] · (j − p)
        out[h]      = Σ_j softmax_j(score[h]) v[j, h]        lse[h] = log Σ_j exp score[h, j]

    with q, k and v times their scales, if any. Request b has queries q_starts[b]:q_starts[b + 1]
    and keys kv_starts[b]:kv_starts[b + 1]. Its queries are its newest tokens: query i is at
    position p = kv_len − q_len + i, and sees the keys that `mask` allows for p. Returns
    out [tokens, heads, D_V] and lse [tokens, heads].
    """
    tokens, heads, _ = q.shape
    k_scale = scales_of_keys(k_scale, kv_starts, keys_per_scale)
    v_scale = scales_of_keys(v_scale, kv_starts, keys_per_scale)
    q, v = scaled(q, q_scale, dtype), scaled(v, v_scale, dtype)
    k_nope = scaled(k_nope, None if k_scale is None else k_scale[:, None], dtype)
    k_rope = scaled(k_rope, k_scale, dtype)
    out = torch.zeros(tokens, heads, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=dtype, device=q.device)
    requests = zip(pairwise(q_starts), pairwise(kv_starts), strict=True)
    for (q_start, q_end), (kv_start, kv_end) in requests:
        shared = k_rope[kv_start:kv_end, None].expand(-1, heads, -1)
        keys = torch.cat([k_nope[kv_start:kv_end], shared], dim=-1)
        values = v[kv_start:kv_end]
        for token in range(q_start, q_end):
            position = kv_end - kv_start - (q_end - token)
            first, last = mask.interval(position, kv_end - kv_start)
            score = torch.einsum("hd,jhd->hj", q[token], keys[first:last])
            score = score * softmax_scale
            if alibi_slopes is not None:
                distance = torch.arange(first, last, device=q.device) - position
                score = score + alibi_slopes.to(dtype)[:, None] * distance.to(dtype)
            weights, lse[token] = attention_weights(score, sink, weights_dtype)
            out[token] = torch.einsum("hj,jhd->hd", weights, values[first:last])
    return out, lse


def scales_of_keys(
    scale: Tensor | None, kv_starts: Sequence[int], keys_per_scale: int
) -> Tensor | None:
    """Return [keys, ...] of the scales of each n keys: those of request b begin at kv_starts[b] //
    n + b, room for as many as it may have."""
    if scale is None or keys_per_scale == 1:
        return scale
    rows = [
        kv_start // keys_per_scale + request + key // keys_per_scale
        for request, (kv_start, kv_end) in enumerate(pairwise(kv_starts))
        for key in range(kv_end - kv_start)
    ]
    return scale[torch.tensor(rows, dtype=torch.int64, device=scale.device)]


def scaled(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, each row times its scale."""
    x = x.to(dtype)
    return x if scale is None else x * scale.to(dtype)[..., None]


def alibi_slopes(num_heads: int) -> Tensor:
    """The ALiBi slope of every head, float64 [heads].

        slope[h] = 2^(−8 (h + 1) / H)                                  for H a power of two

    Otherwise the slopes of the largest power of two P < H, then every other slope of 2P.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return torch.tensor(slopes[:num_heads], dtype=torch.float64, device="cpu")


@without_autocast
def mla_prefill_batched(
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
    """`mla_prefill` of all queries of a request at once."""
    k_scale = scales_of_keys(k_scale, kv_starts, keys_per_scale)
    v_scale = scales_of_keys(v_scale, kv_starts, keys_per_scale)
    q, v = scaled(q, q_scale, dtype), scaled(v, v_scale, dtype)
    k_nope = scaled(k_nope, None if k_scale is None else k_scale[:, None], dtype)
    k_rope = scaled(k_rope, k_scale, dtype)
    out, lse = empty_results(q, v.shape[-1], dtype)
    for own, rows in zip(_slices(q_starts), _slices(kv_starts), strict=True):
        shared = k_rope[rows, None].expand(-1, q.shape[1], -1)
        keys = torch.cat([k_nope[rows], shared], dim=-1)
        visible = visible_keys(mask, len(q[own]), len(keys), q.device)
        keys, values = readable_rows(keys, visible), readable_rows(v[rows], visible)
        scores = torch.einsum("qhd,khd->qhk", q[own], keys) * softmax_scale
        if alibi_slopes is not None:
            position = torch.arange(len(q[own]), device=q.device) + len(keys) - len(q[own])
            distance = torch.arange(len(keys), device=q.device) - position[:, None]
            scores = scores + alibi_slopes.to(dtype)[:, None] * distance.to(dtype)[:, None]
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        weights, lse[own] = attention_weights(scores, sink, weights_dtype)
        out[own] = torch.einsum("qhk,khd->qhd", weights, values)
    return out, lse


def _slices(starts: Sequence[int]) -> list[slice]:
    return [slice(first, last) for first, last in pairwise(starts)]
