"""The calls of the plugins for vLLM and SGLang: `mlakit.integrations.steps` and its users."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mlakit.model.masks import CAUSAL, NULL
from mlakit.ops import (
    append_rows,
    indexer_logits,
    indexer_select,
    indexer_topk,
    mla_decode,
    mla_prefill,
    physical_rows,
    sparse_mla,
)
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.precompile.calls import (
    DRAFTS,
    E4M3,
    MAX_BATCH,
    SCALE,
    Call,
    by_head,
    by_token,
    empty,
    index_batches,
    index_cache,
    integers,
    latent_cache,
    ones,
    powers_of_two,
    score_shapes,
    selection_batches,
    token_counts,
    unaligned,
)
from mlakit.precompile.deployment import Deployment, User


def engine_calls(d: Deployment, user: User) -> Iterator[Call]:
    if user == "vllm":
        yield from appends(d)
    if d.geometry.has_indexer:
        yield from sparse(d, user)
        if user == "vllm":
            yield from index_appends(d)
            yield from index_scores(d)
            yield from selections(d)
        else:
            yield from row_selections(d)
    else:
        yield from decode(d, user)
    yield from prefill(d, user)


def scale_of(d: Deployment, user: User) -> float | Tensor:
    """The scale of all rows: vLLM has it on the device, SGLang's is 1."""
    return ones() if d.format == "fp8" and user == "vllm" else 1.0


def appends(d: Deployment) -> Iterator[Call]:
    """Latents and the shared key, which is a view of the projection's result."""
    row, cache = d.geometry.row, latent_cache(d, scale_of(d, "vllm"))

    def run(tokens: int) -> None:
        latent = empty(tokens, row.kv_lora_rank, dtype=d.torch_dtype)
        projected = empty(tokens, row.width, dtype=d.torch_dtype)
        rope = projected[:, row.kv_lora_rank :] if row.qk_rope_head_dim else None
        append_rows(latent, rope, cache, integers(tokens, dtype=torch.int64))

    for tokens in (1, 16, d.max_tokens):
        yield Call(f"append {tokens} tokens", partial(run, tokens))


def index_appends(d: Deployment) -> Iterator[Call]:
    cache = index_cache(d)

    def run(tokens: int, power_of_two: bool) -> None:
        keys = empty(tokens, d.geometry.index_head_dim, dtype=d.torch_dtype)
        slots = integers(tokens, dtype=torch.int64)
        append_rows(keys, None, cache, slots, power_of_two_scales=power_of_two)

    for tokens in (1, d.max_tokens):
        for power_of_two in (False, True):
            name = f"append {tokens} index keys, power of two {power_of_two}"
            yield Call(name, partial(run, tokens, power_of_two))


def has_fp8_queries(d: Deployment, user: User) -> bool:
    """Return whether the queries are e4m3, like the rows: vLLM quantises them."""
    return d.format == "fp8" and user == "vllm" and d.dtype == "bf16"


