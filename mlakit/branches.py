"""The composed steps: what a serving layer does between its projections.

`prefill_branch` expands latents and attends in the expanded form, `decode_branch` absorbs the
up-projection into the query and attends to the cache itself, `mla_step` sends each request of a
mixed batch to the one that suits it. All of them append the step's new tokens to the cache first,
and attend to them as the cache holds them.

Whatever can be known to be wrong beforehand is found before anything is written: a step that was
refused can be mended and made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit import dispatch
from mlakit.cache import PagedLatentCache, PageTable, from_host, gather_rows, select_requests
from mlakit.checks import FLOATS, Dims, values_visible
from mlakit.geometry import Rope
from mlakit.kernels.cpu.workers import on_one_thread
from mlakit.knobs import Backend
from mlakit.masks import CAUSAL, NULL, Mask
from mlakit.ops import merge_states, mla_decode, mla_prefill, norm_rope_quant_append, sparse_mla
from mlakit.ops._arguments import (
    check_kv_lens,
    check_layer,
    check_mask,
    check_page_table,
    check_query_starts,
    check_result,
    check_row_lists,
    check_seen_rows,
)
from mlakit.ops._library import refuse_grad
from mlakit.ops.decode import check_plan
from mlakit.ops.norm_rope_quant import check_rope
from mlakit.plan import ContextPlan, DecodePlan, DecodePlanTensors, EvenSplit, plan_context
from mlakit.reprs import shapes_repr
from mlakit.specs import Problem, device_facts
from mlakit.weights import UpProjection

DECODE_UP_TO = 8  # new tokens of a request that still take the decode branch in `mla_step`


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """What one layer brings to a step, its projections to and from the hidden size aside."""

    up: UpProjection
    gamma: Tensor  # [D_C] weight of the latent's RMSNorm
    freqs: Tensor  # [positions, D_R] cos0, sin0, cos1, sin1, …
    softmax_scale: float
    epsilon: float = 1e-6
    rope: Rope = "interleaved"

    __repr__ = shapes_repr

    def __post_init__(self) -> None:
        dims = Dims("LayerWeights")
        g = self.up.geometry
        dims.bind("D_C", g.kv_lora_rank, "the geometry's kv_lora_rank")
        dims.bind("D_R", g.qk_rope_head_dim, "the geometry's qk_rope_head_dim")
        dims.match("gamma", self.gamma, "D_C", dtypes=FLOATS)
        dims.match("freqs", self.freqs, "positions", "D_R", dtypes=FLOATS)
        dims.finite("softmax_scale", self.softmax_scale)
        check_rope(dims, self.rope, self.epsilon)


@dataclass(frozen=True, eq=False)
class CachedBatch:
    """The requests of a step, and where their tokens are cached."""

    cache: PagedLatentCache
    page_table: PageTable
    kv_lens: Tensor  # [batch] int32 tokens the cache holds once this step's are in it
    q_starts: Tensor  # [batch + 1] int32 rows of q and kv per request, its newest tokens
    layer: int = 0

    __repr__ = shapes_repr


@dataclass(frozen=True)
class StepPlan:
    """Which requests of a mixed batch decode and which prefill, to share among layers.

    kv_lens  tokens of each request, those of the step included
    q_lens   new tokens of the step, per request
    decode   the requests that decode; those without new tokens are in neither list
    prefill  the requests that prefill
    context  how the prefilling ones go through their cached context
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    context: ContextPlan


