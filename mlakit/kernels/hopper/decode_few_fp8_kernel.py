"""Absorbed attention over paged rows of e4m3, 512 values and 64 rotated columns: few heads.

Formats    fp8           one scale for the tensor: it joins the softmax's, and the result
           fp8_token     a scale beside each row: it multiplies scores and weights
           fp8_block128  a scale per part of 128 columns among the bytes of a row, likewise
Queries    bf16, fp16 or e4m3. The last come as words, to memory of their own, and have a scale for
           each token, which multiplies scores. Beside them rotated columns may be bf16, as of rows
Work       as `decode_few_kernel`: a program has the 8, 16 or 32 heads (ROWS) of one query over a
           range of its request's keys, 64 keys a block, one such unit after the other
Bound      by bytes in flight, if shared memory is spared: it could not also take rows that are
           written back as halves. So both dots read bytes and widen them in registers (`e4m3`)

             producer, one warp        scorer, four warps              adder, four warps
  a block    wait for free places
             copy a block     full ->  Sᵀ = K·Qᵀ, part by part    ->  read a part
                                       m = max(m, Sᵀ)
                                       Pᵀ = exp2(Sᵀ − m)  message ->  Oᵀ = Oᵀ·a + Vᵀ·Pᵀ
                             <- empty: each part, when both have read it
  a unit                               write lse           factor ->  write Oᵀ · factor

Scorers    two, who take turns (`decode_few_fp8_scorer`): while one waits for its dots and for the
           other warps of its softmax, the other goes on
Adders     one, or two of them, each with half the columns (`_fp8_warps` of `decode`)
Scales     of rows are brought by the producer (`decode_row_scales`), to places that go with those
           of the rotated columns: given back when weights are sent
Channels   the rings of `decode_few_rings`, whose latent boxes have two readers, the adder of
           their columns and the scorer of their block; two places for messages with barriers
           `full` and `empty`, the weights of block n and the decay of the sums before it in place
           n % 2; and one for the factor of a unit, from the first scorer. Blocks are counted
           through all units
Phases     who waits for one of a barrier must know that the phase before is over. Of a message's
           place it is: one scorer has all blocks of a place. Of a ring's it is where the ring has
           room for two blocks: the box before in that place is then of a scorer's own last block,
           or of one whose peak it has heard, or whose message an adder has
Deadlock   none. All walk the same units and blocks. The scorer of block n waits for its boxes; for
           the peak of block n − 1, which is told before any message is sent; and for the adder to
           be done with message n − 2. An adder waits for boxes and for the message of the block
           whose boxes it reads; the producer for both to have read an earlier box, and with scales
           for the message of that block. At the end of a unit the first scorer waits for the
           second, which then waits for queries of the next. So the earliest block that is not done
           can always go on
Memory     all of shared memory, with 16 heads some 180 KB of places, all of them in flight but for
           the boxes just being read
Numbers    rows are widened exactly, and so are queries; P, times the row's scale, is rounded to
           float16. Sums are float32, in units that keep halves in range. Rows past a query's last
           key and their scales are zeros, for 0 · NaN is NaN
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.decode_copies import copying_threads, copying_warps
from mlakit.kernels.hopper.decode_few_fp8_scorer import (
    HALVES,
    Scoring,
    Turns,
    new_fitted,
    new_heads,
    new_maxima,
    new_messages,
    new_standing,
    score,
)
from mlakit.kernels.hopper.decode_few_rings import (
    COLUMNS,
    PARTS,
    Channels,
    Queries,
    after,
    message_place,
    new_ring,
    produce,
    release,
    store,
)
from mlakit.kernels.hopper.decode_row_scales import Scales, new_scale_boxes
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
from mlakit.kernels.hopper.e4m3 import column_of_sum, load_values
from mlakit.kernels.hopper.primitives import new_barrier


@gluon.jit
def _read_values(latent, part: gl.constexpr, place, turn, kept, LAYOUT: gl.constexpr):
    """Of a part of a block, in this place."""
    if part % latent.BOXES == 0:
        mbarrier.wait(latent.full.index(place), turn)
    box = latent.boxes.index(place * latent.BOXES + part % latent.BOXES)
    return load_values(box, kept, LAYOUT)


@gluon.jit
def _add_values(
    messages, number, latent, place, turn, sums, kept, FIRST: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The sums with a block taken in, whose first `kept` keys there are: all its own boxes.

    sums  of the columns of each part from FIRST on, [COLUMNS, heads]
    """
    OWN_PARTS: gl.constexpr = len(sums)
    values = _read_values(latent, 0, place, turn, kept, LAYOUT)
    message, message_turn = message_place(number)
    mbarrier.wait(messages.full.index(message), message_turn)
    decay = messages.decays.index(message).load(gl.SliceLayout(0, LAYOUT))
    decay = gl.expand_dims(decay, 0)
    done = ()
    for part in gl.static_range(OWN_PARTS):
        copy = messages.weights[FIRST + part if messages.COPIES > 1 else 0]
        weights = copy.index(message).permute((1, 0))
        dots = warpgroup_mma(values, weights, sums[part] * decay, is_async=True)
        if part % latent.BOXES == latent.BOXES - 1:
            release(latent, place)
            place, turn = after(latent, place, turn)
        next_values = values
        if part + 1 < OWN_PARTS:
            next_values = _read_values(latent, part + 1, place, turn, kept, LAYOUT)
        dots, values = warpgroup_mma_wait(0, deps=(dots, values))
        done += (dots,)
        values = next_values
    mbarrier.arrive(messages.empty.index(message), count=1)
    place, turn = after(latent, place, turn, (PARTS - OWN_PARTS) // latent.BOXES)
    return done, place, turn


@gluon.jit
def _adder(
    NUMBER: gl.constexpr, ADDERS: gl.constexpr, item, index, inputs, work, results, messages,
    channels,
):  # fmt: skip
    HEADS: gl.constexpr = work.ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    OWN_PARTS: gl.constexpr = PARTS // ADDERS
    gl.static_assert(OWN_PARTS % channels.latent.BOXES == 0)  # a place has one of them to read it
    FIRST: gl.constexpr = NUMBER * OWN_PARTS
    latent = channels.latent
    place, turn = after(latent, item * 0, item * 0, FIRST // latent.BOXES)
    received, units_before = item * 0, item * 0
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        sums = ()
        for _ in gl.static_range(OWN_PARTS):
            sums += (gl.zeros([COLUMNS, HEADS], gl.float32, LAYOUT),)
        for block in range(keys.first_block, keys.end_block):
            sums, place, turn = _add_values(
                messages, received, latent, place, turn, sums, keys.end - block * 64, FIRST, LAYOUT
            )
            received += 1
        mbarrier.wait(messages.factor_full, units_before & 1)
        factor = messages.factor.load(gl.SliceLayout(0, LAYOUT))
        mbarrier.arrive(messages.factor_empty, count=1)
        units_before += 1
        unit = find_place(work, item, index)
        store(unit, results, work.heads, sums, factor, column_of_sum(LAYOUT), FIRST)
        item, index = next_unit(work, item, index + gl.num_programs(0))


@gluon.jit(
    # other strides are 1 nearly always, as head_blocks is, and take no registers then
    do_not_specialize=[
        "stride_table_request",
        "stride_lse_token",
        "q_token_rows",
        "q_rope_token_rows",
        "heads",
        "slot_rows",
        "tensor_scale",
    ]
)
def mla_decode_few_fp8_kernel(
    q,  # descriptors: boxes of ROWS x 128, of ROWS x 64 where rotated; words of e4m3
    q_rope,
    kv,  # words, 64 x 32; where rotated 64 x 64 bfloat16, or 64 x 16 words (fp8)
    kv_rope,  # of either PAGE rows where that are fewer
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
    scales,  # float32 of rows, or None
    stride_scales_page,
    stride_scales_row,
    tensor_scale,
    device_scale,  # the tensor's, where it is on the device, or None
    q_scale,  # float32 of tokens, where queries are e4m3, or None
    stride_q_scale,
    ROWS: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    IS_GIVEN: gl.constexpr,  # the plan is not of this kernel: see `_has_room`, `mask_scores`
    ITEM_COLUMNS: gl.constexpr,
    FORMAT: gl.constexpr,
    ROPE_COLUMN: gl.constexpr,  # of the descriptor
    BOXES: gl.constexpr,  # of a place of the ring of latent columns
    PLACES: gl.constexpr,  # for two blocks at least
    ROPE_PLACES: gl.constexpr,
    ADDERS: gl.constexpr,
    SCORER_REGISTERS: gl.constexpr,  # of a thread
    ADDER_REGISTERS: gl.constexpr,  # of the second one; the first has the rest
    PRODUCER_REGISTERS: gl.constexpr,
):
    """grid: (units of a request that are worked on at once, workers of the plan)"""
    if device_scale is not None:
        tensor_scale = gl.load(device_scale).to(gl.float32)
        scale_log2 *= tensor_scale
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
    COPIES: gl.constexpr = PARTS if FORMAT == "fp8_block128" else 1
    WARPS: gl.constexpr = copying_warps(words)
    row_scales = Scales(scales, stride_scales_page, stride_scales_row, COPIES, WARPS)
    scale_boxes: gl.constexpr = None
    COPIED: gl.constexpr = copying_threads(words)
    ARRIVALS: gl.constexpr = COPIED + (0 if scales is None else 1)  # of copies, and of scales
    if scales is not None:
        scale_boxes = new_scale_boxes(ROPE_PLACES, COPIES)
    channels = Channels(
        new_ring(PLACES, COLUMNS // 4, kv, READERS=2, BOXES=BOXES, ARRIVALS=COPIED),
        new_ring(ROPE_PLACES, kv_rope.block_shape[1], kv_rope, READERS=1, ARRIVALS=ARRIVALS),
        scale_boxes,
    )
    copied = Queries(
        gl.allocate_shared_memory(q.dtype, [PARTS, ROWS, q.block_shape[1]], q.layout),
        gl.allocate_shared_memory(q_rope.dtype, [1, ROWS, q_rope.block_shape[1]], q_rope.layout),
        new_barrier(),
    )
    queries = copied
    if q.dtype == gl.int32:
        rope = copied.rope
        if q_rope.dtype == gl.int32:
            ROPE_TYPE: gl.constexpr = gl.float16 if FORMAT == "fp8" else gl.bfloat16
            rope = gl.allocate_shared_memory(ROPE_TYPE, [1, ROWS, 64], HALVES)
        latent = gl.allocate_shared_memory(gl.float16, [PARTS, ROWS, COLUMNS], HALVES)
        queries = Queries(latent, rope, copied.arrival)
    messages = new_messages(ROWS, COPIES, ADDERS)
    scoring = Scoring(
        copied, queries, q_scale, stride_q_scale, messages, channels, scale_log2, tensor_scale,
        SIGN, IS_GIVEN, FORMAT,
    )  # fmt: skip
    fitted = new_fitted(ROWS)
    item, index = next_unit(work, gl.load(worker_starts + gl.program_id(1)), gl.program_id(0))
    if item < work.last_item:
        let_merge_start(work, item)
        told, told_back = new_standing(ROWS), new_standing(ROWS)
        end, end_total = new_standing(ROWS), new_heads(ROWS)
        first = Turns(0, new_maxima(ROWS), told_back, told, end, end_total, fitted)
        second = Turns(1, new_maxima(ROWS), told, told_back, end, end_total, fitted)
        if ADDERS == 1:
            gl.warp_specialize(
                [
                    (_adder, (0, 1, item, index, inputs, work, results, messages, channels)),
                    (score, (first, item, index, inputs, work, results, scoring)),
                    (score, (second, item, index, inputs, work, results, scoring)),
                    (produce, (item, index, inputs, work, channels, row_scales, ROPE_COLUMN)),
                ],
                [4, 4, WARPS],
                [SCORER_REGISTERS, SCORER_REGISTERS, PRODUCER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (_adder, (0, 2, item, index, inputs, work, results, messages, channels)),
                    (score, (first, item, index, inputs, work, results, scoring)),
                    (score, (second, item, index, inputs, work, results, scoring)),
                    (_adder, (1, 2, item, index, inputs, work, results, messages, channels)),
                    (produce, (item, index, inputs, work, channels, row_scales, ROPE_COLUMN)),
                ],
                [4, 4, 4, WARPS],
                [SCORER_REGISTERS, SCORER_REGISTERS, ADDER_REGISTERS, PRODUCER_REGISTERS],
            )
