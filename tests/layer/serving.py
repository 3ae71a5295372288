"""Requests served by a layer in chunks: prompts in pieces, then token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mlakit import CachedBatch, plan_step
from mlakit.layer import MLAAttention
from mlakit.steps import PooledKeyCache
from mlakit.tools.testing import poison, shuffled_pages

PAGE = 16
# prompts longer than a page in uneven pieces, with steps that have nothing new for one of the
# requests, then one token at a time
CHUNKS = ((20, 5), (30, 1), (0, 20), (10, 0), (2, 2), *[(1, 1)] * 6)


class Server:
    """Pages for two requests, shuffled and poisoned, and the layers that share them."""

    def __init__(
        self,
        layer: MLAAttention,
        lengths: Sequence[int],
        *,
        format: str = "fp32",
        index_format: str = "fp32",
        num_layers: int = 1,
        page_size: int = PAGE,
    ) -> None:
        pages = [-(-n // page_size) for n in lengths]
        device = layer.kv_b_proj.weight.device
        generator = torch.Generator().manual_seed(3)
        table = shuffled_pages(len(lengths), pages, sum(pages) + 3, generator)
        self.page_table = table.to(device)
        sizes = {"num_pages": sum(pages) + 3, "page_size": page_size, "num_layers": num_layers}
        self.cache = poisoned(layer.allocate_cache(format, **sizes))
        self.index_cache = None
        if layer.indexer is not None:
            self.index_cache = poisoned(layer.indexer.allocate_index_cache(index_format, **sizes))
        self.kv_lens = [0] * len(lengths)
        self.device = device

    def batch(self, new: Sequence[int], layer: int = 0) -> CachedBatch:
        """The batch of a step with so many new tokens; call it once a step."""
        self.kv_lens = [before + n for before, n in zip(self.kv_lens, new, strict=True)]
        return CachedBatch(
            self.cache,
            self.page_table,
            torch.tensor(self.kv_lens, dtype=torch.int32, device=self.device),
            torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=self.device),
            layer,
        )


def poisoned(cache: Any) -> Any:
    if isinstance(cache, PooledKeyCache):
        for each in (cache.keys, cache.states):
            poisoned(each)
        return cache
    for stored in (cache.payload, cache.beside):
        if stored is not None:
            poison(stored)
    return cache


def serve(
    layer: MLAAttention,
    inputs: Sequence[Tensor],
    chunks: Sequence[Sequence[int]] = CHUNKS,
    **options: Any,
) -> list[Tensor]:
    """The layer's results for whole requests [tokens, hidden], served in chunks."""
    server = Server(layer, [len(x) for x in inputs], **options)
    found: list[list[Tensor]] = [[] for _ in inputs]
    for wanted in chunks:
        at = list(server.kv_lens)
        new = [min(n, len(x) - a) for n, x, a in zip(wanted, inputs, at, strict=True)]
        x = torch.cat([x[a : a + n] for x, a, n in zip(inputs, at, new, strict=True)])
        batch = server.batch(new)
        plan = None if x.device.type == "cpu" else plan_step(server.kv_lens, new)
        out = layer(x, batch, plan=plan, index_cache=server.index_cache)
        for own, part in zip(found, out.split(new), strict=True):
            own.append(part)
    assert server.kv_lens == [len(x) for x in inputs]
    return [torch.cat(parts) for parts in found]
