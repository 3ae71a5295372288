"""Queries of the 64-head FP8 sparse kernel in shared memory; `device.query_scale` scales them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.device.compat import record, reinterpret, tma_load
from mlakit.kernels.hopper.device.primitives import SMEM_16BIT, alloc_barrier
from mlakit.kernels.hopper.sparse.lists import locate_tile


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
    """Allocate the queries; `rope_tiles` are those of the blocks' rotated columns, or None."""
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
