"""Scales of an FP8 cache's rows on their way to shared memory, and of FP8 queries.

A producer loads the scales of a block before it waits for a free stage, and stores them after the
loads of the block are issued: their latency of about a thousand cycles is then hidden. The pages
they are in are looked up a block earlier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.decode.scheduler import locate_tile
from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.fp8_rows import HEADROOM, power_of_two
from mlakit.kernels.hopper.device.paged_loads import pages_of_keys, row_in_page
from mlakit.kernels.hopper.device.primitives import SMEM_VECTOR, lane_layout

GROUPS = gl.constexpr(4)  # of a row's latent columns, where each has a scale
# of a row's largest scale, at least 2**HEADROOM: products of smaller ones are as if they had it
SMALLEST_FACTOR = gl.constexpr(2.0**-24)


@record
class RowScales:
    """The scales of a cache's rows, in global memory."""

    first: object  # float32; None: there are none
    stride_page: object
    stride_row: object
    COUNT: object  # scales of a row, contiguous
    WARPS: object  # of the producer


@record
class ScaleStages:
    """The scales of blocks, in shared memory."""

    values: object  # float32 [stages · COUNT, 64]
    amax: object  # float32 [stages, 1]: the largest of a block
    COUNT: object
    groups: object  # GroupStages, where values are powers of two of rows; or None


@record
class GroupStages:
    """The four scales of each row, for products whose columns are summed group after group."""

    # float16 [stages · GROUPS, 64]: a group's scale over its row's power of two
    factors: object
    # float32 [stages · (GROUPS + 1), 64]: what a score is multiplied by before each group's product
    # is added, and after the last one. Together they give each product its scale
    steps: object


@gluon.constexpr_function
def _keys_layout(warps, count):
    """Return [64 keys]: all of them in each warp, so that no warp waits for another.

    With four scales per row the registers of four warps do not suffice for that.
    """
    if (warps, count) == (4, 4):
        return lane_layout(4)
    return gl.DistributedLinearLayout(
        reg_bases=[[1]],
        lane_bases=[[2], [4], [8], [16], [32]],
        warp_bases=[[0], [0]] if warps == 4 else [],
        block_bases=[],
        shape=[64],
    )


@gluon.constexpr_function
def _groups_layout(warps):
    """Return [64 keys, 4 scales]: keys as `_keys_layout` has them, with all their scales."""
    bases = [[0, 1], [0, 2]]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=bases if warps == 4 else [*bases, [1, 0]],
        lane_bases=lanes if warps == 4 else [*lanes[1:], [32, 0]],
        warp_bases=[[32, 0], [0, 0]] if warps == 4 else [],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.jit
