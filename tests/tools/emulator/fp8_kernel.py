"""A Gluon kernel of one product of e4m3 tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.device.primitives import acc_layout, smem_layout

BLOCKED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
ACC = gl.constexpr(acc_layout(64, 32))
SMEM = gl.constexpr(smem_layout(128, 8))


@gluon.jit
def _stored(x):
    row = gl.arange(0, 64, gl.SliceLayout(1, BLOCKED))
    column = gl.arange(0, 128, gl.SliceLayout(0, BLOCKED))
    tile = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], SMEM)
    tile.store(gl.load(x + gl.expand_dims(row, 1) * 128 + gl.expand_dims(column, 0)))
    return tile


@gluon.jit
def multiply(a, b, out):
    """out [64, 64] = a [64, 128] bᵀ [128, 64] + 1000."""
    left, right = _stored(a), _stored(b)
    fence_async_shared()
    acc = gl.full([64, 64], 1000.0, gl.float32, ACC)
    pending = warpgroup_mma(left, right.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(pending,))
    row = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    column = gl.arange(0, 64, gl.SliceLayout(0, ACC))
    gl.store(out + gl.expand_dims(row, 1) * 64 + gl.expand_dims(column, 0), acc)
