"""The arguments of the decode kernels, as named tuples.

Triton specialises the members of a tuple like single arguments: None and 1 become constants,
pointers and integers that are multiples of 16 are known as such. Two kinds stay single:

TMA descriptors   the launcher of Triton 3.6 encodes them only there
varying integers  `do_not_specialize` has no effect inside a tuple, and each 1 or multiple of 16
                  among them would compile another kernel (`VARYING`)

Kernels have the single arguments before the tuples: behind TMA descriptors they are aligned in
pairs, which are loaded together, whatever the tuples hold.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mlakit.formats import FormatTraits
from mlakit.kernels.hopper.device.softmax import ScoreTraits

# integers that differ from call to call; other strides are nearly always 1 and cost no register
VARYING = [
    "stride_table_request",
    "stride_lse_token",
    "q_token_rows",
    "q_rope_token_rows",
    "heads",
    "slot_rows",
]


class Batch(NamedTuple):
    """The requests: their queries, lengths and pages."""

    q_starts: Tensor  # [batch + 1]
    kv_lens: Tensor  # [batch]
    page_table: Tensor  # [batch, max_pages]
    stride_q_starts: int
    stride_kv_lens: int
    stride_entry: int  # of the page table, from a page of a request to the next


class Schedule(NamedTuple):
    """The keys that each persistent CTA attends to; see `mlakit.plan.DecodePlanTensors`."""

    items: Tensor  # [max_items, ITEM_COLUMNS]
    cta_starts: Tensor  # [num_ctas + 1]
    partial_starts: Tensor  # [batch + 1]
    head_tiles: int | None  # work tiles of a query; None where the kernel has it as a constant


class OutputArguments(NamedTuple):
    """Final results, and float32 partials of splits."""

    out: Tensor  # [tokens, heads, 512]
    lse: Tensor  # [tokens, heads] float32
    partial_out: Tensor  # [slots, slot_rows, 512] float32
    partial_lse: Tensor  # [slots, slot_rows] float32
    sink: Tensor | None  # [heads] float32
    stride_out_token: int
    stride_out_head: int
    stride_lse_head: int
    stride_sink: int


class Gather(NamedTuple):
    """The cache as a gather producer reads it, row by row; None where TMA loads blocks."""

    words: Tensor | None  # int32
    row_chunks: int | None  # chunks of 16 bytes from a row to the next
    rope_row_chunks: int | None = None  # of rotated columns in a tensor of their own


class KVScales(NamedTuple):
    """Scales of an FP8 cache."""

    row_scales: Tensor | None  # float32 of rows, or of 128 columns of each
    stride_page: int
    stride_row: int
    tensor_scale: float  # of all rows; 1.0 where it is on the device
    device_scale: Tensor | None  # the same, on the device


class QScales(NamedTuple):
    """Scales of FP8 queries."""

    q_scale: Tensor | None  # [tokens] float32
    stride_q_scale: int


class Traits(NamedTuple):
    """The constants that a kernel is compiled for."""

    ROWS: int  # heads of a work tile
    PAGE: int  # rows of a page
    PAGE_ROWS: int  # rows of the cache's descriptor from a page to the next
    FORMAT: FormatTraits
    ROPE_COLUMN: int  # of the descriptor of rotated columns
    IS_CAUSAL: bool
    SCORES: ScoreTraits
    ITEM_COLUMNS: int
    Q_BY_HEAD: bool  # heads-major: the tokens of a head are adjacent
    Q_ROPE_BY_HEAD: bool
