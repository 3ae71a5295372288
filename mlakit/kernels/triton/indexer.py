"""The lightning indexer's logits, portable Triton; `indexer_topk` selects the best of them.

Maths      logits[t, j] = Σ_h weights[t, h] · relu(q[t, h]·key[j]), −inf where j is not visible
Work       one program per (tile of one request's queries, run of key tiles). Dot products are
           [keys, queries × heads]: each thread then sums many heads of a key
Memory     a key is read once per query tile; every column of the result is written, invisible ones
           without reading a key
Limits     none: any number of heads, any cache format; widths are padded to powers of two
Numbers    e4m3 queries and keys are operands of dots as they are from sm_89 on, and are accumulated
           as the tensor cores do; other keys are converted in registers to a type that holds them
Lineage    own design; ideas: the maths of DeepSeek V3.2's indexer. DeepGEMM's kernel has queries as
           rows of the dot product, ours has keys
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.cache.layouts import bits
from mlakit.kernels.arguments import LogitsArguments, filled
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.arguments import cache_arguments, length_arguments, page_table_arguments
from mlakit.kernels.triton.indexer_configs import has_fp8_dots, pick_indexer_config
from mlakit.kernels.triton.primitives import load_row_tile, mask_interval, widen_e4m3
from mlakit.kernels.triton.rows import (
    TRITON_TYPES,
    ComputeTypes,
    RowTraits,
    row_tiles,
    row_traits,
)
from mlakit.model.masks import MaskTraits

E4M3 = torch.float8_e4m3fn


def indexer_logits(a: LogitsArguments, out: Tensor) -> None:
    q, weights, layer, page_table = a.q, a.weights, a.layer, a.page_table
    kv_lens, q_starts, mask = a.kv_lens, filled(a.q_starts), a.mask
    (tokens, heads, _), columns, batch = q.shape, out.shape[1], kv_lens.shape[0]
    device = target(q.device)
    tiles = row_tiles(layer)
    types = _dot_types(q.dtype, layer)
    is_fp8 = device.has_fp8 and has_fp8_dots(str(q.dtype), layer.codec)
    itemsize = max(types.latent.itemsize, types.rope.itemsize if tiles.rope_width else 0)
    config = pick_indexer_config(
        heads=heads,
        padded_width=tiles.padded_width,
        itemsize=1 if is_fp8 else itemsize,
        is_dequantised=layer.codec.traits.HAS_E8M0_SCALES,
        tokens=a.num_tokens or tokens,
        batch=batch,
        columns=columns,
        arch=device.arch,
        num_sms=device.num_sms,
        shared_bytes=device.shared_bytes,
    )
    # a request of n queries has at most n // queries + 1 tiles of them
    query_tiles = tokens if config.queries == 1 else tokens // config.queries + batch
    runs = triton.cdiv(columns, config.keys * config.tiles)
    is_flat = isinstance(page_table, tuple)
    table, stride_table_request = page_table_arguments(page_table)
    cache, traits = cache_arguments(layer), row_traits(layer, tiles, types, has_fp8=device.has_fp8)
    q = bits(q)
    if is_fp8:
        q, cache = q.view(E4M3), cache._replace(payload=cache.payload.view(E4M3))
        traits = traits._replace(DTYPE=tl.float8e4nv)
    launch(
        _indexer_logits_kernel,
        (query_tiles * runs if batch else 0,),
        num_requests=batch,
        columns=columns,
        query_tiles=query_tiles,
        tiles=config.tiles,
        window=mask.window,
        stride_table_request=stride_table_request,
        out=out,
        stride_out=out.stride(0),
        queries=QueryArguments(q, weights, *q.stride()[:2], *weights.stride()),
        cache=cache,
        page_table=table,
        lengths=length_arguments(q_starts, kv_lens),
        TRAITS=Traits(
            HEADS=heads,
            ROW=traits,
            IS_Q_FP8=a.q.dtype == E4M3,
            PAGE=layer.page_size,
            IS_FLAT=is_flat,
            HAS_WHOLE_PAGES=not is_flat and _has_whole_pages(config.keys, layer.page_size),
            MASK=mask.traits,
            QUERIES=config.queries,
            HEAD_BLOCK=config.heads,
            # one of no heads, too: what a block loads has to be known when the kernel is compiled
            HEAD_BLOCKS=max(triton.cdiv(heads, config.heads), 1),
            KEYS=config.keys,
            STAGES=config.num_stages,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _has_whole_pages(keys: int, page_size: int) -> bool:
    """Return whether a key tile is part of a page, or a few whole pages."""
    return page_size % keys == 0 or (keys % page_size == 0 and keys // page_size <= 4)


def _dot_types(q_dtype: torch.dtype, layer: CacheLayer) -> ComputeTypes:
    """Types of dots that hold q and the keys exactly: a 16-bit type if one does."""
    stored, format = layer.payload.dtype, layer.codec.traits
    if stored in TRITON_TYPES:
        both = _common_type(q_dtype, stored)
        return ComputeTypes(both, both)
    if format.SCALED_BY == "tensor":
        both = q_dtype if q_dtype in TRITON_TYPES else torch.bfloat16
        return ComputeTypes(both, both)
    # any 16-bit type holds e4m3; only bfloat16 has the range of rows that are dequantised
    latent = _common_type(q_dtype, torch.bfloat16 if format.HAS_E8M0_SCALES else E4M3)
    return ComputeTypes(latent, _common_type(q_dtype, torch.bfloat16))


def _common_type(*dtypes: torch.dtype) -> torch.dtype:
    """The type that holds values of all `dtypes`; every other type holds e4m3."""
    wide = {dtype for dtype in dtypes if dtype != E4M3} or {torch.bfloat16}
    return wide.pop() if len(wide) == 1 else torch.float32


class QueryArguments(NamedTuple):
    """The queries of the indexer and the weights of their heads."""

    q: Tensor  # [tokens, HEADS, D_C + D_R], e4m3 as uint8
    weights: Tensor  # [tokens, HEADS] float32
    stride_token: int
    stride_head: int
    stride_weights_token: int
    stride_weights_head: int


class Traits(NamedTuple):
    """The constants that the kernel is compiled for."""

    HEADS: int
    ROW: RowTraits
    IS_Q_FP8: bool
    PAGE: int
    IS_FLAT: bool
    HAS_WHOLE_PAGES: bool
    MASK: MaskTraits
    QUERIES: int
    HEAD_BLOCK: int
    HEAD_BLOCKS: int
    KEYS: int
    STAGES: int


# differ from call to call: specialised, each would compile further kernels
VARYING = ["num_requests", "columns", "query_tiles", "tiles", "window", "stride_table_request"]


@triton.jit(do_not_specialize=VARYING)
def _indexer_logits_kernel(
    num_requests,
    columns,
    query_tiles,
    tiles,
    window,
    stride_table_request,
    out,  # [tokens, columns] float32
    stride_out,
    queries,  # `QueryArguments`
    cache,  # `CacheArguments`
    page_table,  # `PageTableArguments`
    lengths,  # `LengthArguments`
    TRAITS: tl.constexpr,
):
    """Logits of QUERIES queries of one request over `tiles` tiles of KEYS keys."""
    ROW: tl.constexpr = TRAITS.ROW
    PAGE: tl.constexpr = TRAITS.PAGE
    IS_FLAT: tl.constexpr = TRAITS.IS_FLAT
    MASK: tl.constexpr = TRAITS.MASK
    QUERIES: tl.constexpr = TRAITS.QUERIES
    HEAD_BLOCKS: tl.constexpr = TRAITS.HEAD_BLOCKS
    KEYS: tl.constexpr = TRAITS.KEYS
    STAGES: tl.constexpr = TRAITS.STAGES
    # neighbouring programs of one request read the same keys
    query_tile = tl.program_id(0) % query_tiles
    run = tl.program_id(0) // query_tiles
    request, q_start, q_len, kv_len, first = _find_queries(
        query_tile, query_tiles, lengths, num_requests, QUERIES
    )
    if first < q_len:
        query = first + tl.arange(0, QUERIES)
        is_query = query < q_len
        first_token = (q_start + first).to(tl.int64)
        token = first_token + tl.arange(0, QUERIES)
        low, high = mask_interval(kv_len - q_len + query, kv_len, window, MASK)  # [QUERIES]
        # intervals of neighbouring queries leave no gap
        begin = tl.min(tl.where(is_query, low, kv_len), 0)
        end = tl.max(tl.where(is_query, high, 0), 0)
        first_tile = tl.minimum(run * tiles, tl.cdiv(columns, KEYS))
        last_tile = tl.minimum(first_tile + tiles, tl.cdiv(columns, KEYS))
        first_seen = tl.minimum(tl.maximum(begin // KEYS, first_tile), last_tile)
        last_seen = tl.minimum(tl.maximum(tl.cdiv(end, KEYS), first_seen), last_tile)

        at = out + (token * stride_out)[None, :]
        _store_invisible(at, first_tile, first_seen, is_query, columns, KEYS)
        _store_invisible(at, last_seen, last_tile, is_query, columns, KEYS)
        if first_seen < last_seen:
            entries = page_table.entries + request * stride_table_request
            if IS_FLAT:
                entry = tl.load(page_table.starts + request * page_table.stride_starts)
                entries += entry.to(tl.int64) * page_table.stride_entry
            if HEAD_BLOCKS == 1:
                num_queries = q_len - first
                q_tile, q_rope = _load_queries(queries, first_token, num_queries, 0, TRAITS)
                weight = _load_weights(queries, first_token, num_queries, 0, TRAITS)
            for tile in tl.range(first_seen, last_seen, num_stages=STAGES):
                key = tile * KEYS + tl.arange(0, KEYS)
                is_read = (key >= begin) & (key < end)
                if TRAITS.HAS_WHOLE_PAGES:
                    row_at, beside_at = _locate_tile(
                        tile, entries, begin, end, page_table.stride_entry, cache, PAGE, KEYS
                    )
                else:
                    page, in_page = _locate(
                        key, entries, is_read, page_table.stride_entry, PAGE, IS_FLAT
                    )
                    row_at = page * cache.stride_page + in_page * cache.stride_row
                    beside_page = page * cache.stride_beside_page
                    beside_at = beside_page + in_page * cache.stride_beside_row
                rows = cache.payload + row_at
                beside = None
                if cache.beside is not None:
                    beside = cache.beside + beside_at
                if tl.float8e4nv == ROW.DTYPE:
                    latent, rope, factors = _load_fp8_tile(rows, beside, is_read, ROW)
                else:
                    latent, rope, factors = load_row_tile(rows, beside, is_read, ROW)
                logits = tl.zeros([KEYS, QUERIES], tl.float32)
                for block in range(HEAD_BLOCKS):
                    if HEAD_BLOCKS > 1:
                        num_queries = q_len - first
                        q_tile, q_rope = _load_queries(
                            queries, first_token, num_queries, block, TRAITS
                        )
                        weight = _load_weights(queries, first_token, num_queries, block, TRAITS)
                    dots = _keys_dot_queries(latent, rope, factors, q_tile, q_rope, ROW)
                    logits += _sum_heads(dots, weight, block, TRAITS)
                logits = _scale_keys(logits, factors, cache, ROW)
                is_seen = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
                logits = tl.where(is_seen, logits, -float("inf"))
                _store_logits(at, logits, key, is_query, columns)


@triton.jit
def _locate_tile(
    tile, entries, begin, end, stride_entry, cache, PAGE: tl.constexpr, KEYS: tl.constexpr
):
    """Offsets int64 [KEYS] of the rows, and of what is beside them, of a key tile that is part of
    a page, or a few whole pages: one load per page instead of one per key."""
    row = tl.arange(0, KEYS)
    PAGES: tl.constexpr = KEYS // PAGE if KEYS > PAGE else 1
    first = tile * KEYS
    in_page = (row % PAGE if KEYS > PAGE else first % PAGE + row).to(tl.int64)
    page_at = tl.zeros([KEYS], tl.int64)
    beside_at = tl.zeros([KEYS], tl.int64)
    for i in tl.static_range(PAGES):
        key = first + i * PAGE
        is_read = (key < end) & (key + PAGE > begin)
        at = entries + (first // PAGE + i).to(tl.int64) * stride_entry
        page = tl.load(at, mask=is_read, other=0).to(tl.int64)
        # a product, not a choice, of which Triton 3.9 does not see how addresses are aligned
        is_own = (row // PAGE == i).to(tl.int64) if PAGES > 1 else 1
        page_at += is_own * (page * cache.stride_page)
        beside_at += is_own * (page * cache.stride_beside_page)
    row_at = page_at + in_page * cache.stride_row
    return row_at, beside_at + in_page * cache.stride_beside_row


@triton.jit
def _locate(key, entries, is_read, stride_entry, PAGE: tl.constexpr, IS_FLAT: tl.constexpr):
    """Return int64 (page, row in the page) of a request's keys."""
    entry = key if IS_FLAT else key // PAGE
    named = tl.load(entries + entry.to(tl.int64) * stride_entry, mask=is_read, other=0).to(tl.int64)
    if IS_FLAT:
        return named // PAGE, named % PAGE
    return named, (key % PAGE).to(tl.int64)


