"""Merging of partial softmaxes (`merge_states`), portable Triton.

Maths      lse = log Σ_p exp lse_p;  out = Σ_p exp(lse_p) out_p / (exp lse + exp sink)
Work       one program per block of (token, head) rows; a launch merges up to 8 partials, and
           further launches fold in the rest
Memory     every partial is read once, and not where its lse is −inf; with more than 8 partials
           4 · (v_width + 1) bytes of scratch per row
Limits     none; a program reads all partials of its rows before it writes: out may be a partial
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.kernels import workspace
from mlakit.kernels.arguments import MergeArguments
from mlakit.kernels.launch import launch
from mlakit.kernels.triton.arguments import output_arguments
from mlakit.kernels.triton.configs import MERGED_SPLITS, pick_merge_config
from mlakit.kernels.triton.primitives import finish_merge, load_sink, merge_split


def merge_states(a: MergeArguments, out: Tensor, lse: Tensor) -> None:
    if out.numel() == 0:
        return
    partials = list(zip(a.outs, a.lses, strict=True))
    head, tail = partials[:MERGED_SPLITS], partials[MERGED_SPLITS:]
    while tail:
        folded = workspace.scratch(out.shape, torch.float32, out.device)
        folded_lse = workspace.scratch(lse.shape, torch.float32, out.device)
        _merge(head, None, folded, folded_lse)
        head = [(folded, folded_lse), *tail[: MERGED_SPLITS - 1]]
        tail = tail[MERGED_SPLITS - 1 :]
    _merge(head, a.sink, out, lse)


def _merge(
    partials: Sequence[tuple[Tensor, Tensor]], sink: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    tokens, heads, v_width = out.shape
    config = pick_merge_config(v_width=v_width)
    launch(
        _merge_states_kernel,
        (triton.cdiv(tokens * heads, config.rows),),
        tuple(partial for partial, _ in partials),
        tuple(partial_lse for _, partial_lse in partials),
        tuple(stride for partial, _ in partials for stride in partial.stride()[:2]),
        tuple(stride for _, partial_lse in partials for stride in partial_lse.stride()),
        output_arguments(out, lse, sink=sink),
        num_rows=tokens * heads,
        heads=heads,
        stride_lse_token=lse.stride(0),
        PARTIALS=len(partials),
        V_WIDTH=v_width,
        COLUMNS=triton.next_power_of_2(v_width),
        ROWS=config.rows,
        num_warps=config.num_warps,
    )


@triton.jit(do_not_specialize=["num_rows", "heads"])
def _merge_states_kernel(
    outs,  # a tuple of [tokens, heads, V_WIDTH]
    lses,  # a tuple of [tokens, heads] float32
    outs_strides,  # token and head of each partial
    lses_strides,
    outputs,  # `OutputArguments`
    num_rows,  # tokens · heads
    heads,
    stride_lse_token,
    PARTIALS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    in_row = (column < V_WIDTH)[None, :]
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(PARTIALS):
        lse_at = token * lses_strides[2 * i] + head * lses_strides[2 * i + 1]
        partial_lse = tl.load(lses[i] + lse_at, mask=is_row, other=-float("inf"))
        # a partial without keys may hold anything
        has_keys = is_row & (partial_lse != -float("inf"))
        at = token * outs_strides[2 * i] + head * outs_strides[2 * i + 1]
        partial = tl.load(
            outs[i] + at[:, None] + column[None, :], mask=has_keys[:, None] & in_row, other=0.0
        )
        row_max, row_sum, acc = merge_split(row_max, row_sum, acc, partial_lse, partial)
    sink_log2 = None
    if outputs.sink is not None:
        sink_log2 = load_sink(outputs, head, is_row)
    merged, merged_lse = finish_merge(row_max, row_sum, acc, sink_log2)
    mask = is_row[:, None] & in_row
    row_at = token * outputs.stride_out_token + head * outputs.stride_out_head
    at = outputs.out + row_at[:, None] + column[None, :]
    tl.store(at, merged.to(outputs.out.dtype.element_ty), mask=mask)
    lse_at = outputs.lse + token * stride_lse_token + head * outputs.stride_lse_head
    tl.store(lse_at, merged_lse, mask=is_row)
