"""The epilogue of a work tile: lse, the scale of the accumulators, and where they are stored.

A final result goes to `out` and `lse`. A split goes to float32 partials, which the merge kernel
combines; it then adds the sink, once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mlakit.kernels.hopper.device.primitives import log2
from mlakit.kernels.hopper.device.softmax import NEG_INF

LN2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
D_C = gl.constexpr(512)  # columns of a result


@gluon.constexpr_function
def store_layout(columns):
    """Return [64, columns] of four warps: 8 neighbouring columns per thread and 32 per quad, whose
    accumulator elements they are, so that they are exchanged inside of a quad."""
    more = [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *more],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def finish_rows(tile, outputs, heads, head, row_max, row_sum):
    """Return (lse, out_scale): out = acc · out_scale."""
    is_empty = row_sum == 0.0
    lse = (row_max + log2(gl.where(is_empty, 1.0, row_sum))) * LN2
    lse = gl.where(is_empty, NEG_INF, lse)
    # an infinite score: the probabilities are NaN, row_sum is not
    lse = gl.where(row_max == float("inf"), row_max, lse)
    denominator = row_sum
    if outputs.sink is not None:
        sink = gl.load(
            outputs.sink + head.to(gl.int64) * outputs.stride_sink, mask=head < heads, other=0.0
        )
        with_sink = denominator + gl.exp2(sink * LOG2_E - row_max)
        denominator = gl.where(tile.slot < 0, with_sink, denominator)
    return lse, gl.where(is_empty, 0.0, 1.0 / denominator)


@gluon.jit
def store_lse(tile, outputs, heads, row, lse):
    head = tile.first_head + row
    if tile.slot < 0:
        lse_row = outputs.lse + tile.token.to(gl.int64) * outputs.stride_lse_token
        at = head.to(gl.int64) * outputs.stride_lse_head
        gl.store(lse_row + at, lse, mask=head < heads)
    else:
        gl.store(outputs.partial_lse + tile.slot_row + row, lse, mask=head < heads)


@gluon.jit
def store_acc(
    tile,
    outputs,
    heads,
    acc,
    FIRST: gl.constexpr,
    HEAD_AXIS: gl.constexpr,
    column=None,
    scale=None,
    WIDTH: gl.constexpr = D_C,
):
    """Store accumulators: the results of a work tile, or its partial in float32.

    acc      tuple of [heads, columns] or [columns, heads] (HEAD_AXIS 0 or 1) of neighbouring
             columns
    FIRST    column that they begin with
    column   [columns] of an accumulator, relative to its first; None: they are in order
    scale    [heads] that acc is multiplied by; None: it is final
    WIDTH    columns of a result
    """
    LAYOUT: gl.constexpr = acc[0].type.layout
    COLUMN_AXIS: gl.constexpr = 1 - HEAD_AXIS
    if column is not None:
        column = FIRST + column
    row = gl.arange(0, acc[0].shape[HEAD_AXIS], gl.SliceLayout(COLUMN_AXIS, LAYOUT))
    head = tile.first_head + row
    if column is None:
        column = FIRST + gl.arange(0, acc[0].shape[COLUMN_AXIS], gl.SliceLayout(HEAD_AXIS, LAYOUT))
    mask = None
    if scale is None:
        mask = gl.expand_dims(head < heads, COLUMN_AXIS)  # for both branches
    if tile.slot < 0:
        token = outputs.out + tile.token.to(gl.int64) * outputs.stride_out_token
        # int64: where heads are the outer axis, a head is all tokens apart
        starts = head.to(gl.int64) * outputs.stride_out_head
        _store_tiles(token, starts, column, acc, scale, head, heads, mask, HEAD_AXIS)
    else:
        slot = outputs.partial_out + tile.slot_row * WIDTH
        _store_tiles(slot, row * WIDTH, column, acc, scale, head, heads, mask, HEAD_AXIS)


@gluon.jit
def _store_tiles(first, row_starts, column, acc, scale, head, heads, mask, HEAD_AXIS: gl.constexpr):
    COLUMN_AXIS: gl.constexpr = 1 - HEAD_AXIS
    DTYPE: gl.constexpr = first.dtype.element_ty
    is_head = head < heads
    at = gl.expand_dims(row_starts, COLUMN_AXIS) + gl.expand_dims(column, HEAD_AXIS)
    for i in gl.static_range(len(acc)):
        step = i * acc[i].shape[COLUMN_AXIS]
        if scale is None:
            gl.store(first + step + at, acc[i].to(DTYPE), mask=mask)
        else:
            values = (acc[i] * gl.expand_dims(scale, COLUMN_AXIS)).to(DTYPE)
            gl.store(first + step + at, values, mask=gl.expand_dims(is_head, COLUMN_AXIS))


@gluon.jit
def store_staged(tile, outputs, heads, acc, FIRST: gl.constexpr, staging):
    """Store one accumulator [64 heads, columns] like `store_acc`. A final result goes through an
    smem tile of that shape, and is written 16 bytes per thread."""
    if tile.slot < 0:
        _store_final(tile, outputs, heads, acc, FIRST, staging)
    else:
        _store_partial(tile, outputs, heads, acc, FIRST)


@gluon.jit
def _store_final(tile, outputs, heads, acc, FIRST: gl.constexpr, staging):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    staging.store(acc.to(outputs.out.dtype.element_ty))
    head = tile.first_head + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    token = outputs.out + tile.token.to(gl.int64) * outputs.stride_out_token
    at = gl.expand_dims(head.to(gl.int64) * outputs.stride_out_head, 1) + gl.expand_dims(column, 0)
    gl.store(token + at, staging.load(LAYOUT), mask=gl.expand_dims(head < heads, 1))
    fence_async_shared()


@gluon.jit
def _store_partial(tile, outputs, heads, acc, FIRST: gl.constexpr):
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    slot = outputs.partial_out + tile.slot_row * D_C
    at = gl.expand_dims(row * D_C, 1) + gl.expand_dims(column, 0)
    gl.store(slot + at, acc, mask=gl.expand_dims(tile.first_head + row < heads, 1))
