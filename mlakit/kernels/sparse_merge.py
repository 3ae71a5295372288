"""The merge kernel of a sparse attention whose lists were split: float32 partials become results.

Maths      lse = log Σ_p exp lse_p;  out = Σ_p exp(lse_p − lse) · out_p, a sink in the denominator;
           max_logits is the largest of all splits, or NaN if one is NaN
Work       a program merges all splits of a few (token, head) rows, several at a time
Memory     float32 partials [num_splits, tokens, heads, v_width], read once
Limits     none
Lineage    own design; ideas: split-KV flash decoding, programmatic dependent launch
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.kernels.launch import launch
from mlakit.kernels.triton.arguments import output_arguments
from mlakit.kernels.triton.configs import pick_decode_merge_config
from mlakit.kernels.triton.primitives import merge_splits, store_merged


def merge_list_splits(
    partials: list[Tensor],  # of out, lse, max_logits: float32 [num_splits, tokens, heads, n]
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor,
    *,
    is_chained: bool = False,
) -> None:
    """Merge the splits; if `is_chained` start before the attention kernel ends (PDL, sm_90)."""
    num_splits, tokens, heads, v_width = partials[0].shape
    config = pick_decode_merge_config(v_width=v_width, expected_splits=num_splits)
    launch(
        _merge_list_splits_kernel,
        (triton.cdiv(tokens * heads, config.rows),),
        num_rows=tokens * heads,
        heads=heads,
        num_splits=num_splits,
        stride_lse_token=lse.stride(0),
        stride_max_token=max_logits.stride(0),
        partials=PartialArguments(*partials),
        outputs=output_arguments(out, lse, max_logits, sink=sink),
        V_WIDTH=v_width,
        COLUMNS=triton.next_power_of_2(v_width),
        ROWS=config.rows,
        SPLITS=min(config.splits, triton.next_power_of_2(num_splits)),
        IS_CHAINED=is_chained,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if is_chained else {}),
    )


class PartialArguments(NamedTuple):
    """The partials of splits, float32."""

    out: Tensor  # [num_splits, tokens, heads, V_WIDTH]
    lse: Tensor  # [num_splits, tokens, heads]
    max_logits: Tensor


# differ from call to call: specialised, each would compile further kernels
VARYING = ["num_rows", "heads", "num_splits", "stride_lse_token", "stride_max_token"]


@triton.jit(do_not_specialize=VARYING)
def _merge_list_splits_kernel(
    num_rows,  # tokens · heads
    heads,
    num_splits,
    stride_lse_token,
    stride_max_token,
    partials,  # `PartialArguments`
    outputs,  # `OutputArguments`
    V_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,  # of each row, read at the same time
    IS_CHAINED: tl.constexpr,
):
    if IS_CHAINED:
        gdc_launch_dependents()  # the next kernel waits for this one
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.arange(0, COLUMNS)
    in_row = (column < V_WIDTH)[None, None, :]
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    max_logit = tl.full([ROWS], -float("inf"), tl.float32)
    num_nan = tl.zeros([ROWS], tl.int32)
    for start in range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        at = split.to(tl.int64)[:, None] * num_rows + row[None, :]
        exists = (split < num_splits)[:, None] & is_row[None, :]
        # loaded together: latency, not bandwidth, is the limit
        split_lse = tl.load(partials.lse + at, mask=exists, other=-float("inf"))
        split_max = tl.load(partials.max_logits + at, mask=exists, other=-float("inf"))
        values = tl.load(
            partials.out + at[:, :, None] * V_WIDTH + column[None, None, :],
            mask=exists[:, :, None] & in_row,
            other=0.0,
        )
        row_max, row_sum, acc = merge_splits(row_max, row_sum, acc, split_lse, values)
        is_nan = split_max != split_max
        num_nan += tl.sum(is_nan.to(tl.int32), 0)
        max_logit = tl.maximum(max_logit, tl.max(tl.where(is_nan, -float("inf"), split_max), 0))
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    out_rows = outputs.out + (token * outputs.stride_out_token + head * outputs.stride_out_head)
    lse_at = outputs.lse + token * stride_lse_token + head * outputs.stride_lse_head
    store_merged(row_max, row_sum, acc, outputs, head, out_rows, lse_at, is_row, V_WIDTH)
    max_logit = tl.where(num_nan > 0, float("nan"), max_logit)
    max_at = outputs.max_logits + token * stride_max_token + head * outputs.stride_max_head
    tl.store(max_at, max_logit, mask=is_row)
