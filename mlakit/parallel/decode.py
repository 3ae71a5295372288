"""`context_parallel_decode`: every rank caches a shard of the tokens of every request.

DeepSeek's latents have one head, so tensor parallelism replicates the whole cache on every rank.
Context parallelism divides it: a rank appends and reads its own tokens only.
"""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import CAUSAL, Mask
from mlakit.ops import mla_decode, sparse_mla
from mlakit.ops._checks import check_mask, check_sink
from mlakit.parallel.context import ContextGroup
from mlakit.parallel.merge import MergeMethod
from mlakit.plan import DecodePlan, DecodePlanTensors, EvenSplit
from mlakit.steps import CachedBatch, LayerWeights
from mlakit.steps.batch import append_tokens
from mlakit.steps.checks import check_step, select_kernels
from mlakit.steps.decode import absorb, check_absorbed_attention

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
    rows: Tensor | None = None,
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
    rows        [tokens, topk] physical rows of this rank's cache: attend to these only, as
                `context_parallel_sparse_step` selects them; `mask` must be left at its default
    sink        [heads of q] float32 logit that joins out's denominator only, once; None: that of
                the weights
    plan        as in `mla_decode`, for this rank's lengths; with `rows` an `EvenSplit`

    Returns out [tokens, heads, D_V] in q's dtype: this rank's heads with "all_to_all", else all.
    0 for a query that sees no key.

    A refused call changes nothing. An error on one rank only, such as a page table that is too
    small, leaves the others waiting in a collective until its timeout.
    """
    dims = Dims(NAME)
    ranks = ContextGroup.checked(dims, group, interleave, method, is_head_sharded=is_head_sharded)
    check_mask(dims.op, mask)
    seen = mask if rows is None else None
    lengths = check_step(dims, q, kv, weights, batch, seen, shard=ranks.shard)
    check_absorbed_attention(dims, q, batch, lengths, rows, None, mask, plan, ranks.shard)
    check_sink(dims, sink)
    attention = "mla_decode" if rows is None else "sparse_mla"
    heads = ranks.attending_heads(dims)
    select_kernels((attention,), q, weights, batch, mask, backend, heads=heads)
    absorbed, q_rope, rotated = absorb(q, weights, backend)
    append_tokens(
        q_rope, kv, weights, batch, q_rope_out=rotated, kv_shard=ranks.shard, backend=backend
    )

    def attend(absorbed: Tensor) -> tuple[Tensor, Tensor]:
        if rows is not None:
            assert not isinstance(plan, (DecodePlan, DecodePlanTensors))
            latents, lse, _ = sparse_mla(
                absorbed,
                batch.cache,
                rows,
                layer=batch.layer,
                softmax_scale=weights.softmax_scale,
                plan=plan,
                backend=backend,
            )
            return latents, lse
        return mla_decode(
            absorbed,
            batch.cache,
            batch.page_table,
            batch.kv_lens,
            q_starts=batch.q_starts,
            layer=batch.layer,
            softmax_scale=weights.softmax_scale,
            mask=mask,
            kv_shard=ranks.shard,
            plan=plan,
            backend=backend,
        )

    return ranks.attend(absorbed, attend, weights, backend, sink=sink)
