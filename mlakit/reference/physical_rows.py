"""Reference of the map from positions to cache rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def physical_rows(
    tokens: Tensor,  # [queries, topk] positions in the request of each query
    slots: Sequence[Tensor],  # per request [tokens]: the physical row of each token, -1 for none
    q_lens: Sequence[int],
) -> Tensor:
    """The physical rows of listed tokens, int32 [queries, topk], one query at a time.

        rows[t, i] = slots[request of t][tokens[t, i]]

    A position outside of the request gives -1, and so do the queries after those of all requests.
    """
    rows = torch.full(tokens.shape, -1, dtype=torch.int32, device=tokens.device)
    query = 0
    for own, q_len in zip(slots, q_lens, strict=True):
        for _ in range(q_len):
            listed = tokens[query]
            found = (listed >= 0) & (listed < len(own))
            rows[query, found] = own[listed[found].long()].to(rows)
            query += 1
    return rows
