"""`mla_prefill_branch_fp8`: dense prefill with an FP8 block-scaled up-projection."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import gather_rows, token_requests, token_slots
from mlakit.compat.modular.arguments import (
    check_collection,
    check_target,
    check_used_pages,
    step_lengths,
)
from mlakit.compat.modular.collection import KeyCache, KVCollection
from mlakit.compat.modular.masks import mask_from_name
from mlakit.compat.modular.rope_norm import append_step, check_step
from mlakit.compat.modular.score_mods import slopes_from_name
from mlakit.dispatch import selection
from mlakit.dispatch.checks import E4M3, FLOATS, INTEGERS, Dims, as_signed, values_visible
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.model.masks import Mask
from mlakit.ops import mla_prefill, quantize_fp8, scaled_mm_fp8
from mlakit.ops._refusals import refuse_grad, refuse_results
from mlakit.steps.weights import SCALE_UB

GRANULARITIES = (64, 128)


def mla_prefill_branch_fp8(
    output: Tensor,
    q: Tensor,
    input_row_offsets: Tensor,
    freqs_cis: Tensor,
    kv_norm_gamma: Tensor,
    kv_collection: KVCollection,
    layer_idx: int,
    scale: float,
    epsilon: float,
    buffer_row_offsets: Tensor,
    cache_offsets: Tensor,
    buffer_length: int,
    kv_b_proj: Tensor,
    kv_b_proj_scale: Tensor,
    *,
    m_scale_granularity: int = 1,
    n_scale_granularity: int = 128,
    k_scale_granularity: int = 128,
    mask_str: str = "causal",
    local_window_size: int | None = None,
    score_mod_str: str = "no_pos",
    target: str | None = None,
) -> Tensor:
    """Prefill of new tokens whose raw latents are already in the cache.

    1. Rotates q's rope columns, and rotates and normalises the new cache rows, in place. Rows with
       scales are read times their scales and written with new ones.
    2. Quantises the latents of all keys per token and group, and up-projects them to K and V.
    3. Attends in the expanded form, with K's rope columns from the cache.

    output             [tokens, heads, D_V] in q's dtype, written
    q                  [tokens, heads, D_N + D_R]; columns D_N onwards are overwritten
    buffer_row_offsets [batch + 1] rows of each request in the latent buffer (`mla_prefill_plan`)
    cache_offsets      [batch] or [batch + 1]: the first key of each request in the buffer
    buffer_length      rows of the buffer; with 0 the call has no effect
    kv_b_proj          [heads · (D_N + D_V), D_C] e4m3; per head D_N rows of K, then D_V rows of V
    kv_b_proj_scale    [ceil(rows / n), ceil(D_C / k)] float32, n = k = 64 or 128

    Raises ValueError if the buffer does not hold every key that the queries see. Returns `output`.
    """
    dims = Dims("mla_prefill_branch_fp8")
    cache = check_collection(dims, kv_collection, layer_idx)
    dims.match("q", q, "tokens", "heads", "qk", dtypes=FLOATS)
    dims.writable("q", q)
    dims.match("output", output, "tokens", "heads", "v", dtypes=[q.dtype])
    dims.writable("output", output)
    refuse_results(dims.op, q=q, output=output)
    refuse_grad(dims.op, kv_b_proj=kv_b_proj, kv_b_proj_scale=kv_b_proj_scale)
    check_target(dims, target, q)
    _check_cache(dims, cache, q)
    rope = dims["rope"]
    dims.require(dims["heads"] >= 1, "q", "have at least one head", 0)
    dims.require(rope < dims["qk"], "q", f"have more columns than its {rope} rope ones", dims["qk"])
    scale = dims.finite("scale", scale)
    mask = mask_from_name(dims, mask_str, local_window_size)
    slopes = slopes_from_name(dims, score_mod_str, mask, dims["heads"], q.device)
    group = _check_weight(
        dims,
        kv_b_proj,
        kv_b_proj_scale,
        cache,
        (m_scale_granularity, n_scale_granularity, k_scale_granularity),
    )
    offsets = check_step(
        dims, cache, input_row_offsets, freqs_cis, kv_norm_gamma, epsilon, "kv_norm_gamma"
    )
    length = dims.integer("buffer_length", buffer_length, 0)
    _check_buffer(dims, cache, offsets, mask, buffer_row_offsets, cache_offsets, length)
    if length == 0 or dims["tokens"] == 0:
        return output

    _select_kernels(q, cache, (dims["qk"] - rope, rope, dims["v"]), mask)
    q_rope = q[..., dims["qk"] - rope :]
    by_page = _with_scales_by_page(cache, offsets, mask)
    new_slots, _ = by_page.new_slots(offsets, dims["tokens"])
    raw = by_page.layer.read_unchecked(new_slots)
    append_step(by_page, q_rope, q_rope, raw, offsets, freqs_cis, kv_norm_gamma, epsilon)
    cache.store_scales(by_page, offsets, dims["tokens"])
    rows, kv_starts = _visible_rows(by_page, offsets, mask, length, q.dtype)
    latent, k_rope = rows.split([cache.row.kv_lora_rank, rope], dim=-1)
    quantised, scales = quantize_fp8(latent, group, scale_ub=SCALE_UB)
    expanded = scaled_mm_fp8(
        quantised,
        scales,
        kv_b_proj,
        kv_b_proj_scale,
        n_group=group,
        k_group=group,
        out_dtype=q.dtype,
    )
    k_nope, v = expanded.unflatten(1, (dims["heads"], -1)).split(
        [dims["qk"] - rope, dims["v"]], dim=-1
    )
    mla_prefill(
        q,
        k_nope,
        k_rope,
        v,
        offsets,
        kv_starts,
        softmax_scale=scale,
        mask=mask,
        alibi_slopes=slopes,
        out=output,
    )
    return output


def _select_kernels(
    q: Tensor, cache: KeyCache, head_widths: tuple[int, int, int], mask: Mask
) -> None:
    """Select all kernels, so that an unsupported call fails before the first write."""
    problem = Problem(
        *device_facts(q.device),
        dtype=str(q.dtype),
        heads=q.shape[1],
        row=cache.row,
        head_widths=head_widths,
        mask=mask.kind,
    )
    for op in ("quantize_fp8", "scaled_mm_fp8", "mla_prefill"):
        selection.select(op, problem)


def _check_cache(dims: Dims, cache: KeyCache, q: Tensor) -> None:
    payload = cache.layer.payload
    dims.require(
        payload.dtype == q.dtype or payload.dtype not in FLOATS,
        "kv_collection",
        f"hold rows of q's dtype, {q.dtype}, or float8_e4m3fn",
        f"format {cache.layer.codec.name}",
    )


def _check_weight(
    dims: Dims, weight: Tensor, scale: Tensor, cache: KeyCache, granularity: tuple[int, int, int]
) -> int:
    """The scale granularity along D_C, which is also that along the weight's rows."""
    for axis, size in zip("mnk", granularity, strict=True):
        dims.integer(f"{axis}_scale_granularity", size, 1)
    m, n, k = granularity
    dims.require(m == 1, "m_scale_granularity", "be 1", m)
    dims.require(n in GRANULARITIES, "n_scale_granularity", "be 64 or 128", n)
    dims.require(k == n, "k_scale_granularity", f"equal n_scale_granularity, {n}", k)
    outputs = dims["heads"] * (dims["qk"] - dims["rope"] + dims["v"])
    dims.bind("heads · (D_N + D_V)", outputs, "what q, the cache and output need")
    dims.match("kv_b_proj", weight, "heads · (D_N + D_V)", "latent", dtypes=[E4M3])
    dims.bind("row groups", -(-outputs // n), f"the rows of kv_b_proj / {n}, rounded up")
    dims.bind("column groups", -(-cache.row.kv_lora_rank // k), f"kv_lora_rank / {k}, rounded up")
    axes = ("row groups", "column groups")
    dims.match("kv_b_proj_scale", scale, *axes, dtypes=[torch.float32])
    dims.rows_contiguous("kv_b_proj", weight)
    dims.rows_contiguous("kv_b_proj_scale", scale)
    return n


def _check_buffer(
    dims: Dims,
    cache: KeyCache,
    row_offsets: Tensor,
    mask: Mask,
    buffer_row_offsets: Tensor,
    cache_offsets: Tensor,
    buffer_length: int,
) -> None:
    """Require a row in the buffer and a page in the cache for every key that a new token sees."""
    batch = dims["batch"]
    dims.match("buffer_row_offsets", buffer_row_offsets, "batch + 1", dtypes=INTEGERS)
    dims.match("cache_offsets", cache_offsets, "cache offsets", dtypes=INTEGERS)
    entries = len(cache_offsets)
    dims.require(
        entries in (batch, batch + 1),
        "cache_offsets",
        f"have {batch} or {batch + 1} entries",
        entries,
    )
    lengths = step_lengths(dims, cache, row_offsets)
    if lengths is None or not values_visible(buffer_row_offsets):
        return
    dims.starts("buffer_row_offsets", buffer_row_offsets, None)
    starts = as_signed(buffer_row_offsets).tolist()
    dims.require(
        starts[-1] <= buffer_length,
        "buffer_length",
        f"not be below buffer_row_offsets[-1], {starts[-1]}",
        buffer_length,
    )
    if buffer_length == 0:
        return
    before, after = lengths
    first = mask.first_visible_keys(before, after)
    check_used_pages(dims, cache, first, after, "cache_lengths + new tokens")
    for request, skipped in enumerate(as_signed(cache_offsets[:batch]).tolist()):
        if after[request] == before[request]:
            continue
        dims.require(skipped >= 0, f"cache_offsets[{request}]", "not be negative", skipped)
        dims.require(
            skipped <= first[request],
            f"cache_offsets[{request}]",
            f"not skip key {first[request]}, which the queries see",
            skipped,
        )
        rows = starts[request + 1] - starts[request]
        dims.require(
            rows >= after[request] - skipped,
            f"buffer_row_offsets of request {request}",
            f"leave room for its {after[request] - skipped} keys",
            f"{rows} rows",
        )


def _with_scales_by_page(cache: KeyCache, row_offsets: Tensor, mask: Mask) -> KeyCache:
    """The cache with the scales of all visible keys in the pages of their rows."""
    if cache.scales_lookup_table is None:
        return cache
    before, after = cache.cache_lengths, cache.kv_lens(row_offsets)
    return cache.with_scales_by_page(mask.first_visible_keys_on_device(before, after), after)


def _visible_rows(
    cache: KeyCache, row_offsets: Tensor, mask: Mask, buffer_length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (cache rows [keys, width] of the visible keys, kv_starts [batch + 1]).

    A window or chunk mask hides the oldest keys. It depends on distances to the queries or on whole
    chunks, so it is the same mask over the remaining keys.
    """
    before, after = cache.cache_lengths, cache.kv_lens(row_offsets)
    if values_visible(before) and values_visible(row_offsets):
        lows, highs = before.tolist(), after.tolist()
        first = mask.first_visible_keys(lows, highs)
        return gather_rows(cache.layer, cache.lookup_table, first, highs, dtype)
    # the host does not know the number of keys, but the size of the buffer
    first_seen = mask.first_visible_keys_on_device(before, after)
    starts = torch.nn.functional.pad((after - first_seen).cumsum(0), (1, 0)).clamp(
        max=buffer_length
    )
    request, index = token_requests(starts, buffer_length)
    # rows past the last key are read from slot 0, and are not attended to
    is_key = request < len(before)
    request = torch.where(is_key, request, 0)
    slots = token_slots(
        cache.lookup_table,
        cache.page_size,
        request,
        torch.where(is_key, first_seen.long()[request] + index, 0),
    )
    return cache.layer.read_unchecked(torch.where(is_key, slots, 0), dtype), starts.to(torch.int32)