def plan_step(
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    *,
    decode_up_to: int = DECODE_UP_TO,
    max_context_rows: int | None = None,
) -> StepPlan:
    """Send requests with up to `decode_up_to` new tokens to the decode branch, others to prefill.

    kv_lens  tokens of each request, those of the step included
    q_lens   new tokens of the step, per request

    The choice is made for each request alone: a long prompt does not drag the others along.
    """
    dims = Dims("plan_step")
    limit = dims.integer("decode_up_to", decode_up_to, 0)
    whole = plan_context(kv_lens, q_lens)  # for its checks
    lengths, new = whole.kv_lens, whole.q_lens
    prefill = tuple(b for b, n in enumerate(new) if n > limit)
    return StepPlan(
        kv_lens=lengths,
        q_lens=new,
        decode=tuple(b for b, n in enumerate(new) if 0 < n <= limit),
        prefill=prefill,
        context=plan_context(
            [lengths[b] for b in prefill], [new[b] for b in prefill], max_rows=max_context_rows
        ),
    )


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
    plan             `plan_context` of the step, to share among layers; required on a GPU, where
                     making one here would wait for the lengths
    max_context_rows cached keys expanded at a time, for a plan made here; None: all of them. The
                     results over the new tokens and over each such chunk, in q's dtype, are merged
                     in float32. A window or chunk mask needs no more than its own keys and takes
                     them in one piece

    Returns out [tokens, heads, D_V] in q's dtype; 0 where the mask shows a query nothing.
    """
    dims = Dims("prefill_branch")
    check_mask(dims.op, mask)
    lengths = _check_step(dims, q, kv, weights, batch, mask)
    plan = _context_plan(dims, batch, plan, max_context_rows, lengths)
    out = check_result(dims, "out", out, "tokens", "heads", "D_V", dtype=q.dtype)
    _select_kernels(_expanding_ops(weights), q, weights, batch, mask, backend)
    q_rope = q[..., weights.up.geometry.qk_nope_head_dim :]
    _append(q_rope, kv, weights, batch, q_rope_out=q_rope, backend=backend)
    _attend_expanded(q, weights, batch, plan, mask, out, backend)
    return out


def decode_branch(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    rows: Tensor | None = None,
    topk_lens: Tensor | None = None,
    mask: Mask = CAUSAL,
    plan: DecodePlan | DecodePlanTensors | EvenSplit | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Append the new tokens, absorb the up-projection, attend to the cache, project up.

        out = (softmax([q_nope W_UK | q_rope]·row · scale) c) W_UVᵀ

    q          [tokens, heads, D_N + D_R], not modified
    kv         [tokens, D_C + D_R] raw latents
    rows       [tokens, topk] physical rows: attend to these only (`sparse_mla`), in which case the
               lists decide what a query sees and `mask` must be left alone
    topk_lens  [tokens] int32 entries of `rows` that count
    plan       as in `mla_decode`, for the batch's kv_lens; with `rows` an `EvenSplit`

    Returns out [tokens, heads, D_V] in q's dtype; 0 where nothing was attended.
    """
    dims = Dims("decode_branch")
    check_mask(dims.op, mask)
    lengths = _check_step(dims, q, kv, weights, batch, mask if rows is None else None)
    _check_absorbed(dims, q, batch, lengths, rows, topk_lens, mask, plan)
    out = check_result(dims, "out", out, "tokens", "heads", "D_V", dtype=q.dtype)
    g = weights.up.geometry
    q_nope, q_rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)
    absorbed = q.new_empty(*q.shape[:2], g.row.width)
    latent, rotated = absorbed.split([g.kv_lora_rank, g.qk_rope_head_dim], dim=-1)
    weights.up.absorb.apply(q_nope, out=latent, backend=backend)
    attention = "mla_decode" if rows is None else "sparse_mla"
    _select_kernels((attention,), q, weights, batch, mask, backend)
    _append(q_rope, kv, weights, batch, q_rope_out=rotated, backend=backend)
    attended = _attend_absorbed(absorbed, weights, batch, rows, topk_lens, mask, plan, backend)
    return weights.up.values.apply(attended, out=out, backend=backend)


