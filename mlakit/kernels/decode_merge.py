"""The merge kernel of a decode that was split over keys: float32 partials become results.

Maths      lse = log Σ_p exp lse_p;  out = Σ_p exp(lse_p − lse) · out_p, a sink in the denominator
Work       a program merges a few rows of a request that a plan split, or of a row tile that was
           split on its own; it reads several of their partials at a time, in the order of keys
Memory     float32 partials [slots, slot_rows, v_width], read once. Row r of a slot is head
           r % padded_heads of query r // padded_heads of the request (of the row tile)
Limits     a request with more rows than a slot was not split, whatever its plan says
Lineage    own design; ideas: split-KV flash decoding, programmatic dependent launch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.cache import UNSHARDED, KVShard
from mlakit.kernels.decode_plan import find_tile, key_tiles, load_lengths, own_split_tiles
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.arguments import length_arguments, output_arguments
from mlakit.kernels.triton.configs import pick_decode_merge_config
from mlakit.kernels.triton.primitives import merge_splits, store_merged
from mlakit.model.masks import NULL, Mask, MaskTraits
from mlakit.plan import DecodePlanTensors

PROGRAMS_PER_SM = 4  # that run at once
INVARIANT_SPLITS = 16  # of a request, whatever the batch
INVARIANT_QUERIES = 8  # of a request that is split: the last token and 7 drafts


@dataclass(frozen=True)
class RowTileSplits:
    """Splits of every row tile by itself, which are found again without a plan."""

    max_splits: int
    num_tiles: int  # row tiles of the batch
    split_tiles: int  # key tiles of a split; 0: all splits of a request alike
    block_m: int
    block_n: int
    mask: Mask
    shard: KVShard


# constants of a merge with a plan: masks and shards compile no further kernels
NO_SPLITS = RowTileSplits(0, 0, 0, 1, 1, NULL, UNSHARDED)


def rows_per_slot(plan: DecodePlanTensors, *, most_queries: int, padded_heads: int) -> int:
    """Return the rows of a slot: those the plan was made for; else room for as many queries as a
    request that is split may have.

    A request is split if its queries fit, so whether they do must not depend on the batch.
    """
    return plan.slot_rows or padded_heads * min(most_queries, INVARIANT_QUERIES)


def clear_results(out: Tensor, lse: Tensor, q_starts: Tensor) -> None:
    """Write the results of no keys for every query; padding after the queries stays as it is."""
    is_query = torch.arange(out.shape[0], device=out.device) < q_starts[-1]
    out.masked_fill_(is_query[:, None, None], 0.0)
    lse.masked_fill_(is_query[:, None], -torch.inf)


def merge_partials(
    partial_out: Tensor,  # [slots · slot_rows, v_width] float32
    partial_lse: Tensor,  # [slots · slot_rows] float32
    *,
    partial_starts: Tensor | None,  # [batch + 1] slots of each request, of a plan
    row_tile_splits: RowTileSplits | None = None,  # where there is no plan
    q_starts: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    padded_heads: int,  # rows of a query in a slot
    slot_rows: int,
    is_batch_invariant: bool,  # the bits of a request must not depend on the batch
    sink: Tensor | None,  # [heads] float32
    out: Tensor,  # [tokens, heads, v_width]
    lse: Tensor,  # [tokens, heads] float32
) -> None:
    """Write the rows of `out` and `lse` that were split; the others are not touched."""
    heads, v_width = out.shape[1:]
    batch = kv_lens.shape[0]
    splits = row_tile_splits or NO_SPLITS
    device = target(out.device)
    num_owners = batch if row_tile_splits is None else splits.num_tiles
    # a plan has two slots per CTA, at most
    expected_splits = partial_lse.shape[0] // max(2 * slot_rows * num_owners, 1)
    if is_batch_invariant:  # the order of the sums depends on how many splits are read at once
        expected_splits = INVARIANT_SPLITS
    config = pick_decode_merge_config(v_width=v_width, expected_splits=expected_splits)
    # padded heads have no rows to merge
    rows = slot_rows // padded_heads * heads if row_tile_splits is None else slot_rows
    row_groups = triton.cdiv(rows, config.rows)
    is_chained = device.has_pdl
    launch(
        _merge_partials_kernel,
        (min(num_owners * row_groups, PROGRAMS_PER_SM * device.num_sms),),
        num_owners=num_owners,
        row_groups=row_groups,
        heads=heads,
        padded_heads=padded_heads,
        window=splits.mask.window,
        slot_rows=slot_rows,
        split_tiles=splits.split_tiles,
        max_splits=splits.max_splits,
        num_requests=batch,
        stride_lse_token=lse.stride(0),
        partials=PartialArguments(partial_out, partial_lse),
        partial_starts=partial_starts,
        lengths=length_arguments(q_starts, kv_lens),
        shard=splits.shard,
        outputs=output_arguments(out, lse, sink=sink),
        TRAITS=Traits(
            MASK=splits.mask.traits,
            IS_SHARDED=splits.shard.world > 1,
            V_WIDTH=v_width,
            COLUMNS=triton.next_power_of_2(v_width),
            BM=splits.block_m,
            BN=splits.block_n,
            ROWS=config.rows,
            SPLITS=config.splits,
            IS_CHAINED=is_chained,
        ),
        num_warps=config.num_warps,
        # finding the splits again takes registers; without this the assembler spills
        **({} if row_tile_splits is None else {"maxnreg": 168}),
        **({"launch_pdl": True} if is_chained else {}),
    )


class PartialArguments(NamedTuple):
    """The partials of splits."""

    out: Tensor  # float32 [slots, slot_rows, V_WIDTH]
    lse: Tensor  # float32 [slots, slot_rows]


class Rows(NamedTuple):
    """Some rows of one owner, in the kernel."""

    first_slot: tl.tensor  # the owner's
    splits: tl.tensor
    slot_row: tl.tensor  # [ROWS], as are the others
    token: tl.tensor
    head: tl.tensor
    is_row: tl.tensor


class Traits(NamedTuple):
    """The constants that the kernel is compiled for."""

    MASK: MaskTraits
    IS_SHARDED: bool
    V_WIDTH: int
    COLUMNS: int  # V_WIDTH padded
    BM: int
    BN: int
    ROWS: int
    SPLITS: int  # of each row, read at the same time
    IS_CHAINED: bool  # PDL


# differ from call to call: specialised, each would compile further kernels
VARYING = [
    *("num_owners", "row_groups", "heads", "padded_heads", "window", "slot_rows", "split_tiles"),
    *("max_splits", "num_requests", "stride_lse_token"),
]


@triton.jit(do_not_specialize=VARYING)
def _merge_partials_kernel(
    num_owners,  # requests, or row tiles
    row_groups,  # of ROWS rows, of an owner
    heads,
    padded_heads,
    window,
    slot_rows,
    split_tiles,
    max_splits,
    num_requests,
    stride_lse_token,
    partials,  # `PartialArguments`
    partial_starts,  # of a plan; None: splits are `RowTileSplits`
    lengths,  # `LengthArguments`
    shard,  # `KVShard`
    outputs,  # `OutputArguments`
    TRAITS: tl.constexpr,
):
    """ROWS rows at a time of the requests (of the row tiles) that were split."""
    MASK: tl.constexpr = TRAITS.MASK
    IS_SHARDED: tl.constexpr = TRAITS.IS_SHARDED
    BM: tl.constexpr = TRAITS.BM
    BN: tl.constexpr = TRAITS.BN
    ROWS: tl.constexpr = TRAITS.ROWS
    if TRAITS.IS_CHAINED:
        gdc_launch_dependents()  # the next kernel waits for this one
    tasks = num_owners * row_groups
    if partial_starts is not None:
        tasks = tl.where(tl.load(partial_starts + num_requests) > 0, tasks, 0)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        owner = task // row_groups
        row = task % row_groups * ROWS + tl.arange(0, ROWS)
        if partial_starts is not None:
            first_slot = tl.load(partial_starts + owner)
            splits = tl.load(partial_starts + owner + 1) - first_slot
            q_first, q_len, _ = load_lengths(lengths, owner, owner >= 0)
            splits = tl.where(q_len * padded_heads > slot_rows, 0, splits)
            query, head = row // heads, row % heads
            slot_row = query * padded_heads + head
            is_row = query < q_len
        else:
            request, row_tile = find_tile(owner, lengths, num_requests, padded_heads, BM)
            q_first, q_len, kv_len = load_lengths(lengths, request, request >= 0)
            _, num_tiles = key_tiles(q_len, kv_len, window, shard, MASK, IS_SHARDED, BN)
            _, splits = own_split_tiles(num_tiles, split_tiles, max_splits)
            first_slot = owner * max_splits
            query = (row_tile * BM + row) // padded_heads
            head = (row_tile * BM + row) % padded_heads
            slot_row = row
            is_row = (row < BM) & (head < heads)
            splits = tl.where((request >= 0) & (splits > 1), splits, 0)
        if TRAITS.IS_CHAINED:
            gdc_wait()  # only now: the plan was complete before the decode kernel started
        if splits > 0:
            rows = Rows(first_slot, splits, slot_row, q_first + query, head, is_row)
            _merge_rows(rows, slot_rows, stride_lse_token, partials, outputs, TRAITS)
    if TRAITS.IS_CHAINED:
        gdc_wait()  # in every program: the next kernel also relies on the decode kernel


@triton.jit
def _merge_rows(rows, slot_rows, stride_lse_token, partials, outputs, TRAITS: tl.constexpr):
    """Merge the partials of some rows, in the order of keys."""
    V_WIDTH: tl.constexpr = TRAITS.V_WIDTH
    COLUMNS: tl.constexpr = TRAITS.COLUMNS
    ROWS: tl.constexpr = TRAITS.ROWS
    SPLITS: tl.constexpr = TRAITS.SPLITS
    splits, is_row, head = rows.splits, rows.is_row, rows.head
    column = tl.arange(0, COLUMNS)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        slot = (rows.first_slot + split).to(tl.int64)
        at = slot[:, None] * slot_rows + rows.slot_row[None, :]
        exists = (split < splits)[:, None] & is_row[None, :]
        # [SPLITS, ROWS], and with columns; loaded together: latency, not bandwidth, is the limit
        split_lse = tl.load(partials.lse + at, mask=exists, other=-float("inf"))
        values = tl.load(
            partials.out + at[:, :, None] * V_WIDTH + column[None, None, :],
            mask=exists[:, :, None] & (column < V_WIDTH)[None, None, :],
            other=0.0,
        )
        row_max, row_sum, acc = merge_splits(row_max, row_sum, acc, split_lse, values)
    token = rows.token.to(tl.int64)
    head = head.to(tl.int64)
    out_at = token * outputs.stride_out_token + head * outputs.stride_out_head
    out_rows = outputs.out + out_at
    lse_at = outputs.lse + token * stride_lse_token + head * outputs.stride_lse_head
    store_merged(row_max, row_sum, acc, outputs, head, out_rows, lse_at, is_row, V_WIDTH)
