"""Chunks of the cached context of a prefill batch, as frozen objects made from lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mlakit.dispatch.checks import INTEGERS, Dims
from mlakit.dispatch.reprs import shapes_repr
from mlakit.plan.split_heuristic import ceil_div

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class ContextPlan:
    """The cached context of a prefill step in chunks of bounded size.

    kv_lens  tokens of each request, including those of the step
    q_lens   new tokens of the step, per request
    chunks   for each chunk and request, the keys [first, last) of the request's context, which is
             its kv_len − q_len older tokens
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, int], ...], ...]


def plan_context(
    kv_lens: Sequence[int], q_lens: Sequence[int], *, max_rows: int | None = None
) -> ContextPlan:
    """Divide the cached context of a prefill batch into chunks of at most `max_rows` rows.

    The context of a request is its tokens from before the step: all but the q_len newest of its
    kv_len tokens. The contexts of all requests are concatenated, and a chunk ends every `max_rows`
    rows (None: one chunk). Requests without new tokens attend to nothing and are left out.
    """
    dims = Dims("plan_context")
    all_tokens = dims.integers("kv_lens", kv_lens, 0)
    new = dims.integers("q_lens", q_lens, 0)
    batch = len(all_tokens)
    dims.require(len(new) == batch, "q_lens", f"have {batch} entries", len(new))
    dims.new_tokens_counted(all_tokens, new)
    context = [
        kv_len - q_len if q_len else 0 for kv_len, q_len in zip(all_tokens, new, strict=True)
    ]
    total = sum(context)
    rows = dims.integer("max_rows", max_rows, 1) if max_rows is not None else max(total, 1)
    starts = list(accumulate(context, initial=0))
    chunks = tuple(
        tuple(
            (min(max(low - start, 0), length), min(max(low + rows - start, 0), length))
            for start, length in zip(starts, context, strict=False)
        )
        for low in range(0, total, rows)
    )
    return ContextPlan(all_tokens, new, chunks)


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """Chunks of context that each fit a buffer of fixed size.

    Request b has the rows `buffer_row_offsets[c, b]` to `buffer_row_offsets[c, b + 1]` of the
    buffer in chunk c, filled from its cache rows from `cache_offsets[c, b]` on. Rows past the
    request's last token, up to the end of its last page, are padding.

    buffer_row_offsets  [max_chunks, batch + 1] int32, on the device of the lengths
    cache_offsets       [max_chunks, batch + 1] int32, on the same device; the last column is 0
    buffer_lengths      [max_chunks] int32 on the CPU: rows in use, -1 for an unused chunk
    """

    buffer_row_offsets: Tensor
    cache_offsets: Tensor
    buffer_lengths: Tensor

    __repr__ = shapes_repr


def plan_prefill(
    kv_lens: Tensor,
    buffer_size: int,
    *,
    page_size: int,
    max_chunks: int = 16,
    op: str = "plan_prefill",
) -> PrefillPlan:
    """Divide the context of a ragged batch into chunks of `buffer_size` rows.

        rows[b]  = align_up(kv_lens[b], page_size)
        start[b] = Σ rows[<b]                 the requests are concatenated
        chunk c has the rows [c·buffer_size, (c+1)·buffer_size) of the concatenation

        buffer_row_offsets[c, b] = clamp(start[b] - c·buffer_size, 0, buffer_size)
        cache_offsets[c, b]      = clamp(c·buffer_size - start[b], 0, rows[b])

    kv_lens  [batch] int32, int64 or uint32; tokens of each request, including those of the step

    A batch without rows has one chunk of length 0; a batch without requests gives zeros. Raises
    ValueError, under the name `op`, if `max_chunks` is too small. Synchronises once, for the total
    number of rows.
    """
    dims = Dims(op)
    dims.match("kv_lens", kv_lens, "batch", dtypes=INTEGERS)
    dims.lengths("kv_lens", kv_lens)
    dims.integer("buffer_size", buffer_size, 1)
    dims.require(buffer_size <= MAX_INT32, "buffer_size", f"not exceed {MAX_INT32}", buffer_size)
    dims.integer("page_size", page_size, 1)
    dims.integer("max_chunks", max_chunks, 1)
    if len(kv_lens) == 0:
        empty = torch.zeros(max_chunks, 1, dtype=torch.int32, device=kv_lens.device)
        return PrefillPlan(
            empty, empty.clone(), torch.zeros(max_chunks, dtype=torch.int32, device="cpu")
        )

    rows = (kv_lens.to(torch.int64) + (page_size - 1)) // page_size * page_size  # [batch]
    starts = torch.nn.functional.pad(rows.cumsum(0), (1, 0))  # [batch + 1]
    total = int(starts[-1])
    buffer_lengths = _chunk_lengths(op, total, buffer_size, max_chunks)

    chunk_starts = torch.arange(max_chunks, device=rows.device)[:, None] * buffer_size
    consumed = (chunk_starts - starts[:-1]).clamp(min=0).minimum(rows)  # [max_chunks, batch]
    return PrefillPlan(
        buffer_row_offsets=(starts - chunk_starts).clamp(0, buffer_size).to(torch.int32),
        cache_offsets=torch.nn.functional.pad(consumed, (0, 1)).to(torch.int32),
        buffer_lengths=buffer_lengths,
    )


def _chunk_lengths(op: str, total: int, buffer_size: int, max_chunks: int) -> Tensor:
    num_chunks = max(ceil_div(total, buffer_size), 1)
    Dims(op).require(
        num_chunks <= max_chunks,
        "max_chunks",
        f"be at least {num_chunks} for {total} rows in whole pages and buffer_size {buffer_size}",
        max_chunks,
    )
    lengths = [min(total - chunk * buffer_size, buffer_size) for chunk in range(num_chunks)]
    return torch.tensor(lengths + [-1] * (max_chunks - num_chunks), dtype=torch.int32, device="cpu")
