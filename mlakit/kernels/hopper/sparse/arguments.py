"""The arguments of the sparse kernels, as named tuples.

`decode.arguments` says which arguments stay single, and why. Here the lengths of lists do, too:
they are unaligned in some launches of the last tokens, and where their stride is the constant 1,
m64_bf16 spills with a second cache (13 stores, 24 loads).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

VARYING = [
    "tokens",
    "heads",
    "num_splits",
    "lens",
    "topk",
    "stride_token",
    "stride_lens",
    "extra_lens",
    "extra_topk",
    "extra_stride_token",
    "extra_stride_lens",
]


class RopeArguments(NamedTuple):
    """Rotated columns in a tensor of their own; see `lists.RopeRows`."""

    payload: Tensor  # FP8 columns as int32
    page_chunks: int
    row_chunks: int


class ListArguments(NamedTuple):
    """A cache, and the lists of its rows that tokens attend to; see `lists.RowList`."""

    payload: Tensor  # the cache, FP8 rows as int32
    rows: Tensor  # [tokens, topk] ids
    num_slots: int
    page_chunks: int
    row_chunks: int
    stride_entry: int
    rope: RopeArguments | None = None  # of a split cache


class OutputArguments(NamedTuple):
    """The fields of `epilogue.Outputs`: of several splits float32 [num_splits, ...], no sink."""

    out: Tensor  # [tokens, heads, 512]
    lse: Tensor  # [tokens, heads] float32
    max_logits: Tensor  # [tokens, heads] float32
    sink: Tensor | None  # [heads] float32
    stride_out_token: int
    stride_out_head: int
    stride_lse_token: int
    stride_lse_head: int
    stride_max_token: int
    stride_max_head: int
    stride_sink: int


class RowScaleArguments(NamedTuple):
    """Scales that are not inside the rows of a cache, with the fields of `fp8_rows.RowScales`."""

    first: Tensor | None
    stride_page: int
    stride_row: int
    tensor_scale: float


class ScaleArguments(NamedTuple):
    """The factor of scores, and the scales of FP8 caches."""

    scale_log2: float  # |softmax_scale| · log2(e)
    main: RowScaleArguments | None
    extra: RowScaleArguments | None  # of a second cache
