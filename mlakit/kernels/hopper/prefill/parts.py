"""Columns of queries and keys that one TMA descriptor and one smem tile hold: loads and QK.

Shared by both prefill kernels: everything here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from mlakit.kernels.hopper.device.compat import record, tma_load
from mlakit.kernels.hopper.device.primitives import acc_layout


@record
class Part:
    """Some columns of queries and keys: TMA descriptors and smem tiles."""

    q: object
    k: object
    q_tiles: object  # [warpgroups, 64, columns], one per consumer warpgroup
    k_tiles: object  # [stages, BLOCK_K, columns]
    COLUMN: object  # of q
    IS_ROPE: object  # the keys are those of all heads


@gluon.jit
def make_part(
    q,
    k,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    COLUMN: gl.constexpr,
    IS_ROPE: gl.constexpr,
):
    columns: gl.constexpr = q.block_shape[1]
    q_tiles = gl.allocate_shared_memory(q.dtype, [WARPGROUPS, 64, columns], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, k.block_shape[0], columns], k.layout)
    return Part(q=q, k=k, q_tiles=q_tiles, k_tiles=k_tiles, COLUMN=COLUMN, IS_ROPE=IS_ROPE)


@gluon.jit
def load_queries(parts, stages, tile, tiles_done, stride_head, ROW_BYTES: gl.constexpr):
    """Start to load the queries of a work tile, 64 per consumer warpgroup, once it releases them.

    stages  `pipeline.Stages` of queries
    ROW_BYTES  of a query, all parts
    """
    WARPGROUPS: gl.constexpr = parts[0].q_tiles.shape[0]
    for i in gl.static_range(WARPGROUPS):
        full = stages.full.index(i)
        mbarrier.wait(stages.empty.index(i), (tiles_done & 1) ^ 1)
        mbarrier.expect(full, 64 * ROW_BYTES)
        for j in gl.static_range(len(parts)):
            part = parts[j]
            column = tile.head * stride_head + part.COLUMN
            tma_load(part.q, [tile.q_row + 64 * i, column], full, part.q_tiles.index(i))


@gluon.jit
def load_keys(parts, stage, full, tile, row, stride_head):
    """Start to load a block of keys, from `row` on, into a stage that is empty."""
    for i in gl.static_range(len(parts)):
        part = parts[i]
        if part.IS_ROPE:
            tma_load(part.k, [row, 0], full, part.k_tiles.index(stage))
        else:
            column = tile.head * stride_head + part.COLUMN
            tma_load(part.k, [row, column], full, part.k_tiles.index(stage))


@gluon.jit
def issue_qk(parts, stage, ROW0: gl.constexpr, MMA_K: gl.constexpr = 16):
    """Issue S = Q Kᵀ of a stage.

    MMA_K  of `acc_layout`
    """
    BLOCK_K: gl.constexpr = parts[0].k_tiles.shape[1]
    scores = gl.zeros([64, BLOCK_K], gl.float32, acc_layout(BLOCK_K, MMA_K))
    for i in gl.static_range(len(parts)):
        part = parts[i]
        block = part.k_tiles.index(stage).permute((1, 0))
        query = part.q_tiles.index(ROW0 // 64)
        scores = warpgroup_mma(query, block, scores, use_acc=i > 0, is_async=True)
    return scores