def _load_groups(scales, inputs, block, pages, is_read):
    """The four scales of each key, 16 bytes at once: four vectors [64 keys]."""
    LAYOUT: gl.constexpr = _groups_layout(scales.WARPS)
    KEYS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    offset = gl.arange(0, 64, KEYS)
    if len(pages.shape) == 1:
        pages = gl.convert_layout(pages, KEYS, assert_trivial=True)
    # the explicit factors of four show the compiler the alignment to 16 bytes
    at = pages.to(gl.int64) * (scales.stride_page // 4 * 4)
    at += row_in_page(inputs, block, offset).to(gl.int64) * (scales.stride_row // 4 * 4)
    group = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)), 0)
    is_read = gl.expand_dims(gl.convert_layout(is_read, KEYS, assert_trivial=True), 1)
    loaded = gl.load(scales.first + (gl.expand_dims(at, 1) + group), mask=is_read, other=0.0)
    even, odd = gl.split(loaded.reshape([64, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    KEY: gl.constexpr = _keys_layout(scales.WARPS, 4)
    return (
        gl.convert_layout(s0, KEY, assert_trivial=True),
        gl.convert_layout(s1, KEY, assert_trivial=True),
        gl.convert_layout(s2, KEY, assert_trivial=True),
        gl.convert_layout(s3, KEY, assert_trivial=True),
    )


@gluon.jit
def store_scalar(smem, value, WARPS: gl.constexpr):
    """Store one number, to an smem vector [1]."""
    smem.store(gl.full([1], value, gl.float32, lane_layout(WARPS)))


@gluon.jit
def alloc_scale_stages(STAGES: gl.constexpr, COUNT: gl.constexpr, IS_GROUPED: gl.constexpr = False):
    groups = None
    if IS_GROUPED:
        groups = GroupStages(
            gl.allocate_shared_memory(gl.float16, [STAGES * GROUPS, 64], SMEM_VECTOR),
            gl.allocate_shared_memory(gl.float32, [STAGES * (GROUPS + 1), 64], SMEM_VECTOR),
        )
    return ScaleStages(
        gl.allocate_shared_memory(gl.float32, [STAGES * COUNT, 64], SMEM_VECTOR),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1], SMEM_VECTOR),
        COUNT,
        groups,
    )


@gluon.jit
def lookup_scales(scales, inputs, keys, block):
    """Start the page lookup of a block's scales."""
    if scales.first is not None:
        return pages_of_keys(inputs, keys, block, _keys_layout(scales.WARPS, scales.COUNT))
    else:
        return block


@gluon.jit
def load_scales(scales, inputs, keys, block, pages):
    """Start to load the scales of a block, and the page lookup of the next one's.

    Returns (a tuple of COUNT vectors [64 keys], zeros past the last key; pages of the next block).
    """
    loaded = ()
    if scales.first is not None:
        offset = gl.arange(0, 64, _keys_layout(scales.WARPS, scales.COUNT))
        is_read = block * 64 + offset < keys.end
        if scales.COUNT == 4:
            loaded += _load_groups(scales, inputs, block, pages, is_read)
        else:
            at = scales.first + pages.to(gl.int64) * scales.stride_page
            at += row_in_page(inputs, block, offset).to(gl.int64) * scales.stride_row
            loaded += (gl.load(at, mask=is_read, other=0.0),)
    return loaded, lookup_scales(scales, inputs, keys, block + 1)


@gluon.jit
def _store_groups(groups, stage, loaded):
    """Store what `GroupStages` has of four scales per row; returns the powers of two of rows."""
    scales = ()
    largest = 0
    for group in gl.static_range(GROUPS):
        scale = loaded[group] + loaded[group] * 0.0  # inf becomes NaN
        scale = gl.where(scale < 0, 0.0, scale)
        scales += (scale,)
        largest = gl.maximum(scale.to(gl.int32, bitcast=True), largest)
    power, inverse = power_of_two((largest >> 23) - HEADROOM)
    before = inverse  # of rotated columns, whose products have no scale
    for group in gl.static_range(GROUPS):
        factor = scales[group] * inverse
        groups.factors.index(stage * GROUPS + group).store(factor.to(gl.float16))
        # a product's scale is divided by, and a NaN stays one
        factor = gl.where(factor < SMALLEST_FACTOR, SMALLEST_FACTOR, factor)
        groups.steps.index(stage * (GROUPS + 1) + group).store(before / factor)
        before = factor
    groups.steps.index(stage * (GROUPS + 1) + GROUPS).store(before * power)
    # values of a row without scales are zeros, and it may be one past the last key
    return gl.where(largest == 0, 0.0, power)


@gluon.jit
def store_scales(scales, stages, stage, loaded):
    """Store the scales of a block to its stage; returns them as they are stored."""
    if stages.groups is not None:
        loaded = (_store_groups(stages.groups, stage, loaded),)
    stored = ()
    for group in gl.static_range(len(loaded)):
        scale = loaded[group]
        if len(loaded) == 1:
            scale = gl.where(scale < 0, 0.0, scale)  # a NaN stays one
        stages.values.index(stage * len(loaded) + group).store(scale)
        stored += (scale,)
    amax = stored[0]
    for group in gl.static_range(1, len(loaded)):
        amax = gl.maximum(amax, stored[group])
    store_scalar(stages.amax.index(stage), gl.max(amax, 0), scales.WARPS)
    return stored


@gluon.jit
def apply_tensor_scale(kv_scales, scale_log2):
    """Return (scale_log2, tensor_scale) of `arguments.KVScales`; a scale on the device is not yet
    part of scale_log2."""
    tensor_scale = kv_scales.tensor_scale
    if kv_scales.device_scale is not None:
        tensor_scale = gl.load(kv_scales.device_scale).to(gl.float32)
        scale_log2 *= tensor_scale
    return scale_log2, tensor_scale


@gluon.jit
def load_q_scale(scales, scheduler, item, index):
    """The scale of a work tile's query: `scales` has q_scale [tokens] or None, and its stride."""
    scale = gl.to_tensor(1.0)
    if scales.q_scale is not None:
        token = locate_tile(scheduler, item, index).token.to(gl.int64)
        scale = gl.load(scales.q_scale + token * scales.stride_q_scale)
    return scale
