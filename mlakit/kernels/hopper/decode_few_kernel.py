"""Absorbed attention over paged rows of 576 columns, 512 of them values: few heads, one stream.

Work       a program: the 8, 16 or 32 heads (ROWS) of one query over a range of its request's keys,
           64 keys a block; one such unit after the other, as the plan's items say
Bound      by bytes in flight, not by arithmetic: a producer keeps rings of copies full, between
           units too, and keys are on the side of the dots that is 64 rows wide in any case

             producer, one warp                       consumer, four warps
  a block    look up the pages of the next one        Sᵀ = K·Qᵀ, part by part as they come
             five times: wait for a free place        <- empty: the rope part
               and copy a part to it          full -> m = max(m, Sᵀ), Pᵀ = exp2(Sᵀ − m)
                                                      Oᵀ = Oᵀ·a + Vᵀ·Pᵀ, part by part
                                                      <- empty: each part of the latents

Channels   a block is five boxes: the rope part, then four parts of 128 latent columns. Either kind
           has a ring of places, each of them with two barriers: `full` (the copy is there) and
           `empty` (the consumer is done with it). Queries have one buffer that the consumer fills,
           once it has done the last dots of the unit before. For the phases of barriers see
           `decode_few_rings`, which has what is common to kernels for few heads
Deadlock   none. Both walk the same units (`next_unit`) and blocks (`find_keys`; a unit without keys
           has no box), and send, await and free boxes in the same order. For box n the producer
           waits until box n − PLACES is free, for which the consumer needs the boxes of that one's
           block and no later ones; a ring has room for a block, so they were all sent before
Memory     all of shared memory, with 16 heads 200 KB of places: a block in work takes 72, the rest
           is in flight; 255 registers. Partials of units that do not see all keys of their query go
           to scratch in float32, `merge_partials` joins them
Numbers    P is rounded to the cache's dtype, sums are float32; rows past a query's last key are
           zeroed before they are multiplied, for 0 · NaN is NaN
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.decode_copies import await_rows, copying_threads, copying_warps
from mlakit.kernels.hopper.decode_few_rings import (
    COLUMNS,
    PARTS,
    Channels,
    Queries,
    after,
    load_queries,
    new_ring,
    produce,
    store,
)
from mlakit.kernels.hopper.decode_row_scales import Scales
from mlakit.kernels.hopper.decode_softmax import FIRST_PEAK, finish, mask_scores, store_lse
from mlakit.kernels.hopper.decode_work import (
    Inputs,
    Results,
    Work,
    count_units,
    find_keys,
    find_place,
    let_merge_start,
    next_unit,
)
from mlakit.kernels.hopper.primitives import new_barrier, opaque_zero, zero_rows

PRODUCER_REGISTERS = gl.constexpr(96)
ROPE_COLUMN = gl.constexpr(512)
ROPE_PLACES = gl.constexpr(3)


@gluon.jit
def _scores(inputs, queries, channels, place, turn, rope_place, rope_turn, LAYOUT: gl.constexpr):
    """Of a block, [64 keys, heads]. Its rope part is free again."""
    latent, rope = channels.latent, channels.rope
    HEADS: gl.constexpr = queries.rope.shape[1]
    zero = opaque_zero()
    nothing = gl.zeros([64, HEADS], gl.float32, LAYOUT)
    await_rows(inputs, rope.full.index(rope_place), rope_turn)
    q = queries.rope.index(zero).permute((1, 0))
    dots = warpgroup_mma(rope.boxes.index(rope_place), q, nothing, use_acc=False, is_async=True)
    for part in gl.static_range(PARTS):
        await_rows(inputs, latent.full.index(place), turn)
        q = queries.latent.index(zero + part).permute((1, 0))
        dots = warpgroup_mma(latent.boxes.index(place), q, dots, is_async=True)
        place, turn = after(latent, place, turn)
    scores = warpgroup_mma_wait(0, deps=(dots,))
    mbarrier.arrive(rope.empty.index(rope_place), count=1)
    return scores


@gluon.jit
def _add_values(weights, latent, place, turn, sums, decay, kept):
    """sums · decay + Vᵀ·P of a block, whose first `kept` keys there are. Its places are free again.

    weights  P in shared memory, [1, heads, 64 keys]
    sums     of the columns of each part, [COLUMNS, heads]
    """
    places = ()
    for _ in gl.static_range(PARTS):
        places += (place,)
        place, turn = after(latent, place, turn)
    zero_rows(latent.boxes, places, kept)
    weights = weights.index(opaque_zero()).permute((1, 0))
    pending = ()
    for part in gl.static_range(PARTS):
        values = latent.boxes.index(places[part]).permute((1, 0))
        pending += (warpgroup_mma(values, weights, sums[part] * decay, is_async=True),)
    done = ()
    for part in gl.static_range(PARTS):
        done += (warpgroup_mma_wait(PARTS - 1 - part, deps=(pending[part],)),)
        mbarrier.arrive(latent.empty.index(places[part]), count=1)
    return done, place, turn


@gluon.jit
def _consumer(
    item, index, inputs, work, results, queries, weights, channels, scale,
    SIGN: gl.constexpr, IS_GIVEN: gl.constexpr,
):  # fmt: skip
    HEADS: gl.constexpr = work.ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    latent, rope = channels.latent, channels.rope
    place, turn, rope_place, rope_turn = item * 0, item * 0, item * 0, item * 0
    units_before = item * 0  # its parity is the phase of the queries' barrier
    load_queries(inputs, work, item, index, queries)
    # addresses of a thread's elements are found in each turn: kept, they would be spilled
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        nothing = gl.zeros([COLUMNS, HEADS], gl.float32, LAYOUT)
        sums = (nothing, nothing, nothing, nothing)
        peak = gl.full([HEADS], FIRST_PEAK, gl.float32, ROW)
        total = gl.zeros([64, HEADS], gl.float32, LAYOUT)  # of every 64th key, until the end
        mbarrier.wait(queries.arrival, units_before & 1)
        for block in range(keys.first_block, keys.end_block):
            scores = _scores(inputs, queries, channels, place, turn, rope_place, rope_turn, LAYOUT)
            rope_place, rope_turn = after(rope, rope_place, rope_turn)
            scores = mask_scores(scores, block, keys, 0, SIGN, IS_GIVEN)
            new_peak = gl.maximum(peak, gl.max(scores, 0) * scale)
            decay = gl.expand_dims(gl.exp2(peak - new_peak), 0)
            exponentials = gl.exp2(scores * scale - gl.expand_dims(new_peak, 0))
            weights.index(0).permute((1, 0)).store(exponentials.to(weights.dtype))
            fence_async_shared()
            total = total * decay + exponentials
            peak = new_peak
            sums, place, turn = _add_values(
                weights, latent, place, turn, sums, decay, keys.end - block * 64
            )
        next_item, next_index = next_unit(work, item, index + gl.num_programs(0))
        if next_item < work.last_item:
            load_queries(inputs, work, next_item, next_index, queries)
        unit = find_place(work, item, index)
        row = gl.arange(0, HEADS, ROW)
        lse, factor = finish(
            unit, results, work.heads, unit.first_head + row, peak, gl.sum(total, 0)
        )
        store_lse(unit, results, work.heads, row, lse)
        # eight threads write columns that are neighbours
        column = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
        store(unit, results, work.heads, sums, factor, column)
        units_before += 1
        item = next_item
        index = next_index


@gluon.jit(
    # other strides are 1 nearly always, as head_blocks is, and take no registers then
    do_not_specialize=[
        "stride_table_request",
        "stride_lse_token",
        "q_token_rows",
        "q_rope_token_rows",
        "heads",
        "slot_rows",
    ]
)
def mla_decode_few_kernel(
    q,  # descriptors: boxes of ROWS x 128, of ROWS x 64 where rotated
    q_rope,
    kv,  # of 64 x 128 and 64 x 64; where pages are smaller of PAGE x 64 both
    kv_rope,
    table,
    q_starts,
    kv_lens,
    sink,
    out,
    lse,
    partial_out,  # [slots, slot_rows, 512] float32
    partial_lse,  # [slots, slot_rows] float32
    items,
    worker_starts,
    partial_starts,
    scale_log2,
    stride_table_request,
    stride_table_entry,
    stride_q_starts,
    stride_kv_lens,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    stride_sink,
    q_token_rows,
    q_rope_token_rows,
    heads,
    slot_rows,
    head_blocks,
    words,  # the cache's first, if rows are copied one by one, or None
    row_quads,  # four words each, from a row of it to the next; or None
    ROWS: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    IS_GIVEN: gl.constexpr,  # the plan is not of this kernel: see `_has_room`, `mask_scores`
    ITEM_COLUMNS: gl.constexpr,
):
    """grid: (units of a request that are worked on at once, workers of the plan)"""
    # what fits beside the queries
    PLACES: gl.constexpr = 12 if ROWS == 8 else 11 if ROWS == 16 else 10
    inputs = Inputs(
        q, q_rope, kv, kv_rope, q_token_rows, q_rope_token_rows, table, stride_table_request,
        stride_table_entry, PAGE_ROWS, PAGE, words, row_quads,
    )  # fmt: skip
    work = Work(
        items, partial_starts, q_starts, kv_lens, stride_q_starts, stride_kv_lens, heads,
        head_blocks, ROWS, slot_rows, gl.load(worker_starts + gl.program_id(1) + 1), IS_CAUSAL,
        IS_GIVEN, ITEM_COLUMNS, False,  # MAY_REHEARSE
    )  # fmt: skip
    results = Results(
        out, lse, partial_out, partial_lse, sink, stride_out_token, stride_out_head,
        stride_lse_token, stride_lse_head, stride_sink,
    )  # fmt: skip
    NONE: gl.constexpr = None
    WARPS: gl.constexpr = copying_warps(words)
    ARRIVALS: gl.constexpr = copying_threads(words)
    no_scales = Scales(NONE, 0, 0, 0, WARPS)
    channels = Channels(
        new_ring(PLACES, COLUMNS, kv, READERS=1, ARRIVALS=ARRIVALS),
        new_ring(ROPE_PLACES, 64, kv_rope, READERS=1, ARRIVALS=ARRIVALS),
        NONE,
    )
    queries = Queries(
        gl.allocate_shared_memory(q.dtype, [PARTS, ROWS, COLUMNS], q.layout),
        gl.allocate_shared_memory(q.dtype, [1, ROWS, 64], q.layout),
        new_barrier(),
    )
    weights = gl.allocate_shared_memory(kv.dtype, [1, ROWS, 64], kv.layout)
    item, index = next_unit(work, gl.load(worker_starts + gl.program_id(1)), gl.program_id(0))
    if item < work.last_item:
        let_merge_start(work, item)
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        item, index, inputs, work, results, queries, weights, channels, scale_log2,
                        SIGN, IS_GIVEN,
                    ),
                ),
                (produce, (item, index, inputs, work, channels, no_scales, ROPE_COLUMN)),
            ],
            [WARPS],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
