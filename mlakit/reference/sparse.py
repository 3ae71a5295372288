"""Reference of sparse attention: absorbed MLA over the selected rows of each query token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.reference.softmax import attention_weights

Lengths = Sequence[int] | Tensor


@without_autocast
def sparse_mla(
    q: Tensor,  # [tokens, heads, width]
    pool: Tensor,  # [num_rows, width], dequantised
    rows: Tensor,  # [tokens, topk] int, rows of `pool`
    *,
    softmax_scale: float,
    v_width: int,
    topk_lens: Lengths | None = None,  # [tokens]
    sink: Tensor | None = None,  # [heads]
    extra: tuple[Tensor, Tensor, Lengths | None] | None = None,  # a second (pool, rows, topk_lens)
    weights_dtype: torch.dtype | None = None,  # round the softmax weights to this dtype
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Absorbed MLA attention over selected rows, one query token at a time.

        score[h, s] = q[h]·pool[rows[s]] · softmax_scale
        out[h]      = Σ_s softmax_s(score[h]) pool[rows[s], :v_width]
        lse[h]      = log Σ_s exp score[h, s]          max_logits[h] = max_s score[h, s]

    Entry s of token t is valid iff s < topk_lens[t] and 0 <= rows[t, s] < num_rows; other entries
    are ignored, and a duplicate row counts twice. There is no mask: the selection must be causal.
    The rows of `extra` join those of `rows` in one softmax. Returns out [tokens, heads, v_width],
    lse [tokens, heads] and max_logits [tokens, heads], -inf without valid entries.
    """
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, v_width, dtype=dtype, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=dtype, device=q.device)
    max_logits = torch.full_like(lse, -torch.inf)
    for token in range(tokens):
        attended = _selected(pool, rows, topk_lens, token).to(dtype)
        if extra is not None:
            attended = torch.cat([attended, _selected(*extra, token).to(dtype)])
        score = q[token].to(dtype) @ attended.T * softmax_scale
        weights, lse[token] = attention_weights(score, sink, weights_dtype)
        out[token] = weights @ attended[:, :v_width]
        if attended.shape[0] > 0:
            max_logits[token] = score.amax(-1)
    return out, lse, max_logits


def _selected(pool: Tensor, rows: Tensor, topk_lens: Lengths | None, token: int) -> Tensor:
    length = rows.shape[1] if topk_lens is None else max(int(topk_lens[token]), 0)
    selected = rows[token, :length].long()
    return pool[selected[(selected >= 0) & (selected < pool.shape[0])]]


@without_autocast
def sparse_mla_batched(
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
    """`sparse_mla` of all queries of a request at once."""
    lists = [(pool, rows, topk_lens)] if extra is None else [(pool, rows, topk_lens), extra]
    parts = [_listed(*each) for each in lists]
    listed, is_valid = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    listed = listed.to(dtype)
    scores = (q.to(dtype) @ listed.mT * softmax_scale).masked_fill(~is_valid[:, None], -torch.inf)
    weights, lse = attention_weights(scores, sink, weights_dtype)
    max_logits = scores.amax(-1) if listed.shape[1] else lse
    return weights @ listed[..., :v_width], lse, max_logits


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
