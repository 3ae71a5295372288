"""Launchers of decode kernels, on Hopper and on Blackwell, plan and launch a call with these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import e, log2
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import UNSHARDED, CacheLayer
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels import workspace
from mlakit.kernels.arguments import DecodeArguments, DecodePlanArguments, filled
from mlakit.kernels.decode_merge import clear_results, merge_partials, rows_per_slot
from mlakit.kernels.decode_plan import OwnSplits, plan_decode
from mlakit.kernels.hopper.decode.arguments import (
    Batch,
    Gather,
    OutputArguments,
    Schedule,
    Traits,
)
from mlakit.kernels.hopper.decode.configs import BLOCK, D_R, Tiles
from mlakit.kernels.hopper.device.primitives import smem_layout
from mlakit.kernels.hopper.device.softmax import ScoreTraits
from mlakit.kernels.hopper.pool_rows import pool_rows
from mlakit.kernels.launch import launch, target
from mlakit.model.masks import Mask
from mlakit.plan import DecodePlanTensors, EvenSplit
from mlakit.plan.split_heuristic import DETERMINISTIC_SPLIT_KEYS

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class CacheArguments:
    """Arguments by which a kernel reads the rows of a cache."""

    kv: TensorDescriptor | Tensor
    kv_rope: TensorDescriptor | Tensor
    page_rows: int
    rope_column: int
    gather: Gather
    extra_arguments: dict[str, Any]  # that not every kernel has
    host_scale: float  # of the tensor; 1 where it is on the device
    config: Any  # of `configs`


def run(
    kernel: Any,
    tiles: Tiles,
    cache: CacheArguments,
    a: DecodeArguments,
    out: Tensor,
    lse: Tensor,
    *,
    has_constant_head_tiles: bool = False,
) -> None:
    """Make the plan of a call if it has none, launch a kernel, and merge what is split; a.q and
    a.q_rope are uniformly strided or heads-major (`_checks`).

    has_constant_head_tiles  the kernel has the number of head tiles as a constant
    """
    q_latent, q_rope, q_starts = a.q, filled(a.q_rope), filled(a.q_starts)
    layer, kv_lens, splits = a.layer, a.kv_lens, a.splits
    softmax_scale, mask, sink = a.softmax_scale, a.mask, a.sink
    assert isinstance(a.page_table, Tensor)
    page_table = a.page_table
    (tokens, heads, _), batch = q_latent.shape, kv_lens.shape[0]
    if isinstance(splits, DecodePlanTensors):
        plan = splits
        if plan.empty_requests.shape[0] > 0:
            clear_results(out, lse, q_starts)  # no item of a plan writes these
    else:
        own_splits = None
        if isinstance(splits, EvenSplit):
            own_splits = OwnSplits(0, splits.num_splits)
        elif a.deterministic:
            own_splits = OwnSplits(DETERMINISTIC_SPLIT_KEYS // tiles.keys)
        plan = _plan(tiles, layer, page_table, q_starts, kv_lens, mask, heads, tokens, own_splits)
    head_tiles = triton.cdiv(heads, tiles.rows)
    request_tiles = triton.cdiv(tokens, batch) * head_tiles
    padded_heads = head_tiles * tiles.rows
    slot_rows = rows_per_slot(plan, most_queries=a.most_queries, padded_heads=padded_heads)
    partial_rows = plan.max_partials * slot_rows
    partial_out = workspace.scratch((partial_rows, out.shape[-1]), torch.float32, out.device)
    partial_lse = workspace.scratch((partial_rows,), torch.float32, out.device)
    q_tiles, q_token_rows = _query_tiles(q_latent, tiles.rows, tiles.q_columns)
    rope_tiles, rope_token_rows = _query_tiles(q_rope, tiles.rows, D_R)
    is_external = plan.slot_rows != request_tiles * tiles.rows or plan.tile % BLOCK > 0
    options = {} if cache.config.MAX_REGISTERS is None else {"maxnreg": cache.config.MAX_REGISTERS}
    launch(
        kernel,
        (request_tiles, plan.cta_starts.shape[0] - 1),
        q=q_tiles,
        q_rope=rope_tiles,
        kv=cache.kv,
        kv_rope=cache.kv_rope,
        # a scale of 0 would turn the −inf of a hidden key into NaN
        scale_log2=max(abs(softmax_scale) * log2(e) * cache.host_scale, SMALLEST_SCALE),
        stride_table_request=page_table.stride(0),
        q_token_rows=q_token_rows,
        q_rope_token_rows=rope_token_rows,
        heads=heads,
        slot_rows=slot_rows,
        stride_lse_token=lse.stride(0),
        batch=Batch(
            *(q_starts, kv_lens, page_table),
            *(q_starts.stride(0), kv_lens.stride(0), page_table.stride(1)),
        ),
        schedule=Schedule(
            *(plan.items, plan.cta_starts, plan.partial_starts),
            None if has_constant_head_tiles else head_tiles,
        ),
        outputs=OutputArguments(
            *(out, lse, partial_out, partial_lse, sink),
            *(*out.stride()[:2], lse.stride(1), 0 if sink is None else sink.stride(0)),
        ),
        gather=cache.gather,
        **cache.extra_arguments,
        TRAITS=Traits(
            ROWS=tiles.rows,
            PAGE=layer.page_size,
            PAGE_ROWS=cache.page_rows,
            FORMAT=layer.codec.traits,
            ROPE_COLUMN=cache.rope_column,
            IS_CAUSAL=mask.is_causal,
            SCORES=ScoreTraits(
                SIGN=(softmax_scale > 0) - (softmax_scale < 0),
                IS_EXTERNAL_PLAN=is_external,
            ),
            ITEM_COLUMNS=plan.items.shape[1],
            Q_BY_HEAD=_is_heads_major(q_latent),
            Q_ROPE_BY_HEAD=_is_heads_major(q_rope),
        ),
        CONFIG=cache.config,
        num_warps=4,
        **options,
    )
    if plan.max_partials == 0:
        return
    merge_partials(
        partial_out,
        partial_lse,
        partial_starts=plan.partial_starts,
        q_starts=q_starts,
        kv_lens=kv_lens,
        padded_heads=padded_heads,
        slot_rows=slot_rows,
        is_batch_invariant=a.is_batch_invariant,
        sink=sink,
        out=out,
        lse=lse,
    )


def make_plan(tiles: Tiles, a: DecodePlanArguments) -> DecodePlanTensors:
    """A plan, made on the device, for as many CTAs as run at the same time."""
    assert isinstance(a.page_table, Tensor)
    lengths = (a.q_starts, a.kv_lens, a.mask)
    return _plan(tiles, a.layer, a.page_table, *lengths, a.heads, a.num_tokens, None, a.out)


def _plan(
    tiles: Tiles,
    layer: CacheLayer,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    mask: Mask,
    heads: int,
    num_tokens: int,
    own_splits: OwnSplits | None,
    out: DecodePlanTensors | None = None,
) -> DecodePlanTensors:
    padded_heads = triton.cdiv(heads, tiles.rows) * tiles.rows
    rows = triton.cdiv(num_tokens, max(kv_lens.shape[0], 1)) * padded_heads
    num_sms = target(kv_lens.device).num_sms
    return plan_decode(
        q_starts,
        kv_lens,
        shard=UNSHARDED,
        mask=mask,
        heads=padded_heads,
        num_ctas=max(num_sms * tiles.rows // max(rows, tiles.rows), 1),
        tile=tiles.keys,
        min_tiles=tiles.min_keys // tiles.keys,
        slot_rows=rows,
        capacity=page_table.shape[1] * layer.page_size,
        own=own_splits,
        num_tokens=num_tokens,
        out=out,
    )


def _is_heads_major(q: Tensor) -> bool:
    """Return whether q is heads-major: the tokens of a head are adjacent."""
    return q.shape[0] > 1 and q.shape[1] > 1 and 0 < q.stride(0) < q.stride(1)


def _query_tiles(q: Tensor, rows: int, columns: int) -> tuple[TensorDescriptor, int]:
    """TMA tiles of 16-bit queries, or of the words of FP8 ones, and rows between two tokens.

    Where queries lie by head, a row has all tokens of a head, and columns are counted.
    """
    is_heads_major = _is_heads_major(q)
    if is_heads_major:
        tokens, heads, width = q.shape
        token_rows = q.stride(0)
        q_rows = q.as_strided((heads, (tokens - 1) * token_rows + width), (q.stride(1), 1))
    else:
        q_rows, token_rows = pool_rows(q)
    if q.dtype == E4M3:
        token_rows = token_rows // 4 if is_heads_major else token_rows
        return tma_tiles(q_rows.view(torch.int32), rows, columns // 4), token_rows
    return tma_tiles(q_rows, rows, columns), token_rows


# kept: what a layout checks of itself takes the host longer than the rest of a descriptor
_smem_layout = lru_cache(maxsize=64)(smem_layout)


def tma_tiles(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = _smem_layout(columns, tensor.element_size() * 8)
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)
