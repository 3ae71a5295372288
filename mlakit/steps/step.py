"""`mla_step`: one step over a batch in which some requests decode and others prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mlakit.cache import from_host, select_requests
from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import CAUSAL
from mlakit.plan import ContextPlan, DecodePlan, DecodePlanTensors, EvenSplit, plan_context
from mlakit.steps.batch import CachedBatch, LayerWeights
from mlakit.steps.checks import (
    StepLengths,
    check_out,
    check_overwritten,
    check_plan_lengths,
    check_step,
    select_kernels,
)
from mlakit.steps.decode import check_absorbed_attention, decode_branch
from mlakit.steps.prefill import prefill_branch, prefill_ops

DECODE_THRESHOLD = 8  # a request with at most this many new tokens decodes


@dataclass(frozen=True)
class StepPlan:
    """The requests of a mixed batch that decode and those that prefill, for all layers.

    kv_lens  tokens of each request, including those of the step
    q_lens   new tokens of the step, per request
    decode   the requests that decode; requests without new tokens are in neither list
    prefill  the requests that prefill
    context  the chunks of their cached context
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
    decode_threshold: int = DECODE_THRESHOLD,
    max_context_rows: int | None = None,
) -> StepPlan:
    """Requests with at most `decode_threshold` new tokens decode, the others prefill.

    kv_lens  tokens of each request, including those of the step
    q_lens   new tokens of the step, per request
    """
    dims = Dims("plan_step")
    threshold = dims.integer("decode_threshold", decode_threshold, 0)
    checked = plan_context(kv_lens, q_lens)
    lengths, new = checked.kv_lens, checked.q_lens
    prefill = tuple(b for b, n in enumerate(new) if n > threshold)
    return StepPlan(
        kv_lens=lengths,
        q_lens=new,
        decode=tuple(b for b, n in enumerate(new) if 0 < n <= threshold),
        prefill=prefill,
        context=plan_context(
            [lengths[b] for b in prefill], [new[b] for b in prefill], max_rows=max_context_rows
        ),
    )


def mla_step(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    plan: StepPlan | None = None,
    decode_plan: DecodePlan | DecodePlanTensors | EvenSplit | None = None,
    decode_threshold: int | None = None,
    max_context_rows: int | None = None,
    overwrite_q: bool = False,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """One causal step over a mixed batch: requests with few new tokens decode, others prefill.

    q            [tokens, heads, D_N + D_R], not modified unless `overwrite_q`
    kv           [tokens, D_C + D_R] raw latents
    plan         `plan_step` of the step, shared by all layers; required on a GPU. Without one,
                 `decode_threshold` (default 8) and `max_context_rows` go into the plan made here
    decode_plan  as `plan` of `decode_branch`, shared by all layers, for a batch in which every
                 request decodes; None: each layer makes its own
    overwrite_q  the rope columns of q may be rotated in place, which saves a copy of the prompts' q

    Returns out [tokens, heads, D_V] in q's dtype. Padding as in `CachedBatch`.
    """
    dims = Dims("mla_step")
    lengths = check_step(dims, q, kv, weights, batch, CAUSAL)
    plan = _step_plan(dims, batch, plan, decode_threshold, max_context_rows, lengths)
    if plan.prefill and decode_plan is not None:
        dims.fail("decode_plan", "be None where a request prefills", type(decode_plan).__name__)
    if plan.decode or not plan.prefill:
        check_absorbed_attention(
            *(dims, q, batch, lengths, None, None, CAUSAL, decode_plan), plan_name="decode_plan"
        )
    if overwrite_q and plan.prefill:
        check_overwritten(dims, q)
    out = check_out(dims, out, q.dtype)
    if not plan.prefill:
        return decode_branch(q, kv, weights, batch, plan=decode_plan, out=out, backend=backend)
    select_kernels(prefill_ops(weights), q, weights, batch, CAUSAL, backend)
    if plan.decode:
        own, decoding = _select(batch, plan.decode, plan)
        _into(
            out,
            own,
            lambda q, kv, out: decode_branch(q, kv, weights, decoding, out=out, backend=backend),
            q,
            kv,
        )
    own, prefilling = _select(batch, plan.prefill, plan)
    is_copied = isinstance(own, Tensor)
    _into(
        out,
        own,
        lambda q, kv, out: prefill_branch(
            q if overwrite_q or is_copied else q.clone(memory_format=torch.contiguous_format),
            kv,
            weights,
            prefilling,
            plan=plan.context,
            out=out,
            backend=backend,
        ),
        q,
        kv,
    )
    return out


def _into(
    out: Tensor,
    own: slice | Tensor,
    branch: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    q: Tensor,
    kv: Tensor,
) -> None:
    """Write branch(q, kv, out) of the tokens `own` to their rows of `out`."""
    if isinstance(own, slice):
        branch(q[own], kv[own], out[own])
    else:
        out.index_copy_(0, own, branch(q.index_select(0, own), kv.index_select(0, own), None))


def _step_plan(
    dims: Dims,
    batch: CachedBatch,
    plan: StepPlan | None,
    decode_threshold: int | None,
    max_rows: int | None,
    lengths: StepLengths | None,
) -> StepPlan:
    """The caller's plan, checked if the lengths are known; otherwise a new plan."""
    if plan is not None:
        dims.instance("plan", plan, StepPlan)
        choices = {"decode_threshold": decode_threshold, "max_context_rows": max_rows}
        for name, choice in choices.items():
            dims.require(choice is None, name, "be None if plan is given", choice)
        check_plan_lengths(dims, StepLengths(plan.kv_lens, plan.q_lens), batch, lengths)
        must = f"be made for {dims['tokens']} new tokens at most"
        dims.require(sum(plan.q_lens) <= dims["tokens"], "plan", must, sum(plan.q_lens))
        return plan
    if lengths is None:
        dims.fail("plan", "be given if lengths are not on the host (plan_step)", None)
    threshold = DECODE_THRESHOLD if decode_threshold is None else decode_threshold
    return plan_step(*lengths, decode_threshold=threshold, max_context_rows=max_rows)


def _select(
    batch: CachedBatch, requests: Sequence[int], plan: StepPlan
) -> tuple[slice | Tensor, CachedBatch]:
    """Return (tokens, batch) of some requests, without a synchronisation; tokens that follow each
    other are a slice, so that nothing is copied."""
    device = batch.q_starts.device
    ranges = list(pairwise(accumulate(plan.q_lens, initial=0)))
    first, last = ranges[requests[0]][0], ranges[requests[-1]][1]
    count = sum(plan.q_lens[b] for b in requests)
    own: slice | Tensor = slice(first, last)
    if count < last - first:
        tokens = torch.cat([torch.arange(*ranges[b], device="cpu") for b in requests])
        own = from_host(tokens, torch.int64, device)
    if len(requests) == len(plan.kv_lens):
        return own, batch
    q_starts = list(accumulate((plan.q_lens[b] for b in requests), initial=0))
    kv_lens = [plan.kv_lens[b] for b in requests]
    return own, CachedBatch(
        batch.cache,
        select_requests(batch.page_table, requests, kv_lens),
        batch.kv_lens[from_host(list(requests), torch.int64, device)],
        from_host(q_starts, batch.q_starts.dtype, device),
        batch.layer,
    )
