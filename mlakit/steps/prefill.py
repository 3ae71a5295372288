"""`prefill_branch`: append, expand the latents to K and V, attend.

`prefill_attend` is the same without the append.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import CAUSAL, NULL, Mask
from mlakit.ops import mla_prefill
from mlakit.ops._checks import check_mask, check_sink
from mlakit.plan import ContextPlan, plan_context
from mlakit.steps.batch import CachedBatch, LayerWeights, append_tokens
from mlakit.steps.checks import (
    StepLengths,
    check_attention,
    check_out,
    check_overwritten,
    check_plan_lengths,
    check_step,
    product_ops,
    select_kernels,
)
from mlakit.steps.context import (
    WORKSPACE_BYTES,
    Expanded,
    KeyRange,
    Part,
    PartialResults,
    divided,
    expand_ahead,
    pick_part_sizes,
    read_keys,
)
from mlakit.steps.weights import UpProjection


def prefill_branch(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    mask: Mask = CAUSAL,
    plan: ContextPlan | None = None,
    max_context_rows: int | None = None,
    max_workspace_bytes: int = WORKSPACE_BYTES,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Append the new tokens, expand the keys they see, attend.

        [k_nope | v] = c W_UKVᵀ      out = softmax([q_nope | q_rope]·[k_nope | k_rope] · scale) v

    q                [tokens, heads, D_N + D_R]; its rope columns are rotated in place
    kv               [tokens, D_C + D_R] raw latents
    plan             `plan_context` of the step, shared by all layers; required on a GPU, where a
                     plan made here would synchronise
    max_context_rows cached keys per chunk for a plan made here; None: as the workspace allows. The
                     results over the new tokens and over each chunk, in q's dtype, are merged in
                     float32. A window or chunk mask reads only its own keys, in one chunk
    max_workspace_bytes   for K and V: chunks that need more are divided, by keys and by heads

    Returns out [tokens, heads, D_V] in q's dtype; 0 for a query that sees no key.
    """
    dims = Dims("prefill_branch")
    check_mask(dims.op, mask)
    lengths = check_step(dims, q, kv, weights, batch, mask)
    check_overwritten(dims, q)
    plan = _context_plan(dims, batch, plan, max_context_rows, lengths)
    room = dims.integer("max_workspace_bytes", max_workspace_bytes, 1)
    out = check_out(dims, out, q.dtype)
    select_kernels(prefill_ops(weights), q, weights, batch, mask, backend)
    q_rope = q[..., weights.up.geometry.qk_nope_head_dim :]
    append_tokens(q_rope, kv, weights, batch, q_rope_out=q_rope, backend=backend)
    attention = Attention(weights.up, batch, weights.softmax_scale, weights.sink, room, backend)
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
    max_workspace_bytes: int = WORKSPACE_BYTES,
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
    plan, max_context_rows, max_workspace_bytes   as in `prefill_branch`

    Returns out [tokens, heads, D_V] in q's dtype and lse [tokens, heads] float32, as `mla_prefill`
    does; where nothing was attended, out is 0 and lse −inf.
    """
    dims = Dims("prefill_attend")
    check_mask(dims.op, mask)
    lengths = check_attention(dims, q, up, batch, mask)
    plan = _context_plan(dims, batch, plan, max_context_rows, lengths)
    room = dims.integer("max_workspace_bytes", max_workspace_bytes, 1)
    check_sink(dims, sink)
    dims.finite("softmax_scale", softmax_scale)
    out = check_out(dims, out, q.dtype)
    attention = Attention(up, batch, softmax_scale, sink, room, backend)
    return out, _attend(q, attention, plan, mask, out)


@dataclass(frozen=True)
class Attention:
    """The arguments of attention that all parts of a step's context share."""

    up: UpProjection
    batch: CachedBatch
    softmax_scale: float
    sink: Tensor | None
    workspace_bytes: int
    backend: Backend

    def expander(self, dtype: torch.dtype) -> Callable[[Part, Tensor], Expanded]:
        """Makes K and V of a part, in memory of a buffer."""
        layer = self.batch.cache.layer(self.batch.layer)
        row = layer.codec.row
        read: dict[KeyRange, tuple[Tensor, Tensor]] = {}  # of the last part: the next may share it

        def expand(part: Part, buffer: Tensor) -> Expanded:
            if part.keys not in read:
                read.clear()
                read[part.keys] = read_keys(layer, self.batch.page_table, part.keys, dtype)
            rows, kv_starts = read[part.keys]
            latent, k_rope = rows.split([row.kv_lora_rank, row.qk_rope_head_dim], dim=-1)
            k_nope, v = self.up.expand(
                latent, heads=part.heads, buffer=buffer, backend=self.backend
            )
            return Expanded(k_nope, k_rope, v, kv_starts)

        return expand