@triton.jit
def _find_queries(tile, query_tiles, lengths, num_requests, QUERIES: tl.constexpr):
    """Return (request int64, its first query token, its query tokens, its keys, index of the first
    query of a query tile, which may be past the query tokens).

    The tiles of request r start at q_starts[r] // QUERIES + r: every request has enough of them.
    With one query per tile, a tile's request is the last one that starts at or before it.
    """
    # the request if all have the same number of queries: its lengths are loaded at once
    usual_tiles = tl.maximum(query_tiles // num_requests, 1)
    request = tl.minimum(tile // usual_tiles, num_requests - 1).to(tl.int64)
    start, end, kv_len = _load_lengths(request, lengths)
    if (tile < _first_tile(start, request, QUERIES)) | (
        tile >= _first_tile(end, request + 1, QUERIES)
    ):
        low, high = tl.zeros([], tl.int64), tl.zeros([], tl.int64) + num_requests
        while high - low > 1:
            middle = (low + high) // 2
            start_at = lengths.q_starts + middle * lengths.stride_q_starts
            middle_start = tl.load(start_at).to(tl.int32)
            is_past = _first_tile(middle_start, middle, QUERIES) > tile
            low, high = tl.where(is_past, low, middle), tl.where(is_past, middle, high)
        request = low
        start, end, kv_len = _load_lengths(request, lengths)
    first = ((tile - _first_tile(start, request, QUERIES)) * QUERIES).to(tl.int32)
    return request, start, end - start, kv_len, first


@triton.jit
def _first_tile(start, request, QUERIES: tl.constexpr):
    """The first query tile of a request whose query tokens begin at `start`."""
    tile = start.to(tl.int64)
    if QUERIES > 1:
        tile = tile // QUERIES + request
    return tile


@triton.jit
def _load_lengths(request, lengths):
    """Return (first query token, one past the last, keys) of a request."""
    starts = lengths.q_starts + request * lengths.stride_q_starts
    start = tl.load(starts).to(tl.int32)
    end = tl.load(starts + lengths.stride_q_starts).to(tl.int32)
    kv_len = tl.load(lengths.kv_lens + request * lengths.stride_kv_lens)
    return start, end, kv_len.to(tl.int32)


@triton.jit
def _rows_of_block(first_token, num_queries, block, TRAITS: tl.constexpr):
    """Return (token int64, head, does it exist?) of each row [queries × heads] of a head block."""
    HEADS: tl.constexpr = TRAITS.HEADS
    HEAD_BLOCK: tl.constexpr = TRAITS.HEAD_BLOCK
    QUERIES: tl.constexpr = TRAITS.QUERIES
    row = tl.arange(0, QUERIES * HEAD_BLOCK)
    query, head = row // HEAD_BLOCK, block * HEAD_BLOCK + row % HEAD_BLOCK
    return first_token + query, head, (query < num_queries) & (head < HEADS)


@triton.jit
def _load_queries(queries, first_token, num_queries, block, TRAITS: tl.constexpr):
    """A block of heads: tuples of [WIDTH, queries × heads] and of none or one [ROPE_WIDTH, ...]."""
    ROW: tl.constexpr = TRAITS.ROW
    IS_Q_FP8: tl.constexpr = TRAITS.IS_Q_FP8
    token, head, is_row = _rows_of_block(first_token, num_queries, block, TRAITS)
    # not reshaped from [queries, heads]: the compiler then knows how addresses are aligned
    token_at = token * queries.stride_token
    at = (token_at + head.to(tl.int64) * queries.stride_head)[None, :]
    is_row = is_row[None, :]
    latent = ()
    PIECES: tl.constexpr = ROW.PIECES
    for piece in tl.static_range(PIECES):
        column = piece * ROW.WIDTH + tl.arange(0, ROW.WIDTH)[:, None]
        stored = tl.load(queries.q + at + column, mask=is_row & (column < ROW.D_C), other=0.0)
        latent += (_as_float(stored, IS_Q_FP8, ROW.DTYPE, ROW.HAS_FP8),)
    rope = ()
    if ROW.ROPE_WIDTH > 0:
        column = tl.arange(0, ROW.ROPE_WIDTH)[:, None]
        rope_at = queries.q + at + ROW.D_C + column
        stored = tl.load(rope_at, mask=is_row & (column < ROW.D_R), other=0.0)
        rope += (_as_float(stored, IS_Q_FP8, ROW.ROPE_DTYPE, ROW.HAS_FP8),)
    return latent, rope


@triton.jit
def _load_fp8_tile(rows, scales, is_read, ROW: tl.constexpr):
    """`load_row_tile` of e4m3 columns, as they are."""
    latent = ()
    factors = ()
    PIECES: tl.constexpr = ROW.PIECES
    for piece in tl.static_range(PIECES):
        column = piece * ROW.WIDTH + tl.arange(0, ROW.WIDTH)[None, :]
        mask = is_read[:, None]
        if (piece + 1) * ROW.WIDTH > ROW.D_C:
            mask = mask & (column < ROW.D_C)
        latent += (tl.load(rows[:, None] + column, mask=mask, other=0.0),)
    if ROW.FACTORS == "row":
        factor = tl.load(scales, mask=is_read, other=0.0)
        factors += (tl.where(factor < 0, 0.0, factor),)  # a NaN stays one
    return latent, latent[0], factors


@triton.jit
def _load_weights(queries, first_token, num_queries, block, TRAITS: tl.constexpr):
    """Return float32 [queries × heads]."""
    token, head, is_row = _rows_of_block(first_token, num_queries, block, TRAITS)
    at = token * queries.stride_weights_token + head.to(tl.int64) * queries.stride_weights_head
    return tl.load(queries.weights + at, mask=is_row, other=0.0)


@triton.jit
def _as_float(stored, IS_FP8: tl.constexpr, DTYPE: tl.constexpr, HAS_FP8: tl.constexpr):
    if tl.float8e4nv == DTYPE:
        values = stored
    elif IS_FP8:
        values = widen_e4m3(stored, DTYPE, HAS_FP8)
    else:
        values = stored.to(DTYPE)
    return values


@triton.jit
def _keys_dot_queries(latent, rope, factors, q_tile, q_rope, ROW: tl.constexpr):
    """keys·q, float32 [keys, queries × heads], without the scale per token or tensor."""
    dots = tl.dot(latent[0], q_tile[0], input_precision="ieee")
    if ROW.FACTORS == "piece":
        dots *= factors[0][:, None]
    PIECES: tl.constexpr = ROW.PIECES
    for piece in tl.static_range(1, PIECES):
        if ROW.FACTORS == "piece":
            piece_dots = tl.dot(latent[piece], q_tile[piece], input_precision="ieee")
            dots += piece_dots * factors[piece][:, None]
        else:
            dots = tl.dot(latent[piece], q_tile[piece], dots, input_precision="ieee")
    if ROW.ROPE_WIDTH > 0:
        dots = tl.dot(rope, q_rope[0], dots, input_precision="ieee")
    return dots


@triton.jit
def _sum_heads(dots, weight, block, TRAITS: tl.constexpr):
    """Σ_h weight · relu(dots), [keys, QUERIES]."""
    HEADS: tl.constexpr = TRAITS.HEADS
    HEAD_BLOCK: tl.constexpr = TRAITS.HEAD_BLOCK
    QUERIES: tl.constexpr = TRAITS.QUERIES
    # relu keeps a NaN
    terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    KEYS: tl.constexpr = dots.shape[0]
    terms = tl.reshape(terms, [KEYS, QUERIES, HEAD_BLOCK])
    if HEADS % HEAD_BLOCK != 0:
        # dots of padded heads are 0 · key: NaN where the key is not finite
        head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        terms = tl.where((head < HEADS)[None, None, :], terms, 0.0)
    return tl.sum(terms, 2)


@triton.jit
def _scale_keys(logits, factors, cache, ROW: tl.constexpr):
    """logits times the scale of whole keys, which is not negative: relu may come before it."""
    if ROW.FACTORS == "row":
        logits *= factors[0][:, None]
    elif ROW.FORMAT.SCALED_BY == "tensor":
        scale = cache.tensor_scale
        if cache.device_scale is not None:
            scale = tl.load(cache.device_scale).to(tl.float32)
        logits *= scale
    return logits


@triton.jit
def _store_invisible(at, first_tile, last_tile, is_query, columns, KEYS: tl.constexpr):
    """Store −inf to tiles that no query sees."""
    hidden = tl.full([KEYS, is_query.shape[0]], -float("inf"), tl.float32)
    for tile in range(first_tile, last_tile):
        _store_logits(at, hidden, tile * KEYS + tl.arange(0, KEYS), is_query, columns)


@triton.jit
def _store_logits(at, logits, key, is_query, columns):
    mask = (key < columns)[:, None] & is_query[None, :]
    tl.store(at + key[:, None], logits, mask=mask)