def query_forms(d: Deployment, user: User, tokens: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Queries of absorbed attention, as one tensor or in two parts."""
    g, dtype = d.geometry, d.torch_dtype
    heads, widths = g.num_heads, (g.kv_lora_rank, g.qk_rope_head_dim)
    if has_fp8_queries(d, user):
        yield by_token(tokens, heads, g.row.width, E4M3), None
        return
    yield by_token(tokens, heads, g.row.width, dtype), None
    projected = by_token(tokens, heads, g.qk_head_dim, dtype)[..., g.qk_nope_head_dim :]
    for q_rope in (projected, by_token(tokens, heads, widths[1], dtype)):
        yield by_token(tokens, heads, widths[0], dtype), q_rope


def heads_major_queries(d: Deployment, user: User, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries as a product per head leaves them, in which the tokens of a head are adjacent."""
    if has_fp8_queries(d, user):
        return
    g, dtype = d.geometry, d.torch_dtype
    projected = by_token(tokens, g.num_heads, g.qk_head_dim, dtype)[..., g.qk_nope_head_dim :]
    yield by_head(tokens, g.num_heads, g.kv_lora_rank, dtype), projected


def decode(d: Deployment, user: User) -> Iterator[Call]:
    """Steps of one or a few queries per request, with a plan made on the device."""
    cache = latent_cache(d, scale_of(d, user))

    def run(batch: int, drafts: int, pages: int) -> None:
        tokens = batch * drafts
        several = drafts > 1
        table, lens = integers(batch, pages), integers(batch)
        starts = integers(batch + 1) if several else None
        for q, q_rope in (*query_forms(d, user, tokens), *heads_major_queries(d, user, tokens)):
            plan = None
            if not d.is_batch_invariant:
                plan = plan_mla_decode(
                    cache,
                    table,
                    lens,
                    heads=q.shape[1],
                    num_tokens=tokens if several else None,
                    q_starts=starts,
                    dtype=q.dtype,
                )
            mla_decode(
                q,
                cache,
                table,
                lens,
                q_rope=q_rope,
                q_scale=ones(1).expand(tokens) if q.dtype == E4M3 else None,
                q_starts=starts,
                softmax_scale=SCALE,
                plan=plan,
                deterministic=d.is_batch_invariant,
            )

    for batch in powers_of_two(MAX_BATCH):
        for drafts in DRAFTS:
            for pages in sorted({1, d.max_pages}):
                name = f"decode {batch} requests of {drafts} queries, {pages} pages"
                yield Call(name, partial(run, batch, drafts, pages))


def prefill(d: Deployment, user: User) -> Iterator[Call]:
    """New tokens among themselves, and over a part of their context."""
    g, heads, dtype = d.geometry, d.geometry.num_heads, d.torch_dtype
    columns = g.qk_nope_head_dim + g.v_head_dim

    def run(tokens: int, batch: int, is_causal: bool, starts: tuple[Tensor, Tensor]) -> None:
        q, k = (by_token(tokens, heads, g.qk_head_dim, dtype) for _ in range(2))
        v = by_token(tokens, heads, g.v_head_dim, dtype)
        if user == "vllm":  # a part of what the up-projection makes
            v = by_token(tokens, heads, columns, dtype)[..., g.qk_nope_head_dim :]
        mla_prefill(
            q,
            k[..., : g.qk_nope_head_dim],
            k[:, 0, g.qk_nope_head_dim :],
            v,
            *starts,
            softmax_scale=SCALE,
            mask=CAUSAL if is_causal else NULL,
        )

    # kernels depend on the queries per request
    for mean in powers_of_two(min(256, d.max_tokens)):
        for batch in (1, 4):
            starts, part = integers(batch + 1), unaligned(batch + 1)
            for is_causal in (True, False):
                name = f"prefill {batch} requests of {mean} tokens, causal {is_causal}"
                yield Call(name, partial(run, mean * batch, batch, is_causal, (starts, starts)))
            for each in ((starts, part), (part, part)):  # parts of a context
                name = f"prefill {batch} requests of {mean} tokens, over a part of their context"
                yield Call(name, partial(run, mean * batch, batch, False, each))


def sparse(d: Deployment, user: User) -> Iterator[Call]:
    """Attention to the rows that the indexer selected."""
    g, cache = d.geometry, latent_cache(d, scale_of(d, user))

    def run(tokens: int) -> None:
        rows = integers(tokens, g.index_topk)
        for q, q_rope in query_forms(d, user, tokens):
            sparse_mla(q, cache, rows, q_rope=q_rope, softmax_scale=SCALE)

    def find_rows(tokens: int, batch: int | None) -> None:
        table = integers(tokens if batch is None else batch, d.max_pages)
        starts = None if batch is None else integers(batch + 1)
        physical_rows(integers(tokens, g.index_topk), table, d.page_size, starts)

    for tokens in (1, 4):
        for batch in (None, 1, tokens):
            yield Call(f"rows of {tokens} tokens", partial(find_rows, tokens, batch))
    for tokens in token_counts(d):
        yield Call(f"sparse attention of {tokens} tokens", partial(run, tokens))


def index_scores(d: Deployment) -> Iterator[Call]:
    g, cache = d.geometry, index_cache(d)

    def run(batch: int, tokens: int, columns: int) -> None:
        for table in (integers(batch, d.max_pages), unaligned(batch, d.max_pages)):
            score(batch, tokens, columns, table)

    def score(batch: int, tokens: int, columns: int, table: Tensor) -> None:
        indexer_logits(
            by_token(tokens, g.index_n_heads, g.index_head_dim, E4M3),
            empty(tokens, g.index_n_heads),
            cache,
            table,
            integers(batch),
            q_starts=integers(batch + 1) if tokens > batch else None,
            max_kv_len=columns,
        )

    for each in index_batches(d):
        yield Call(f"scores of {each}", partial(run, *each))


def selections(d: Deployment) -> Iterator[Call]:
    """Positions of the best keys among scores of any width."""

    def run(tokens: int, columns: int) -> None:
        indexer_topk(empty(tokens, columns), d.geometry.index_topk)

    for tokens, columns in score_shapes(d):
        yield Call(f"top-k of {tokens} tokens, {columns} keys", partial(run, tokens, columns))


def row_selections(d: Deployment) -> Iterator[Call]:
    """Scores and selection in one op."""
    g, cache = d.geometry, index_cache(d)

    def run(batch: int, tokens: int, columns: int) -> None:
        indexer_select(
            by_token(tokens, g.index_n_heads, g.index_head_dim, E4M3),
            empty(tokens, g.index_n_heads),
            cache,
            integers(batch, d.max_pages),
            integers(batch),
            g.index_topk,
            q_starts=integers(batch + 1) if tokens > batch else None,
            max_kv_len=columns,
        )

    for each in selection_batches(d):
        yield Call(f"selection of {each}", partial(run, *each))
