"""Plans and launches `decode_kernel`: absorbed MLA attention over paged rows, portable Triton.

Work       a plan deals items, splits of a request's keys, to as many persistent CTAs as run at the
           same time (`decode_plan` makes one on the device where none is given). With an even split
           or deterministic=True every row tile is split on its own, and its splits depend on the
           request alone. `decode_kernel` attends, `decode_merge` merges the splits
Memory     float32 partials: with a plan its `max_partials` (2 per CTA if made on the device),
           else one per split that a request may have
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
import triton
from torch import Tensor

from mlakit.cache import CacheLayer, KVShard, PageTable
from mlakit.cache.page_table import capacity_of
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels import workspace
from mlakit.kernels.arguments import DecodeArguments, DecodePlanArguments, Splits, filled
from mlakit.kernels.decode_merge import (
    PartialArguments,
    RowTileSplits,
    clear_results,
    merge_partials,
    rows_per_slot,
)
from mlakit.kernels.decode_plan import NO_PLAN, PlanArguments, plan_decode
from mlakit.kernels.launch import Target, launch, target
from mlakit.kernels.triton.arguments import (
    cache_arguments,
    length_arguments,
    output_arguments,
    page_table_arguments,
    query_arguments,
)
from mlakit.kernels.triton.configs import DecodeConfig, pick_decode_config
from mlakit.kernels.triton.decode_kernel import Traits, mla_decode_kernel
from mlakit.kernels.triton.rows import (
    compute_types,
    latent_type,
    row_tiles,
    row_traits,
)
from mlakit.model.masks import Mask
from mlakit.plan import DecodePlanTensors, EvenSplit
from mlakit.plan.split_heuristic import DETERMINISTIC_SPLIT_KEYS


def mla_decode(a: DecodeArguments, out: Tensor, lse: Tensor) -> None:
    q_latent, q_rope, q_scale, q_starts = a.q, filled(a.q_rope), a.q_scale, filled(a.q_starts)
    layer, page_table, kv_lens, splits = a.layer, a.page_table, a.kv_lens, a.splits
    softmax_scale, mask, sink, shard = a.softmax_scale, a.mask, a.sink, a.shard
    tokens, heads, _ = q_latent.shape
    if tokens == 0 or heads == 0:
        return
    device = target(q_latent.device)
    types = compute_types(q_latent, q_rope, layer)
    batch = kv_lens.shape[0]
    config = _config(layer, page_table, heads, q_latent.dtype, device)
    tiles = row_tiles(layer, config.widest)
    padded_heads = triton.cdiv(heads, config.block_m) * config.block_m
    rows = padded_heads * triton.cdiv(tokens, batch)
    capacity = capacity_of(page_table, layer.page_size)
    if splits is None and not a.deterministic:
        splits = _plan(q_starts, kv_lens, shard, mask, config, device, padded_heads, rows, capacity)
    schedule = _schedule(
        splits,
        config,
        capacity=capacity,
        rows=rows,
        all_rows=padded_heads * tokens,
        padded_heads=padded_heads,
        most_queries=a.most_queries,
    )
    plan = splits if isinstance(splits, DecodePlanTensors) else None
    if plan is not None and plan.empty_requests.shape[0] > 0:
        clear_results(out, lse, q_starts)  # no item of a plan writes these
    partial_out = workspace.scratch(
        (schedule.partial_rows, out.shape[-1]), torch.float32, out.device
    )
    partial_lse = workspace.scratch((schedule.partial_rows,), torch.float32, out.device)
    cache = cache_arguments(layer)
    table, stride_table_request = page_table_arguments(page_table)
    launch(
        mla_decode_kernel,
        schedule.grid,
        # a scale of 0 would turn the −inf of a hidden key into NaN
        scale_log2=max(abs(softmax_scale) * log2(e) * cache.tensor_scale, SMALLEST_SCALE),
        heads=heads,
        padded_heads=padded_heads,
        window=mask.window,
        slot_rows=schedule.slot_rows,
        split_tiles=schedule.split_tiles,
        num_requests=batch,
        stride_table_request=stride_table_request,
        stride_lse_token=lse.stride(0),
        query=query_arguments(q_latent, q_rope, q_scale),
        cache=cache,
        page_table=table,
        lengths=length_arguments(q_starts, kv_lens),
        shard=shard,
        plan=PlanArguments(plan.items, plan.cta_starts, plan.partial_starts) if plan else NO_PLAN,
        partials=PartialArguments(partial_out, partial_lse),
        outputs=output_arguments(out, lse, sink=sink),
        TRAITS=Traits(
            MASK=mask.traits,
            IS_SHARDED=shard.world > 1,
            ROW=row_traits(layer, tiles, types, has_fp8=device.has_fp8),
            PAGE=layer.page_size,
            STRIDE_ROW=cache.stride_row,
            STRIDE_BESIDE_ROW=cache.stride_beside_row,
            IS_NEGATIVE=softmax_scale < 0,
            IS_UNCHAINED=config.is_unchained,
            CUTS_TILES=plan is not None and plan.tile % config.block_n > 0,
            ITEM_COLUMNS=plan.items.shape[1] if plan else 0,
            BM=config.block_m,
            BN=config.block_n,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # one pointer per key: on these GPUs the assembler spills rather than use more registers
        **({"maxnreg": 255} if device.arch in (89, 120) and table.starts is not None else {}),
    )
    if schedule.partial_rows == 0:
        return
    merge_partials(
        partial_out,
        partial_lse,
        partial_starts=plan.partial_starts if plan else None,
        row_tile_splits=None
        if plan
        else RowTileSplits(
            *schedule.grid, schedule.split_tiles, config.block_m, config.block_n, mask, shard
        ),
        q_starts=q_starts,
        kv_lens=kv_lens,
        padded_heads=padded_heads,
        slot_rows=schedule.slot_rows,
        is_batch_invariant=a.is_batch_invariant,
        sink=sink,
        out=out,
        lse=lse,
    )


def plan_mla_decode(a: DecodePlanArguments) -> DecodePlanTensors:
    """A plan, made on the device, for as many CTAs as run at the same time."""
    layer, page_table, kv_lens, heads = a.layer, a.page_table, a.kv_lens, a.heads
    device = target(kv_lens.device)
    config = _config(layer, page_table, heads, a.dtype, device)
    padded_heads = triton.cdiv(heads, config.block_m) * config.block_m
    rows = padded_heads * triton.cdiv(a.num_tokens, max(kv_lens.shape[0], 1))
    capacity = capacity_of(page_table, layer.page_size)
    sizes = (padded_heads, rows, capacity)
    return _plan(
        *(a.q_starts, kv_lens, a.shard, a.mask, config, device, *sizes),
        num_tokens=a.num_tokens,
        out=a.out,
    )


def _plan(
    q_starts: Tensor,
    kv_lens: Tensor,
    shard: KVShard,
    mask: Mask,
    config: DecodeConfig,
    device: Target,
    padded_heads: int,
    rows: int,  # of a request, on average
    capacity: int,
    *,
    num_tokens: int = 0,
    out: DecodePlanTensors | None = None,
) -> DecodePlanTensors:
    programs = max(rows // config.block_m, 1)  # of a CTA of the plan, one row tile each
    return plan_decode(
        q_starts,
        kv_lens,
        shard=shard,
        mask=mask,
        heads=padded_heads,
        num_ctas=max(device.num_sms * config.programs_per_sm // programs, 1),
        tile=config.block_n,
        min_tiles=config.min_tiles,
        slot_rows=rows,
        capacity=capacity,
        num_tokens=num_tokens,
        out=out,
    )


def _config(
    layer: CacheLayer, page_table: PageTable, heads: int, q_dtype: torch.dtype, device: Target
) -> DecodeConfig:
    return pick_decode_config(
        row_tiles(layer),
        rows=heads,
        page_size=1 if isinstance(page_table, tuple) else layer.page_size,
        format=layer.codec.traits,
        itemsize=latent_type(q_dtype, layer).itemsize,
        shared_bytes=device.shared_bytes,
        arch=device.arch,
    )


@dataclass(frozen=True)
class Schedule:
    """The grid and the partials, in numbers that do not depend on the lengths."""

    grid: tuple[int, int]  # (row tiles, CTAs of the plan), or (splits, row tiles)
    slot_rows: int  # rows of a partial
    num_slots: int
    split_tiles: int = 0  # key tiles of a split; 0: a request's splits are equal

    @property
    def partial_rows(self) -> int:
        return self.slot_rows * self.num_slots


def _schedule(
    splits: Splits,
    config: DecodeConfig,
    *,
    capacity: int,
    rows: int,
    all_rows: int,
    padded_heads: int,
    most_queries: int,
) -> Schedule:
    """The schedule of a plan, of an even split, or of splits that depend on a request's own length.

    capacity  keys that a request may have
    rows      row tiles' rows of a request, on average
    all_rows  rows of all requests
    """
    if isinstance(splits, DecodePlanTensors):
        num_ctas = splits.cta_starts.shape[0] - 1
        slot_rows = rows_per_slot(splits, most_queries=most_queries, padded_heads=padded_heads)
        row_tiles = triton.cdiv(rows, config.block_m)
        return Schedule((row_tiles, num_ctas), slot_rows, splits.max_partials)
    if isinstance(splits, EvenSplit):
        split_tiles, num_splits = 0, splits.num_splits
    else:
        split_tiles = max(DETERMINISTIC_SPLIT_KEYS // config.block_n, 1)
        # one tile more: a window may begin inside one
        num_splits = triton.cdiv(capacity // config.block_n + 2, split_tiles)
    num_tiles = all_rows // config.block_m
    slots = num_tiles * num_splits if num_splits > 1 else 0
    return Schedule((num_splits, num_tiles), config.block_m, slots, split_tiles)
