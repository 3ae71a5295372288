"""Absorbed attention of each request's newest tokens over its paged latent cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mlakit.cache import UNSHARDED, CacheLayer, KVShard, PagedLatentCache, PageTable
from mlakit.cache.page_table import capacity_of
from mlakit.dispatch import selection
from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend, DecodeKernel
from mlakit.dispatch.specs import Problem, Use, device_facts, num_sms
from mlakit.kernels.arguments import DecodeArguments, DecodePlanArguments, Splits
from mlakit.model.masks import CAUSAL, Mask
from mlakit.ops._checks import (
    as_shard,
    check_absorbed_query,
    check_kv_lens,
    check_layer,
    check_mask,
    check_page_table,
    check_query_starts,
    check_result,
    check_seen_rows,
    check_shard,
    check_sink,
    check_stored,
    is_heads_major,
    is_uniformly_strided,
    result_dtype,
)
from mlakit.ops._library import op
from mlakit.plan import DecodePlan, DecodePlanTensors, EvenSplit

NAME = "mla_decode"


def mla_decode(
    q: Tensor,
    cache: PagedLatentCache,
    page_table: PageTable,
    kv_lens: Tensor,
    *,
    softmax_scale: float,
    q_rope: Tensor | None = None,
    q_scale: Tensor | None = None,
    q_starts: Tensor | None = None,
    layer: int = 0,
    mask: Mask = CAUSAL,
    sink: Tensor | None = None,
    kv_shard: tuple[int, int, int] | None = None,
    plan: DecodePlan | DecodePlanTensors | EvenSplit | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    deterministic: bool = False,
    backend: Backend | DecodeKernel = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of the newest tokens of each request over its cached rows.

        score = q·row · softmax_scale    out = softmax(score) @ row[:v_width]

    q          [tokens, heads, D_C + D_R] bf16, fp16, float32 or e4m3: absorbed and rotated. With
               q_rope it is the absorbed part alone, [tokens, heads, D_C]
    q_rope     [tokens, heads, D_R] in q's dtype: the rotated part
    q_scale    [tokens] float32, multiplies q (for e4m3 queries)
    page_table [batch, max_pages] int32, or (kv_starts [batch + 1], slots); entries past a request's
               last page are not read
    kv_lens    [batch] int32 cached tokens, these queries included
    q_starts   [batch + 1] int32 rows of q per request; None means one query each. Rows after
               q_starts[-1] are padding: not read, and left as they are in out and lse
    sink       [heads] float32 logit that joins out's denominator only
    kv_shard   (rank, world, interleave): the cache holds only this rank's tokens of each request,
               those at positions p with (p // interleave) % world == rank; kv_lens stays global
    backend    auto, a backend, or one of its kernels by name: "hopper:m64_bf16"
    plan       how the keys are split (`plan_mla_decode`, `plan_decode`, its `tensors`,
               `EvenSplit`); never changes a result beyond float32 rounding

    Query i of a request with q_len queries sees keys 0 … kv_len − q_len + i (causal mask). Returns
    out [tokens, heads, v_width] in q's dtype (bf16 for e4m3) and lse [tokens, heads] float32; where
    nothing was attended, out is 0 and lse −inf.
    """
    cache_layer = check_layer(NAME, cache, layer)
    check_mask(NAME, mask)
    arguments = DecodeArguments(
        q=q,
        layer=cache_layer,
        page_table=page_table,
        kv_lens=kv_lens,
        q_rope=q_rope,
        q_scale=q_scale,
        q_starts=q_starts,
        most_queries=0,
        softmax_scale=softmax_scale,
        mask=mask,
        sink=sink,
        shard=UNSHARDED if kv_shard is None else as_shard(NAME, kv_shard),
        splits=None if plan is None else _splits(plan, cache_layer),
        deterministic=deterministic,
        backend=backend,
    )
    return _decode(arguments, out, lse)


def _empty(a: DecodeArguments) -> tuple[Tensor, Tensor]:
    out = a.q.new_empty(*a.q.shape[:2], a.layer.codec.row.v_width, dtype=result_dtype(a.q))
    return out, a.q.new_empty(a.q.shape[:2], dtype=torch.float32)


