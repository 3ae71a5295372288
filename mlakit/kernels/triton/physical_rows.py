"""Physical rows of the positions that an indexer listed: one kernel.

Maths      rows[t, i] = table[request of t, tokens[t, i] // PAGE] · PAGE + tokens[t, i] % PAGE
Work       one program per BLOCK entries of one query
Memory     reads tokens and the table entries that they name; an entry that names no row becomes -1
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mlakit.kernels.arguments import PhysicalRowsArguments, stride_of
from mlakit.kernels.launch import launch
from mlakit.kernels.triton.configs import PHYSICAL_ROWS_BLOCK, PHYSICAL_ROWS_PROBES
from mlakit.kernels.triton.primitives import find_request


def physical_rows(a: PhysicalRowsArguments, out: Tensor) -> None:
    tokens, q_starts = a.tokens, a.q_starts
    num_queries, topk = tokens.shape
    flat = isinstance(a.page_table, tuple)
    kv_starts, table = a.page_table if isinstance(a.page_table, tuple) else (None, a.page_table)
    block = min(triton.next_power_of_2(max(topk, 1)), PHYSICAL_ROWS_BLOCK)
    launch(
        physical_rows_kernel,
        (num_queries, triton.cdiv(topk, block)),
        tokens=tokens,
        kv_starts=kv_starts,
        table=table,
        q_starts=q_starts,
        out=out,
        topk=topk,
        batch=num_queries if q_starts is None else q_starts.shape[0] - 1,
        capacity=0 if flat else table.shape[1] * a.page_size,
        tokens_stride=tokens.stride(0),
        kv_starts_stride=stride_of(kv_starts, 0),
        table_stride_request=0 if flat else table.stride(0),
        table_stride_column=table.stride(-1),
        q_starts_stride=stride_of(q_starts, 0),
        out_stride=out.stride(0),
        PAGE=a.page_size,
        BLOCK=block,
        PROBES=PHYSICAL_ROWS_PROBES,
        num_warps=4 if block > 256 else 1,
    )


@triton.jit(
    do_not_specialize=[
        "topk",
        "batch",
        "capacity",
        "kv_starts_stride",
        "table_stride_request",
        "q_starts_stride",
    ]
)
def physical_rows_kernel(
    tokens,  # [queries, topk]
    kv_starts,  # [batch + 1]; None if `table` holds pages
    table,  # [batch, max_pages] pages, or [slots]
    q_starts,  # [batch + 1]; None: one query per request
    out,  # [queries, topk] int32
    topk,
    batch,
    capacity,  # tokens of a request by its pages
    tokens_stride,
    kv_starts_stride,
    table_stride_request,
    table_stride_column,
    q_starts_stride,
    out_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PROBES: tl.constexpr,
):
    """BLOCK rows of one query."""
    query = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(tokens + query * tokens_stride + index, mask=index < topk, other=-1)
    position = position.to(tl.int64)
    request, is_live = query, query >= 0
    if q_starts is not None:
        is_live = query < tl.load(q_starts + batch * q_starts_stride)  # others are padding
        request = find_request(query, is_live, q_starts, q_starts_stride, batch, PROBES)
    if kv_starts is None:
        is_inside = is_live & (position >= 0) & (position < capacity)
        entry = table + request * table_stride_request + position // PAGE * table_stride_column
        row = tl.load(entry, mask=is_inside, other=-1).to(tl.int64) * PAGE + position % PAGE
        row = tl.where(is_inside, row, -1)
    else:
        at = kv_starts + request * kv_starts_stride
        start = tl.load(at, mask=is_live, other=0).to(tl.int64)
        end = tl.load(at + kv_starts_stride, mask=is_live, other=0).to(tl.int64)
        is_inside = (position >= 0) & (position < end - start)
        entry = table + (start + position) * table_stride_column
        row = tl.load(entry, mask=is_inside, other=-1).to(tl.int64)
    # an empty entry of the table; what int32 cannot hold is no row
    row = tl.where((row < 0) | (row > 0x7FFFFFFF), -1, row)
    tl.store(out + query * out_stride + index, row.to(tl.int32), mask=index < topk)
