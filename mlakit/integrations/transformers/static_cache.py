"""A latent cache of fixed size, for decode steps under torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from mlakit import (
    CachedBatch,
    MLAGeometry,
    PagedLatentCache,
    UnsupportedError,
    append_rows,
    format_of_dtype,
)
from mlakit.dispatch.checks import Dims, values_visible
from mlakit.formats import Format
from mlakit.integrations.transformers import checks
from mlakit.integrations.transformers.selected_columns import pools_keys
from mlakit.integrations.transformers.v4_attention import v4_modules


class StaticLatentLayer(CacheLayerMixin):
    """One layer: rows in pages of its own requests, and their number on the device.

    A step begins at the lengths that the last layer has: it gets its rows last, so they count the
    tokens that all layers have. A forward that fails before does not change them.
    """

    is_sliding = False
    is_croppable = True
    # generate() would make masks of four axes for a compileable cache
    is_compileable = False

    def __init__(
        self, pool: PagedLatentCache, page_table: Tensor, index: int, geometry: MLAGeometry
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool, self.page_table, self.index, self.geometry = pool, page_table, index, geometry
        # [batch] int32 with the new tokens; past max_length they count tokens that are not stored
        self.kv_lens = torch.zeros(len(page_table), dtype=torch.int32, device=page_table.device)
        self.committed = self.kv_lens  # those of the last layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The memory is there from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        """Append latents [batch, 1, length, D_C] and rotated keys [batch, 1, length, D_R].

        Tokens after max_length are not stored.
        """
        length, page = key_states.shape[2], self.pool.page_size
        if self.index == 0:
            self._check_room(len(key_states), length)
        new = torch.arange(length, device=self.page_table.device)
        position = self.committed.long()[:, None] + new
        last = self.page_table.shape[1] - 1
        pages = self.page_table.long().gather(1, (position // page).clamp(max=last))
        slots = (pages * page + position % page).masked_fill(position >= self.get_max_length(), -1)
        latent, k_rope = (part[:, 0].flatten(0, 1) for part in (key_states, value_states))
        append_rows(latent, k_rope, self.pool, slots.flatten(), layer=self.index)
        self.kv_lens.copy_(self.committed + length)
        return self, value_states

    def _check_room(self, batch: int, length: int) -> None:
        """Refuse another batch, and more tokens than there is memory for where the host knows."""
        size, most = len(self.page_table), self.get_max_length()
        if batch != size:
            raise ValueError(
                f"StaticLatentCache: the batch must have batch_size, {size} requests, got {batch}"
            )
        known = int(self.committed.max()) if values_visible(self.committed) else 0
        if known + length > most:
            raise ValueError(
                f"StaticLatentCache: max_length must be at least the {known} cached and {length} "
                f"new tokens, got {most}"
            )

    def mark_lost(self, out: Tensor) -> Tensor:
        """Make the results [batch, ...] of requests NaN that have more tokens than are stored.

        The host does not know the lengths of a graph or on a GPU. The first layer is enough.
        """
        if self.index != 0:
            return out
        is_lost = self.kv_lens > self.get_max_length()
        return out.masked_fill(is_lost.view(-1, *[1] * (out.ndim - 1)), torch.nan)

    def batch(self, length: int) -> CachedBatch:
        """The requests with `length` new tokens each, which are appended."""
        size = len(self.page_table)
        q_starts = torch.arange(size + 1, dtype=torch.int32, device=self.page_table.device)
        stored = self.kv_lens.clamp(max=self.get_max_length())
        return CachedBatch(self.pool, self.page_table, stored, q_starts * length, self.index)

    def rows(self, indices: Tensor) -> Tensor | None:
        """The rows [tokens, topk] of selected columns; None where every token can be selected.

        indices  [batch, length, topk]; they may name columns after the query's
        """
        length, topk = indices.shape[1:]
        if topk >= self.get_max_length():
            return None
        new = torch.arange(length, device=indices.device) - length
        query = (self.kv_lens.long()[:, None] + new)[..., None]
        column, page = indices.long(), self.pool.page_size
        pages = self.page_table.long().gather(1, (column // page).flatten(1)).view_as(column)
        rows = (pages * page + column % page).masked_fill(column > query, -1)
        return rows.flatten(0, 1).int()

    def get_seq_length(self) -> Any:
        return self.committed[
            0
        ]  # a tensor, as that of a StaticLayer: a graph does not depend on it

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_max_length(self) -> int:
        return self.page_table.shape[1] * self.pool.page_size

    def reset(self) -> None:
        self.kv_lens.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove that many tokens, given as a negative number; a positive one is a length."""
        given = int(tokens_to_remove)
        if given > 0:
            self.kv_lens.clamp_(max=given)
        else:
            self.kv_lens.add_(given).clamp_(min=0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise UnsupportedError(
            "StaticLatentCache: its requests cannot be reordered, repeated or selected; use a "
            "DynamicCache, where beams share pages"
        )

    batch_repeat_interleave = batch_select_indices = reorder_cache

    def offload(self) -> None:
        raise UnsupportedError("StaticLatentCache: it cannot be offloaded")

    prefetch = offload


class StaticIndexedLatentLayer(StaticLatentLayer):
    """A layer of a sparse model, with memory for the model's index keys."""

    # [batch, max_length + 1, D], made with the first keys; the last column is for tokens after it
    indexer_keys: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store keys [batch, length, D] of the tokens that were appended; all keys, then zeros."""
        batch, length, width = indexer_key_states.shape
        most = self.get_max_length()
        if self.indexer_keys is None:
            self.indexer_keys = indexer_key_states.new_zeros(batch, most + 1, width)
        new = torch.arange(length, device=self.page_table.device) - length
        position = (self.kv_lens.long()[:, None] + new).clamp(max=most)
        position = position[..., None].expand(-1, -1, width)
        self.indexer_keys.scatter_(1, position, indexer_key_states)
        return self.indexer_keys[:, :most]


class StaticLatentCache(Cache):
    """The cache of a patched model with memory for `max_length` tokens of each request.

    A decode step with it is one graph: `torch.compile(model.forward, fullgraph=True)`. The prompts
    of a batch have one length: there is no padding.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int,
        max_length: int,
        format: Format | None = None,
        page_size: int = 64,
    ) -> None:
        dims = Dims("StaticLatentCache")
        batch = dims.integer("batch_size", batch_size, 1)
        page_size = dims.integer("page_size", page_size, 1)
        pages = -(-dims.integer("max_length", max_length, 1) // page_size)
        if v4_modules(model):
            name = type(model).__name__
            raise UnsupportedError(
                f"StaticLatentCache: {name} has compressed rows, whose number no graph knows"
            )
        modules = checks.mla_modules(model)
        checks.check_model(model, modules, format)
        checks.check_one_device("StaticLatentCache: the model must have", modules)
        _check_layers(model, modules)
        weight = checks.kv_b_proj(modules[0])
        geometry = MLAGeometry.from_config(modules[0].config)
        pool = PagedLatentCache.allocate(
            geometry,
            format or format_of_dtype(weight.dtype),
            num_pages=batch * pages,
            page_size=page_size,
            num_layers=len(modules),
            device=weight.matrix.device,
        )
        table = torch.arange(batch * pages, dtype=torch.int32, device=weight.matrix.device)
        table = table.view(batch, pages)
        is_sparse = getattr(modules[0].config, "index_topk", None) is not None
        kind = StaticIndexedLatentLayer if is_sparse else StaticLatentLayer
        layers = [kind(pool, table, i, geometry) for i in range(len(modules))]
        for layer in layers:
            layer.committed = layers[-1].kv_lens
        self.format = pool.format
        super().__init__(layers=[*layers])


def _check_layers(model: Any, modules: list[nn.Module]) -> None:
    layers = [int(module.layer_idx) for module in modules]  # type: ignore[arg-type]
    if layers != list(range(len(layers))):
        name = type(model).__name__
        raise UnsupportedError(f"StaticLatentCache: {name} has layers without MLA")
    if any(map(pools_keys, modules)):
        name = type(model).__name__
        raise UnsupportedError(
            f"StaticLatentCache: {name} has indexers that pool keys, which no graph can"
        )
