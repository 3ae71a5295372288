"""`mla_prefill_plan`: chunks of a batch's context for a buffer of fixed size."""

from __future__ import annotations

from torch import Tensor

from mlakit.compat.modular.arguments import check_row_offsets
from mlakit.dispatch.checks import INTEGERS, Dims, as_signed
from mlakit.plan import plan_prefill


def mla_prefill_plan(
    input_row_offsets: Tensor,
    cache_lengths: Tensor,
    buffer_size: int,
    *,
    page_size: int,
    max_chunks: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (buffer_row_offsets, cache_offsets, buffer_lengths) for `mla_prefill_branch_fp8`.

    The keys of all requests, each rounded up to whole pages, are concatenated and divided into
    chunks of `buffer_size` rows.

    buffer_row_offsets  int32 [max_chunks, batch + 1]: first row of each request in each chunk
    cache_offsets       int32 [max_chunks, batch + 1]: keys of each request in earlier chunks
    buffer_lengths      int32 [max_chunks] on the CPU: rows of each chunk, −1 if unused

    Raises ValueError if more than `max_chunks` chunks are needed.
    """
    dims = Dims("mla_prefill_plan")
    dims.match("cache_lengths", cache_lengths, "batch", dtypes=INTEGERS)
    offsets = check_row_offsets(dims, "input_row_offsets", input_row_offsets, None)
    dims.lengths("cache_lengths", cache_lengths, 2**31 - 1, "the int32 maximum")
    plan = plan_prefill(
        as_signed(cache_lengths).long() + offsets.long().diff(),
        dims.integer("buffer_size", buffer_size, 1),
        page_size=dims.integer("page_size", page_size, 1),
        max_chunks=dims.integer("max_chunks", max_chunks, 1),
        op=dims.op,
    )
    return plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths
