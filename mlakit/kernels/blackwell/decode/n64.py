"""Decode kernels with keys as M share key ranges, lookups, products, softmax and epilogue.

Their producers differ, by how rows come to shared memory: `n64_bf16`, `n64_fp8_kv`.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from mlakit.kernels.blackwell.device.gathers import GATHERED
from mlakit.kernels.blackwell.device.keys_as_m import (
    HEADS,
    KEYS,
    PART,
    PARTS,
    SCORE_LOAD,
    initial_softmax,
    issue_scores,
    issue_values,
    result,
    row_sums,
    softmax_block,
    wait_for_values,
)
from mlakit.kernels.hopper.decode.scheduler import (
    count_tiles,
    key_range,
    locate_tile,
    next_tile,
)
from mlakit.kernels.hopper.device.epilogue import finish_rows, store_acc, store_lse
from mlakit.kernels.hopper.device.pipeline import load_query


@gluon.jit
def blocks_of(keys):
    """Return (first block, number of blocks); one at least: results of no keys are written, too."""
    first = keys.low // KEYS
    end = (keys.end + KEYS - 1) // KEYS
    return first, gl.maximum(end - first, 1)


@gluon.jit
def lookup(inputs, keys, block, half, LAYOUT: gl.constexpr):
    """Start the page lookup of the first or the last 64 keys of a block, [64]."""
    key = block * KEYS + half * GATHERED + gl.arange(0, GATHERED, LAYOUT)
    at = keys.pages + (key // inputs.PAGE).to(gl.int64) * inputs.stride_entry
    return gl.load(at, mask=is_seen(keys, key), other=0).to(gl.int32)


@gluon.jit
def is_seen(keys, key):
    return (key >= keys.low) & (key < keys.end)


@gluon.jit
def rows_of_half(inputs, keys, block, half, page, LAYOUT: gl.constexpr):
    """Return (rows of 64 keys in the pool, which of them the query sees)."""
    key = block * KEYS + half * GATHERED + gl.arange(0, GATHERED, LAYOUT)
    return page * inputs.PAGE_ROWS + key % inputs.PAGE, is_seen(keys, key)


@gluon.jit
def start_tile(inputs, scheduler, item, index, block, query, barriers):
    """Start to load the queries of a work tile whose first block is number `block`; return
    (`scheduler.KeyRange`, its first block of the request, its number of blocks)."""
    keys = key_range(inputs, scheduler, item, index)
    first, num_blocks = blocks_of(keys)
    # the products that read the queries of the last tile are complete
    mbarrier.wait(barriers.scores_full, (block & 1) ^ 1)
    load_query(inputs, scheduler, item, index, query)
    return keys, first, num_blocks


@gluon.jit
def issue(item, index, inputs, scheduler, query, smem, tmem, barriers):
    """Issue the products of every block."""
    block = item * 0
    tiles_done = item * 0
    while item < scheduler.last_item:
        _, num_blocks = blocks_of(key_range(inputs, scheduler, item, index))
        mbarrier.wait(query.full, tiles_done & 1)
        # no hoisting: descriptors of operands would be kept across blocks, and spilled
        for i in tl.range(0, num_blocks, disable_licm=True):
            issue_scores(block, smem, tmem, barriers)
            issue_values(block, i, smem, tmem, barriers)
            block += 1
        tiles_done += 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit
def softmax_warps(item, index, inputs, scheduler, outputs, smem, tmem, barriers, scale):
    """Make probabilities of the scores of every block, and store the results of every tile."""
    ROWS: gl.constexpr = smem.q.shape[1]
    LAYOUT: gl.constexpr = tmem.scores.get_reg_layout(instr_variant=SCORE_LOAD)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    block = item * 0
    # no hoisting: addresses of results would be kept across tiles, and spilled
    for _ in tl.range(0, count_tiles(scheduler, item, index), disable_licm=True):
        keys = key_range(inputs, scheduler, item, index)
        first, num_blocks = blocks_of(keys)
        softmax = initial_softmax(tmem)
        for i in range(num_blocks):
            key = (first + i) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
            softmax = softmax_block(
                block, i, is_seen(keys, key), softmax, smem, tmem, barriers, scale
            )
            block += 1
        tile = locate_tile(scheduler, item, index)
        head = tile.first_head + row
        row_sum = row_sums(softmax)
        lse, out_scale = finish_rows(tile, outputs, scheduler.heads, head, softmax.row_max, row_sum)
        store_lse(tile, outputs, scheduler.heads, row, lse)
        smem.out_scale.store(out_scale)
        wait_for_values(block - 1, barriers)
        for i in gl.static_range(ROWS // HEADS):
            some = tile.replace(
                first_head=tile.first_head + i * HEADS, slot_row=tile.slot_row + i * HEADS
            )
            for part in gl.static_range(PARTS):
                values = (result(smem, tmem, part, i),)
                store_acc(some, outputs, scheduler.heads, values, part * PART, 1)
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))
