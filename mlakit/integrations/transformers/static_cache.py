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
from mlakit.checks import Dims
from mlakit.formats import Format
from mlakit.integrations.transformers import checks
from mlakit.integrations.transformers.attention import up_projection


class StaticLatentLayer(CacheLayerMixin):
    """One layer: rows in pages of its own requests, and their number on the device."""

    is_sliding = False
    # generate() would make masks of four axes for a compileable cache
    is_compileable = False

    def __init__(self, pool: PagedLatentCache, page_table: Tensor, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool, self.page_table, self.index = pool, page_table, index
        self.kv_lens = torch.zeros(len(page_table), dtype=torch.int32, device=page_table.device)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The memory is there from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        """Append latents [batch, 1, length, D_C] and rotated keys [batch, 1, length, D_R]."""
        length, page = key_states.shape[2], self.pool.page_size
        new = torch.arange(length, device=self.page_table.device)
        position = self.kv_lens.long()[:, None] + new
        slots = self.page_table.long().gather(1, position // page) * page + position % page
        latent, k_rope = (part[:, 0].flatten(0, 1) for part in (key_states, value_states))
        append_rows(latent, k_rope, self.pool, slots.flatten(), layer=self.index)
        self.kv_lens += length
        return self, value_states

    def batch(self, length: int) -> CachedBatch:
        """The requests with `length` new tokens each, which are appended."""
        size = len(self.page_table)
        q_starts = torch.arange(size + 1, dtype=torch.int32, device=self.page_table.device)
        return CachedBatch(self.pool, self.page_table, self.kv_lens, q_starts * length, self.index)

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
        return self.kv_lens[0]  # a tensor, as that of a StaticLayer: a graph does not depend on it

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_max_length(self) -> int:
        return self.page_table.shape[1] * self.pool.page_size

    def reset(self) -> None:
        self.kv_lens.zero_()


class StaticIndexedLatentLayer(StaticLatentLayer):
    """A layer of a sparse model, with memory for the model's index keys."""

    def __init__(self, pool: PagedLatentCache, page_table: Tensor, index: int) -> None:
        super().__init__(pool, page_table, index)
        self.indexer_keys: Tensor | None = None  # [batch, max_length, D], made with the first keys

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store keys [batch, length, D] of the tokens that were appended; all keys, then zeros."""
        batch, length, width = indexer_key_states.shape
        if self.indexer_keys is None:
            shape = (batch, self.get_max_length(), width)
            self.indexer_keys = indexer_key_states.new_zeros(shape)
        new = torch.arange(length, device=self.page_table.device) - length
        position = (self.kv_lens.long()[:, None] + new)[..., None].expand(-1, -1, width)
        self.indexer_keys.scatter_(1, position, indexer_key_states)
        return self.indexer_keys


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
        modules = checks.mla_modules(model)
        checks.check_model(model, modules, format)
        _check_layers(model, modules)
        weight = checks.kv_b_proj(modules[0])
        pool = PagedLatentCache.allocate(
            MLAGeometry.from_config(modules[0].config),
            format or format_of_dtype(weight.dtype),
            num_pages=batch * pages,
            page_size=page_size,
            num_layers=len(modules),
            device=weight.device,
        )
        table = torch.arange(batch * pages, dtype=torch.int32, device=weight.device)
        table = table.view(batch, pages)
        for module in modules:
            up_projection(module)  # a graph takes it as it is
        is_sparse = getattr(modules[0].config, "index_topk", None) is not None
        kind = StaticIndexedLatentLayer if is_sparse else StaticLatentLayer
        super().__init__(layers=[kind(pool, table, i) for i in range(len(modules))])


def _check_layers(model: Any, modules: list[nn.Module]) -> None:
    layers = [int(module.layer_idx) for module in modules]  # type: ignore[arg-type]
    if layers != list(range(len(layers))):
        name = type(model).__name__
        raise UnsupportedError(f"StaticLatentCache: {name} has layers without MLA")
