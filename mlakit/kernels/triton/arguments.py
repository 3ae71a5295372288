"""The arguments of the portable kernels, as named tuples.

Triton specialises the members of a tuple like single arguments: None and 1 become constants,
pointers and integers that are multiples of 16 are known as such. `do_not_specialize` has no effect
there. So integers that differ from call to call stay single (`VARYING` of each kernel): each 1 and
each multiple of 16 among them would compile another kernel. Strides along vectors are nearly always
1 and belong to the tuple of their tensor.

A tuple may be None, but a kernel cannot ask whether it is: Triton 3.6 compares no tuple that has a
constant in it. A trait says so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.cache import CacheLayer


class Query(NamedTuple):
    """The absorbed queries."""

    latent: Tensor  # [tokens, heads, D_C], e4m3 as uint8
    rope: Tensor  # [tokens, heads, D_R]
    scale: Tensor | None  # [tokens] float32
    stride_token: int
    stride_head: int
    stride_rope_token: int
    stride_rope_head: int
    stride_scale: int


class Cache(NamedTuple):
    """The rows of a cache."""

    payload: Tensor  # [pages, page_size, row], FP8 as uint8
    scales: Tensor | None  # [pages, page_size, n], beside the rows
    tensor_scale: float  # of all rows; 1.0 where it is on the device
    device_scale: Tensor | None  # the same, on the device
    stride_page: int
    stride_row: int
    stride_scales_page: int
    stride_scales_row: int


class Results(NamedTuple):
    """The results of attention, or float32 partials of splits."""

    out: Tensor  # [tokens, heads, V_WIDTH]
    lse: Tensor  # [tokens, heads] float32
    max_logits: Tensor | None  # likewise; only of sparse attention
    sink: Tensor | None  # [heads] float32; partials have none
    stride_out_token: int
    stride_out_head: int
    stride_lse_head: int
    stride_max_head: int
    stride_sink: int


def query_of(latent: Tensor, rope: Tensor, scale: Tensor | None) -> Query:
    return Query(
        latent=as_bytes(latent),
        rope=as_bytes(rope),
        scale=scale,
        stride_token=latent.stride(0),
        stride_head=latent.stride(1),
        stride_rope_token=rope.stride(0),
        stride_rope_head=rope.stride(1),
        stride_scale=stride_of(scale, 0),
    )


def cache_of(layer: CacheLayer) -> Cache:
    payload, scales, scale = as_bytes(layer.payload), layer.scales, layer.tensor_scale
    is_on_device = isinstance(scale, Tensor)
    return Cache(
        payload=payload,
        scales=scales,
        tensor_scale=1.0 if is_on_device else float(scale),
        device_scale=scale.to(payload.device) if is_on_device else None,
        stride_page=payload.stride(0),
        stride_row=payload.stride(1),
        stride_scales_page=stride_of(scales, 0),
        stride_scales_row=stride_of(scales, 1),
    )


def results_of(
    out: Tensor, lse: Tensor, max_logits: Tensor | None = None, *, sink: Tensor | None = None
) -> Results:
    """Return results, or partials [splits, ...] of them."""
    return Results(
        out=out,
        lse=lse,
        max_logits=max_logits,
        sink=sink,
        stride_out_token=out.stride(-3),
        stride_out_head=out.stride(-2),
        stride_lse_head=lse.stride(-1),
        stride_max_head=stride_of(max_logits, -1),
        stride_sink=stride_of(sink, 0),
    )


def stride_of(tensor: Tensor | None, axis: int) -> int:
    """Return a stride, 0 for a tensor that is not there."""
    return 0 if tensor is None else tensor.stride(axis)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor of e4m3 as uint8, which kernels read it as; other tensors unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
