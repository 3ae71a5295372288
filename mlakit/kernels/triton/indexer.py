"""The lightning indexer's scores and its top-k, portable Triton.

Maths      logits[t, j] = Σ_h weights[t, h] · relu(q[t, h]·key[j]), −inf where j is not visible
Work       logits: a program per (tile of one request's queries, run of key tiles); products are
           [keys, queries × heads], so that a thread has many heads of a key to add up
           top-k: a program per part of a row finds a threshold that at least k and at most
           `capacity` of its logits reach (a histogram of 8 bits of them at a time) and writes those
           down in order; parts are joined the same way; places come from counting the better ones
Memory     logits: a key is read once per tile of queries and widened in registers; all columns of
           the result are written, those that no query sees without reading anything
           top-k: a row is read two to five times; scratch of `capacity` numbers per part
Order      top-k: best first, ties to the lower column, −inf never, NaN above every number
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.arguments import LogitsArguments, filled
from mlakit.cache import CacheLayer
from mlakit.kernels.triton.configs import (
    pick_indexer_config,
)
from mlakit.kernels.triton.launch import launch, target
from mlakit.kernels.triton.primitives import (
    load_factor,
    load_latent,
    load_rope,
    mask_interval,
    widen_e4m3,
)
from mlakit.kernels.triton.rows import TRITON_TYPES, as_bytes, row_tiles, rows_are_aligned

E4M3 = torch.float8_e4m3fn


def indexer_logits(a: LogitsArguments, out: Tensor) -> None:
    q, weights, layer, page_table = a.q, a.weights, a.layer, a.page_table
    kv_lens, q_starts, mask = a.kv_lens, filled(a.q_starts), a.mask
    (tokens, heads, _), columns, batch = q.shape, out.shape[1], kv_lens.shape[0]
    gpu = target(q.device)
    format = layer.codec.name
    tiles = row_tiles(layer)
    latent, rope = _dot_types(q.dtype, layer)
    itemsize = max(latent.itemsize, rope.itemsize if tiles.rope_width else 0)
    config = pick_indexer_config(
        heads=heads,
        padded_width=tiles.padded_width,
        itemsize=itemsize,
        mean_queries=tokens / max(batch, 1),
        arch=gpu.arch,
        shared_bytes=gpu.shared_bytes,
    )
    # a request of n queries has at most n // queries + 1 tiles of them
    query_tiles = tokens if config.queries == 1 else tokens // config.queries + batch
    runs = triton.cdiv(columns, config.keys * config.tiles)
    is_flat = isinstance(page_table, tuple)
    starts, table = page_table if isinstance(page_table, tuple) else (None, page_table)
    scale, scales, payload = layer.tensor_scale, layer.scales, as_bytes(layer.payload)
    launch(
        _indexer_logits_kernel,
        (query_tiles * runs if batch else 0,),
        as_bytes(q),
        weights,
        payload,
        payload if scales is None else scales,
        table,
        starts,
        kv_lens,
        q_starts,
        scale.to(q.device) if isinstance(scale, Tensor) else None,
        1.0 if isinstance(scale, Tensor) else float(scale),
        out,
        batch,
        columns,
        query_tiles,
        mask.window,
        *q.stride()[:2],
        *weights.stride(),
        *payload.stride()[:2],
        *((0, 0) if scales is None else scales.stride()[:2]),
        *((0, table.stride(0)) if is_flat else table.stride()),
        0 if starts is None else starts.stride(0),
        kv_lens.stride(0),
        q_starts.stride(0),
        out.stride(0),
        HEADS=heads,
        FORMAT=format,
        DTYPE=TRITON_TYPES[latent],
        ROPE_DTYPE=TRITON_TYPES[rope],
        IS_Q_BYTES=q.dtype == E4M3,
        D_C=tiles.d_c,
        D_R=tiles.d_r,
        PIECES=tiles.pieces,
        WIDTH=tiles.width,
        ROPE_WIDTH=tiles.rope_width,
        PAGE=layer.page_size,
        IS_FLAT=is_flat,
        IS_CAUSAL=mask.is_causal,
        IS_SLIDING=mask.kind.startswith("sliding_window"),
        IS_CHUNKED=mask.kind.startswith("chunked"),
        HAS_FP8=gpu.has_fp8,
        IS_ALIGNED=rows_are_aligned(layer),
        QUERIES=config.queries,
        HEAD_BLOCK=config.heads,
        HEAD_BLOCKS=triton.cdiv(heads, config.heads),
        KEYS=config.keys,
        TILES=config.tiles,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _dot_types(q_dtype: torch.dtype, layer: CacheLayer) -> tuple[torch.dtype, torch.dtype]:
    """Types for latent and rotated columns that hold q and the keys exactly, halves if any do."""
    stored, format = layer.payload.dtype, layer.codec.name
    if stored in TRITON_TYPES:
        both = _common_type(q_dtype, stored)
        return both, both
    if format == "fp8":
        both = q_dtype if q_dtype in TRITON_TYPES else torch.bfloat16
        return both, both
    # e4m3 fits every half; times a power of two (fp8_block64 is decoded) it fits bfloat16 only
    is_decoded = format == "fp8_block64"
    latent = _common_type(q_dtype, torch.bfloat16 if is_decoded else E4M3)
    return latent, _common_type(q_dtype, torch.bfloat16)


def _common_type(*dtypes: torch.dtype) -> torch.dtype:
    """The type that holds numbers of all `dtypes`; e4m3 fits every other one."""
    wide = {dtype for dtype in dtypes if dtype != E4M3} or {torch.bfloat16}
    return wide.pop() if len(wide) == 1 else torch.float32


@triton.jit(
    do_not_specialize=[
        "tensor_scale_value",
        "batch",
        "columns",
        "query_tiles",
        "window",
        "stride_table_request",
        "stride_table_entry",
        "stride_starts",
        "stride_kv_lens",
        "stride_q_starts",
    ]
)
def _indexer_logits_kernel(
    q,  # [tokens, HEADS, D_C + D_R]; bytes for e4m3
    weights,  # [tokens, HEADS] float32
    payload,  # [pages, PAGE, payload columns]
    scales,  # [pages, PAGE, scales]; any pointer where a format has none
    table,  # [batch, max_pages] pages; IS_FLAT: [n] slots
    starts,  # IS_FLAT: [batch + 1], where a request's slots start; or None
    kv_lens,  # [batch]
    q_starts,  # [batch + 1]
    tensor_scale,  # [1] float32, or None for the number
    tensor_scale_value,
    out,  # [tokens, columns] float32
    batch,
    columns,
    query_tiles,
    window,
    stride_q_token,
    stride_q_head,
    stride_weights_token,
    stride_weights_head,
    stride_page,
    stride_row,
    stride_scales_page,
    stride_scales_row,
    stride_table_request,
    stride_table_entry,
    stride_starts,
    stride_kv_lens,
    stride_q_starts,
    stride_out,
    HEADS: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    IS_Q_BYTES: tl.constexpr,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    IS_FLAT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_SLIDING: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Scores of one request's QUERIES queries over TILES tiles of KEYS keys."""
    # neighbours have the same keys where they belong to one request
    query_tile = tl.program_id(0) % query_tiles
    run = tl.program_id(0) // query_tiles
    request, first = _find_queries(query_tile, q_starts, batch, stride_q_starts, QUERIES)
    q_start = tl.load(q_starts + request * stride_q_starts).to(tl.int32)
    q_len = tl.load(q_starts + (request + 1) * stride_q_starts).to(tl.int32) - q_start
    kv_len = tl.load(kv_lens + request * stride_kv_lens).to(tl.int32)
    if first < q_len:
        query = first + tl.arange(0, QUERIES)
        is_query = query < q_len
        token = (q_start + query).to(tl.int64)
        low, high = mask_interval(
            kv_len - q_len + query, kv_len, window, IS_CAUSAL, IS_SLIDING, IS_CHUNKED
        )  # [QUERIES]
        # of neighbouring queries the intervals leave no gap
        begin = tl.min(tl.where(is_query, low, kv_len), 0)
        end = tl.max(tl.where(is_query, high, 0), 0)
        first_tile = tl.minimum(run * TILES, tl.cdiv(columns, KEYS))
        last_tile = tl.minimum(first_tile + TILES, tl.cdiv(columns, KEYS))
        first_seen = tl.minimum(tl.maximum(begin // KEYS, first_tile), last_tile)
        last_seen = tl.minimum(tl.maximum(tl.cdiv(end, KEYS), first_seen), last_tile)

        at = out + (token * stride_out)[None, :]
        _store_nothing(at, first_tile, first_seen, is_query, columns, KEYS)
        _store_nothing(at, last_seen, last_tile, is_query, columns, KEYS)
        if first_seen < last_seen:
            entries = table + request * stride_table_request
            if IS_FLAT:
                entry = tl.load(starts + request * stride_starts).to(tl.int64)
                entries += entry * stride_table_entry
            if HEAD_BLOCKS == 1:
                q_tile, q_rope = _load_queries(
                    q, token, is_query, 0, stride_q_token, stride_q_head, HEADS, HEAD_BLOCK,
                    PIECES, WIDTH, ROPE_WIDTH, D_C, D_R, IS_Q_BYTES, DTYPE, ROPE_DTYPE, HAS_FP8,
                )  # fmt: skip
                weight = _load_weights(
                    weights, token, is_query, 0, stride_weights_token, stride_weights_head, HEADS,
                    HEAD_BLOCK,
                )  # fmt: skip
            for tile in range(first_seen, last_seen):
                key = tile * KEYS + tl.arange(0, KEYS)
                is_read = (key >= begin) & (key < end)
                page, in_page = _locate(key, entries, is_read, stride_table_entry, PAGE, IS_FLAT)
                rows = payload + (page * stride_page + in_page * stride_row)
                scales_at = scales + (page * stride_scales_page + in_page * stride_scales_row)
                latent, rope, factors = _load_keys(
                    rows, scales_at, is_read, PIECES, WIDTH, ROPE_WIDTH, D_C, D_R, FORMAT, DTYPE,
                    ROPE_DTYPE, HAS_FP8, IS_ALIGNED,
                )  # fmt: skip
                logits = tl.zeros([KEYS, QUERIES], tl.float32)
                for block in range(HEAD_BLOCKS):
                    if HEAD_BLOCKS > 1:
                        q_tile, q_rope = _load_queries(
                            q, token, is_query, block, stride_q_token, stride_q_head, HEADS,
                            HEAD_BLOCK, PIECES, WIDTH, ROPE_WIDTH, D_C, D_R, IS_Q_BYTES, DTYPE,
                            ROPE_DTYPE, HAS_FP8,
                        )  # fmt: skip
                        weight = _load_weights(
                            weights, token, is_query, block, stride_weights_token,
                            stride_weights_head, HEADS, HEAD_BLOCK,
                        )  # fmt: skip
                    dots = _multiply(
                        latent, rope, factors, q_tile, q_rope, PIECES, ROPE_WIDTH, FORMAT
                    )
                    logits += _add_heads(dots, weight, block, HEADS, HEAD_BLOCK, QUERIES)
                logits = _scale_keys(logits, factors, tensor_scale, tensor_scale_value, FORMAT)
                is_seen = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
                logits = tl.where(is_seen, logits, -float("inf"))
                _store_logits(at, logits, key, is_query, columns)


@triton.jit
def _locate(key, entries, is_read, stride_entry, PAGE: tl.constexpr, IS_FLAT: tl.constexpr):
    """int64 (page, row in it) of a request's keys."""
    entry = key if IS_FLAT else key // PAGE
    named = tl.load(entries + entry.to(tl.int64) * stride_entry, mask=is_read, other=0).to(tl.int64)
    if IS_FLAT:
        return named // PAGE, named % PAGE
    return named, (key % PAGE).to(tl.int64)


@triton.jit
def _find_queries(tile, q_starts, batch, stride_q_starts, QUERIES: tl.constexpr):
    """(request int64, index of its first query) of a tile of queries; the index may be too large.

    The tiles of request r start at q_starts[r] // QUERIES + r, so that each has enough of them. If
    a tile is one query, its request is the last that starts at or before it.
    """
    low, high = tl.zeros([], tl.int64), tl.zeros([], tl.int64) + batch
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(q_starts + middle * stride_q_starts).to(tl.int64)
        if QUERIES > 1:
            start = start // QUERIES + middle
        low, high = tl.where(start <= tile, middle, low), tl.where(start <= tile, high, middle)
    start = tl.load(q_starts + low * stride_q_starts).to(tl.int64)
    if QUERIES > 1:
        start = start // QUERIES + low
    return low, ((tile - start) * QUERIES).to(tl.int32)


@triton.jit
def _load_keys(
    rows, scales, is_read, PIECES: tl.constexpr, WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    D_C: tl.constexpr, D_R: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr, HAS_FP8: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Tuples of [keys, WIDTH], of none or one [keys, ROPE_WIDTH], of the factors [keys]."""
    latent, rope, factors = (), (), ()
    for piece in tl.static_range(PIECES):
        tile = load_latent(rows, scales, is_read, piece, WIDTH, D_C, FORMAT, DTYPE, HAS_FP8)
        latent += (tile,)
        # of each piece its own, or of the first one for all
        if FORMAT == "fp8_block128" or (FORMAT == "fp8_token" and piece == 0):
            factors += (load_factor(rows, scales, is_read, piece, D_C, FORMAT, IS_ALIGNED),)
    if ROPE_WIDTH > 0:
        tile = load_rope(
            rows, is_read, ROPE_WIDTH, D_C, D_R, FORMAT, ROPE_DTYPE, HAS_FP8, IS_ALIGNED
        )
        rope += (tile,)
    return latent, rope, factors


@triton.jit
def _load_queries(
    q, token, is_query, block, stride_q_token, stride_q_head, HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    D_C: tl.constexpr, D_R: tl.constexpr, IS_Q_BYTES: tl.constexpr, DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    """A block of heads: tuples of [WIDTH, queries × heads] and of none or one [ROPE_WIDTH, ...]."""
    ROWS: tl.constexpr = token.shape[0] * HEAD_BLOCK
    head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    at = token[:, None] * stride_q_token + head[None, :].to(tl.int64) * stride_q_head
    at = tl.reshape(at, [ROWS])[None, :]
    is_row = tl.reshape(is_query[:, None] & (head < HEADS)[None, :], [ROWS])[None, :]
    latent = ()
    for piece in tl.static_range(PIECES):
        column = piece * WIDTH + tl.arange(0, WIDTH)[:, None]
        stored = tl.load(q + at + column, mask=is_row & (column < D_C), other=0)
        latent += (_as_float(stored, IS_Q_BYTES, DTYPE, HAS_FP8),)
    rope = ()
    if ROPE_WIDTH > 0:
        column = tl.arange(0, ROPE_WIDTH)[:, None]
        stored = tl.load(q + at + D_C + column, mask=is_row & (column < D_R), other=0)
        rope += (_as_float(stored, IS_Q_BYTES, ROPE_DTYPE, HAS_FP8),)
    return latent, rope


@triton.jit
def _load_weights(
    weights, token, is_query, block, stride_token, stride_head, HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [queries × heads]."""
    head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    at = token[:, None] * stride_token + head[None, :].to(tl.int64) * stride_head
    mask = is_query[:, None] & (head < HEADS)[None, :]
    weight = tl.load(weights + at, mask=mask, other=0.0)
    return tl.reshape(weight, [token.shape[0] * HEAD_BLOCK])


@triton.jit
def _as_float(stored, IS_BYTES: tl.constexpr, DTYPE: tl.constexpr, HAS_FP8: tl.constexpr):
    if IS_BYTES:
        return widen_e4m3(stored, DTYPE, HAS_FP8)
    return stored.to(DTYPE)


@triton.jit
def _multiply(
    latent,
    rope,
    factors,
    q_tile,
    q_rope,
    PIECES: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """keys·q, float32 [keys, queries × heads]; one scale per token or tensor is still missing."""
    dots = tl.dot(latent[0], q_tile[0], input_precision="ieee")
    if FORMAT == "fp8_block128":
        dots *= factors[0][:, None]
    for piece in tl.static_range(1, PIECES):
        if FORMAT == "fp8_block128":
            part = tl.dot(latent[piece], q_tile[piece], input_precision="ieee")
            dots += part * factors[piece][:, None]
        else:
            dots = tl.dot(latent[piece], q_tile[piece], dots, input_precision="ieee")
    if ROPE_WIDTH > 0:
        dots = tl.dot(rope[0], q_rope[0], dots, input_precision="ieee")
    return dots


@triton.jit
def _add_heads(
    dots, weight, block, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, QUERIES: tl.constexpr
):
    """Σ_h weight · relu(dots), [keys, QUERIES]."""
    # a NaN stays one
    terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    KEYS: tl.constexpr = dots.shape[0]
    terms = tl.reshape(terms, [KEYS, QUERIES, HEAD_BLOCK])
    if HEADS % HEAD_BLOCK != 0:
        # the dots of a head that there is not are 0 times the key: NaN, if that is not finite
        head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        terms = tl.where((head < HEADS)[None, None, :], terms, 0.0)
    return tl.sum(terms, 2)


@triton.jit
def _scale_keys(logits, factors, tensor_scale, tensor_scale_value, FORMAT: tl.constexpr):
    """With the scale of whole keys; it is not below 0, so that relu may come before it."""
    if FORMAT == "fp8_token":
        logits *= factors[0][:, None]
    elif FORMAT == "fp8":
        scale = tensor_scale_value
        if tensor_scale is not None:
            scale = tl.load(tensor_scale).to(tl.float32)
        logits *= scale
    return logits


@triton.jit
def _store_nothing(at, first_tile, last_tile, is_query, columns, KEYS: tl.constexpr):
    """−inf to tiles that no query sees."""
    nothing = tl.full([KEYS, is_query.shape[0]], -float("inf"), tl.float32)
    for tile in range(first_tile, last_tile):
        _store_logits(at, nothing, tile * KEYS + tl.arange(0, KEYS), is_query, columns)


@triton.jit
def _store_logits(at, logits, key, is_query, columns):
    mask = (key < columns)[:, None] & is_query[None, :]
    tl.store(at + key[:, None], logits, mask=mask)
