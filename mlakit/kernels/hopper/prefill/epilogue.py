"""The epilogue of a work tile: lse, and results written 16 bytes per thread."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.epilogue import LN2, LOG2_E, store_layout
from mlakit.kernels.hopper.device.primitives import log2, opaque_zero
from mlakit.kernels.hopper.device.softmax import NEG_INF


@record
class Outputs:
    """The tensors that results are written to."""

    out: object
    lse: object
    sink: object  # or None
    stride_out_token: object
    stride_out_head: object
    stride_sink: object
    stride_lse_token: object
    stride_lse_head: object


@gluon.jit
def finish_rows(outputs, tile, row_max, row_sum):
    """Return (lse, out_scale): out = acc · out_scale."""
    is_empty = row_sum == 0.0
    lse = (row_max + log2(gl.where(is_empty, 1.0, row_sum))) * LN2
    lse = gl.where(is_empty, NEG_INF, lse)
    # an infinite score: the probabilities are NaN, row_sum is not
    lse = gl.where(row_max == float("inf"), row_max, lse)
    denominator = row_sum
    if outputs.sink is not None:
        sink = gl.load(outputs.sink + tile.head.to(gl.int64) * outputs.stride_sink)
        denominator += gl.exp2(sink * LOG2_E - row_max)
    return lse, gl.where(is_empty, 0.0, 1.0 / denominator)


@gluon.jit
def store_lse(outputs, tile, ROW0: gl.constexpr, lse):
    # opaque: offsets would be kept in registers from tile to tile
    row = ROW0 + gl.arange(0, lse.shape[0], lse.type.layout) + opaque_zero()
    token = (tile.q_row + row).to(gl.int64)
    head = outputs.lse + tile.head.to(gl.int64) * outputs.stride_lse_head
    gl.store(head + token * outputs.stride_lse_token, lse, mask=row < tile.num_rows)


@gluon.jit
def store_out(outputs, tile, ROW0: gl.constexpr, acc):
    values = acc.to(outputs.out.dtype.element_ty)
    store_rows(outputs, tile, ROW0, 0, gl.convert_layout(values, store_layout(acc.shape[1])))


@gluon.jit
def store_rows(outputs, tile, ROW0: gl.constexpr, COLUMN: gl.constexpr, values):
    """Store some columns of results, from COLUMN on, by the threads that have them."""
    LAYOUT: gl.constexpr = values.type.layout
    row = gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT)) + opaque_zero()
    column = COLUMN + gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    first = outputs.out + tile.head.to(gl.int64) * outputs.stride_out_head
    first += (tile.q_row + ROW0).to(gl.int64) * outputs.stride_out_token
    # offsets of 128 rows fit int32 unless rows are 32 MB apart
    at = gl.expand_dims(row * outputs.stride_out_token, 1) + gl.expand_dims(column, 0)
    gl.store(first + at, values, mask=gl.expand_dims(ROW0 + row < tile.num_rows, 1))
