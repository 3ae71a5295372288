"""Arguments with one thing wrong, and the type of a table of wrong calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.model.geometry import RowShape

OTHER_ROWS = PagedLatentCache.allocate(RowShape(40, 8), num_pages=2, page_size=4)


def changed(tensor: Tensor, index: Any, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def columns_first(tensor: Tensor) -> Tensor:
    """The same numbers, strided along the last axis."""
    return tensor.mT.contiguous().mT


def expanded_pages(cache: PagedLatentCache) -> PagedLatentCache:
    """The first page of the pool as every page: a write would change them all."""
    return replace(cache, payload=cache.payload[:, :1].expand(cache.payload.shape))


def with_scale(cache: PagedLatentCache, value: float) -> PagedLatentCache:
    """A pool of e4m3 rows whose tensor scale got another value after the pool was made."""
    layers, pages, page_size, _ = cache.payload.shape
    scale = torch.tensor(1.0)
    pool = PagedLatentCache.allocate(
        cache.row,
        "fp8",
        num_pages=pages,
        page_size=page_size,
        num_layers=layers,
        tensor_scale=scale,
    )
    scale.fill_(value)
    return pool


# by call, the message without the name of the op, of a ValueError if it names no other, and what to
# change in the call; `a` has its arguments, tensors for the results among them
WrongCalls = dict[str, dict[str, Callable[[dict[str, Any]], dict[str, Any]]]]
