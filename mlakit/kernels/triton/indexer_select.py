"""`indexer_select`, portable Triton: blocks of query tokens, and keys that are always selected.

Maths      keys that are always selected have the score +inf; `indexer_topk` selects
Work       blocks: one program per block and run of requests. Scores: one program per query token
           and run of keys
Limits     none
Lineage    own design
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.kernels import workspace
from mlakit.kernels.arguments import SelectBlockArguments
from mlakit.kernels.launch import launch
from mlakit.kernels.triton.arguments import length_arguments
from mlakit.kernels.triton.configs import power_of_two
from mlakit.kernels.triton.indexer_topk import find_visible, select_rows
from mlakit.model.masks import Mask

BATCH_BLOCK = 1024
ALWAYS_BLOCK = 256  # keys
ALIGNMENT = 4  # int32


def indexer_select(a: SelectBlockArguments, out: Tensor) -> None:
    tokens, always = len(out), a.init_tokens + a.local_tokens
    if tokens and always:
        launch(
            _put_first_kernel,
            (tokens, triton.cdiv(always, ALWAYS_BLOCK)),
            logits=a.logits,
            lengths=length_arguments(a.q_starts, a.kv_lens),
            columns=a.logits.shape[1],
            first_token=a.first_token,
            num_requests=a.kv_lens.shape[0],
            window=a.mask.window,
            init_tokens=a.init_tokens,
            local_tokens=a.local_tokens,
            stride_logits=a.logits.stride(0),
            MASK=a.mask.traits,
            BLOCK=ALWAYS_BLOCK,
            num_warps=4,
        )
    select_rows(a, out)


def plan_query_blocks(
    q_starts: Tensor, kv_lens: Tensor, mask: Mask, blocks: Sequence[range]
) -> list[tuple[Tensor, Tensor]]:
    """Return (q_starts, kv_lens) of each block of query tokens, as if no other queries existed."""
    batch = kv_lens.shape[0]
    # those of every block begin at a multiple of 16 bytes: other pointers are other kernels
    columns = triton.cdiv(batch + 1, ALIGNMENT) * ALIGNMENT
    starts = workspace.scratch((len(blocks), columns), torch.int32, kv_lens.device)
    lens = workspace.scratch((len(blocks), columns), torch.int32, kv_lens.device)
    block = min(power_of_two(batch + 1), BATCH_BLOCK)
    launch(
        _query_blocks_kernel,
        (len(blocks), triton.cdiv(batch + 1, block)),
        q_starts=q_starts,
        kv_lens=kv_lens,
        block_starts=starts,
        block_lens=lens,
        batch=batch,
        size=len(blocks[0]),
        tokens=blocks[-1].stop,
        columns=columns,
        stride_q_starts=q_starts.stride(0),
        stride_kv_lens=kv_lens.stride(0),
        IS_CAUSAL=mask.is_causal,
        BLOCK=block,
        num_warps=4,
    )
    return [(starts[i, : batch + 1], lens[i, :batch]) for i in range(len(blocks))]


VARYING_ALWAYS = [
    *("columns", "first_token", "num_requests", "window", "init_tokens", "local_tokens"),
    "stride_logits",
]


@triton.jit(do_not_specialize=VARYING_ALWAYS)
def _put_first_kernel(
    logits,  # [tokens, columns] float32
    lengths,  # `LengthArguments`
    columns,
    first_token,  # that the first row is of
    num_requests,
    window,
    init_tokens,
    local_tokens,
    stride_logits,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _, first, last = find_visible(first_token + row, lengths, num_requests, window, MASK)
    last = tl.minimum(last, columns)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_init = index < init_tokens
    column = tl.where(is_init, first + index, last - local_tokens + index - init_tokens)
    is_seen = (column >= first) & (column < last) & (index < init_tokens + local_tokens)
    tl.store(logits + row * stride_logits + column, float("inf"), mask=is_seen)


VARYING = ["batch", "size", "tokens", "columns", "stride_q_starts", "stride_kv_lens"]


@triton.jit(do_not_specialize=VARYING)
def _query_blocks_kernel(
    q_starts,  # [batch + 1]
    kv_lens,  # [batch]
    block_starts,  # [blocks, columns] int32
    block_lens,  # [blocks, columns] int32
    batch,
    size,  # tokens of a block
    tokens,
    columns,
    stride_q_starts,
    stride_kv_lens,
    IS_CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * size
    last = tl.minimum(first + size, tokens)
    request = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(q_starts + request * stride_q_starts, mask=request <= batch, other=0)
    start = start.to(tl.int32)
    clipped = tl.minimum(tl.maximum(start - first, 0), last - first)
    row = tl.program_id(0).to(tl.int64)
    tl.store(block_starts + row * columns + request, clipped, mask=request <= batch)
    exists = request < batch
    kv_len = tl.load(kv_lens + request * stride_kv_lens, mask=exists, other=0).to(tl.int32)
    if IS_CAUSAL:  # the keys of later queries are invisible
        end = tl.load(q_starts + (request + 1) * stride_q_starts, mask=exists, other=0)
        end = end.to(tl.int32)
        after = tl.minimum(tl.maximum(end - last, 0), end - start)
        kv_len = tl.maximum(kv_len - after, 0)
    tl.store(block_lens + row * columns + request, kv_len, mask=exists)
