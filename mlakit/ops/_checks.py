"""Checks that several ops share: cache layers, page tables, ragged queries, results to write to."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mlakit.cache import UNSHARDED, CacheLayer, KVShard, PagedLatentCache, PageTable
from mlakit.dispatch.checks import E4M3, FLOATS, Dims, values_visible
from mlakit.kernels import workspace
from mlakit.model.masks import Mask
from mlakit.ops._one_query_each import one_query_each

INTEGERS = (torch.int32, torch.int64)


def check_layer(op: str, cache: object, layer: int, *, owner: str = "") -> CacheLayer:
    """The layer of a cache that a public function was given, itself or as part of `owner`."""
    if not isinstance(cache, PagedLatentCache):
        got = type(cache).__name__
        hint = "; PagedLatentCache.wrap(tensor, geometry) makes one" if got == "Tensor" else ""
        raise TypeError(f"{op}: {owner}cache must be a PagedLatentCache, got {got}{hint}")
    if type(layer) is int:
        known = cache.find_layer(layer)
        if known is not None:
            return known
    dims = Dims(op)
    index = dims.integer(f"{owner}layer", layer, 0)
    below = f"be below the cache's {cache.num_layers} layers"
    dims.require(index < cache.num_layers, f"{owner}layer", below, index)
    return cache.layer(index)


def check_stored(dims: Dims, layer: CacheLayer, arg: str = "cache") -> None:
    """The rows are on the device of the arguments so far, and the scale of all rows is usable."""
    dims.same_device(arg, layer.payload)
    if layer.codec.has_tensor_scale:
        dims.scale(f"the tensor_scale of {arg}", layer.tensor_scale)


def check_query_starts(
    dims: Dims, q_starts: Tensor | None, num_tokens: int, batch: int, *, is_padded: bool = False
) -> Tensor:
    """`q_starts` [batch + 1], made here where every request has one query.

    is_padded  rows after the last request's may follow
    """
    if q_starts is None:
        dims.require(
            num_tokens == batch,
            "q_starts",
            f"be given for {num_tokens} query tokens of {batch} requests",
            None,
        )
        return one_query_each(batch, dims.device)
    dims.bind("batch + 1", batch + 1, "one more than the batch")
    dims.match("q_starts", q_starts, "batch + 1", dtypes=INTEGERS)
    dims.starts("q_starts", q_starts, num_tokens, "the number of query tokens", is_padded=is_padded)
    known = batch > 0 or num_tokens == 0
    dims.require(known, "q_starts", f"have a request for {num_tokens} query tokens", "none")
    return q_starts


def check_padded_starts(dims: Dims, q_starts: Tensor, num_tokens: int) -> int:
    """`q_starts` [batch + 1] of queries that padding may follow; gives the batch."""
    dims.match("q_starts", q_starts, "batch + 1", dtypes=INTEGERS)
    dims.starts("q_starts", q_starts, num_tokens, "the number of query tokens", is_padded=True)
    return q_starts.shape[0] - 1


def check_page_table(
    dims: Dims,
    page_table: PageTable,
    batch: int,
    *,
    source: str = "the batch of kv_lens",
    arg: str = "page_table",
) -> None:
    """Either form of a page table, for `batch` requests."""
    dims.bind("batch", batch, source)
    if isinstance(page_table, tuple):
        check_table_pair(dims, page_table, arg)
        starts, slots = page_table
        dims.bind("batch + 1", batch + 1, "one more than the batch")
        dims.match(f"{arg}[0]", starts, "batch + 1", dtypes=INTEGERS)
        dims.match(f"{arg}[1]", slots, f"slots of {arg}", dtypes=INTEGERS)
        dims.starts(f"{arg}[0]", starts, None)
        if values_visible(starts):
            last = int(starts[-1])
            held = f"not exceed the {len(slots)} slots of {arg}[1]"
            dims.require(last <= len(slots), f"{arg}[0][-1]", held, last)
    else:
        dims.match(arg, page_table, "batch", f"pages of {arg}", dtypes=INTEGERS)


def check_table_pair(dims: Dims, page_table: tuple[Tensor, ...], arg: str = "page_table") -> None:
    got = f"a tuple of {len(page_table)}"
    dims.require(len(page_table) == 2, arg, "be a tensor or (kv_starts, slots)", got)


def check_used_rows(
    dims: Dims,
    page_table: PageTable,
    layer: CacheLayer,
    first: list[int],
    last: list[int],
    *,
    arg: str = "page_table",
    counted: str = "kv_lens",
) -> None:
    """Tokens [first, last) of every request have an entry in the table that is inside the pool.

    counted  what the rows of a request are, in messages
    """
    if _is_table_inside(page_table, layer, first, last):
        return
    for request, (low, high) in enumerate(zip(first, last, strict=True)):
        if low == high:
            continue
        if isinstance(page_table, tuple):
            begin, end = page_table[0][request : request + 2].tolist()
            entries, tokens_per_entry, limit = page_table[1][begin:end], 1, layer.num_slots
        else:
            begin, entries, tokens_per_entry = 0, page_table[request], layer.page_size
            limit = layer.payload.shape[0]
        capacity = len(entries) * tokens_per_entry
        dims.require(
            high <= capacity,
            f"{counted}[{request}]",
            f"not exceed the {capacity} tokens its page table holds",
            high,
        )
        used = slice(low // tokens_per_entry, -(-high // tokens_per_entry))
        outside = ((entries[used] < 0) | (entries[used] >= limit)).nonzero()
        if len(outside):
            wrong = used.start + int(outside[0])
            column = (
                f"1][{begin + wrong}" if isinstance(page_table, tuple) else f"{request}, {wrong}"
            )
            dims.fail(f"{arg}[{column}]", f"be in [0, {limit})", int(entries[wrong]))


def _is_table_inside(
    page_table: PageTable, layer: CacheLayer, first: list[int], last: list[int]
) -> bool:
    """Return whether all entries between the first and the last used column are in the pool.

    Three operations for the whole batch; a request by itself takes ten.
    """
    if isinstance(page_table, tuple) or page_table.numel() == 0:
        return False
    low = min(first, default=0) // layer.page_size
    high = -(-max(last, default=0) // layer.page_size)
    if not low < high <= page_table.shape[1]:
        return False
    smallest, largest = page_table[:, low:high].aminmax()
    return int(smallest) >= 0 and int(largest) < layer.payload.shape[0]


def check_seen_rows(
    dims: Dims,
    page_table: PageTable,
    layer: CacheLayer,
    mask: Mask,
    q_starts: Tensor,
    kv_lens: list[int],
    shard: KVShard = UNSHARDED,
) -> None:
    """Every row that some query sees is in the page table, and inside the pool."""
    first, last = [], []
    for kv_len, (start, end) in zip(kv_lens, pairwise(q_starts.tolist()), strict=True):
        low, high = kv_len, kv_len
        if end > start:
            low = mask.interval(kv_len - (end - start), kv_len)[0]
            high = max(low, mask.interval(kv_len - 1, kv_len)[1])
        first.append(shard.local_count(low))
        last.append(shard.local_count(high))
    check_used_rows(dims, page_table, layer, first, last)


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
    """Return the dtype of the results of attention over q: q's dtype, bf16 for e4m3."""
    return torch.bfloat16 if q.dtype == E4M3 else q.dtype