def mla_step(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    plan: StepPlan | None = None,
    decode_up_to: int | None = None,
    max_context_rows: int | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """One causal step over a mixed batch: short requests decode, long ones prefill.

    q     [tokens, heads, D_N + D_R], not modified
    kv    [tokens, D_C + D_R] raw latents
    plan  `plan_step` of the step, to share among layers; required on a GPU. Without one,
          `decode_up_to` (8 if not given) and `max_context_rows` go into the plan made here

    Returns out [tokens, heads, D_V] in q's dtype.
    """
    dims = Dims("mla_step")
    lengths = _check_step(dims, q, kv, weights, batch, CAUSAL)
    plan = _step_plan(dims, batch, plan, decode_up_to, max_context_rows, lengths)
    if plan.decode:
        _check_absorbed(dims, q, batch, lengths, None, None, CAUSAL, None)
    out = check_result(dims, "out", out, "tokens", "heads", "D_V", dtype=q.dtype)
    if not plan.prefill:
        return decode_branch(q, kv, weights, batch, out=out, backend=backend)
    _select_kernels(_expanding_ops(weights), q, weights, batch, CAUSAL, backend)
    if plan.decode:
        tokens, part = _subset(batch, plan.decode, plan)
        out[tokens] = decode_branch(q[tokens], kv[tokens], weights, part, backend=backend)
    tokens, part = _subset(batch, plan.prefill, plan)
    out[tokens] = prefill_branch(
        q[tokens], kv[tokens], weights, part, plan=plan.context, backend=backend
    )
    return out


class _Lengths(NamedTuple):
    """A step's lengths on the host, per request: all tokens, and how many of them are new."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]


def _check_step(
    dims: Dims,
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    mask: Mask | None,
) -> _Lengths | None:
    """Everything about a step that its ops would find wrong only after some of them have written.

    Binds tokens, heads and D_V. `mask` None: the cached context is not read by page table. Returns
    the lengths where they may be read.
    """
    for name, value, kind in (("weights", weights, LayerWeights), ("batch", batch, CachedBatch)):
        if not isinstance(value, kind):
            got = type(value).__name__
            raise TypeError(f"{dims.op}: {name} must be {kind.__name__}, got {got}")
    up, g = weights.up, weights.up.geometry
    layer = check_layer(dims.op, batch.cache, batch.layer)
    dims.bind("heads", g.num_heads, "the geometry's num_heads")
    dims.bind("D_N + D_R", g.qk_head_dim, "the geometry's qk_head_dim")
    dims.bind("D_C + D_R", g.row.width, "the geometry's row width")
    dims.bind("D_V", g.v_head_dim, "the geometry's v_head_dim")
    dims.match("q", q, "tokens", "heads", "D_N + D_R", dtypes=FLOATS)
    dims.match("kv", kv, "tokens", "D_C + D_R", dtypes=FLOATS)
    dims.same_device("weights", up.joint.weight)
    dims.same_device("cache", layer.payload)
    row = layer.codec.row
    dims.require(row == g.row, "cache", f"have rows like the geometry's, {g.row}", row)
    dims.require(
        row.v_width == g.kv_lora_rank,
        "cache",
        "have its latent columns as values, which are what W_UV takes",
        f"values of {row.v_width} columns",
    )
    if not up.is_fp8:
        dims.dtype("q", q, up.joint.weight.dtype)
    refuse_grad(dims.op, q=q, kv=kv, kv_b_proj=up.joint.weight, gamma=weights.gamma)
    kv_lens = check_kv_lens(dims, batch.kv_lens)
    starts = check_query_starts(dims, batch.q_starts, dims["tokens"], dims["batch"])
    check_page_table(dims, batch.page_table, dims["batch"])
    if kv_lens is None or not values_visible(starts):
        return None
    q_lens = starts.diff().tolist()
    dims.new_tokens_counted(kv_lens, q_lens)
    if mask is not None:
        check_seen_rows(dims, batch.page_table, layer, mask, starts, kv_lens)
    return _Lengths(tuple(kv_lens), tuple(q_lens))


def _expanding_ops(weights: LayerWeights) -> tuple[str, ...]:
    """What the prefill branch runs after its append."""
    products = ("quantize_fp8", "scaled_mm_fp8") if weights.up.is_fp8 else ("batched_matmul",)
    return (*products, "mla_prefill", "merge_states")


def _select_kernels(
    ops: tuple[str, ...],
    q: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    mask: Mask,
    backend: Backend,
) -> None:
    """Have the kernels chosen before the first write: a step that none takes changes nothing."""
    if torch.compiler.is_compiling():
        return
    g = weights.up.geometry
    problem = Problem(
        *device_facts(q.device),
        dtype=str(q.dtype),
        format=batch.cache.format,
        heads=g.num_heads,
        page_size=batch.cache.page_size,
        row=g.row,
        head_widths=(g.qk_nope_head_dim, g.qk_rope_head_dim, g.v_head_dim),
        mask=mask.kind,
    )
    for op in ops:
        dispatch.select(op, problem, backend)


def _check_absorbed(
    dims: Dims,
    q: Tensor,
    batch: CachedBatch,
    lengths: _Lengths | None,
    rows: Tensor | None,
    topk_lens: Tensor | None,
    mask: Mask,
    plan: DecodePlan | DecodePlanTensors | EvenSplit | None,
) -> None:
    """What the attention of the decode branch would refuse."""
    is_of_lengths = isinstance(plan, (DecodePlan, DecodePlanTensors))
    stored = batch.cache.payload.dtype
    if stored in FLOATS:
        dims.dtype("q", q, stored)
    if rows is not None:
        check_row_lists(dims, "rows", rows, "topk_lens", topk_lens)
        dims.require(mask == CAUSAL, "mask", "be left alone with rows, which decide", mask)
        dims.require(not is_of_lengths, "plan", "be an EvenSplit with rows", "a DecodePlan")
        return
    dims.require(topk_lens is None, "topk_lens", "come with rows", "none")
    if not is_of_lengths or lengths is None:
        return
    kv_lens, q_lens = lengths
    if isinstance(plan, DecodePlan):
        must = f"be made for kv_lens {kv_lens}"
        dims.require(plan.kv_lens == kv_lens, "plan", must, plan.kv_lens)
    elif isinstance(plan, DecodePlanTensors):
        check_plan(dims, plan, q_lens, kv_lens, mask)


def _context_plan(
    dims: Dims,
    batch: CachedBatch,
    plan: ContextPlan | None,
    max_rows: int | None,
    lengths: _Lengths | None,
) -> ContextPlan:
    """The caller's plan, checked as far as lengths are known; or one made from them."""
    if plan is not None:
        dims.require(max_rows is None, "max_context_rows", "be left to the plan given", max_rows)
        _check_plan(dims, plan.kv_lens, plan.q_lens, batch, lengths)
        return plan
    if lengths is None:
        dims.fail("plan", "be given where lengths are not on the host (plan_context)", None)
    return plan_context(*lengths, max_rows=max_rows)


def _step_plan(
    dims: Dims,
    batch: CachedBatch,
    plan: StepPlan | None,
    decode_up_to: int | None,
    max_rows: int | None,
    lengths: _Lengths | None,
) -> StepPlan:
    """As `_context_plan`, for a mixed batch."""
    if plan is not None:
        choices = {"decode_up_to": decode_up_to, "max_context_rows": max_rows}
        for name, choice in choices.items():
            dims.require(choice is None, name, "be left to the plan given", choice)
        _check_plan(dims, plan.kv_lens, plan.q_lens, batch, lengths)
        dims.require(
            sum(plan.q_lens) == dims["tokens"],
            "plan",
            f"be made for {dims['tokens']} new tokens",
            sum(plan.q_lens),
        )
        return plan
    if lengths is None:
        dims.fail("plan", "be given where lengths are not on the host (plan_step)", None)
    limit = DECODE_UP_TO if decode_up_to is None else decode_up_to
    return plan_step(*lengths, decode_up_to=limit, max_context_rows=max_rows)


def _check_plan(
    dims: Dims,
    kv_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    batch: CachedBatch,
    lengths: _Lengths | None,
) -> None:
    """A plan is for the lengths it was made from: a stale one would leave keys out."""
    size = len(batch.kv_lens)
    dims.require(len(kv_lens) == size, "plan", f"be made for a batch of {size}", len(kv_lens))
    if lengths is not None:
        dims.require(
            (kv_lens, q_lens) == tuple(lengths),
            "plan",
            f"be made for kv_lens {lengths.kv_lens} and q_lens {lengths.q_lens}",
            f"{kv_lens} and {q_lens}",
        )


def _subset(
    batch: CachedBatch, requests: Sequence[int], plan: StepPlan
) -> tuple[Tensor, CachedBatch]:
    """(token indices, batch) of some requests, from the lengths of the plan."""
    device = batch.q_starts.device
    ranges = list(pairwise(accumulate(plan.q_lens, initial=0)))
    tokens = torch.cat([torch.arange(*ranges[b], device="cpu") for b in requests])
    own = list(accumulate((plan.q_lens[b] for b in requests), initial=0))
    kv_lens = [plan.kv_lens[b] for b in requests]
    return from_host(tokens, torch.int64, device), CachedBatch(
        batch.cache,
        select_requests(batch.page_table, requests, kv_lens),
        batch.kv_lens[from_host(list(requests), torch.int64, device)],
        from_host(own, batch.q_starts.dtype, device),
        batch.layer,
    )


def _append(
    q_rope: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    q_rope_out: Tensor,
    backend: Backend,
) -> None:
    norm_rope_quant_append(
        q_rope,
        kv,
        weights.freqs,
        weights.gamma,
        batch.cache,
        batch.page_table,
        batch.kv_lens,
        batch.q_starts,
        epsilon=weights.epsilon,
        layer=batch.layer,
        rope=weights.rope,
        q_rope_out=q_rope_out,
        backend=backend,
    )


def _attend_absorbed(
    q: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    rows: Tensor | None,
    topk_lens: Tensor | None,
    mask: Mask,
    plan: DecodePlan | DecodePlanTensors | EvenSplit | None,
    backend: Backend,
) -> Tensor:
    """Attention of absorbed, rotated q over the cache, [tokens, heads, D_C]."""
    if rows is None:
        return mla_decode(
            q,
            batch.cache,
            batch.page_table,
            batch.kv_lens,
            q_starts=batch.q_starts,
            layer=batch.layer,
            softmax_scale=weights.softmax_scale,
            mask=mask,
            plan=plan,
            backend=backend,
        )[0]
    assert not isinstance(plan, (DecodePlan, DecodePlanTensors))
    return sparse_mla(
        q,
        batch.cache,
        rows,
        topk_lens=topk_lens,
        layer=batch.layer,
        softmax_scale=weights.softmax_scale,
        plan=plan,
        backend=backend,
    )[0]


def _attend_expanded(
    q: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    plan: ContextPlan,
    mask: Mask,
    out: Tensor,
    backend: Backend,
) -> None:
    """Attention of rotated q over keys expanded from the cache, chunk by chunk, into `out`."""
    after = plan.kv_lens
    before = [high - new for high, new in zip(after, plan.q_lens, strict=True)]
    if mask not in (CAUSAL, NULL):
        # such a mask goes by distance or by whole chunks, so it may be moved to the first key seen
        first = [
            mask.interval(low, high)[0] if high > low else high
            for low, high in zip(before, after, strict=True)
        ]
        _attend_rows(q, weights, batch, first, after, mask, out, backend)
        return
    if not plan.chunks:
        _attend_rows(q, weights, batch, before, after, mask, out, backend)
        return
    # the new tokens see each other through the mask, and all of the context
    new, lse = _attend_rows(q, weights, batch, before, after, mask, None, backend)
    # rounded to q's dtype once, however many chunks there are
    merged = on_one_thread(new.float, q.device)
    for chunk in plan.chunks:
        lows, highs = zip(*chunk, strict=True)
        part, part_lse = _attend_rows(q, weights, batch, lows, highs, NULL, None, backend)
        part = on_one_thread(part.float, q.device)
        merge_states([merged, part], [lse, part_lse], out=merged, lse=lse, backend=backend)
    on_one_thread(lambda: out.copy_(merged), q.device)


def _attend_rows(
    q: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    first: Sequence[int],
    last: Sequence[int],
    mask: Mask,
    out: Tensor | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the cached tokens [first, last) of every request, its queries the newest."""
    layer = batch.cache.layer(batch.layer)
    rows, kv_starts = on_one_thread(
        lambda: gather_rows(layer, batch.page_table, first, last, q.dtype), q.device
    )
    row = layer.codec.row
    latent, k_rope = rows.split([row.kv_lora_rank, row.qk_rope_head_dim], dim=-1)
    k_nope, v = weights.up.expand(latent, backend=backend)
    return mla_prefill(
        q,
        k_nope,
        k_rope,
        v,
        batch.q_starts,
        kv_starts,
        softmax_scale=weights.softmax_scale,
        mask=mask,
        out=out,
        backend=backend,
    )
