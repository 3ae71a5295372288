"""The calls of `mlakit.steps`: `decode_branch`, `prefill_branch`, `mla_step` and `sparse_step`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.model.geometry import RowShape
from mlakit.model.masks import CAUSAL, NULL, compressed_causal
from mlakit.ops import (
    indexer_select,
    merge_states,
    mla_decode,
    mla_prefill,
    norm_rope_quant_append,
    physical_rows,
    sparse_mla,
)
from mlakit.precompile.calls import (
    DRAFTS,
    E4M3,
    MAX_BATCH,
    NUM_PAGES,
    SCALE,
    Call,
    by_token,
    empty,
    integers,
    latent_cache,
    ones,
    powers_of_two,
    selection_batches,
    token_counts,
)
from mlakit.precompile.deployment import Deployment
from mlakit.steps import CachedBatch, PooledKeyCache, PooledKeys
from mlakit.steps.context import MAX_PARTIALS
from mlakit.steps.pools import append_pools
from mlakit.steps.weights import BLOCK, UpProjection


def step_calls(d: Deployment) -> Iterator[Call]:
    yield from appends(d)
    yield from decode(d)
    yield from prefill(d)
    yield from merges(d)
    if d.geometry.has_indexer:
        yield from sparse(d)
        yield from selections(d)
        if d.index_pool > 1:
            yield from pools(d)
    if d.has_fp8_weights:
        yield from products(d)


def appends(d: Deployment) -> Iterator[Call]:
    """New tokens of a step: latents, rotated queries, and the indexer's keys."""
    g, dtype, cache = d.geometry, d.torch_dtype, latent_cache(d)
    freqs = empty(d.max_context, g.qk_rope_head_dim)
    keys_cache = index_cache(d) if g.has_indexer and d.index_pool == 1 else None

    def run(tokens: int, batch: int, is_absorbed: bool) -> None:
        requests = integers(batch, d.max_pages), integers(batch), integers(batch + 1)
        q_rope = by_token(tokens, g.num_heads, g.qk_head_dim, dtype)[..., g.qk_nope_head_dim :]
        absorbed = by_token(tokens, g.num_heads, g.row.width, dtype)[..., g.kv_lora_rank :]
        norm_rope_quant_append(
            q_rope,
            empty(tokens, g.row.width, dtype=dtype),
            freqs,
            empty(g.kv_lora_rank, dtype=dtype),
            cache,
            *requests,
            epsilon=1e-6,
            rope=g.rope,
            q_rope_out=absorbed if is_absorbed else q_rope,
        )
        if keys_cache is not None:
            norm_rope_quant_append(
                by_token(tokens, 1, 0, dtype),
                empty(tokens, g.index_head_dim, dtype=dtype),
                freqs[:, :0],
                None,
                keys_cache,
                *requests,
                epsilon=0.0,
                power_of_two_scales=True,
            )

    for tokens in powers_of_two(d.max_tokens):
        for is_absorbed in (True, False):
            name = f"append {tokens} tokens of a step, absorbed {is_absorbed}"
            yield Call(name, partial(run, tokens, min(tokens, MAX_BATCH), is_absorbed))


def index_cache(d: Deployment) -> PagedLatentCache:
    """The keys of the indexer as `LightningIndexer.allocate_index_cache` has them."""
    return PagedLatentCache.allocate(
        RowShape(d.geometry.index_head_dim, 0),
        "fp8_token",
        num_pages=NUM_PAGES,
        page_size=d.page_size // d.index_pool,
    )


def pools(d: Deployment) -> Iterator[Call]:
    """The index keys of pools of new tokens, and the rows of selected pools."""
    width, latents = d.geometry.index_head_dim, latent_cache(d)
    cache = PooledKeyCache.allocate(width, d.index_pool, num_pages=NUM_PAGES, page_size=d.page_size)
    bias = empty(d.index_pool, width, dtype=d.torch_dtype)

    def run(tokens: int, batch: int) -> None:
        keys, gate = (empty(tokens, width, dtype=d.torch_dtype) for _ in range(2))
        made = PooledKeys(gate, bias, cache.states, selects_tail=d.selects_tail)
        requests = integers(batch, d.max_pages), integers(batch), integers(batch + 1)
        step = CachedBatch(latents, *requests)
        append_pools(keys, made, cache.keys, 0, step, power_of_two_scales=True, backend="auto")
        if d.selects_tail:  # as `rows_of_pools` calls it
            tail = integers(tokens, d.index_pool - 1, dtype=torch.int64)
            physical_rows(tail, step.page_table, d.page_size, step.q_starts)

    for tokens in powers_of_two(d.max_tokens):
        yield Call(f"pool {tokens} tokens of a step", partial(run, tokens, min(tokens, MAX_BATCH)))


def decode(d: Deployment) -> Iterator[Call]:
    g, cache = d.geometry, latent_cache(d)

    def run(batch: int, drafts: int, pages: int) -> None:
        mla_decode(
            by_token(batch * drafts, g.num_heads, g.row.width, d.torch_dtype),
            cache,
            integers(batch, pages),
            integers(batch),
            q_starts=integers(batch + 1),
            softmax_scale=SCALE,
        )

    for batch in powers_of_two(MAX_BATCH):
        for drafts in DRAFTS:
            for pages in sorted({1, d.max_pages}):
                name = f"decode {batch} requests of {drafts} queries, {pages} pages, of a step"
                yield Call(name, partial(run, batch, drafts, pages))


