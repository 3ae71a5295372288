"""Scales of a cache's rows on their way to shared memory, by a producer's warps.

Loads take some thousand cycles, in which the copies of the block can be sent: so scales are loaded
before and stored after, and the pages they are in are known a block earlier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.compat import record
from mlakit.kernels.hopper.decode_work import pages_of, row_in_page

LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@record
class Scales:
    """Of the rows of a cache."""

    first: object  # float32; or None: there are none
    stride_page: object
    stride_row: object
    COUNT: object  # of a row, side by side
    WARPS: object  # of the producer


@record
class ScaleBoxes:
    """Of blocks: block n of a program is in place n % PLACES."""

    values: object  # float32 [PLACES · COUNT, 64]
    largest: object  # float32 [PLACES, 1]
    COUNT: object


@gluon.constexpr_function
def _keys_layout(warps, count):
    """[64], of a block: all of them in each warp, for which no other is waited then.

    But for four scales a row four warps have not the registers.
    """
    if (warps, count) == (4, 4):
        return gl.BlockedLayout([1], [32], [4], [0])
    return gl.DistributedLinearLayout(
        reg_bases=[[1]],
        lane_bases=[[2], [4], [8], [16], [32]],
        warp_bases=[[0], [0]] if warps == 4 else [],
        block_bases=[],
        shape=[64],
    )


@gluon.jit
def store_one(box, value, WARPS: gl.constexpr):
    """A number, for all to read."""
    box.store(gl.full([1], value, gl.float32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon.jit
def new_scale_boxes(PLACES: gl.constexpr, COUNT: gl.constexpr):
    return ScaleBoxes(
        gl.allocate_shared_memory(gl.float32, [PLACES * COUNT, 64], LINES),
        gl.allocate_shared_memory(gl.float32, [PLACES, 1], LINES),
        COUNT,
    )


@gluon.jit
def pages_of_scales(scales, inputs, keys, block):
    """Of the keys of a block, where rows have scales."""
    if scales.first is not None:
        return pages_of(inputs, keys, block, _keys_layout(scales.WARPS, scales.COUNT))
    else:  # noqa: RET505
        return block


@gluon.jit
def load_scales(scales, inputs, keys, block, pages):
    """(those of a block, whose pages these are; pages of the next block): to be waited for later.

    A tuple of as many [64 keys] as a row has scales, zeros past the last key.
    """
    found = ()
    if scales.first is not None:
        offset = gl.arange(0, 64, _keys_layout(scales.WARPS, scales.COUNT))
        is_read = block * 64 + offset < keys.end
        at = scales.first + pages.to(gl.int64) * scales.stride_page
        at += row_in_page(inputs, block, offset).to(gl.int64) * scales.stride_row
        for part in gl.static_range(scales.COUNT):
            found += (gl.load(at + part, mask=is_read, other=0.0),)
    return found, pages_of_scales(scales, inputs, keys, block + 1)


@gluon.jit
def store_scales(scales, boxes, place, found):
    """To a place; what they are there, in the same tuple."""
    stored = ()
    for part in gl.static_range(len(found)):
        scale = found[part]
        if len(found) == 1:
            scale = gl.where(scale < 0, 0.0, scale)  # a NaN stays one
        boxes.values.index(place * len(found) + part).store(scale)
        stored += (scale,)
    largest = stored[0]
    for part in gl.static_range(1, len(found)):
        largest = gl.maximum(largest, stored[part])
    store_one(boxes.largest.index(place), gl.max(largest, 0), scales.WARPS)
    return stored
