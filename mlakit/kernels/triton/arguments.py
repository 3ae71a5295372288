"""The arguments of the portable kernels, as named tuples.

Triton specialises the members of a tuple like single arguments: None and 1 become constants,
pointers and integers that are multiples of 16 are known as such. `do_not_specialize` has no effect
there. So integers that differ from call to call stay single (`VARYING` of each kernel): each 1 and
each multiple of 16 among them would compile another kernel. Strides along vectors are nearly always
1 and belong to the tuple of their tensor.

A tuple may be None, but a kernel cannot ask whether it is: Triton 3.6 compares no tuple that has a
constant in it. A trait says so. No field is `values` or `type`: Triton's own tuples have these.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mlakit.cache import CacheLayer, PageTable
from mlakit.cache.layouts import bits
from mlakit.kernels.arguments import stride_of


class QueryArguments(NamedTuple):
    """The absorbed queries."""

    latent: Tensor  # [tokens, heads, D_C], e4m3 as uint8
    rope: Tensor  # [tokens, heads, D_R]
    scale: Tensor | None  # [tokens] float32
    stride_token: int
    stride_head: int
    stride_rope_token: int
    stride_rope_head: int
    stride_scale: int


class CacheArguments(NamedTuple):
    """The rows of a cache."""

    payload: Tensor  # [pages, page_size, row], FP8 as uint8
    beside: Tensor | None  # [pages, page_size, n]: scales, or rotated columns
    tensor_scale: float  # of all rows; 1.0 where it is on the device
    device_scale: Tensor | None  # the same, on the device
    stride_page: int
    stride_row: int
    stride_beside_page: int
    stride_beside_row: int


class OutputArguments(NamedTuple):
    """The tensors that results are written to, or float32 partials of splits."""

    out: Tensor  # [tokens, heads, V_WIDTH]
    lse: Tensor  # [tokens, heads] float32
    max_logits: Tensor | None  # likewise; only of sparse attention
    sink: Tensor | None  # [heads] float32; partials have none
    stride_out_token: int
    stride_out_head: int
    stride_lse_head: int
    stride_max_head: int
    stride_sink: int


class LengthArguments(NamedTuple):
    """The queries and the keys of each request."""

    q_starts: Tensor | None  # [batch + 1]
    kv_lens: Tensor | None  # [batch]
    stride_q_starts: int
    stride_kv_lens: int


class PageTableArguments(NamedTuple):
    """The cache rows of each request."""

    entries: Tensor | None  # [batch, max_pages] pages, or [n] slots
    starts: Tensor | None  # [batch + 1], where the slots of a request start; None: pages
    stride_entry: int
    stride_starts: int


def query_arguments(latent: Tensor, rope: Tensor, scale: Tensor | None) -> QueryArguments:
    return QueryArguments(
        *(bits(latent), bits(rope), scale),
        *(*latent.stride()[:2], *rope.stride()[:2], stride_of(scale, 0)),
    )


def cache_arguments(layer: CacheLayer) -> CacheArguments:
    payload, beside, scale = bits(layer.payload), layer.beside, layer.tensor_scale
    host_scale, device_scale = 1.0, None
    if isinstance(scale, Tensor):
        device_scale = scale.to(payload.device)
    else:
        host_scale = float(scale)
    beside_strides = (0, 0) if beside is None else beside.stride()[:2]
    beside = None if beside is None else bits(beside)
    return CacheArguments(
        *(payload, beside, host_scale, device_scale),
        *(*payload.stride()[:2], *beside_strides),
    )


def length_arguments(q_starts: Tensor | None, kv_lens: Tensor | None) -> LengthArguments:
    return LengthArguments(q_starts, kv_lens, stride_of(q_starts, 0), stride_of(kv_lens, 0))


def page_table_arguments(page_table: PageTable | None) -> tuple[PageTableArguments, int]:
    """Return the arguments, and the stride from a request to the next: 0 for slots."""
    starts, entries = page_table if isinstance(page_table, tuple) else (None, page_table)
    strides = (0,) if entries is None else entries.stride()
    arguments = PageTableArguments(entries, starts, strides[-1], stride_of(starts, 0))
    return arguments, strides[0] if starts is None else 0


def output_arguments(
    out: Tensor, lse: Tensor, max_logits: Tensor | None = None, *, sink: Tensor | None = None
) -> OutputArguments:
    """Return the arguments for results, or for partials [splits, ...] of them."""
    return OutputArguments(
        *(out, lse, max_logits, sink),
        *(*out.stride()[-3:-1], lse.stride()[-1], stride_of(max_logits, -1), stride_of(sink, 0)),
    )