def prefill(d: Deployment) -> Iterator[Call]:
    """Over keys and values that the up-projection made, and rows of the cache."""
    g, dtype = d.geometry, d.torch_dtype

    def run(tokens: int, batch: int, is_causal: bool) -> None:
        expanded = by_token(tokens, g.num_heads, g.qk_nope_head_dim + g.v_head_dim, dtype)
        starts = integers(batch + 1)
        mla_prefill(
            by_token(tokens, g.num_heads, g.qk_head_dim, dtype),
            expanded[..., : g.qk_nope_head_dim],
            empty(tokens, g.row.width, dtype=dtype)[:, g.kv_lora_rank :],
            expanded[..., g.qk_nope_head_dim :],
            starts,
            starts,
            softmax_scale=SCALE,
            mask=CAUSAL if is_causal else NULL,
        )

    for mean in powers_of_two(min(256, d.max_tokens)):
        for batch in (1, 4):
            for is_causal in (True, False):
                name = f"prefill {batch} requests of {mean} tokens of a step, causal {is_causal}"
                yield Call(name, partial(run, mean * batch, batch, is_causal))


def merges(d: Deployment) -> Iterator[Call]:
    """Results over parts of a context; the first may be a merged one, in float32."""
    g = d.geometry

    def run(parts: int, first: torch.dtype, merged: torch.dtype) -> None:
        shape = 16, g.num_heads, g.v_head_dim
        outs = [by_token(*shape, first)]
        outs += [by_token(*shape, d.torch_dtype) for _ in range(parts - 1)]
        lses = [empty(*shape[:2]) for _ in outs]
        merge_states(outs, lses, out=by_token(*shape, merged), lse=lses[0])

    dtypes = list(dict.fromkeys((d.torch_dtype, torch.float32)))
    for parts in range(2, MAX_PARTIALS + 1):
        for first in dtypes:
            for merged in dtypes:
                name = f"merge {parts} results, {first} to {merged}"
                yield Call(name, partial(run, parts, first, merged))


def sparse(d: Deployment) -> Iterator[Call]:
    g, cache = d.geometry, latent_cache(d)
    listed = g.index_topk + (d.index_pool - 1 if d.selects_tail else 0)

    def run(tokens: int) -> None:
        q = by_token(tokens, g.num_heads, g.row.width, d.torch_dtype)
        sparse_mla(q, cache, integers(tokens, listed), softmax_scale=SCALE)

    for tokens in token_counts(d):
        yield Call(f"sparse attention of {tokens} tokens of a step", partial(run, tokens))


def selections(d: Deployment) -> Iterator[Call]:
    g, cache = d.geometry, index_cache(d)

    def run(batch: int, tokens: int, columns: int) -> None:
        indexer_select(
            by_token(tokens, g.index_n_heads, g.index_head_dim, E4M3),
            empty(tokens, g.index_n_heads),
            cache,
            integers(batch, d.max_pages),
            integers(batch),
            g.index_topk // d.index_pool,
            q_starts=integers(batch + 1),
            mask=CAUSAL if d.index_pool == 1 else compressed_causal(d.index_pool),
            max_kv_len=columns // d.index_pool,
        )

    for each in selection_batches(d):
        yield Call(f"selection of {each} of a step", partial(run, *each))


def products(d: Deployment) -> Iterator[Call]:
    """Products with an up-projection of e4m3."""
    g = d.geometry
    rows = g.num_heads * (g.qk_nope_head_dim + g.v_head_dim)
    matrix = empty(rows, g.kv_lora_rank, dtype=torch.uint8).zero_().view(E4M3)
    blocks = -(-rows // BLOCK), -(-g.kv_lora_rank // BLOCK)
    up = UpProjection.from_checkpoint(matrix, g, ones(*blocks))

    def by_head(tokens: int) -> None:
        q = by_token(tokens, g.num_heads, g.qk_head_dim, d.torch_dtype)
        absorbed = by_token(tokens, g.num_heads, g.row.width, d.torch_dtype)
        up.w_uk_t.apply(q[..., : g.qk_nope_head_dim], out=absorbed[..., : g.kv_lora_rank])
        attended = by_token(tokens, g.num_heads, g.row.v_width, d.torch_dtype)
        up.w_uv.apply(attended, out=by_token(tokens, g.num_heads, g.v_head_dim, d.torch_dtype))

    def expanded(tokens: int) -> None:
        latents: Tensor = empty(tokens, g.row.width, dtype=d.torch_dtype)
        up.expand(latents[:, : g.kv_lora_rank])

    # scales of a token count that is no multiple of 16 lie at other strides
    for tokens in sorted({each for n in token_counts(d) for each in (n, n + 4)}):
        yield Call(f"absorb {tokens} tokens", partial(by_head, tokens))
        yield Call(f"expand {tokens} tokens", partial(expanded, tokens))
