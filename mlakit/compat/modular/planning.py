"""`mla_prefill_plan`: how a batch's context is cut into chunks of a fixed buffer."""

from __future__ import annotations

from torch import Tensor

from mlakit.checks import INTEGERS, Dims, as_signed
from mlakit.compat.modular.arguments import check_row_offsets
from mlakit.plan import plan_prefill


def mla_prefill_plan(
    input_row_offsets: Tensor,
    cache_lengths: Tensor,
    buffer_size: int,
    *,
    page_size: int,
    max_chunks: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """(buffer_row_offsets, cache_offsets, buffer_lengths) for `mla_prefill_branch_fp8`.

    Each request takes its keys, rounded up to whole pages, of one long line; the line is cut into
    chunks of `buffer_size` rows.

    buffer_row_offsets  int32 [max_chunks, batch + 1]: each request's first row in each chunk
    cache_offsets       int32 [max_chunks, batch + 1]: keys of it that earlier chunks took
    buffer_lengths      int32 [max_chunks] on the CPU: rows of each chunk, −1 where unused

    Needing more than `max_chunks` is a ValueError.
    """
    dims = Dims("mla_prefill_plan")
    dims.match("cache_lengths", cache_lengths, "batch", dtypes=INTEGERS)
    offsets = check_row_offsets(dims, "input_row_offsets", input_row_offsets, None)
    dims.lengths("cache_lengths", cache_lengths, 2**31 - 1, "what int32 holds")
    plan = plan_prefill(
        as_signed(cache_lengths).long() + offsets.long().diff(),
        dims.integer("buffer_size", buffer_size, 1),
        page_size=dims.integer("page_size", page_size, 1),
        max_chunks=dims.integer("max_chunks", max_chunks, 1),
        op=dims.op,
    )
    return plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths
