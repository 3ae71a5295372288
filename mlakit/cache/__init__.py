"""The paged latent cache: storage, layers, page tables, views of other engines' cache tensors.

A pool has `num_pages` pages of `page_size` rows in each of `num_layers` layers. A *slot* is the
physical index of a row, `page * page_size + offset`, the same in every layer (vLLM's
`slot_mapping`). Token t of a request is in the page at column t // page_size of its page table row,
at offset t % page_size.

    pool.py         PagedLatentCache, CacheLayer
    page_table.py   page tables and slots of tokens
    shard.py        KVShard: the tokens of one context-parallel rank
    layouts.py      memory layouts, ours and those of other engines
    layer_views.py  cached views of layers; copies and pickles
    slot_checks.py  checks of slots
"""

from mlakit.cache.page_table import (
    PageTable,
    from_host,
    request_slots,
    select_requests,
    token_positions,
    token_requests,
    token_slots,
)
from mlakit.cache.pool import CacheLayer, PagedLatentCache, gather_rows
from mlakit.cache.shard import UNSHARDED, KVShard

__all__ = [
    "UNSHARDED",
    "CacheLayer",
    "KVShard",
    "PageTable",
    "PagedLatentCache",
    "from_host",
    "gather_rows",
    "request_slots",
    "select_requests",
    "token_positions",
    "token_requests",
    "token_slots",
]
