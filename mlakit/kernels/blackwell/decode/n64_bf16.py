"""Absorbed MLA decode over 16-bit cache rows on Blackwell, 16, 32 or 64 heads per CTA.

Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
Work       a work tile is ROWS heads of one query over a split of its request's keys, 128 keys at a
           time, which are the M side of both products (`device.keys_as_m`); a persistent CTA
           computes one tile after the other (`hopper.decode.scheduler`)
Roles      a softmax warpgroup; a warp that issues the products; a producer warpgroup that gathers
           rows with TMA, four per instruction, so pages may have any size
Memory     64 heads: 222 KB of shared memory, of which the queries are 72 KB and the four stages of
           latent columns 128 KB; 16 heads have five. Tensor memory: five times ROWS columns.
           Splits write float32 partials (`kernels.decode_merge`)
Limits     D_C = 512, D_R = 64. Triton 3.9 or newer
Numbers    P is rounded to the cache's dtype, acc is float32. Rows of keys that a query does not see
           are zeros in shared memory: a gather reads zeros for row −1
Lineage    own design; ideas: swapped operands for few heads, split-KV flash decoding, FlashMLA's
           TMA gathers
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from mlakit.kernels.blackwell.device.gathers import ENTRIES, GATHERED, Rows
from mlakit.kernels.blackwell.device.keys_as_m import (
    HEADS,
    KEYS,
    PART,
    PARTS,
    SCORE_LOAD,
    alloc,
    gather_block,
    initial_softmax,
    issue_scores,
    issue_values,
    result,
    row_sums,
    softmax_block,
    wait_for_values,
)
from mlakit.kernels.hopper.decode.arguments import VARYING
from mlakit.kernels.hopper.decode.scheduler import (
    count_tiles,
    first_tile,
    key_range,
    launch_dependents,
    locate_tile,
    make_work,
    next_tile,
)
from mlakit.kernels.hopper.device.epilogue import finish_rows, store_acc, store_lse
from mlakit.kernels.hopper.device.pipeline import Query, load_query
from mlakit.kernels.hopper.device.primitives import alloc_barrier
from mlakit.kernels.hopper.sparse.seesaw import Scale


@gluon.jit
def _blocks(keys):
    """Return (first block, number of blocks); one at least: results of no keys are written, too."""
    first = keys.low // KEYS
    end = (keys.end + KEYS - 1) // KEYS
    return first, gl.maximum(end - first, 1)


@gluon.jit
def _lookup(inputs, keys, block, half):
    """Start the page lookup of the first or the last 64 keys of a block, in `ENTRIES`."""
    key = block * KEYS + half * GATHERED + gl.arange(0, GATHERED, ENTRIES)
    at = keys.pages + (key // inputs.PAGE).to(gl.int64) * inputs.stride_entry
    return gl.load(at, mask=_is_seen(keys, key), other=0).to(gl.int32)


@gluon.jit
def _is_seen(keys, key):
    return (key >= keys.low) & (key < keys.end)


@gluon.jit
def _rows(inputs, keys, block, half, page):
    """The rows of 64 keys, in the tensors of their latent and of their rotated columns."""
    key = block * KEYS + half * GATHERED + gl.arange(0, GATHERED, ENTRIES)
    row = gl.where(_is_seen(keys, key), page * inputs.PAGE_ROWS + key % inputs.PAGE, -1)
    NONE: gl.constexpr = None
    return Rows(inputs.kv, NONE, False, row), Rows(inputs.kv_rope, NONE, False, row)


@gluon.jit
def producer(item, index, inputs, scheduler, query, smem, barriers):
    """Load the queries of every work tile, and gather its blocks."""
    block = item * 0  # of all work tiles
    while item < scheduler.last_item:
        keys = key_range(inputs, scheduler, item, index)
        first, num_blocks = _blocks(keys)
        # the products that read the queries of the last tile are complete
        mbarrier.wait(barriers.scores_full, (block & 1) ^ 1)
        load_query(inputs, scheduler, item, index, query)
        low_pages = _lookup(inputs, keys, first, 0)
        high_pages = _lookup(inputs, keys, first, 1)
        for i in range(num_blocks):
            low, low_rope = _rows(inputs, keys, first + i, 0, low_pages)
            high, high_rope = _rows(inputs, keys, first + i, 1, high_pages)
            low_pages = _lookup(inputs, keys, first + i + 1, 0)
            high_pages = _lookup(inputs, keys, first + i + 1, 1)
            ROPE_COLUMN: gl.constexpr = inputs.ROPE_COLUMN
            rope = (low_rope, high_rope)
            gather_block((low, high), rope, block, ROPE_COLUMN, smem, barriers)
            block += 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit
def issue(item, index, inputs, scheduler, query, smem, tmem, barriers):
    """Issue the products of every block."""
    block = item * 0
    tiles_done = item * 0
    while item < scheduler.last_item:
        _, num_blocks = _blocks(key_range(inputs, scheduler, item, index))
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
        first, num_blocks = _blocks(keys)
        softmax = initial_softmax(tmem)
        for i in range(num_blocks):
            key = (first + i) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
            is_seen = _is_seen(keys, key)
            softmax = softmax_block(block, i, is_seen, softmax, smem, tmem, barriers, scale)
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


@gluon.jit(do_not_specialize=VARYING)
def mla_decode_n64_bf16_kernel(
    q,  # TMA descriptors: tiles of ROWS x 128
    q_rope,  # of ROWS x 64
    kv,  # rows of 64 columns
    kv_rope,  # likewise
    scale_log2,
    stride_table_request,
    q_token_rows,
    q_rope_token_rows,
    heads,
    slot_rows,
    stride_lse_token,
    batch,  # these four are of `arguments`
    schedule,
    outputs,
    gather,
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `device.configs.KeysAsMConfig`
):
    """Run the plan on a grid (work tiles of a request that run at once, CTAs of the plan)."""
    inputs, scheduler, outputs = make_work(
        (q, q_rope, kv, kv_rope),
        (stride_table_request, q_token_rows, q_rope_token_rows, heads, slot_rows, stride_lse_token),
        (batch, schedule, outputs, gather),
        TRAITS,
        schedule.head_tiles,
    )
    smem, tmem, barriers = alloc(q.dtype, True, CONFIG)
    query = Query(smem.q, smem.q_rope, alloc_barrier())
    scale = Scale(size=scale_log2, SIGN=TRAITS.SCORES.SIGN)
    item, index = first_tile(scheduler, schedule)
    if item < scheduler.last_item:
        launch_dependents(scheduler, item)
        gl.warp_specialize(
            [
                (
                    softmax_warps,
                    (item, index, inputs, scheduler, outputs, smem, tmem, barriers, scale),
                ),
                (producer, (item, index, inputs, scheduler, query, smem, barriers)),
                (issue, (item, index, inputs, scheduler, query, smem, tmem, barriers)),
            ],
            [4, 1],
            [CONFIG.PRODUCER_REGISTERS, CONFIG.ISSUE_REGISTERS],
        )
