"""Caches with one thing wrong, and the type of the tables of wrong calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from mlakit.cache import PagedLatentCache
from mlakit.model.geometry import RowShape
from tests.spoiling import Edit, WrongCalls

# by call, the messages without the name of the op; tensors for the results are among the arguments
CallTables = Mapping[str, WrongCalls]

OTHER_ROWS = PagedLatentCache.allocate(RowShape(40, 8), num_pages=2, page_size=4)
# the first page of the pool as every page: a write would change them all
EXPANDED_PAGES = Edit(
    lambda cache: replace(cache, payload=cache.payload[:, :1].expand(cache.payload.shape))
)


def rescaled(cache: PagedLatentCache, value: float) -> PagedLatentCache:
    """A pool of e4m3 rows whose tensor scale got another value after the pool was made."""
    layers, pages, page_size, _ = cache.payload.shape
    scale = torch.tensor(1.0)
    sizes = {"num_pages": pages, "page_size": page_size, "num_layers": layers}
    pool = PagedLatentCache.allocate(cache.row, "fp8", **sizes, tensor_scale=scale)
    scale.fill_(value)
    return pool


def with_scale(value: float) -> Edit:
    return Edit(lambda cache: rescaled(cache, value))
