"""The merge kernel of a sparse attention whose lists were split: float32 partials become results.

Maths      lse = log Σ_p exp lse_p;  out = Σ_p exp(lse_p − lse) · out_p, a sink in the denominator;
           max_logits is the largest of all splits, or NaN if one is NaN
Work       a program merges all splits of a few (token, head) rows
Memory     float32 partials [num_splits, tokens, heads, v_width], read once
Limits     none
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mlakit.kernels.triton.configs import pick_merge_config
from mlakit.kernels.triton.launch import launch
from mlakit.kernels.triton.primitives import merge_split, store_merged


def merge_list_splits(
    partials: list[Tensor],  # of out, lse, max_logits: float32 [num_splits, tokens, heads, n]
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor,
) -> None:
    num_splits, tokens, heads, v_width = partials[0].shape
    config = pick_merge_config(v_width=v_width)
    launch(
        _merge_list_splits_kernel,
        (triton.cdiv(tokens * heads, config.rows),),
        *partials,
        sink,
        out,
        lse,
        max_logits,
        tokens * heads,
        heads,
        num_splits,
        0 if sink is None else sink.stride(0),
        *out.stride()[:2],
        *lse.stride(),
        *max_logits.stride(),
        V_WIDTH=v_width,
        COLUMNS=triton.next_power_of_2(v_width),
        ROWS=config.rows,
        num_warps=config.num_warps,
    )


VARYING = [
    "num_rows", "heads", "num_splits", "stride_sink", "stride_lse_token", "stride_lse_head",
    "stride_max_token", "stride_max_head",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _merge_list_splits_kernel(
    partial_out,  # [num_splits, rows, V_WIDTH] float32
    partial_lse, partial_max,  # [num_splits, rows] float32
    sink,  # [heads] float32, or None
    out, lse, max_logits,
    num_rows,  # tokens · heads
    heads, num_splits,
    stride_sink, stride_out_token, stride_out_head,
    stride_lse_token, stride_lse_head, stride_max_token, stride_max_head,
    V_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.arange(0, COLUMNS)
    in_row = (column < V_WIDTH)[None, :]
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    max_logit = tl.full([ROWS], -float("inf"), tl.float32)
    num_nan = tl.zeros([ROWS], tl.int32)
    for split in range(num_splits):
        at = split * num_rows.to(tl.int64) + row
        split_lse = tl.load(partial_lse + at, mask=is_row, other=-float("inf"))
        split_max = tl.load(partial_max + at, mask=is_row, other=-float("inf"))
        # the out of a split without keys is not written
        has_keys = is_row & (split_lse != -float("inf"))
        values = tl.load(
            partial_out + at[:, None] * V_WIDTH + column[None, :],
            mask=has_keys[:, None] & in_row,
            other=0.0,
        )
        row_max, row_sum, acc = merge_split(row_max, row_sum, acc, split_lse, values)
        num_nan += (split_max != split_max).to(tl.int32)
        max_logit = tl.where(split_max > max_logit, split_max, max_logit)
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    out_rows = out + (token * stride_out_token + head * stride_out_head)
    lse_at = lse + token * stride_lse_token + head * stride_lse_head
    store_merged(row_max, row_sum, acc, sink, stride_sink, head, out_rows, lse_at, is_row, V_WIDTH)
    max_logit = tl.where(num_nan > 0, float("nan"), max_logit)
    tl.store(max_logits + token * stride_max_token + head * stride_max_head, max_logit, mask=is_row)
