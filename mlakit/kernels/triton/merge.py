"""Combining partial softmaxes, portable Triton.

Maths      lse = log Σ_p exp lse_p;  out = Σ_p exp(lse_p) out_p / (exp lse + exp sink)
Work       one program per block of (token, head) rows; up to 8 parts a launch, more are folded in
Memory     every part is read once, and not where its lse is −inf; 4 · (v_width + 1) bytes of
           scratch per row where more than 8 parts are given, nothing otherwise
Limits     none; a program reads all parts of its rows before it writes, so out may be a part
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.arguments import MergeArguments
from mlakit.kernels.triton.configs import MERGED_SPLITS, pick_merge_config
from mlakit.kernels.triton.launch import launch
from mlakit.kernels.triton.primitives import finish_merge, merge_split
from mlakit.replay import workspace


def merge_states(a: MergeArguments, out: Tensor, lse: Tensor) -> None:
    if out.numel() == 0:
        return
    parts = list(zip(a.outs, a.lses, strict=True))
    head, tail = parts[:MERGED_SPLITS], parts[MERGED_SPLITS:]
    while tail:
        folded = workspace.scratch(out.shape, torch.float32, out.device)
        folded_lse = workspace.scratch(lse.shape, torch.float32, out.device)
        _merge(head, None, folded, folded_lse)
        head = [(folded, folded_lse), *tail[: MERGED_SPLITS - 1]]
        tail = tail[MERGED_SPLITS - 1 :]
    _merge(head, a.sink, out, lse)


def _merge(
    parts: Sequence[tuple[Tensor, Tensor]], sink: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    tokens, heads, v_width = out.shape
    config = pick_merge_config(v_width=v_width)
    launch(
        _merge_states_kernel,
        (triton.cdiv(tokens * heads, config.rows),),
        tuple(part for part, _ in parts),
        tuple(part_lse for _, part_lse in parts),
        sink,
        out,
        lse,
        tuple(stride for part, _ in parts for stride in part.stride()[:2]),
        tuple(stride for _, part_lse in parts for stride in part_lse.stride()),
        0 if sink is None else sink.stride(0),
        *out.stride()[:2],
        *lse.stride(),
        tokens * heads,
        heads,
        PARTS=len(parts),
        V_WIDTH=v_width,
        COLUMNS=triton.next_power_of_2(v_width),
        ROWS=config.rows,
        num_warps=config.num_warps,
    )


@triton.jit(do_not_specialize=["num_rows", "heads", "stride_sink"])
def _merge_states_kernel(
    outs,  # a tuple of [tokens, heads, V_WIDTH]
    lses,  # a tuple of [tokens, heads] float32
    sink,  # [heads] float32, or None
    out,
    lse,
    outs_strides,  # token and head, part by part
    lses_strides,
    stride_sink,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    num_rows,  # tokens · heads
    heads,
    PARTS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    in_row = (column < V_WIDTH)[None, :]
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, COLUMNS], tl.float32)
    for p in tl.static_range(PARTS):
        lse_at = token * lses_strides[2 * p] + head * lses_strides[2 * p + 1]
        part_lse = tl.load(lses[p] + lse_at, mask=inside, other=-float("inf"))
        # what a part holds where it saw nothing is not looked at
        is_live = inside & (part_lse != -float("inf"))
        at = token * outs_strides[2 * p] + head * outs_strides[2 * p + 1]
        part = tl.load(
            outs[p] + at[:, None] + column[None, :], mask=is_live[:, None] & in_row, other=0.0
        )
        peak, total, weighted = merge_split(peak, total, weighted, part_lse, part)
    sink_log2 = None
    if sink is not None:
        sink_log2 = tl.load(sink + head * stride_sink, mask=inside, other=0.0)
        sink_log2 *= 1.4426950408889634  # log2(e)
    merged, merged_lse = finish_merge(peak, total, weighted, sink_log2)
    tl.store(
        out + (token * stride_out_token + head * stride_out_head)[:, None] + column[None, :],
        merged.to(out.dtype.element_ty),
        mask=inside[:, None] & in_row,
    )
    tl.store(lse + token * stride_lse_token + head * stride_lse_head, merged_lse, mask=inside)
