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
