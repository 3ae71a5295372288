"""The issuing warp: K·Qᵀ of the key tiles of every token block.

A part is 128 keys, the M of a product; its N are the columns (token, head) of the token block.
Tensor memory has two buffers, each with the scores of all parts of a key tile.

Order      `full` of a stage -> products -> `empty` of the stage and `scores.full` of each part, by
           commits; `scores.empty` of a part, by the warpgroups that have loaded its scores
Deadlock   none: all roles walk the same token blocks and key tiles (`hopper.indexer.scheduler`)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from mlakit.kernels.blackwell.indexer import configs
from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.pipeline import two_stages
from mlakit.kernels.hopper.device.primitives import alloc_barriers
from mlakit.kernels.hopper.indexer.loads import next_stage
from mlakit.kernels.hopper.indexer.scheduler import locate_block, locate_single, next_block

PART = gl.constexpr(configs.PART)
WARPGROUPS = gl.constexpr(configs.WARPGROUPS)


@record
class Scores:
    """Tensor memory and its barriers; all have an element per buffer and part."""

    tiles: object  # [buffers · parts, 128 keys, TOKENS · HEADS] float32
    full: object
    empty: object
    PARTS: object  # of a key tile


@gluon.constexpr_function
def _tmem_layout(columns):
    return TensorMemoryLayout((configs.PART, columns), col_stride=1)


@gluon.jit
def alloc_scores(CONFIG: gl.constexpr):
    N: gl.constexpr = CONFIG.TOKENS * CONFIG.HEADS
    PARTS: gl.constexpr = CONFIG.KEYS // PART
    LAYOUT: gl.constexpr = _tmem_layout(N)
    return Scores(
        tiles=allocate_tensor_memory(gl.float32, [2 * PARTS, PART, N], LAYOUT),
        full=alloc_barriers(2 * PARTS, 1),
        empty=alloc_barriers(2 * PARTS, WARPGROUPS // PARTS),
        PARTS=PARTS,
    )


@gluon.jit
def _issue_block(requests, stages, scores, work, q_stage, q_phase, stage, phase, tiles_done):
    """Issue the products of a token block; return the next stage, its phase, and the key tiles."""
    STAGES: gl.constexpr = stages.full.shape[0]
    mbarrier.wait(stages.q_full.index(q_stage), q_phase)
    q = stages.q.index(q_stage).permute((1, 0))
    for key_tile in range(work.first_tile, work.end_tile, work.step):
        buffer, buffer_phase = two_stages(tiles_done)
        mbarrier.wait(stages.full.index(stage), phase)
        for part in gl.static_range(scores.PARTS):
            at = buffer * scores.PARTS + part
            mbarrier.wait(scores.empty.index(at), buffer_phase ^ 1)
            keys = stages.keys.index(stage).slice(part * PART, PART, 0)
            tcgen05_mma(keys, q, scores.tiles.index(at), use_acc=False, mbarriers=[])
            if part == scores.PARTS - 1:
                tcgen05_commit(stages.empty.index(stage))
                if not requests.IS_SINGLE:
                    # not after the loop: the CTA may exit when the last scores are there
                    is_last = key_tile + work.step >= work.end_tile
                    tcgen05_commit(stages.q_empty.index(q_stage), pred=is_last)
            tcgen05_commit(scores.full.index(at))
        stage, phase = next_stage(stage, phase, STAGES)
        tiles_done += 1
    return stage, phase, tiles_done


@gluon.jit
def issue(start, requests, stages, scores):
    """Run the issuing warp. start  (request, block, tile, left), of `scheduler`"""
    request, block, tile, left = start
    stage, phase, uses, tiles_done = tile * 0, tile * 0, tile * 0, tile * 0
    if requests.IS_SINGLE:
        work = locate_single(requests)
        # also without a key tile: the CTA may not exit before its queries are loaded
        _issue_block(requests, stages, scores, work, uses, uses, stage, phase, tiles_done)
    else:
        while left > 0:
            work = locate_block(requests, request, block, tile, left)
            if work.first_tile < work.end_tile:
                q_stage, q_phase = two_stages(uses)
                stage, phase, tiles_done = _issue_block(
                    *(requests, stages, scores, work, q_stage, q_phase, stage, phase, tiles_done)
                )
                uses += 1
            request, block, tile, left = next_block(work, request, block, left)
