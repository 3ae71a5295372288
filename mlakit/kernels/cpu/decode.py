"""Absorbed MLA attention of each request's newest tokens over its cached rows.

Maths      s = q·row · softmax_scale [· q_scale];  out = softmax(s) @ row[:, :v_width]
Work       one request and one span of keys at a time; every cached row is read once per span
Memory     rows are dequantised to float32 block by block, within the workspace
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, PageTable, request_slots
from mlakit.kernels.cpu.merge import merge_states
from mlakit.kernels.cpu.softmax import OnlineSoftmax
from mlakit.kernels.cpu.workspace import rows_that_fit
from mlakit.masks import Mask
from mlakit.plan import partition_ranges

SPLIT_GRANULARITY = 64  # keys; splits begin at multiples of it


def mla_decode(
    q_latent: Tensor,  # [tokens, heads, D_C]
    q_rope: Tensor,  # [tokens, heads, D_R]
    q_scale: Tensor | None,  # [tokens] float32: q = stored q · q_scale
    layer: CacheLayer,
    page_table: PageTable,
    q_starts: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch] cached tokens, these queries included
    *,
    num_splits: int,  # parts a request's keys are attended in, then merged
    softmax_scale: float,
    mask: Mask,
    sink: Tensor | None,  # [heads] float32
    out: Tensor,  # [tokens, heads, v_width]
    lse: Tensor,  # [tokens, heads] float32
) -> None:
    starts = q_starts.tolist()
    for request, kv_len in enumerate(kv_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        q = torch.cat([q_latent[rows].float(), q_rope[rows].float()], dim=-1)
        if q_scale is not None:
            q = q * q_scale[rows, None, None]
        parts = [
            _attend_span(q * softmax_scale, layer, page_table, request, kv_len, span, mask)
            for span in partition_ranges(kv_len, num_splits, SPLIT_GRANULARITY)
        ]
        outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
        request_out, request_lse = merge_states(outs, lses, sink)
        out[rows] = request_out.to(out.dtype)
        lse[rows] = request_lse


def _attend_span(
    q: Tensor,  # [q_len, heads, width] float32, scaled
    layer: CacheLayer,
    page_table: PageTable,
    request: int,
    kv_len: int,
    span: tuple[int, int],
    mask: Mask,
) -> tuple[Tensor, Tensor]:
    """(out [q_len, heads, v_width], lse [q_len, heads]) over the keys of one span."""
    q_len, heads, width = q.shape
    v_width = layer.codec.row.v_width
    seen = [mask.interval(kv_len - q_len + i, kv_len) for i in range(q_len)]
    states = [OnlineSoftmax((heads,), v_width) for _ in range(q_len)]
    first = max(span[0], min((low for low, _ in seen), default=0))
    last = min(span[1], max((high for _, high in seen), default=0))
    tile = rows_that_fit(4 * (2 * width + 3 * heads), at_least=16)
    for start in range(first, last, tile):
        stop = min(start + tile, last)
        slots = request_slots(page_table, layer.page_size, request, start, stop)
        keys = layer.read(slots)
        for query, (low, high), state in zip(q, seen, states, strict=True):
            # a slice, not a mask: what this query does not see may hold NaN
            block = keys[max(low - start, 0) : max(high - start, 0)]
            if len(block):
                state.add(query @ block.T, block[:, :v_width])
    finished = [state.finish() for state in states]
    if not finished:
        return q.new_empty(0, heads, v_width), q.new_empty(0, heads)
    outs, lses = zip(*finished, strict=True)
    return torch.stack(outs), torch.stack(lses)
