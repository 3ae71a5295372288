"""`decode_branch`: append, absorb the up-projection into q, attend to the cache, project up.

`decode_attend` is the same without the append.
"""

from __future__ import annotations

from torch import Tensor

from mlakit.cache import UNSHARDED, KVShard
from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import CAUSAL, Mask
from mlakit.ops import mla_decode, sparse_mla
from mlakit.ops._checks import (
    as_shard,
    check_mask,
    check_row_lists,
    check_shard,
    check_sink,
)
from mlakit.ops.decode import check_plan, check_plan_sizes, check_plan_type
from mlakit.plan import DecodePlan, DecodePlanTensors, EvenSplit
from mlakit.steps.batch import CachedBatch, LayerWeights, append_tokens
from mlakit.steps.checks import (
    StepLengths,
    check_attention,
    check_out,
    check_step,
    select_kernels,
)
from mlakit.steps.weights import UpProjection


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
    rows       [tokens, topk] physical rows: attend to these only (`sparse_mla`); `mask` must then
               be left at its default
    topk_lens  [tokens] int32 valid entries of `rows`
    plan       as in `mla_decode`, for the batch's kv_lens; with `rows` an `EvenSplit`

    Returns out [tokens, heads, D_V] in q's dtype; 0 for a query that sees no key.
    """
    dims = Dims("decode_branch")
    check_mask(dims.op, mask)
    lengths = check_step(dims, q, kv, weights, batch, mask if rows is None else None)
    check_absorbed_attention(dims, q, batch, lengths, rows, topk_lens, mask, plan)
    out = check_out(dims, out, q.dtype)
    absorbed, q_rope, rotated = absorb(q, weights, backend)
    attention = "mla_decode" if rows is None else "sparse_mla"
    select_kernels((attention,), q, weights, batch, mask, backend)
    append_tokens(q_rope, kv, weights, batch, q_rope_out=rotated, backend=backend)
    lists, scale, sink = (rows, topk_lens), weights.softmax_scale, weights.sink
    q_parts = (absorbed, None)
    _attend(q_parts, weights.up, batch, scale, lists, mask, plan, out, backend, sink=sink)
    return out


def decode_attend(
    q: Tensor,
    up: UpProjection,
    batch: CachedBatch,
    *,
    softmax_scale: float,
    rows: Tensor | None = None,
    topk_lens: Tensor | None = None,
    mask: Mask = CAUSAL,
    sink: Tensor | None = None,
    kv_shard: tuple[int, int, int] | None = None,
    plan: DecodePlan | DecodePlanTensors | EvenSplit | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """`decode_branch` after its append: absorb the up-projection, attend to the cache, project up.

    For engines that rotate queries and fill the cache themselves (`append_rows`). Nothing but the
    results is written.

    q          [tokens, heads, D_N + D_R], its rope columns rotated
    up         of the layer; its heads are those of q
    batch      requests whose new tokens are in the cache
    rows, topk_lens, mask, plan   as in `decode_branch`
    sink       [heads] float32 logit that joins out's denominator only
    kv_shard   (rank, world, interleave), as in `mla_decode`; `merge_states` of all ranks is then
               the attention, and takes the sink; not with rows

    Returns out [tokens, heads, D_V] in q's dtype and lse [tokens, heads] float32, as `mla_decode`
    does; where nothing was attended, out is 0 and lse −inf.
    """
    dims = Dims("decode_attend")
    check_mask(dims.op, mask)
    shard = as_shard(dims.op, kv_shard)
    check_shard(dims, shard)
    lengths = check_attention(dims, q, up, batch, mask if rows is None else None, shard)
    check_absorbed_attention(dims, q, batch, lengths, rows, topk_lens, mask, plan, shard)
    if rows is not None:
        dims.require(shard.world == 1, "kv_shard", "be None with rows, which are local", kv_shard)
    check_sink(dims, sink)
    dims.finite("softmax_scale", softmax_scale)
    out = check_out(dims, out, q.dtype)
    g = up.geometry
    q_nope, q_rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)
    latent = q.new_empty(*q.shape[:2], g.kv_lora_rank)
    up.w_uk_t.apply(q_nope, out=latent, backend=backend)
    lists = (rows, topk_lens)
    lse = _attend(
        *((latent, q_rope), up, batch, softmax_scale, lists, mask, plan, out, backend),
        sink=sink,
        kv_shard=shard,
    )
    return out, lse


def absorb(q: Tensor, weights: LayerWeights, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """Return (absorbed [tokens, heads, D_C + D_R], the rope columns of q, those of `absorbed`).

    The latent columns of `absorbed` are q_nope W_UK; its rope columns are not written.
    """
    g = weights.up.geometry
    q_nope, q_rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)
    absorbed = q.new_empty(*q.shape[:2], g.row.width)
    latent, rotated = absorbed.split([g.kv_lora_rank, g.qk_rope_head_dim], dim=-1)
    weights.up.w_uk_t.apply(q_nope, out=latent, backend=backend)
    return absorbed, q_rope, rotated


def check_absorbed_attention(
    dims: Dims,
    q: Tensor,
    batch: CachedBatch,
    lengths: StepLengths | None,
    rows: Tensor | None,
    topk_lens: Tensor | None,
    mask: Mask,
    plan: DecodePlan | DecodePlanTensors | EvenSplit | None,
    shard: KVShard = UNSHARDED,
    *,
    plan_name: str = "plan",
) -> None:
    """Check what `mla_decode` or `sparse_mla` would refuse after the append."""
    check_plan_type(dims, plan_name, plan)
    depends_on_lengths = isinstance(plan, (DecodePlan, DecodePlanTensors))
    stored = batch.cache.payload.dtype
    if stored in FLOATS:
        dims.dtype("q", q, stored)
    if rows is not None:
        check_row_lists(dims, "rows", rows, "topk_lens", topk_lens)
        dims.require(mask == CAUSAL, "mask", "be left at its default with rows", mask)
        dims.require(not depends_on_lengths, plan_name, "be an EvenSplit with rows", "a DecodePlan")
        return
    dims.require(topk_lens is None, "topk_lens", "be None without rows", "a tensor")
    if isinstance(plan, DecodePlanTensors):
        check_plan_sizes(dims, plan_name, plan)
        if lengths is not None:
            check_plan(dims, plan_name, plan, lengths.q_lens, lengths.kv_lens, mask, shard)
    elif isinstance(plan, DecodePlan):
        planned, size = len(plan.kv_lens), dims["batch"]
        dims.require(planned == size, plan_name, f"be made for a batch of {size}", planned)
        if lengths is not None:
            local = tuple(map(shard.local_count, lengths.kv_lens))
            must = f"be made for kv_lens {local}"
            dims.require(plan.kv_lens == local, plan_name, must, plan.kv_lens)


def _attend(
    q: tuple[Tensor, Tensor | None],
    up: UpProjection,
    batch: CachedBatch,
    softmax_scale: float,
    lists: tuple[Tensor | None, Tensor | None],
    mask: Mask,
    plan: DecodePlan | DecodePlanTensors | EvenSplit | None,
    out: Tensor,
    backend: Backend,
    *,
    sink: Tensor | None = None,
    kv_shard: KVShard | None = None,
) -> Tensor:
    """Attention of absorbed, rotated q over the cache, projected up into `out`; gives lse.

    q      (absorbed [tokens, heads, D_C + D_R], None), or its columns apart
    lists  (rows, topk_lens)
    """
    absorbed, q_rope = q
    rows, topk_lens = lists
    if rows is None:
        attended, lse = mla_decode(
            absorbed,
            batch.cache,
            batch.page_table,
            batch.kv_lens,
            q_rope=q_rope,
            q_starts=batch.q_starts,
            layer=batch.layer,
            softmax_scale=softmax_scale,
            mask=mask,
            sink=sink,
            kv_shard=kv_shard,
            plan=plan,
            backend=backend,
        )
    else:
        assert not isinstance(plan, (DecodePlan, DecodePlanTensors))
        attended, lse, _ = sparse_mla(
            absorbed,
            batch.cache,
            rows,
            q_rope=q_rope,
            topk_lens=topk_lens,
            sink=sink,
            layer=batch.layer,
            softmax_scale=softmax_scale,
            plan=plan,
            backend=backend,
        )
    up.w_uv.apply(attended, out=out, backend=backend)
    return lse
