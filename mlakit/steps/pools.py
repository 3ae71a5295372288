"""Index keys of pools of tokens, as GLM-5.3-Flash has them: one key for several tokens.

A pool of a request is its tokens [p · n, (p + 1) · n), and its key a mean of theirs. The pages of
the pooled keys are those of the latents, with one row for n tokens: both share the page table, and
a selected key's row names the rows of its tokens. Keys and gates of the tokens of a pool that is
not complete wait in `states`, in pages of the same numbers with a few rows each, which the tokens
of a page take in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, token_positions
from mlakit.cache.pages import PageCopy
from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.reprs import shapes_repr
from mlakit.formats import Format
from mlakit.model.geometry import RowShape
from mlakit.model.masks import Mask, compressed_causal
from mlakit.ops import compress_rows, physical_rows
from mlakit.ops._checks import check_layer
from mlakit.steps.batch import CachedBatch

MAX_DRAFTS = 4  # newest tokens that a step may overwrite, rejected drafts for example


@dataclass(frozen=True, eq=False)
class PooledKeys:
    """What makes the keys of pools: an `IndexInputs` whose cache has such keys has it.

    The key of a pool is the sum of its tokens' keys, by column weighted with the softmax of
    gate + bias[place in the pool] over the pool.
    """

    gate: Tensor  # [tokens, D]
    bias: Tensor  # [n, D]
    states: PagedLatentCache  # of `PooledKeyCache`
    selects_tail: bool = True  # a query attends to the tokens after its last complete pool, too

    __repr__ = shapes_repr

    @property
    def size(self) -> int:
        """Tokens of a pool."""
        return self.bias.shape[0]

    @property
    def mask(self) -> Mask:
        """The pools that a query sees: those whose last token it sees."""
        return compressed_causal(self.size)

    def listed(self, k: int) -> int:
        """Rows that are listed for a query: the k tokens of pools, and those of the tail."""
        return k + (self.size - 1 if self.selects_tail else 0)


@dataclass(frozen=True, eq=False)
class PooledKeyCache:
    """The keys of pools and the states of tokens, of all layers; pages are those of the latents."""

    keys: PagedLatentCache
    states: PagedLatentCache

    __repr__ = shapes_repr

    @classmethod
    def allocate(
        cls,
        width: int,
        size: int,
        format: Format = "fp8_token",
        *,
        num_pages: int,
        page_size: int,
        num_layers: int = 1,
        device: torch.device | str = "cpu",
    ) -> PooledKeyCache:
        """Zeroed caches.

        width      columns of a key
        size       tokens of a pool
        page_size  tokens of a page, as the latent cache has it: a multiple of `size`
        """
        dims = Dims("PooledKeyCache")
        dims.integer("size", size, 1)
        dims.integer("page_size", page_size, 1)
        must = f"be a multiple of the {size} tokens of a pool"
        dims.require(page_size % size == 0, "page_size", must, page_size)
        common: dict[str, Any] = {
            "num_pages": num_pages,
            "num_layers": num_layers,
            "device": device,
        }
        keys = PagedLatentCache.allocate(
            RowShape(width, 0), format, page_size=page_size // size, **common
        )
        states = PagedLatentCache.allocate(
            RowShape(2 * width, 0), "fp32", page_size=state_rows(page_size, size), **common
        )
        return cls(keys, states)

    @property
    def row(self) -> RowShape:
        """The row of a key."""
        return self.keys.row

    def copy_pages(self, copies: Sequence[PageCopy | tuple[int, int]]) -> None:
        """Copy pages, as `PagedLatentCache.copy_pages`."""
        for cache in (self.keys, self.states):
            cache.copy_pages(copies)


def state_rows(page_size: int, size: int) -> int:
    """Rows of a page of states: the fewest that divide its tokens and hold what a step may read.

    After drafts were rejected, a step reads the tokens of a pool whose last ones are up to
    MAX_DRAFTS older than the newest token that was stored.
    """
    least = size - 1 + MAX_DRAFTS
    return next((n for n in range(least, page_size) if page_size % n == 0), page_size)


def append_pools(
    keys: Tensor,
    pools: PooledKeys,
    cache: PagedLatentCache,
    layer: int,
    batch: CachedBatch,
    *,
    power_of_two_scales: bool,
    backend: Backend,
) -> None:
    """Store the keys of the pools that the new tokens complete, and the states of the others."""
    places = batch.cache.page_size // pools.states.page_size
    page_table = batch.page_table
    assert isinstance(page_table, Tensor)
    compress_rows(
        keys,
        pools.gate,
        pools.bias,
        None,
        None,
        cache,
        page_table,
        pools.states,
        page_table.repeat_interleave(places, dim=1),
        batch.kv_lens,
        batch.q_starts,
        rate=pools.size,
        overlap=False,
        epsilon=0.0,
        layer=layer,
        state_layer=layer,
        keep=pools.states.page_size - pools.size + 1,
        state_pages_repeat=True,
        power_of_two_scales=power_of_two_scales,
        backend=backend,
    )


def rows_of_pools(selected: Tensor, pools: PooledKeys, batch: CachedBatch, out: Tensor) -> None:
    """List the rows of the tokens of selected pools, and those after a query's last pool.

    selected  int32 [tokens, k / n], rows of the keys' cache, −1 for none
    out       int32 [tokens, `PooledKeys.listed`]
    """
    size = pools.size
    place = torch.arange(size, dtype=selected.dtype, device=selected.device)
    rows = selected[..., None] * size + place
    of_pools = out[:, : selected.shape[1] * size]
    of_pools.copy_(rows.masked_fill_(selected[..., None] < 0, -1).flatten(1))
    if out.shape[1] == of_pools.shape[1]:
        return
    _, position = token_positions(batch.kv_lens, batch.q_starts, len(selected))
    tail = ((position + 1) // size * size)[:, None] + place[:-1]
    tail = tail.masked_fill(tail > position[:, None], -1)
    tail = physical_rows(tail, batch.page_table, batch.cache.page_size, batch.q_starts)
    out[:, of_pools.shape[1] :].copy_(tail)


def check_pools(
    dims: Dims, pools: PooledKeys, width: int, layer: int, k: int, batch: CachedBatch
) -> None:
    """Check what would be refused after a write, besides the cache of keys."""
    dims.instance("index.pools", pools, PooledKeys)
    dims.bind("D", width, "the row width of index.cache")
    dims.match("index.pools.gate", pools.gate, "tokens", "D", dtypes=FLOATS)
    dims.rows_contiguous("index.pools.gate", pools.gate)
    dims.match("index.pools.bias", pools.bias, "places", "D", dtypes=FLOATS)
    dims.rows_contiguous("index.pools.bias", pools.bias)
    size = pools.size
    dims.require(size > 0 and k % size == 0, "k", f"be a multiple of a pool's {size} tokens", k)
    if isinstance(batch.page_table, tuple):
        dims.fail("page_table", "have pages where index keys are pooled", "a list of slots")
    states = check_layer(dims.op, pools.states, layer, owner="index.pools.states ")
    dims.same_device("index.pools.states", states.payload)
    states.check_writable(dims, "index.pools.states")
    codec, tokens = states.codec, batch.cache.page_size
    has_rows = codec.name == "fp32" and codec.row.width == 2 * width
    must = f"have float32 rows of {2 * width} columns, key and gate of a token"
    dims.require(has_rows, "index.pools.states", must, f"{codec.name}, {codec.row.width} columns")
    rows = state_rows(tokens, size)
    must = f"have pages of {rows} rows, for pages of {tokens} tokens"
    dims.require(states.page_size == rows, "index.pools.states", must, states.page_size)
    must = f"have {batch.cache.num_pages} pages, like the latent cache"
    count = pools.states.num_pages
    dims.require(count == batch.cache.num_pages, "index.pools.states", must, count)
