"""Which tokens a sparse layer selects, and whether these are the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlakit import MLAAttention, plan_step
from tests.layer.serving import Server


def positions_of(rows: Tensor, server: Server, request: int) -> list[list[int]]:
    """Logical tokens of physical rows of one request."""
    page = server.cache.page_size
    table = server.page_table[request].tolist()
    at = {p * page + o: i * page + o for i, p in enumerate(table) for o in range(page)}
    return [[at[row] for row in own if row >= 0] for own in rows.tolist()]


def selected_by(
    layer: MLAAttention, x: Tensor, chunks: Sequence[int], **options: Any
) -> tuple[Tensor, list[list[int]]]:
    """(results, the tokens each query of one request selected), step by step."""
    assert layer.indexer is not None
    server = Server(layer, [len(x)], **options)
    out, chosen = [], []
    for new in chunks:
        at = server.kv_lens[0]
        rows = torch.full((new, layer.indexer.topk), -7, dtype=torch.int32, device=x.device)
        batch = server.batch([new])
        part = x[at : at + new]
        plan = None if x.device.type == "cpu" else plan_step(server.kv_lens, [new])
        own = layer(part, batch, plan=plan, index_cache=server.index_cache, rows=rows)
        out.append(own)
        chosen += positions_of(rows, server, 0)
    return torch.cat(out), chosen


def check_selection(scores: Tensor, chosen: list[list[int]], k: int, slack: float) -> None:
    """As many as visible, and none left out is better than one taken, by more than `slack`."""
    for query, keys in enumerate(chosen):
        assert len(keys) == len(set(keys)) == min(k, query + 1)
        assert max(keys) <= query
        others = sorted(set(range(query + 1)) - set(keys))
        if others:
            own = scores[query]
            assert float(own[others].max() - own[keys].min()) <= slack
