"""Plans of `mla_decode`, made by the kernel that will run: once per step, for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, PageTable
from mlakit.dispatch import selection
from mlakit.dispatch.checks import FLOATS, Dims, UnsupportedError
from mlakit.dispatch.knobs import Backend, DecodeKernel
from mlakit.kernels.arguments import DecodePlanArguments
from mlakit.launch_cache.calls import made_current
from mlakit.launch_cache.plain import has_plain_memory
from mlakit.model.masks import CAUSAL, Mask
from mlakit.ops._checks import (
    as_shard,
    check_kv_lens,
    check_layer,
    check_mask,
    check_page_table,
    check_query_starts,
    check_shard,
)
from mlakit.ops.decode import NAME as PLANNED_OP
from mlakit.ops.decode import decode_problem
from mlakit.plan import DecodePlanTensors

NAME = "plan_mla_decode"


def plan_mla_decode(
    cache: PagedLatentCache,
    page_table: PageTable,
    kv_lens: Tensor,
    *,
    heads: int,
    num_tokens: int | None = None,
    q_starts: Tensor | None = None,
    dtype: torch.dtype | None = None,
    mask: Mask = CAUSAL,
    kv_shard: tuple[int, int, int] | None = None,
    out: DecodePlanTensors | None = None,
    backend: Backend | DecodeKernel = "auto",
) -> DecodePlanTensors:
    """The plan that `mla_decode` would make of these lengths, to share among the layers of a step.

    It is made where the lengths are, without waiting for them. Captured in a CUDA graph together
    with the calls that use it, it is made again at every replay, from the lengths at that time.
    Made outside of the graph, it is refilled with `out=` before each replay.

    kv_lens    as for `mla_decode`, like all arguments of the same name
    heads      of the queries
    num_tokens rows of q, padding included, where `q_starts` are given; else one per request
    dtype      of the queries; None: that of the cache, or bf16 where it is FP8
    out        an earlier plan of as many requests, query tokens and heads for the same kernel: it
               is written in place and returned
    backend    the one that will run: tiles, CTAs and rows of a partial are those of its kernel

    Calls that use the plan must have these lengths, this mask and this shard; another batch size or
    number of query tokens is an error. Calls with other heads, dtypes or backends are still
    correct, but slower. Their scratch is `max_partials` partials of `slot_rows` rows each, at most
    two per CTA. Under torch.compile make the plan outside: its shapes depend on the kernel.
    """
    dims = Dims(NAME)
    layer = check_layer(NAME, cache, 0)
    _refuse_wrappers(page_table, kv_lens=kv_lens, q_starts=q_starts)
    dims.same_device("cache", layer.payload)
    check_mask(NAME, mask)
    heads = dims.integer("heads", heads, 1)
    check_kv_lens(dims, kv_lens)
    batch = dims["batch"]
    check_page_table(dims, page_table, batch)
    if num_tokens is None:
        dims.require(q_starts is None, "num_tokens", "be given with q_starts", None)
        num_tokens = batch
    tokens = dims.integer("num_tokens", num_tokens, 0)
    starts = check_query_starts(dims, q_starts, tokens, batch, is_padded=True)
    shard = as_shard(NAME, kv_shard)
    check_shard(dims, shard)
    if not (out is None or isinstance(out, DecodePlanTensors)):
        got = type(out).__name__
        raise TypeError(f"{NAME}: out must be a plan of plan_mla_decode, got {got}")
    if out is not None:
        for field, tensor in zip(out._fields[:4], out[:4], strict=True):
            dims.same_device(f"out.{field}", tensor)
    if dtype is None:
        dtype = layer.payload.dtype if layer.payload.dtype in FLOATS else torch.bfloat16

    arguments = DecodePlanArguments(
        layer=layer,
        page_table=page_table,
        kv_lens=kv_lens,
        q_starts=starts,
        shard=shard,
        mask=mask,
        heads=heads,
        num_tokens=tokens,
        dtype=dtype,
        out=out,
    )
    spec = selection.select(PLANNED_OP, decode_problem(arguments), backend)
    with made_current(kv_lens.device):
        plan: DecodePlanTensors = spec.plan(arguments)
    return plan


def _refuse_wrappers(page_table: PageTable, **tensors: Tensor | None) -> None:
    """No tensor is unwrapped on the way to the kernel: this is no op of torch.library."""
    if isinstance(page_table, tuple):
        tables = {f"page_table[{i}]": part for i, part in enumerate(page_table)}
    else:
        tables = {"page_table": page_table}
    for name, tensor in (tables | tensors).items():
        if isinstance(tensor, Tensor) and not has_plain_memory(tensor):
            raise UnsupportedError(
                f"{NAME}: {name} must be a tensor whose memory a kernel can read, got a "
                f"{type(tensor).__name__}; make the plan outside of torch.compile and of modes"
            )
