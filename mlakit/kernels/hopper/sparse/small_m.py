"""Work tiles, queries and gathered rows of the sparse kernels with 8, 16 or 32 heads per CTA.

Shared by `small_m_fp8_kv` and `small_m_fp4_kv`: everything here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.device.compat import copy_words, record, reinterpret, tma_load
from mlakit.kernels.hopper.device.paged_loads import gather_layout
from mlakit.kernels.hopper.device.pipeline import D_TILE, D_TILES
from mlakit.kernels.hopper.device.primitives import smem_layout
from mlakit.kernels.hopper.sparse.lists import WorkTile
from mlakit.kernels.hopper.sparse.lists import locate_tile as locate_m64_tile

GATHERED_WORDS = gl.constexpr(gather_layout(32))
LISTED_KEYS = gl.constexpr(gl.SliceLayout(1, gather_layout(32)))
WORD_TILE = gl.constexpr(smem_layout(32, 32))
QUERY_TILE = gl.constexpr(smem_layout(128, 16))


@record
class Gathered:
    """The listed rows, in place of `decode.scheduler.Inputs`; TMA does not load them."""

    words: object


@gluon.jit
def locate_tile(work, tokens, tile, HEADS: gl.constexpr):
    """Return the work tile as `decode.epilogue` takes it; its results are in row `token`."""
    at = locate_m64_tile(work, tokens, tile)
    first_head = at.first_head // (64 // HEADS)
    return WorkTile(at.row, at.token, first_head, -1), WorkTile(at.row, at.row, first_head, -1)


@gluon.jit
def load_query(q, work, tokens, tile, query):
    """Start to load the queries of a work tile; zeros past the last head."""
    HEADS: gl.constexpr = query.latent.shape[1]
    at, _ = locate_tile(work, tokens, tile, HEADS)
    ROPE: gl.constexpr = 0 if query.rope is None else 64
    mbarrier.expect(query.full, HEADS * (D_TILES * D_TILE + ROPE) * 2)
    if query.rope is not None:
        rope = reinterpret(query.rope.index(0), q.rope.dtype, q.rope.block_shape, q.rope.layout)
        tma_load(q.rope, [at.token, at.first_head, 0], query.full, rope)
    for d in gl.static_range(D_TILES):
        latent = reinterpret(
            query.latent.index(d), q.values.dtype, q.values.block_shape, q.values.layout
        )
        tma_load(q.values, [at.token, at.first_head, d * D_TILE], query.full, latent)


@gluon.jit
def copy_rows(start, is_valid, WORD: gl.constexpr, smem):
    """Start to copy 128 bytes of each row of a block; zeros for invalid entries."""
    at = gl.expand_dims(start, 1)
    at += gl.expand_dims(WORD + gl.arange(0, 32, gl.SliceLayout(0, GATHERED_WORDS)), 0)
    words = reinterpret(smem, gl.int32, [64, 32], WORD_TILE)
    copy_words(words, at, mask=gl.expand_dims(is_valid, 1))
