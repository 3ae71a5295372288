"""The epilogue of a sparse work tile: out, lse and max_logits, or the float32 partials of a split.

A split has the same results as a whole list, in float32 and without the sink; the merge kernel
(`kernels.sparse_merge`) combines them. `Outputs` hence has one form for both.

Shared by all sparse kernels: everything here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.epilogue import LN2, finish_rows


@record
class Outputs:
    """The tensors that results are written to; rows are split · tokens + token."""

    out: object  # [rows, heads, 512]
    lse: object  # [rows, heads] float32
    max_logits: object  # [rows, heads] float32
    sink: object  # [heads] float32, or None; None of splits
    stride_out_token: object
    stride_out_head: object
    stride_lse_token: object
    stride_lse_head: object
    stride_max_token: object
    stride_max_head: object
    stride_sink: object


@gluon.constexpr_function
def _stored_layout(columns):
    """Return [64, columns]: 8 bytes of a 16-bit type per thread, whole sectors per row.

    One swap of a lane and a register away from an accumulator, so that shuffles convert it and no
    shared memory is needed.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 1],
            [0, 2],
            [8, 0],
            *([0, 2**i] for i in range(4, columns.bit_length() - 1)),
        ],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def store_half(tile, outputs, heads, acc, softmax, IS_EVEN: gl.constexpr):
    """Store a column half of a result; the even warpgroup stores lse and max_logits as well.

    softmax  `seesaw.Softmax`
    """
    row_max, row_sum = softmax.row_max, softmax.row_sum
    head = tile.first_head + gl.arange(0, 64, row_max.type.layout)
    lse, out_scale = finish_rows(tile, outputs, heads, head, row_max, row_sum)
    if IS_EVEN:
        store_statistics(tile, outputs, heads, head, lse, row_sum, softmax.max_logit)
    out_scale = gl.convert_layout(out_scale, gl.SliceLayout(1, acc.type.layout))
    values = acc * gl.expand_dims(out_scale, 1)
    store_values(tile, outputs, heads, values, 0 if IS_EVEN else 256)


@gluon.jit
def store_statistics(tile, outputs, heads, head, lse, row_sum, max_logit):
    """Store lse and max_logits."""
    head64 = head.to(gl.int64)
    lse_row = outputs.lse + tile.row * outputs.stride_lse_token
    gl.store(lse_row + head64 * outputs.stride_lse_head, lse, mask=head < heads)
    # the maximum skips a NaN, row_sum does not
    has_nan = (row_sum != row_sum) & (max_logit != float("inf"))
    result = gl.where(has_nan, float("nan"), max_logit * LN2)
    max_row = outputs.max_logits + tile.row * outputs.stride_max_token
    gl.store(max_row + head64 * outputs.stride_max_head, result, mask=head < heads)


@gluon.jit
def store_values(tile, outputs, heads, values, FIRST: gl.constexpr):
    """Store 128 or 256 columns of a result, from column FIRST on."""
    if outputs.out.dtype.element_ty == gl.float32:
        store_columns(tile, outputs, heads, values, FIRST)
    else:
        LAYOUT: gl.constexpr = _stored_layout(values.shape[1])
        values = gl.convert_layout(values.to(outputs.out.dtype.element_ty), LAYOUT)
        store_columns(tile, outputs, heads, values, FIRST)


@gluon.jit
def store_columns(tile, outputs, heads, values, first):
    """Store some columns [heads, columns] of a result, from column `first` on, as they lie."""
    LAYOUT: gl.constexpr = values.type.layout
    head = tile.first_head + gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))
    column = first + gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    token = outputs.out + tile.row * outputs.stride_out_token
    # int64: where heads are the outer axis, a head is all tokens apart
    at = gl.expand_dims(head.to(gl.int64) * outputs.stride_out_head, 1) + gl.expand_dims(column, 0)
    gl.store(token + at, values, mask=gl.expand_dims(head < heads, 1))
