"""Checks that several ops share: cache layers, page tables, ragged queries, results to write to."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, PagedLatentCache, PageTable
from mlakit.checks import E4M3, FLOATS, Dims, values_visible

INTEGERS = (torch.int32, torch.int64)


def check_layer(dims: Dims, cache: object, layer: int) -> CacheLayer:
    """The layer of a cache that a public function was given."""
    if not isinstance(cache, PagedLatentCache):
        got = type(cache).__name__
        raise TypeError(f"{dims.op}: cache must be a PagedLatentCache, got {got}")
    index = dims.integer("layer", layer, 0)
    dims.require(
        index < cache.num_layers, "layer", f"be below the cache's {cache.num_layers} layers", index
    )
    return cache.layer(index)


def check_query_starts(dims: Dims, q_starts: Tensor | None, num_tokens: int, batch: int) -> Tensor:
    """`q_starts` [batch + 1], made here where every request has one query."""
    if q_starts is None:
        return torch.arange(batch + 1, dtype=torch.int32, device=dims.device)
    dims.bind("batch + 1", batch + 1, f"batch + 1 with a batch of {batch}")
    dims.match("q_starts", q_starts, "batch + 1", dtypes=INTEGERS)
    dims.starts("q_starts", q_starts, num_tokens, "the number of query tokens")
    return q_starts


def check_page_table(dims: Dims, page_table: PageTable, batch: int) -> None:
    """Either form of a page table, for `batch` requests."""
    dims.bind("batch", batch, f"the batch of kv_lens, {batch}")
    if isinstance(page_table, tuple):
        dims.require(
            len(page_table) == 2, "page_table", "be a tensor or (kv_starts, slots)", len(page_table)
        )
        starts, slots = page_table
        dims.bind("batch + 1", batch + 1, f"batch + 1 with a batch of {batch}")
        dims.match("page_table[0]", starts, "batch + 1", dtypes=INTEGERS)
        dims.match("page_table[1]", slots, "slots", dtypes=INTEGERS)
        dims.starts("page_table[0]", starts, None)
    else:
        dims.match("page_table", page_table, "batch", "max_pages", dtypes=INTEGERS)


def check_used_rows(
    dims: Dims, page_table: PageTable, layer: CacheLayer, first: list[int], last: list[int]
) -> None:
    """Tokens [first, last) of every request have an entry in the table that is inside the pool."""
    for request, (low, high) in enumerate(zip(first, last, strict=True)):
        if isinstance(page_table, tuple):
            begin, end = page_table[0][request : request + 2].tolist()
            capacity, per_entry, limit = end - begin, 1, layer.num_slots
            entries, name = (
                page_table[1][begin + low : begin + high],
                f"page_table[1][{begin + low} +",
            )
        else:
            per_entry, limit = layer.page_size, layer.payload.shape[0]
            capacity = page_table.shape[1] * per_entry
            used = slice(low // per_entry, -(-high // per_entry))
            entries, name = page_table[request, used], f"page_table[{request}, {used.start} +"
        dims.require(
            high <= capacity,
            f"kv_lens[{request}]",
            f"not exceed the {capacity} tokens its page table holds",
            high,
        )
        if low < high:
            outside = (entries < 0) | (entries >= limit)
            if bool(outside.any()):
                place = int(outside.nonzero()[0])
                dims.fail(f"{name} {place}]", f"be in [0, {limit})", int(entries[place]))


def check_kv_lens(dims: Dims, kv_lens: Tensor) -> list[int] | None:
    """Binds "batch"; the lengths themselves where they may be read."""
    dims.match("kv_lens", kv_lens, "batch", dtypes=INTEGERS)
    if not values_visible(kv_lens):
        return None
    lengths: list[int] = kv_lens.tolist()
    for request, length in enumerate(lengths):
        dims.require(length >= 0, f"kv_lens[{request}]", "not be negative", length)
    return lengths


def check_absorbed_query(
    dims: Dims, q: Tensor, q_rope: Tensor | None, layer: CacheLayer
) -> tuple[Tensor, Tensor]:
    """q's latent and rope columns, whether they come together or apart; binds tokens and heads."""
    row = layer.codec.row
    stored = layer.payload.dtype
    dtypes = (stored, E4M3) if stored in FLOATS else (*FLOATS, E4M3)
    if q_rope is None:
        dims.bind("width", row.width, "the row width of the cache")
        dims.match("q", q, "tokens", "heads", "width", dtypes=dtypes)
        dims.rows_contiguous("q", q)
        return q[..., : row.kv_lora_rank], q[..., row.kv_lora_rank :]
    dims.bind("latent", row.kv_lora_rank, "the cache's kv_lora_rank")
    dims.bind("rope", row.qk_rope_head_dim, "the cache's qk_rope_head_dim")
    dims.match("q", q, "tokens", "heads", "latent", dtypes=dtypes)
    dims.match("q_rope", q_rope, "tokens", "heads", "rope", dtypes=(*FLOATS, E4M3))
    dims.rows_contiguous("q", q)
    dims.rows_contiguous("q_rope", q_rope)
    return q, q_rope


def result_dtype(q: Tensor) -> torch.dtype:
    """What attention over q is stored as: q's dtype, bf16 for e4m3."""
    return torch.bfloat16 if q.dtype == E4M3 else q.dtype


def check_sink(dims: Dims, sink: Tensor | None) -> None:
    if sink is not None:
        dims.match("sink", sink, "heads", dtypes=[torch.float32])


def check_result(
    dims: Dims, arg: str, tensor: Tensor | None, *axes: str, dtype: torch.dtype
) -> Tensor:
    """The caller's tensor to write to, checked; or a new one."""
    if tensor is None:
        return torch.empty([dims[axis] for axis in axes], dtype=dtype, device=dims.device)
    dims.match(arg, tensor, *axes, dtypes=[dtype])
    dims.writable(arg, tensor)
    return tensor