def check_mask(op: str, mask: object) -> None:
    if not isinstance(mask, Mask):
        raise TypeError(f"{op}: mask must be a Mask, got {type(mask).__name__}")


def check_row_lists(
    dims: Dims, rows_name: str, rows: Tensor, lens_name: str, lens: Tensor | None
) -> None:
    """Physical rows [tokens, topk] for every query, of which the first `lens` [tokens] count."""
    topk = f"entries of {rows_name}"
    dims.match(rows_name, rows, "tokens", topk, dtypes=INTEGERS)
    if lens is not None:
        dims.match(lens_name, lens, "tokens", dtypes=INTEGERS)
        dims.lengths(lens_name, lens, dims[topk], f"the {topk}")


def check_sink(dims: Dims, sink: Tensor | None) -> None:
    if sink is not None:
        dims.match("sink", sink, "heads", dtypes=[torch.float32])


def as_shard(op: str, shard: tuple[int, int, int] | None) -> KVShard:
    if shard is None:
        return UNSHARDED
    if not isinstance(shard, tuple) or len(shard) not in (2, 3):
        raise TypeError(f"{op}: kv_shard must be (rank, world, interleave), got {shard!r}")
    # here, not only in the op's body: a replayed call does not run it, and 2.0 equals 2
    if any(type(number) is not int for number in shard):
        check_shard(Dims(op), KVShard(*shard))
    return KVShard(*map(int, shard))


def check_shard(dims: Dims, shard: KVShard) -> None:
    dims.integer("kv_shard world", shard.world, 1)
    dims.integer("kv_shard interleave", shard.interleave, 1)
    rank = dims.integer("kv_shard rank", shard.rank, 0)
    dims.require(rank < shard.world, "kv_shard rank", f"be below world, {shard.world}", rank)


def check_result(
    dims: Dims, arg: str, tensor: Tensor | None, *axes: str, dtype: torch.dtype
) -> Tensor:
    """The caller's tensor to write to, checked; or a new one."""
    if tensor is None:
        return workspace.result([dims[axis] for axis in axes], dtype, dims.device)
    dims.match(arg, tensor, *axes, dtypes=[dtype])
    dims.writable(arg, tensor)
    return tensor


def is_heads_major(q: Tensor) -> bool:
    """Return whether queries [tokens, heads, columns] are heads-major: tokens of a head are at one
    stride and heads at a larger one, multiples of 16 bytes, as `batched_matmul` writes them."""
    tokens, heads, columns = q.shape
    apart, distance, _ = q.stride()
    if tokens < 2 or heads < 2 or not 0 < apart < distance:
        return False
    if q.data_ptr() % 16 or apart * q.element_size() % 16 or distance * q.element_size() % 16:
        return False
    return distance >= (tokens - 1) * apart + columns


def is_uniformly_strided(rows: Tensor) -> bool:
    """Return whether rows [n, m, columns] have one stride, a multiple of 16 bytes, of which the
    stride of n is a multiple. TMA can then copy tiles of them."""
    apart, distance, _ = rows.stride()
    if rows.shape[1] == 1 < rows.shape[0]:
        distance = apart  # all rows have the same stride
    if rows.numel() == 0 or distance == 0:
        return False
    if distance * rows.element_size() % 16 or rows.data_ptr() % 16:
        return False
    return rows.shape[0] <= 1 or apart % distance == 0
