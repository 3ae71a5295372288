"""`fused_rope_rmsnorm_quantization_kernel`, `mla_fused_rope_rmsnorm_quantization`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from mlakit.compat.modular.arguments import (
    check_collection,
    check_key_cache,
    check_row_offsets,
    check_used_pages,
    step_lengths,
)
from mlakit.compat.modular.collection import KeyCache, KVCollection
from mlakit.dispatch.checks import E4M3, FLOATS, Dims
from mlakit.ops import norm_rope_quant_append

KVInput: TypeAlias = "Tensor | Callable[[Tensor, Tensor], Tensor]"
"""Raw latents: a tensor [tokens, width], or a function (rows, columns) -> [rows, columns]."""


def fused_rope_rmsnorm_quantization_kernel(
    q_rope_output: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    input_row_offsets: Tensor,
    freqs_cis: Tensor,
    gamma: Tensor,
    k_cache: KeyCache,
    epsilon: float,
    *,
    block_size: int = 128,
    n_rope_blocks: int | None = None,
    n_rms_blocks: int = 1,
) -> Tensor:
    """Rotate the queries; rotate, normalise and cache the latents of the new tokens.

    q_rope_output      [tokens, heads, D_R] in q_rope's dtype or e4m3, written; may alias q_rope or
                       be a strided slice
    q_rope             [tokens, heads, D_R]
    kv                 [tokens, D_C + D_R] raw latents
    input_row_offsets  [batch + 1]: the first token of each request
    freqs_cis          [positions, D_R] cos0, sin0, cos1, …; the rotation rounds in this dtype
    gamma              [D_C] weight of the RMSNorm, which rounds to this dtype before the product
    k_cache            written at the positions of the tokens; unit-scale float8 saturates at ±448.
                       In a cache with scales, those of the new tokens are computed and written

    Token i of request b is at position cache_lengths[b] + i. The launch shape (`block_size`,
    `n_rope_blocks`, `n_rms_blocks`) has no effect on results. Returns `q_rope_output`.
    """
    dims = Dims("fused_rope_rmsnorm_quantization_kernel")
    for name, count in (
        ("block_size", block_size),
        ("n_rope_blocks", 1 if n_rope_blocks is None else n_rope_blocks),
        ("n_rms_blocks", n_rms_blocks),
    ):
        dims.integer(name, count, 1)
    cache = check_key_cache(dims, "k_cache", k_cache)
    _check_query(dims, q_rope)
    _check_output_and_latents(dims, cache, q_rope_output, q_rope, kv, "kv")
    offsets = check_step(dims, cache, input_row_offsets, freqs_cis, gamma, epsilon)
    append_step(cache, q_rope_output, q_rope, kv, offsets, freqs_cis, gamma, epsilon)
    return q_rope_output


def mla_fused_rope_rmsnorm_quantization(
    q_rope_output: Tensor,
    q_rope: Tensor,
    input_row_offsets: Tensor,
    freqs_cis: Tensor,
    gamma: Tensor,
    kv_collection: KVCollection,
    layer_idx: int,
    epsilon: float,
    *,
    kv_input: KVInput,
) -> Tensor:
    """`fused_rope_rmsnorm_quantization_kernel` for one layer of a collection.

    `kv_input` is the raw latents [tokens, D_C + D_R], or a function that returns them: it takes two
    int64 vectors, rows and columns, and returns [rows, columns].
    """
    dims = Dims("mla_fused_rope_rmsnorm_quantization")
    cache = check_collection(dims, kv_collection, layer_idx)
    _check_query(dims, q_rope)
    offsets = check_step(dims, cache, input_row_offsets, freqs_cis, gamma, epsilon)
    kv = _load(kv_input, len(q_rope), cache) if callable(kv_input) else kv_input
    _check_output_and_latents(dims, cache, q_rope_output, q_rope, kv, "kv_input")
    append_step(cache, q_rope_output, q_rope, kv, offsets, freqs_cis, gamma, epsilon)
    return q_rope_output


def check_step(
    dims: Dims,
    cache: KeyCache,
    row_offsets: Tensor,
    freqs_cis: Tensor,
    gamma: Tensor,
    epsilon: float,
    gamma_name: str = "gamma",
) -> Tensor:
    """Check the arguments of an append ("tokens" is bound); returns signed offsets."""
    dims.match("freqs_cis", freqs_cis, "positions", "rope", dtypes=FLOATS)
    dims.rows_contiguous("freqs_cis", freqs_cis)
    dims.match(gamma_name, gamma, "latent", dtypes=FLOATS)
    dims.rows_contiguous(gamma_name, gamma)
    dims.require(dims.finite("epsilon", epsilon) >= 0, "epsilon", "not be negative", epsilon)
    offsets = check_row_offsets(dims, "input_row_offsets", row_offsets, dims["tokens"])
    lengths = step_lengths(dims, cache, offsets)
    if lengths is not None:
        before, after = lengths
        check_used_pages(dims, cache, before, after, "cache_lengths + new tokens")
        furthest = max(
            (high for low, high in zip(before, after, strict=True) if high > low), default=0
        )
        dims.require(
            furthest <= dims["positions"],
            "freqs_cis",
            f"have a row for position {furthest - 1}",
            f"{dims['positions']} rows",
        )
    return offsets


def append_step(
    cache: KeyCache,
    q_rope_output: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    row_offsets: Tensor,
    freqs_cis: Tensor,
    gamma: Tensor,
    epsilon: float,
) -> None:
    """Append with checked arguments; no effect without tokens."""
    if len(q_rope) == 0:
        return
    kv_lens = cache.kv_lens(row_offsets)
    by_page = cache.with_scales_by_page(cache.cache_lengths, kv_lens)
    norm_rope_quant_append(
        q_rope,
        kv,
        freqs_cis,
        gamma,
        by_page.layer.as_pool,
        cache.lookup_table,
        kv_lens,
        row_offsets,
        epsilon=float(epsilon),
        q_rope_out=q_rope_output,
    )
    cache.store_scales(by_page, row_offsets, len(q_rope))


def _load(kv_input: Callable[[Tensor, Tensor], Tensor], num_tokens: int, cache: KeyCache) -> Tensor:
    device = cache.lookup_table.device
    rows = torch.arange(num_tokens, device=device)
    return kv_input(rows, torch.arange(cache.row.width, device=device))


def _check_query(dims: Dims, q_rope: Tensor) -> None:
    dims.match("q_rope", q_rope, "tokens", "heads", "rope", dtypes=FLOATS)
    dims.rows_contiguous("q_rope", q_rope)


def _check_output_and_latents(
    dims: Dims, cache: KeyCache, q_rope_output: Tensor, q_rope: Tensor, kv: Tensor, kv_name: str
) -> None:
    axes = ("tokens", "heads", "rope")
    dims.match("q_rope_output", q_rope_output, *axes, dtypes=[q_rope.dtype, E4M3])
    dims.writable("q_rope_output", q_rope_output)
    dims.bind("row", cache.row.width, "the cache's row width")
    dims.match(kv_name, kv, "tokens", "row", dtypes=FLOATS)
    dims.rows_contiguous(kv_name, kv)
