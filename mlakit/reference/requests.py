"""What references that compute all queries of a request at once share."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.model.masks import Mask


def empty_results(q: Tensor, v_width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, v_width] and lse [tokens, heads] of queries that see no key."""
    out = q.new_zeros(*q.shape[:2], v_width, dtype=dtype)
    return out, q.new_full(q.shape[:2], -torch.inf, dtype=dtype)


def visible_keys(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """bool [q_len, kv_len]: the keys that the newest queries of a request see."""
    position = torch.arange(q_len, device=device) + kv_len - q_len
    return mask.visible(position, torch.arange(kv_len, device=device))


def readable_rows(rows: Tensor, visible: Tensor) -> Tensor:
    """`rows` [keys, ...], 0 where no query sees a key."""
    unseen = ~visible.any(0)
    return rows.masked_fill(unseen.view(-1, *[1] * (rows.ndim - 1)), 0.0)
