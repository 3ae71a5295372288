"""`context_parallel_decode`: every rank caches a shard of the tokens of every request.

DeepSeek's latents have one head, so tensor parallelism repeats the whole cache on every rank.
Context parallelism divides it: a rank appends and reads its own tokens only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch import distributed as dist

from mlakit.branches import CachedBatch, LayerWeights
from mlakit.branches.batch import append_tokens
from mlakit.branches.checks import check_step, select_kernels
from mlakit.branches.decode import absorb, check_absorbed_attention
from mlakit.cache import KVShard
from mlakit.checks import Dims
from mlakit.knobs import Backend
from mlakit.masks import CAUSAL, Mask
from mlakit.ops import mla_decode
from mlakit.ops._checks import check_mask, check_shard, check_sink
from mlakit.parallel.groups import gather_over_ranks, group_rank
from mlakit.parallel.merge import (
    MergeMethod,
    check_divided_heads,
    check_method,
    merge_over_ranks,
)
from mlakit.plan import DecodePlan, DecodePlanTensors, EvenSplit

NAME = "context_parallel_decode"


def context_parallel_decode(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    group: dist.ProcessGroup | None = None,
    *,
    interleave: int = 1,
    method: MergeMethod | None = None,
    is_head_sharded: bool = False,
    mask: Mask = CAUSAL,
    sink: Tensor | None = None,
    plan: DecodePlan | DecodePlanTensors | EvenSplit | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`decode_branch` over a cache that the ranks of `group` share by tokens.

    Position p of every request is cached by rank (p // interleave) % world, as in vLLM
    (`cp_kv_cache_interleave_size`). A rank appends its tokens of the step, attends to its tokens,
    and the ranks merge their results.

    q, kv       as in `decode_branch`; of all new tokens, the same on all ranks
    batch       cache and page_table are this rank's: the pages hold `KVShard.local_count(kv_len)`
                tokens of a request. kv_lens and q_starts are those of whole requests
    interleave  consecutive tokens that one rank caches
    method      as in `merge_over_ranks`; None: "all_to_all" with sharded heads, else "all_gather"
    is_head_sharded
                False: q and weights have all heads. The ranks merge after W_UV, so D_V columns per
                head are sent instead of D_C: a quarter of the bytes for DeepSeek-V3.
                True: q and weights have this rank's heads, a tensor-parallel layer's. The absorbed
                queries of all heads are gathered; every rank gets the latents of its heads and
                multiplies them by its W_UV
    sink        [heads of q] float32 logit that joins out's denominator only, once
    plan        as in `mla_decode`, for this rank's lengths

    Returns out [tokens, heads, D_V] in q's dtype: this rank's heads with "all_to_all", else all.
    0 for a query that sees no key.

    A refused call changes nothing. An error on one rank only, such as a page table that is too
    small, leaves the others waiting in a collective until its timeout.
    """
    dims = Dims(NAME)
    rank, world = group_rank(NAME, group)
    if method is None:
        method = "all_to_all" if is_head_sharded else "all_gather"
    check_method(dims, method)
    check_mask(dims.op, mask)
    shard = KVShard(rank, world, interleave)
    check_shard(dims, shard)
    lengths = check_step(dims, q, kv, weights, batch, mask, shard=shard)
    check_absorbed_attention(dims, q, batch, lengths, None, None, mask, plan, shard)
    check_sink(dims, sink)
    heads = dims["heads"]
    if is_head_sharded:
        must = "be all_to_all with sharded heads"
        dims.require(method == "all_to_all", "method", must, method)
        heads *= world
    elif method == "all_to_all":
        check_divided_heads(dims, "q", heads, world)
        if sink is not None:
            sink = sink[rank * (heads // world) : (rank + 1) * (heads // world)]
    select_kernels(("mla_decode",), q, weights, batch, mask, backend, heads=heads)
    absorbed, q_rope, rotated = absorb(q, weights, backend)
    append_tokens(q_rope, kv, weights, batch, q_rope_out=rotated, kv_shard=shard, backend=backend)
    if is_head_sharded:
        absorbed = _all_heads(absorbed, group, world)
    attended, lse = mla_decode(
        absorbed,
        batch.cache,
        batch.page_table,
        batch.kv_lens,
        q_starts=batch.q_starts,
        layer=batch.layer,
        softmax_scale=weights.softmax_scale,
        mask=mask,
        kv_shard=shard,
        plan=plan,
        backend=backend,
    )
    options: dict[str, Any] = {"method": method, "sink": sink, "backend": backend}
    if is_head_sharded:  # a rank has W_UV of its own heads only
        attended, _ = merge_over_ranks(attended, lse, group, **options)
        return _projected(attended, weights, backend)
    return merge_over_ranks(_projected(attended, weights, backend), lse, group, **options)[0]


def _projected(attended: Tensor, weights: LayerWeights, backend: Backend) -> Tensor:
    """Latents [tokens, heads, D_C] times W_UV: [tokens, heads, D_V]."""
    out = attended.new_empty(*attended.shape[:2], weights.up.geometry.v_head_dim)
    return weights.up.w_uv.apply(attended, out=out, backend=backend)


def _all_heads(absorbed: Tensor, group: dist.ProcessGroup | None, world: int) -> Tensor:
    """Absorbed queries of all ranks' heads, rank after rank, from those of this rank."""
    if world == 1 or absorbed.numel() == 0:
        return absorbed.repeat(1, world, 1)
    by_rank = absorbed.new_empty(world, *absorbed.shape)
    gather_over_ranks(by_rank, absorbed[None], group)
    return by_rank.transpose(0, 1).flatten(1, 2)