def prefill_ops(weights: LayerWeights) -> tuple[str, ...]:
    """The ops that `prefill_branch` calls after the append."""
    return (*product_ops(weights), "mla_prefill", "merge_states")


def _context_plan(
    dims: Dims,
    batch: CachedBatch,
    plan: ContextPlan | None,
    max_rows: int | None,
    lengths: StepLengths | None,
) -> ContextPlan:
    """The caller's plan, checked if the lengths are known; otherwise a new plan."""
    if plan is not None:
        dims.instance("plan", plan, ContextPlan)
        dims.require(max_rows is None, "max_context_rows", "be None if plan is given", max_rows)
        check_plan_lengths(dims, StepLengths(plan.kv_lens, plan.q_lens), batch, lengths)
        return plan
    if lengths is None:
        dims.fail("plan", "be given if lengths are not on the host (plan_context)", None)
    return plan_context(*lengths, max_rows=max_rows)


def _attend(q: Tensor, attention: Attention, plan: ContextPlan, mask: Mask, out: Tensor) -> Tensor:
    """Attention of rotated q over keys expanded from the cache, part by part, into `out`; gives
    lse."""
    up, sink = attention.up, attention.sink
    sizes = pick_part_sizes(
        up.geometry,
        tokens=len(q),
        itemsize=q.element_size(),
        workspace_bytes=attention.workspace_bytes,
        head_group=up.head_group,
    )
    ranges = key_ranges(plan, mask, sizes.max_rows)
    parts = [part for keys in ranges for part in sizes.parts(keys)]
    merged = PartialResults(q, out, sink if len(ranges) > 1 else None, attention.backend)
    partial, lse = merged.room(is_only=len(ranges) == 1)
    for part, expanded in expand_ahead(parts, attention.expander(q.dtype), sizes, q):
        if part.heads.start == 0 and part is not parts[0]:
            partial, lse = merged.room()
        own = (slice(None), part.heads)
        mla_prefill(
            q[own],
            expanded.k_nope,
            expanded.k_rope,
            expanded.v,
            attention.batch.q_starts,
            expanded.kv_starts,
            softmax_scale=attention.softmax_scale,
            mask=part.keys.mask,
            sink=None if sink is None or len(ranges) > 1 else sink[part.heads],
            out=partial[own],
            lse=lse[own],
            backend=attention.backend,
        )
    return merged.finish()


def key_ranges(plan: ContextPlan, mask: Mask, max_rows: int) -> list[KeyRange]:
    """The keys of each partial result: those of the new tokens, then the context in chunks."""
    after = plan.kv_lens
    before = tuple(high - new for high, new in zip(after, plan.q_lens, strict=True))
    if mask not in (CAUSAL, NULL):
        # the mask depends on distances or on whole chunks: it may start at the first visible key
        return [KeyRange(tuple(mask.first_visible_keys(before, after)), after, mask)]
    # the mask applies among the new tokens; they all see the whole context
    ranges = [KeyRange(before, after, mask)]
    for chunk in plan.chunks:
        for part in divided(chunk, max_rows):
            first, last = zip(*part, strict=True)
            ranges.append(KeyRange(first, last, NULL))
    return ranges
