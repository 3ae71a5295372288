"""`prefill_branch`: append, expand the latents to K and V, attend.

`prefill_attend` is the same without the append.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mlakit.branches.batch import CachedBatch, LayerWeights, append_tokens
from mlakit.branches.checks import (
    StepLengths,
    check_attention,
    check_plan_lengths,
    check_step,
    select_kernels,
)
from mlakit.cache import gather_rows
from mlakit.checks import Dims
from mlakit.kernels.cpu.workers import on_one_thread
from mlakit.knobs import Backend
from mlakit.masks import CAUSAL, NULL, Mask
from mlakit.ops import merge_states, mla_prefill
from mlakit.ops._checks import check_mask, check_result, check_sink
from mlakit.plan import ContextPlan, plan_context
from mlakit.weights import UpProjection


def prefill_branch(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    mask: Mask = CAUSAL,
    plan: ContextPlan | None = None,
    max_context_rows: int | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Append the new tokens, expand the keys they see, attend.

        [k_nope | v] = c W_UKVᵀ      out = softmax([q_nope | q_rope]·[k_nope | k_rope] · scale) v

    q                [tokens, heads, D_N + D_R]; its rope columns are rotated in place
    kv               [tokens, D_C + D_R] raw latents
    plan             `plan_context` of the step, shared by all layers; required on a GPU, where a
                     plan made here would synchronise
    max_context_rows cached keys per chunk for a plan made here; None: one chunk. The results over
                     the new tokens and over each chunk, in q's dtype, are merged in float32. A
                     window or chunk mask reads only its own keys, in one chunk

    Returns out [tokens, heads, D_V] in q's dtype; 0 for a query that sees no key.
    """
    dims = Dims("prefill_branch")
    check_mask(dims.op, mask)
    lengths = check_step(dims, q, kv, weights, batch, mask)
    plan = _context_plan(dims, batch, plan, max_context_rows, lengths)
    out = check_result(dims, "out", out, "tokens", "heads", "D_V", dtype=q.dtype)
    select_kernels(prefill_ops(weights), q, weights, batch, mask, backend)
    q_rope = q[..., weights.up.geometry.qk_nope_head_dim :]
    append_tokens(q_rope, kv, weights, batch, q_rope_out=q_rope, backend=backend)
    attention = Attention(weights.up, batch, weights.softmax_scale, None, backend)
    _attend(q, attention, plan, mask, out)
    return out


def prefill_attend(
    q: Tensor,
    up: UpProjection,
    batch: CachedBatch,
    *,
    softmax_scale: float,
    mask: Mask = CAUSAL,
    sink: Tensor | None = None,
    plan: ContextPlan | None = None,
    max_context_rows: int | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """`prefill_branch` after its append: expand the keys that the new tokens see, attend.

    For engines that rotate queries and fill the cache themselves (`append_rows`). Keys and values
    are expanded from the rows as the cache stores them. Nothing but the results is written.

    q       [tokens, heads, D_N + D_R], its rope columns rotated
    up      of the layer; its heads are those of q
    batch   requests whose new tokens are in the cache
    sink    [heads] float32 logit that joins out's denominator only
    plan, max_context_rows   as in `prefill_branch`

    Returns out [tokens, heads, D_V] in q's dtype and lse [tokens, heads] float32, as `mla_prefill`
    does; where nothing was attended, out is 0 and lse −inf.
    """
    dims = Dims("prefill_attend")
    check_mask(dims.op, mask)
    lengths = check_attention(dims, q, up, batch, mask)
    plan = _context_plan(dims, batch, plan, max_context_rows, lengths)
    check_sink(dims, sink)
    dims.finite("softmax_scale", softmax_scale)
    out = check_result(dims, "out", out, "tokens", "heads", "D_V", dtype=q.dtype)
    lse = _attend(q, Attention(up, batch, softmax_scale, sink, backend), plan, mask, out)
    return out, lse


@dataclass(frozen=True)
class Attention:
    """What all chunks of a step's context have in common."""

    up: UpProjection
    batch: CachedBatch
    softmax_scale: float
    sink: Tensor | None
    backend: Backend


def prefill_ops(weights: LayerWeights) -> tuple[str, ...]:
    """The ops that `prefill_branch` calls after the append."""
    matmul = ("quantize_fp8", "scaled_mm_fp8") if weights.up.is_fp8 else ("batched_matmul",)
    return (*matmul, "mla_prefill", "merge_states")


def _context_plan(
    dims: Dims,
    batch: CachedBatch,
    plan: ContextPlan | None,
    max_rows: int | None,
    lengths: StepLengths | None,
) -> ContextPlan:
    """The caller's plan, checked if the lengths are known; otherwise a new plan."""
    if plan is not None:
        dims.require(max_rows is None, "max_context_rows", "be None if plan is given", max_rows)
        check_plan_lengths(dims, StepLengths(plan.kv_lens, plan.q_lens), batch, lengths)
        return plan
    if lengths is None:
        dims.fail("plan", "be given if lengths are not on the host (plan_context)", None)
    return plan_context(*lengths, max_rows=max_rows)


def _attend(q: Tensor, attention: Attention, plan: ContextPlan, mask: Mask, out: Tensor) -> Tensor:
    """Attention of rotated q over keys expanded from the cache, chunk by chunk, into `out`; gives
    lse."""
    after = plan.kv_lens
    before = [high - new for high, new in zip(after, plan.q_lens, strict=True)]
    if mask not in (CAUSAL, NULL):
        # the mask depends on distances or on whole chunks: it may start at the first visible key
        first = mask.first_visible_keys(before, after)
        return _attend_to_keys(q, attention, first, after, mask, out)[1]
    if not plan.chunks:
        return _attend_to_keys(q, attention, before, after, mask, out)[1]
    # the mask applies among the new tokens; they all see the whole context
    sink, part = attention.sink, replace(attention, sink=None)
    new, lse = _attend_to_keys(q, part, before, after, mask, None)
    # float32 between chunks, so that the result is rounded to q's dtype once
    merged = on_one_thread(new.float, q.device)
    for i, chunk in enumerate(plan.chunks):
        lows, highs = zip(*chunk, strict=True)
        partial, partial_lse = _attend_to_keys(q, part, lows, highs, NULL, None)
        partial = on_one_thread(partial.float, q.device)
        merge_states(
            [merged, partial],
            [lse, partial_lse],
            sink=sink if i == len(plan.chunks) - 1 else None,  # it counts once
            out=merged,
            lse=lse,
            backend=attention.backend,
        )
    on_one_thread(lambda: out.copy_(merged), q.device)
    return lse


def _attend_to_keys(
    q: Tensor,
    attention: Attention,
    first: Sequence[int],
    last: Sequence[int],
    mask: Mask,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries over the cached tokens [first, last) of every request."""
    batch = attention.batch
    layer = batch.cache.layer(batch.layer)
    rows, kv_starts = on_one_thread(
        lambda: gather_rows(layer, batch.page_table, first, last, q.dtype), q.device
    )
    row = layer.codec.row
    latent, k_rope = rows.split([row.kv_lora_rank, row.qk_rope_head_dim], dim=-1)
    k_nope, v = attention.up.expand(latent, backend=attention.backend)
    return mla_prefill(
        q,
        k_nope,
        k_rope,
        v,
        batch.q_starts,
        kv_starts,
        softmax_scale=attention.softmax_scale,
        mask=mask,
        sink=attention.sink,
        out=out,
        backend=attention.backend,
    )
