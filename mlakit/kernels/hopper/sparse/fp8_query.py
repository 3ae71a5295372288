"""Queries of the FP8 sparse kernels, scaled to float16's range in shared memory.

Lineage    own design
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.compat import record, reinterpret, tma_load
from mlakit.kernels.hopper.decode import configs as decode_configs
from mlakit.kernels.hopper.decode.fp8_convert import (
    FP16_TARGET,
    pow2_scale,
    row_amax,
)
from mlakit.kernels.hopper.decode.fp8_convert import scale_query as scale_tile
from mlakit.kernels.hopper.primitives import SMEM_16BIT, acc_layout, alloc_barrier
from mlakit.kernels.hopper.sparse.lists import locate_tile

SCORES = gl.constexpr(acc_layout(64))
MIN_ROPE_SHARE = gl.constexpr(decode_configs.MIN_ROPE_SHARE)


@record
class Query:
    left: object  # [1, 64, 256] float16
    right: object
    rope: object  # [1, 64, 64], of the type of the blocks' rotated columns; None: there are none
    full: object


@record
class QueryTiles:
    """TMA descriptors: tiles of 1 x 64 x 256, of 1 x 64 x 64 past column 512."""

    values: object
    rope: object


@gluon.jit
def alloc_query(rope_tiles):
    """rope_tiles  of the blocks' rotated columns, or None"""
    rope: gl.constexpr = None
    if rope_tiles is not None:
        rope = gl.allocate_shared_memory(rope_tiles.dtype, [1, 64, 64], SMEM_16BIT)
    return Query(
        gl.allocate_shared_memory(gl.float16, [1, 64, 256], SMEM_16BIT),
        gl.allocate_shared_memory(gl.float16, [1, 64, 256], SMEM_16BIT),
        rope,
        alloc_barrier(),
    )


@gluon.jit
def _as_loaded(smem, descriptor):
    """The memory of queries, as a TMA tile of the descriptor."""
    return reinterpret(smem, descriptor.dtype, descriptor.block_shape, descriptor.layout)


@gluon.jit
def load_query(q, work, tokens, tile, query):
    """Start to load the queries of a work tile; zeros past the last head."""
    at = locate_tile(work, tokens, tile)
    mbarrier.expect(query.full, 64 * 2 * (512 if q.rope is None else 576))
    right, left = _as_loaded(query.right, q.values), _as_loaded(query.left, q.values)
    tma_load(q.values, [at.token, at.first_head, 256], query.full, right)
    tma_load(q.values, [at.token, at.first_head, 0], query.full, left)
    if q.rope is not None:
        rope = _as_loaded(query.rope, q.rope)
        tma_load(q.rope, [at.token, at.first_head, 0], query.full, rope)


@gluon.jit
def scale_query(q, query):
    """Scale queries to float16's range, in place; returns the scale of scores."""
    ATOMS: gl.constexpr = [4, 64, 64]
    DTYPE: gl.constexpr = q.values.dtype
    LAYOUT: gl.constexpr = query.left.layout
    left = reinterpret(query.left, DTYPE, ATOMS, LAYOUT)
    right = reinterpret(query.right, DTYPE, ATOMS, LAYOUT)
    amax = gl.maximum(row_amax(left.index(0)), row_amax(right.index(0)))
    # one swizzle atom after the other: less code
    for atom in range(1, 4):
        amax = gl.maximum(amax, row_amax(left.index(atom)))
        amax = gl.maximum(amax, row_amax(right.index(atom)))
    if query.rope is not None:
        rope = reinterpret(query.rope, DTYPE, [1, 64, 64], LAYOUT).index(0)
        # bfloat16 has the range, acc has not
        SHARE: gl.constexpr = MIN_ROPE_SHARE if query.rope.dtype == gl.bfloat16 else 1.0
        amax = gl.maximum(amax, row_amax(rope) * SHARE)
    scale, factor = pow2_scale(amax)
    for atom in range(4):
        scale_tile(left.index(atom), gl.float16, factor)
        scale_tile(right.index(atom), gl.float16, factor)
    if query.rope is not None:
        scale_tile(rope, query.rope.dtype, factor)
    fence_async_shared()
    return gl.convert_layout(scale * (1.0 / FP16_TARGET), gl.SliceLayout(1, SCORES))
