"""The issuing warp: Q·Kᵀ and P·V of all query tiles, in the order of `pipeline`."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from mlakit.kernels.blackwell.prefill.pipeline import (
    KEYS,
    QUERIES,
    TMEM_TILE,
    slot_of,
    tail_of,
    turn,
)
from mlakit.kernels.hopper.prefill.pipeline import read_tile, release_tile, wait_tile


@gluon.jit
def probs_of(tmem, slot, DTYPE: gl.constexpr):
    """The probabilities of a block, in the place of its scores."""
    place = tmem.scores.index(slot).slice(0, KEYS * DTYPE.primitive_bitwidth // 32)
    return place.reinterpret(DTYPE, [QUERIES, KEYS], TMEM_TILE)


@gluon.jit
def _issue_scores(block, fill, TILE: gl.constexpr, SIZES, smem, tmem, barriers):
    """Issue Q·Kᵀ of a block and query tile; the last query tile releases the keys."""
    IS_LAST: gl.constexpr = TILE == SIZES.TILES - 1
    slot, _ = slot_of(SIZES, block, TILE)
    scores = tmem.scores.index(slot)
    for part in gl.static_range(SIZES.KEY_PARTS):
        stage, _ = turn(smem, fill + part)
        if TILE == 0:
            index, phase = turn(smem, block * SIZES.KEY_PARTS + part)
            mbarrier.wait(barriers.keys_full.index(index), phase)
        query = smem.q.index(TILE * SIZES.KEY_PARTS + part)
        key = smem.parts.index(stage).permute((1, 0))
        tcgen05_mma(query, key, scores, use_acc=part > 0, mbarriers=[])
        if SIZES.HAS_TAIL and part == 0:
            # before the commit, which says that the tail is multiplied, too
            key = tail_of(SIZES, smem, block).permute((1, 0))
            tcgen05_mma(smem.q_tails.index(TILE), key, scores, mbarriers=[])
        if IS_LAST:
            tcgen05_commit(barriers.empty.index(stage))
    tcgen05_commit(barriers.scores_full.index(slot))


@gluon.jit
def _issue_values(block, fill, is_first, TILE: gl.constexpr, SIZES, smem, tmem, barriers):
    """Issue P·V of a block and query tile; the last query tile releases the values.

    is_first  it is the first block of the work tile
    """
    IS_LAST: gl.constexpr = TILE == SIZES.TILES - 1
    slot, phase = slot_of(SIZES, block, TILE)
    mbarrier.wait(barriers.probs_full.index(slot), phase)
    if TILE == 0:
        index, clean_phase = turn(smem, block)
        mbarrier.wait(barriers.clean.index(index), clean_phase)
    probs = probs_of(tmem, slot, smem.parts.dtype)
    for part in gl.static_range(SIZES.VALUE_PARTS):
        stage, _ = turn(smem, fill + part)
        acc = tmem.acc.index(TILE * SIZES.VALUE_PARTS + part)
        tcgen05_mma(probs, smem.parts.index(stage), acc, use_acc=not is_first, mbarriers=[])
        if IS_LAST:
            tcgen05_commit(barriers.empty.index(stage))
    tcgen05_commit(barriers.values_done.index(TILE))


@gluon.jit
def issue(schedule, tiles, SIZES, smem, tmem, barriers):
    """Issue the products of every work tile."""
    KEY_PARTS: gl.constexpr = SIZES.KEY_PARTS
    VALUE_PARTS: gl.constexpr = SIZES.VALUE_PARTS
    tiles_done = gl.to_tensor(0)
    fill = gl.to_tensor(0)
    block = gl.to_tensor(0)
    wait_tile(tiles, tiles_done)
    num_blocks = read_tile(tiles, schedule, tiles_done, 1).num_blocks
    while num_blocks > 0:
        release_tile(tiles, tiles_done)
        for i in gl.static_range(SIZES.TILES):
            mbarrier.wait(barriers.q_full.index(i), tiles_done & 1)
            _issue_scores(block, fill, i, SIZES, smem, tmem, barriers)
        fill += KEY_PARTS
        # no hoisting: descriptors of operands would be kept across blocks, and spilled
        for index in tl.range(1, num_blocks, disable_licm=True):
            is_first = index == 1
            if SIZES.TILES == 1:
                _issue_scores(block + 1, fill, 0, SIZES, smem, tmem, barriers)
                _issue_values(block, fill + KEY_PARTS, is_first, 0, SIZES, smem, tmem, barriers)
            else:
                for i in gl.static_range(SIZES.TILES):
                    _issue_values(block, fill, is_first, i, SIZES, smem, tmem, barriers)
                    _issue_scores(block + 1, fill + VALUE_PARTS, i, SIZES, smem, tmem, barriers)
            fill += KEY_PARTS + VALUE_PARTS
            block += 1
        tcgen05_commit(barriers.q_empty)
        for i in gl.static_range(SIZES.TILES):
            _issue_values(block, fill, num_blocks == 1, i, SIZES, smem, tmem, barriers)
        fill += VALUE_PARTS
        block += 1
        tiles_done += 1
        wait_tile(tiles, tiles_done)
        num_blocks = read_tile(tiles, schedule, tiles_done, 1).num_blocks
