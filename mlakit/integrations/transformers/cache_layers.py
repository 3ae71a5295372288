"""The layers that a DynamicCache of transformers gets: views of a pool of latent rows per device.

transformers calls a cache method on every layer in turn. What concerns the whole batch is done by
the first layer of each pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
)

from mlakit.formats import Format
from mlakit.integrations.transformers.pool import LatentPool


class PoolLayer(NamedTuple):
    """The value that `update` returns in place of keys; the attention function takes it."""

    pool: LatentPool
    layer: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the latents in a tensor with padding: [batch, 1, columns, D_C]."""
        assert self.pool.cache is not None
        batch, columns = self.pool.step.positions.shape
        return batch, 1, columns, self.pool.cache.row.kv_lora_rank


class LatentLayer(CacheLayerMixin):
    """One layer of a pool. Its length is in columns of the mask, padding included.

    The length grows when the step is committed, at the end of a forward that did not fail.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, pool: LatentPool, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool, self.layer = pool, layer

    @property
    def columns(self) -> int:
        """The columns of the committed steps."""
        return self.pool.columns

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The pool is made at the first `update`, with the dtype of its latents."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        """Store latents [batch, 1, length, D_C] and rotated keys [batch, 1, length, D_R]."""
        self.pool.write(self.layer, key_states, value_states)
        self.is_initialized = True
        return PoolLayer(self.pool, self.layer), value_states

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        if self.layer == 0:
            self.pool.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._selects:
            self.pool.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._selects:
            batch = range(len(self.pool.sequences))
            self.pool.select([row for row in batch for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._selects:
            rows = torch.arange(len(self.pool.sequences), device="cpu")
            self.pool.select(rows[indices.cpu()].tolist())  # indices may be a mask

    @property
    def _selects(self) -> bool:
        return self.layer == 0 and self.columns > 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove that many tokens, given as a negative number; a positive one is a length."""
        given = int(tokens_to_remove)  # generate() passes a tensor
        count = -given if given <= 0 else max(self.columns - given, 0)
        if count and self.layer == 0:
            self.pool.crop(count)

    def offload(self) -> None:
        raise NotImplementedError("mlakit: a pool of latent rows cannot be offloaded")

    def prefetch(self) -> None:
        self.offload()


class IndexedLatentLayer(LatentLayer):
    """A layer of a sparse model. Its index keys stay the model's, one tensor with the padding."""

    def __init__(self, pool: LatentPool, layer: int) -> None:
        super().__init__(pool, layer)
        self.indexer_keys: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        # an indexer that pools keys asks for their shape
        self.keys, values = super().update(key_states, value_states)
        return self.keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        keys = indexer_key_states
        if self.indexer_keys is not None and self.columns:
            # a forward that failed may have left keys after the committed columns
            keys = torch.cat([self.indexer_keys[:, : self.columns], keys], 1)
        self.indexer_keys = keys
        return keys

    def reset(self) -> None:
        super().reset()
        self.indexer_keys = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._select_keys(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_keys(indices)

    def _select_keys(self, rows: Tensor) -> None:
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[rows.to(self.indexer_keys.device)]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self.columns]


def known_pools(cache: object, layers: Sequence[int]) -> list[LatentPool]:
    """The pools of a cache with these MLA layers, one per device; none if it was not begun."""
    if not isinstance(cache, DynamicCache) or max(layers) >= len(cache.layers):
        return []
    known = [cache.layers[layer] for layer in layers]
    return list(dict.fromkeys(each.pool for each in known if isinstance(each, LatentLayer)))


def pools_of(
    cache: object,
    layers: Mapping[int, torch.device],
    format: Format | None,
    page_size: int,
) -> list[LatentPool]:
    """The pools of a cache. An empty DynamicCache gets them: the caller keeps the object.

    layers  the indices of the MLA layers in the cache, and where their rows lie
    """
    known = known_pools(cache, list(layers))
    if known:
        check_begun(cache, layers)
        return known
    cache = check_new(cache)
    pools: dict[torch.device, LatentPool] = {}
    for device, count in Counter(layers.values()).items():
        pools[device] = LatentPool(count, format, page_size, device)
    number = dict.fromkeys(pools, 0)
    while len(cache.layers) <= max(layers):
        cache.layers.append(DynamicLayer())
    for layer, device in layers.items():
        before = type(cache.layers[layer])
        if before not in (DynamicLayer, DynamicIndexedLayer):
            raise ValueError(
                f"mlakit: layer {layer} of past_key_values must be a DynamicLayer, "
                f"got {before.__name__}"
            )
        kind = IndexedLatentLayer if before is DynamicIndexedLayer else LatentLayer
        cache.layers[layer] = kind(pools[device], number[device])
        number[device] += 1
    return list(pools.values())


def check_new(cache: object) -> DynamicCache:
    """A cache without tokens whose layers can be those of a pool."""
    if not isinstance(cache, DynamicCache):
        got = type(cache).__name__
        raise ValueError(
            "mlakit: past_key_values must be a DynamicCache, or for a cache of fixed size the "
            f"StaticLatentCache of mlakit.integrations.transformers.static_cache, got {got}"
        )
    if cache.get_seq_length():
        raise ValueError("mlakit: past_key_values must be empty or begun by a patched model")
    if cache.offloading:
        raise ValueError("mlakit: past_key_values must not be offloaded")
    return cache


def check_begun(cache: Any, layers: Mapping[int, torch.device]) -> None:
    """The rows of a cache that a patched model began are where the weights are."""
    for layer, device in layers.items():
        own: Any = cache.layers[layer]
        if own.pool.device != device:
            raise ValueError(
                f"mlakit: past_key_values must have the rows of layer {layer} on {device}, where "
                f"its weights are, got {own.pool.device}; begin a new cache"
            )
