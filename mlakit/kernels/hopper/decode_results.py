"""Where the results of a unit of `decode_kernel` go: each warpgroup has half of the columns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mlakit.kernels.hopper.decode_softmax import finish, store_lse


@gluon.jit
def store_half(
    place, results, heads, buffer, acc, peak, total, IS_EVEN: gl.constexpr, SCORES: gl.constexpr
):
    """Write a warpgroup's half of a unit's result (by way of `buffer`) or of its partial."""
    SUMS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    FIRST: gl.constexpr = 0 if IS_EVEN else 256
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    head = place.first_head + row
    lse, scale = finish(place, results, heads, head, peak, total)
    acc = acc * gl.expand_dims(gl.convert_layout(scale, SUMS), 1)
    if place.slot < 0:
        _store_final(place, results, heads, buffer, acc, FIRST)
    else:
        _store_partial(place, results, heads, acc, FIRST)
    if IS_EVEN:
        store_lse(place, results, heads, row, lse)


@gluon.jit
def _store_final(place, results, heads, buffer, acc, FIRST: gl.constexpr):
    """By way of shared memory: sixteen bytes a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    buffer.store(acc.to(results.out.dtype.element_ty))
    head = place.first_head + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    row = results.out + place.token.to(gl.int64) * results.stride_out_token
    # int64: where heads come first, each is all tokens apart
    at = gl.expand_dims(head.to(gl.int64) * results.stride_out_head, 1) + gl.expand_dims(column, 0)
    gl.store(row + at, buffer.load(LAYOUT), mask=gl.expand_dims(head < heads, 1))
    fence_async_shared()


@gluon.jit
def _store_partial(place, results, heads, acc, FIRST: gl.constexpr):
    """In float32; four threads write a sector of 32 bytes."""
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    slot = results.partial_out + place.slot_row * 512
    at = gl.expand_dims(row * 512, 1) + gl.expand_dims(column, 0)
    gl.store(slot + at, acc, mask=gl.expand_dims(place.first_head + row < heads, 1))
