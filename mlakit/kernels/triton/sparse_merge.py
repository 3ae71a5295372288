"""The second half of a sparse attention whose lists were cut: parts become results.

Maths      lse = log Σ_p exp lse_p;  out = Σ_p exp(lse_p − lse) · out_p, a sink in the denominator;
           the largest logit is that of all parts, or NaN where one has a NaN
Work       a program is a few rows, heads of tokens, over all of their parts
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mlakit.kernels.triton.configs import pick_merge_config
from mlakit.kernels.triton.launch import launch
from mlakit.kernels.triton.primitives import merge_split, store_merged


def merge_lists(
    scratch: list[Tensor],  # of out, lse and max_logits: [parts, tokens, heads, n] float32
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor,
) -> None:
    parts, tokens, heads, v_width = scratch[0].shape
    config = pick_merge_config(v_width=v_width)
    launch(
        _merge_lists_kernel,
        (triton.cdiv(tokens * heads, config.rows),),
        *scratch,
        sink,
        out,
        lse,
        max_logits,
        tokens * heads,
        heads,
        parts,
        0 if sink is None else sink.stride(0),
        *out.stride()[:2],
        *lse.stride(),
        *max_logits.stride(),
        V_WIDTH=v_width,
        COLUMNS=triton.next_power_of_2(v_width),
        ROWS=config.rows,
        num_warps=config.num_warps,
    )


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "heads",
        "parts",
        "stride_sink",
        "stride_lse_token",
        "stride_lse_head",
        "stride_max_token",
        "stride_max_head",
    ]
)
def _merge_lists_kernel(
    part_outs,  # [parts, rows, V_WIDTH] float32
    part_lses,  # [parts, rows] float32
    part_maxima,  # [parts, rows] float32
    sink,  # [heads] float32, or None
    out,
    lse,
    max_logits,
    num_rows,  # tokens · heads
    heads,
    parts,
    stride_sink,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_max_token,
    stride_max_head,
    V_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.arange(0, COLUMNS)
    in_row = (column < V_WIDTH)[None, :]
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, COLUMNS], tl.float32)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    num_nan = tl.zeros([ROWS], tl.int32)
    for part in range(parts):
        at = part * num_rows.to(tl.int64) + row
        part_lse = tl.load(part_lses + at, mask=is_row, other=-float("inf"))
        part_max = tl.load(part_maxima + at, mask=is_row, other=-float("inf"))
        # a part that saw nothing adds nothing
        is_live = is_row & (part_lse != -float("inf"))
        values = tl.load(
            part_outs + at[:, None] * V_WIDTH + column[None, :],
            mask=is_live[:, None] & in_row,
            other=0.0,
        )
        peak, total, weighted = merge_split(peak, total, weighted, part_lse, values)
        num_nan += (part_max != part_max).to(tl.int32)
        largest = tl.where(part_max > largest, part_max, largest)
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    store_merged(
        peak,
        total,
        weighted,
        sink,
        stride_sink,
        head,
        out + (token * stride_out_token + head * stride_out_head),
        lse + token * stride_lse_token + head * stride_lse_head,
        is_row,
        V_WIDTH,
    )
    largest = tl.where(num_nan > 0, float("nan"), largest)
    tl.store(max_logits + token * stride_max_token + head * stride_max_head, largest, mask=is_row)
