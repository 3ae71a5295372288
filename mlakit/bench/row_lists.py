"""Lists of rows as an indexer may select them."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.bench import gpu

NUMBERS_AT_ONCE = 1 << 26


def distinct_rows(tokens: int, rows: int, topk: int, generator: torch.Generator) -> Tensor:
    """int64 [tokens, topk]: of `rows` rows, each token's own, uniform, distinct, not sorted."""
    step = max(NUMBERS_AT_ONCE // rows, 1)
    lists = []
    for first in range(0, tokens, step):
        size = (min(step, tokens - first), rows)
        keys = torch.rand(size, generator=generator, device=gpu.DEVICE)
        lists.append(keys.topk(topk, dim=-1).indices)
    return torch.cat(lists)
