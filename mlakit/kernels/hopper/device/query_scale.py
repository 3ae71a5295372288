"""Queries of the 64-head FP8 kernels, scaled to float16's range in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mlakit.kernels.hopper.decode import configs
from mlakit.kernels.hopper.device.compat import reinterpret
from mlakit.kernels.hopper.device.fp8_convert import (
    FP16_TARGET,
    load_rows,
    pow2_scale,
    row_amax,
    scale_query,
)
from mlakit.kernels.hopper.device.primitives import acc_layout

SCORES = gl.constexpr(acc_layout(64))
MIN_ROPE_SHARE = gl.constexpr(configs.MIN_ROPE_SHARE)


@gluon.jit
def _magnitudes(smem):
    """|x| of 16-bit numbers as their bits: these have the same order, and need no conversion."""
    return load_rows(smem).to(gl.int16, bitcast=True) & 0x7FFF


@gluon.jit
def scale_to_fp16(query, DTYPE: gl.constexpr):
    """Scale queries, loaded as DTYPE, in place; returns the scale of scores, [64]."""
    ATOMS: gl.constexpr = [4, 64, 64]
    LAYOUT: gl.constexpr = query.left.layout
    left = reinterpret(query.left, DTYPE, ATOMS, LAYOUT)
    right = reinterpret(query.right, DTYPE, ATOMS, LAYOUT)
    largest = _magnitudes(left.index(0))
    # one swizzle atom after the other: less code. Lanes exchange their maxima once, after it
    for atom in range(4):
        largest = gl.maximum(largest, _magnitudes(left.index(atom)))
        largest = gl.maximum(largest, _magnitudes(right.index(atom)))
    amax = gl.max(largest, 1).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    if query.rope is not None:
        rope = reinterpret(query.rope, DTYPE, [1, 64, 64], LAYOUT).index(0)
        # bfloat16 has the range, acc has not
        SHARE: gl.constexpr = MIN_ROPE_SHARE if query.rope.dtype == gl.bfloat16 else 1.0
        amax = gl.maximum(amax, row_amax(rope) * SHARE)
    scale, factor = pow2_scale(amax)
    for atom in range(4):
        scale_query(left.index(atom), gl.float16, factor)
        scale_query(right.index(atom), gl.float16, factor)
    if query.rope is not None:
        scale_query(rope, query.rope.dtype, factor)
    fence_async_shared()
    return gl.convert_layout(scale * (1.0 / FP16_TARGET), gl.SliceLayout(1, SCORES))
