"""Checks before the first write of a step: a refused step changes nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.cache import UNSHARDED, CacheLayer, KVShard
from mlakit.dispatch import selection
from mlakit.dispatch.checks import FLOATS, Dims, values_visible
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.model.masks import Mask
from mlakit.ops._checks import (
    check_kv_lens,
    check_layer,
    check_page_table,
    check_query_starts,
    check_result,
    check_seen_rows,
)
from mlakit.ops._refusals import refuse_grad, refuse_results
from mlakit.ops.norm_rope_quant import check_angles
from mlakit.steps.batch import CachedBatch, LayerWeights
from mlakit.steps.weights import UpProjection


class StepLengths(NamedTuple):
    """Tokens of each request, and how many of them are new, on the host."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]


def check_step(
    dims: Dims,
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    mask: Mask | None,
    *,
    shard: KVShard = UNSHARDED,
    is_padded: bool = True,
) -> StepLengths | None:
    """Check the arguments that all branches share; binds tokens, heads and D_V.

    mask       None if the step does not read the cache by page table
    shard      the tokens that the cache holds
    is_padded  rows after the last request's may follow

    Returns the lengths if the host may read them.
    """
    dims.instance("weights", weights, LayerWeights)
    dims.instance("batch", batch, CachedBatch)
    dims.bind("D_C + D_R", weights.up.geometry.row.width, "the geometry's row width")
    layer = _check_queries(dims, q, weights.up, batch, kv=kv)
    dims.rows_contiguous("q", q)
    dims.rows_contiguous("kv", kv)
    dims.same_device("gamma", weights.gamma)
    dims.same_device("freqs", weights.freqs)
    if weights.sink is not None:
        dims.same_device("sink", weights.sink)
    layer.check_writable(dims)
    refuse_grad(
        dims.op,
        q=q,
        kv=kv,
        kv_b_proj=weights.up.kv_b_proj.weight,
        kv_b_proj_scale=weights.up.kv_b_proj.scale,
        gamma=weights.gamma,
        freqs=weights.freqs,
        sink=weights.sink,
        cache=layer,
    )
    lengths = _check_lengths(dims, batch, layer, mask, shard, is_padded=is_padded)
    if lengths is not None:
        check_angles(dims, weights.freqs, *lengths)
    return lengths


def check_out(dims: Dims, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The caller's result [tokens, heads, D_V], checked; or a new one."""
    refuse_results(dims.op, out=out)
    return check_result(dims, "out", out, "tokens", "heads", "D_V", dtype=dtype)


def check_overwritten(dims: Dims, q: Tensor) -> None:
    """The rope columns of q are rotated in place."""
    dims.not_overlapping("q", q)
    refuse_results(dims.op, q=q)


def check_attention(
    dims: Dims,
    q: Tensor,
    up: UpProjection,
    batch: CachedBatch,
    mask: Mask | None,
    shard: KVShard = UNSHARDED,
) -> StepLengths | None:
    """Check a step as `check_step` does, for attention of rotated queries over the cached rows."""
    dims.instance("up", up, UpProjection)
    dims.instance("batch", batch, CachedBatch)
    layer = _check_queries(dims, q, up, batch)
    matrix = up.kv_b_proj
    refuse_grad(dims.op, q=q, kv_b_proj=matrix.weight, kv_b_proj_scale=matrix.scale)
    return _check_lengths(dims, batch, layer, mask, shard, is_padded=True)


def _check_queries(
    dims: Dims, q: Tensor, up: UpProjection, batch: CachedBatch, *, kv: Tensor | None = None
) -> CacheLayer:
    """q, and kv where a step has it, fit the geometry, the weights and the cache."""
    g = up.geometry
    layer = check_layer(dims.op, batch.cache, batch.layer)
    dims.bind("heads", g.num_heads, "the geometry's num_heads")
    dims.bind("D_N + D_R", g.qk_head_dim, "the geometry's qk_head_dim")
    dims.bind("D_V", g.v_head_dim, "the geometry's v_head_dim")
    dims.match("q", q, "tokens", "heads", "D_N + D_R", dtypes=FLOATS)
    if kv is not None:
        dims.match("kv", kv, "tokens", "D_C + D_R", dtypes=FLOATS)
    dims.same_device("weights", up.kv_b_proj.weight)
    dims.same_device("cache", layer.payload)
    row = layer.codec.row
    dims.require(row == g.row, "cache", f"have rows like the geometry's, {g.row}", row)
    dims.require(
        row.v_width == g.kv_lora_rank,
        "cache",
        "have the latent columns as values, which W_UV takes",
        f"values of {row.v_width} columns",
    )
    if not up.is_fp8:
        dims.dtype("q", q, up.kv_b_proj.weight.dtype)
    return layer


def _check_lengths(
    dims: Dims,
    batch: CachedBatch,
    layer: CacheLayer,
    mask: Mask | None,
    shard: KVShard,
    *,
    is_padded: bool,
) -> StepLengths | None:
    kv_lens = check_kv_lens(dims, batch.kv_lens)
    starts = check_query_starts(
        dims, batch.q_starts, dims["tokens"], dims["batch"], is_padded=is_padded
    )
    check_page_table(dims, batch.page_table, dims["batch"])
    if kv_lens is None or not values_visible(starts):
        return None
    q_lens = starts.diff().tolist()
    dims.new_tokens_counted(kv_lens, q_lens)
    if mask is not None:
        check_seen_rows(dims, batch.page_table, layer, mask, starts, kv_lens, shard)
    return StepLengths(tuple(kv_lens), tuple(q_lens))


def check_plan_lengths(
    dims: Dims, plan: StepLengths, batch: CachedBatch, lengths: StepLengths | None
) -> None:
    """A plan is made for this batch: one for other lengths would leave out keys."""
    size = len(batch.kv_lens)
    planned = len(plan.kv_lens)
    dims.require(planned == size, "plan", f"be made for a batch of {size}", planned)
    if lengths is not None:
        dims.require(
            plan == lengths,
            "plan",
            f"be made for kv_lens {lengths.kv_lens} and q_lens {lengths.q_lens}",
            f"{plan.kv_lens} and {plan.q_lens}",
        )


def product_ops(weights: LayerWeights) -> tuple[str, ...]:
    """The ops that multiply by the up-projection."""
    return ("quantize_fp8", "scaled_mm_fp8") if weights.up.is_fp8 else ("batched_matmul",)


def select_kernels(
    ops: tuple[str, ...],
    q: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    mask: Mask,
    backend: Backend,
    *,
    heads: int | None = None,
) -> None:
    """Select the kernels of `ops`, so that an unsupported step fails before the first write.

    heads  of the queries; None: the geometry's
    """
    if torch.compiler.is_compiling():
        return
    g = weights.up.geometry
    problem = Problem(
        *device_facts(q.device),
        dtype=str(q.dtype),
        format=batch.cache.format,
        heads=g.num_heads if heads is None else heads,
        page_size=batch.cache.page_size,
        row=g.row,
        head_widths=(g.qk_nope_head_dim, g.qk_rope_head_dim, g.v_head_dim),
        mask=mask.kind,
    )
    for op in ops:
        selection.select(op, problem, backend)
