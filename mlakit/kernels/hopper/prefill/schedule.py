"""The tile schedule of a ragged batch, made on the device.

Work       one program per request; each counts the tiles of the requests that come before its own
Order      requests with more keys first; of a request a group of heads whose keys and values fit L2
           together, then the next; of a group the last queries first, which see the most keys if
           the mask is causal; then head by head. Equal requests whose keys and values fit L2
           together are one group: the work tiles that CTAs take last are then short
Memory     a row of ROW_COLUMNS int32 per query tile of a request: work tile t of all heads has row
           t // heads
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from mlakit.kernels import workspace
from mlakit.kernels.hopper.prefill.arguments import ScheduleTensors
from mlakit.kernels.hopper.prefill.configs import L2_BYTES, MAX_INTERLEAVED
from mlakit.kernels.launch import INTERPRETED, launch, target

# q_start, q_len, kv_start, kv_len, the first row of the request if its rows were neighbours, its
# query tiles, heads of a group, the request
ROW_COLUMNS = 8
COUNTERS = 2  # work tiles that were taken beyond the first of each CTA; work tiles
CHUNK = 256  # requests, or rows, at a time


def max_query_tiles(tokens: int, batch: int, block_q: int) -> int:
    """Return an upper bound of the query tiles per head of a batch with `tokens` query tokens."""
    return tokens // block_q + min(batch, tokens)


def make_schedule(
    q_starts: Tensor,  # [batch + 1]
    kv_starts: Tensor,  # [batch + 1]
    *,
    tokens: int,
    heads: int,
    block_q: int,  # queries of a work tile
    key_bytes: int,  # of a key and its value, of one head
) -> ScheduleTensors:
    batch = q_starts.shape[0] - 1
    shape = (max_query_tiles(tokens, batch, block_q), ROW_COLUMNS)
    rows = workspace.scratch(shape, torch.int32, q_starts.device)
    counters = workspace.scratch((COUNTERS,), torch.int32, q_starts.device)
    launch(
        _schedule_prefill_kernel,
        (batch,),
        q_starts=q_starts,
        kv_starts=kv_starts,
        rows=rows,
        counters=counters,
        batch=batch,
        heads=heads,
        group_keys=L2_BYTES // key_bytes,
        stride_q_starts=q_starts.stride(0),
        stride_kv_starts=kv_starts.stride(0),
        BLOCK_Q=block_q,
        MAX_INTERLEAVED=MAX_INTERLEAVED,
        COLUMNS=ROW_COLUMNS,
        CHUNK=CHUNK,
        IS_CHAINED=target(q_starts.device) is not INTERPRETED,
        num_warps=4,
    )
    return ScheduleTensors(rows, counters)


VARYING = ["batch", "heads", "group_keys", "stride_q_starts", "stride_kv_starts"]


@triton.jit(do_not_specialize=VARYING)
def _schedule_prefill_kernel(
    q_starts,  # [batch + 1]
    kv_starts,  # [batch + 1]
    rows,  # [max_query_tiles, COLUMNS] int32
    counters,  # [2] int32
    batch,
    heads,
    group_keys,  # keys of all heads of a group together
    stride_q_starts,
    stride_kv_starts,
    BLOCK_Q: tl.constexpr,
    MAX_INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    if IS_CHAINED:
        gdc_launch_dependents()  # the prefill kernel sets up its barriers meanwhile
    request = tl.program_id(0)
    q_start, q_len = _length(q_starts, request, stride_q_starts, True)
    kv_start, kv_len = _length(kv_starts, request, stride_kv_starts, True)
    tiles_before = tl.zeros([CHUNK], tl.int32)
    equals_before = tl.zeros([CHUNK], tl.int32)
    equals = tl.zeros([CHUNK], tl.int32)
    all_tiles = tl.zeros([CHUNK], tl.int32)
    for start in tl.range(0, batch, CHUNK):
        other = start + tl.arange(0, CHUNK)
        is_there = other < batch
        _, other_q_len = _length(q_starts, other, stride_q_starts, is_there)
        _, other_kv_len = _length(kv_starts, other, stride_kv_starts, is_there)
        tiles = tl.where(is_there, tl.cdiv(other_q_len, BLOCK_Q), 0)
        is_tie = other_kv_len == kv_len
        is_equal = is_tie & (other_q_len == q_len) & is_there
        is_longer = (other_kv_len > kv_len) | (is_tie & (other_q_len > q_len))
        is_before = is_equal & (other < request)
        tiles_before += tl.where(is_longer | is_before, tiles, 0)
        equals_before += is_before.to(tl.int32)
        equals += is_equal.to(tl.int32)
        all_tiles += tiles
    if request == 0:
        tl.store(counters, 0)
        tl.store(counters + 1, tl.sum(all_tiles, 0) * heads)

    num_tiles = tl.cdiv(q_len, BLOCK_Q)
    most = tl.minimum(tl.maximum(group_keys // tl.maximum(kv_len, 1), 1), heads)
    group = tl.cdiv(heads, tl.cdiv(heads, most))  # as few groups, but of one size
    # `interleaved` equal requests take turns: the first tile of each, then the next tile of each
    interleaved = group_keys // heads // tl.maximum(kv_len, 1)
    interleaved = tl.minimum(tl.maximum(interleaved, 1), MAX_INTERLEAVED)
    place = tl.sum(equals_before, 0)
    offset = place % interleaved
    step = tl.minimum(interleaved, tl.sum(equals, 0) - (place - offset))
    first = tl.sum(tiles_before, 0) - offset * num_tiles
    for start in tl.range(0, num_tiles, CHUNK):
        from_last = start + tl.arange(0, CHUNK)
        row = first + offset + from_last * step
        at = rows + row * COLUMNS
        is_row = from_last < num_tiles
        tl.store(at, q_start, mask=is_row)
        tl.store(at + 1, q_len, mask=is_row)
        tl.store(at + 2, kv_start, mask=is_row)
        tl.store(at + 3, kv_len, mask=is_row)
        tl.store(at + 4, row - from_last, mask=is_row)
        tl.store(at + 5, num_tiles, mask=is_row)
        tl.store(at + 6, group, mask=is_row)
        tl.store(at + 7, request, mask=is_row)


@triton.jit
def _length(starts, request, stride, is_there):
    """Return (start, length) of requests, as int32."""
    at = starts + request * stride
    start = tl.load(at, mask=is_there, other=0).to(tl.int32)
    return start, tl.load(at + stride, mask=is_there, other=0).to(tl.int32) - start
