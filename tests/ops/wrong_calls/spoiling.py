"""Arguments with one thing wrong, and the type of a table of wrong calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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


# by call, what to change in it and what is then said, the name of the op aside; `a` has the
# arguments as they should be, tensors for the results among them
WrongCalls = dict[str, list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]]]