@op(NAME, fake=_empty)
def _decode(a: DecodeArguments, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    dims = Dims(NAME)
    q_latent, q_rope = check_absorbed_query(dims, a.q, a.q_rope, a.layer)
    check_stored(dims, a.layer)
    if a.q_scale is not None:
        dims.match("q_scale", a.q_scale, "tokens", dtypes=[torch.float32])
    lengths = check_kv_lens(dims, a.kv_lens)
    starts = check_query_starts(dims, a.q_starts, dims["tokens"], dims["batch"], is_padded=True)
    check_page_table(dims, a.page_table, dims["batch"])
    check_sink(dims, a.sink)
    scale = dims.finite("softmax_scale", a.softmax_scale)
    check_shard(dims, a.shard)
    if isinstance(a.splits, DecodePlanTensors):
        check_plan_sizes(dims, "plan", a.splits)
    if lengths is not None:
        check_seen_rows(dims, a.page_table, a.layer, a.mask, starts, lengths, a.shard)
        if isinstance(a.splits, DecodePlanTensors):
            check_plan(dims, "plan", a.splits, starts.diff().tolist(), lengths, a.mask, a.shard)
    dims.bind("v_width", a.layer.codec.row.v_width, "the cache's value width")
    axes = ("tokens", "heads", "v_width")
    out = check_result(dims, "out", out, *axes, dtype=result_dtype(a.q))
    lse = check_result(dims, "lse", lse, *axes[:2], dtype=torch.float32)

    scheduled = DecodePlanArguments(
        layer=a.layer,
        page_table=a.page_table,
        kv_lens=a.kv_lens,
        q_starts=starts,
        shard=a.shard,
        mask=a.mask,
        heads=dims["heads"],
        num_tokens=dims["tokens"],
        dtype=a.q.dtype,
    )
    checked = a._replace(
        q=q_latent,
        q_rope=q_rope,
        q_starts=starts,
        most_queries=1 if a.q_starts is None else dims["tokens"],
        softmax_scale=scale,
    )
    problem = decode_problem(
        scheduled,
        _uses(a, q_latent, q_rope),
        is_batch_invariant=a.is_batch_invariant,
    )
    selection.select(NAME, problem, a.backend).launch(checked, out, lse)
    return out, lse


def decode_problem(
    a: DecodePlanArguments,
    uses: Iterable[Use] = (),
    *,
    is_batch_invariant: bool = False,
) -> Problem:
    """Describe a call, or the plan of one, to dispatch."""
    uses = list(uses)
    if isinstance(a.page_table, tuple):
        uses.append(Use.FLAT_PAGE_TABLE)
    if a.shard.world > 1:
        uses.append(Use.KV_SHARD)
    payload, rope = a.layer.payload, a.layer.rope
    if not (is_uniformly_strided(payload) and (rope is None or is_uniformly_strided(rope))):
        uses.append(Use.UNALIGNED_CACHE)
    elif rope is not None and not _have_same_gaps(payload, rope):
        uses.append(Use.OTHER_ROPE_STEPS)
    return Problem(
        *device_facts(a.layer.payload.device),
        dtype=str(a.dtype),
        format=a.layer.codec.name,
        heads=a.heads,
        page_size=a.layer.page_size,
        row=a.layer.codec.row,
        mask=a.mask.kind,
        uses=tuple(uses),
        num_tokens=a.num_tokens,
        max_keys=capacity_of(a.page_table, a.layer.page_size),
        num_sms=num_sms(a.layer.payload.device),
        is_batch_invariant=is_batch_invariant,
    )


def _have_same_gaps(first: Tensor, second: Tensor) -> bool:
    """Return whether pages [pages, page_size, columns] of both are as many rows apart."""
    rows = (first.stride(0) * second.stride(1), second.stride(0) * first.stride(1))
    return first.shape[0] <= 1 or first.shape[1] == 1 or rows[0] == rows[1]


def _uses(a: DecodeArguments, q_latent: Tensor, q_rope: Tensor) -> Iterator[Use]:
    """Yield the uses of a call that a plan need not know."""
    if a.q_scale is not None:
        yield Use.Q_SCALE
    has_own_cuts = isinstance(a.splits, EvenSplit) or (a.deterministic and a.splits is None)
    if has_own_cuts and a.q_starts is not None:
        yield Use.FIXED_SPLITS
    if (q_latent.dtype, q_rope.dtype) == (torch.float8_e4m3fn, torch.bfloat16):
        yield Use.BF16_Q_ROPE
    elif q_rope.dtype != q_latent.dtype:
        yield Use.OTHER_Q_ROPE
    if q_latent.shape[0] > 0 and not (_is_addressable(q_latent) and _is_addressable(q_rope)):
        yield Use.UNALIGNED_QUERY


def _is_addressable(q: Tensor) -> bool:
    """Return whether TMA can copy tiles of these queries."""
    return is_uniformly_strided(q) or is_heads_major(q)


def _splits(plan: DecodePlan | DecodePlanTensors | EvenSplit | None, layer: CacheLayer) -> Splits:
    check_plan_type(Dims(NAME), "plan", plan)
    return plan.tensors(layer.payload.device) if isinstance(plan, DecodePlan) else plan


def check_plan_type(dims: Dims, name: str, plan: object) -> None:
    if plan is not None and not isinstance(plan, (DecodePlan, DecodePlanTensors, EvenSplit)):
        got = type(plan).__name__
        raise TypeError(
            f"{dims.op}: {name} must be a DecodePlan, its tensors or an EvenSplit, got {got}"
        )


def check_plan_sizes(dims: Dims, name: str, plan: DecodePlanTensors) -> None:
    """Check the sizes of a plan without reading it: the plan of another batch would make kernels
    write rows that do not exist."""
    same_batch = plan.partial_starts.shape[0] == dims["batch"] + 1
    dims.require(same_batch, name, "be made for this batch", "another batch size")
    tokens = dims["tokens"]
    same_tokens = plan.num_tokens in (0, tokens)
    dims.require(same_tokens, name, f"be made for {tokens} query tokens", plan.num_tokens)


def check_plan(
    dims: Dims,
    name: str,
    plan: DecodePlanTensors,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    mask: Mask,
    shard: KVShard = UNSHARDED,
) -> None:
    """A plan is for the lengths it was made from: a stale one would leave keys out."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in kv_lens]
    for request, first, last, _ in plan.host_items():
        dims.require(request < len(kv_lens), name, "be made for this batch", "another batch size")
        ranges[request].append((first, last))
    for request, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
        if q_len == 0:
            continue
        local = shard.local_count(kv_len)
        # keys that no query sees need no item
        low = shard.local_count(mask.interval(kv_len - q_len, kv_len)[0])
        end = max((last for _, last in ranges[request]), default=0)
        whole_tiles = max(-(-local // plan.tile), 1) * plan.tile
        planned = low + sum(
            max(min(last, local) - max(first, low), 0) for first, last in ranges[request]
        )
        dims.require(
            planned == local and end <= whole_tiles,
            name,
            f"be made for kv_lens[{request}] = {local} keys",
            end if end > whole_tiles else planned,
        )
