"""Absorbed attention of queries in e4m3 over paged rows of e4m3: many heads, scores of bytes.

Formats    fp8           one scale for the tensor: it joins the softmax's, and the result
           fp8_token     a scale beside each row: it multiplies scores and weights
           Queries have a scale for each token, which multiplies scores; with rows of fp8_token
           their rotated columns may be halves
Work       as `decode_kernel`: a program has 64 heads of one query over a range of its request's
           keys, 64 keys a block, one such unit after the other
Bound      by tensor cores and those who wait for them. Scores are dots of bytes, at twice the rate
           of halves; values are widened in registers on their way to their dots (`e4m3`), of which
           columns and not heads are the rows

             producer, one warp       scorer                      two adders, 256 columns each
  a block    wait for a free place
             copy a block    full ->  S = Q·Kᵀ of n + 1
                                      P = exp2(S − m)  message -> Oᵀ = Oᵀ·a + Vᵀ·Pᵀ, part by part
                            <- empty: when the scorer and both adders have read it
  a unit                              write lse         factor -> write Oᵀ · factor

Channels   `Blocks`, as many as there is room for, and with them the scales of their rows
           (`decode_row_scales`); two messages, each emptied by both adders; one factor of a unit.
           Blocks are counted through all units
Deadlock   none. All walk the same units and blocks. The scorer waits for the block after the one it
           weighs, and for message n − 2 to be read; adders for blocks and messages; the producer
           for the three readers of an earlier block, of whom none waits for more than the next one
Memory     all of shared memory, four blocks of it on their way; all registers
Numbers    scores are summed as tensor cores sum products of bytes (`reference.hopper_sums`). P,
           times the row's scale, is rounded to float16, values are exact. Rows past a query's last
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

from mlakit.kernels.hopper.decode_copies import copying_warps
from mlakit.kernels.hopper.decode_e4m3_channels import (
    CHUNK,
    CHUNKS,
    new_blocks,
    new_messages,
    next_place,
    produce_blocks,
)
from mlakit.kernels.hopper.decode_e4m3_scorer import Scoring, score_blocks
from mlakit.kernels.hopper.decode_few_rings import COLUMNS, PARTS, Queries, message_place, store
from mlakit.kernels.hopper.decode_row_scales import Scales
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
from mlakit.kernels.hopper.primitives import IN_EACH_THREAD, new_barrier

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALVES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
OWN_PARTS = gl.constexpr(2)  # of an adder


@gluon.jit
def _read(blocks, place, part, chunk: gl.constexpr, kept):
    """Halves [COLUMNS, CHUNK] of the values of a part of a block."""
    box = blocks.latent.index(place * PARTS + part).slice(chunk * CHUNK, CHUNK, 0)
    return load_values(box, kept - chunk * CHUNK, SUMS)


@gluon.jit
def _add_values(messages, number, blocks, place, turn, sums, kept, FIRST: gl.constexpr):
    """The sums with a block taken in, whose first `kept` keys there are."""
    message, message_turn = message_place(number)
    mbarrier.wait(messages.full.index(message), message_turn)
    first, second = sums
    # before values are read: together they would take more registers than there are
    if gl.max(messages.have_decays.index(message).load(IN_EACH_THREAD), 0) > 0.0:
        decay = gl.expand_dims(messages.decays.index(message).load(gl.SliceLayout(0, SUMS)), 0)
        first *= decay
        second *= decay
    sums = first, second
    mbarrier.wait(blocks.full.index(place), turn)
    values = _read(blocks, place, FIRST, 0, kept)
    done = ()
    for part in gl.static_range(OWN_PARTS):
        dots = sums[part]
        for chunk in gl.static_range(CHUNKS):
            weights = messages.weights.index(message * CHUNKS + chunk).permute((1, 0))
            pending = warpgroup_mma(values, weights, dots, is_async=True)
            next_values = values
            if chunk + 1 < CHUNKS:
                next_values = _read(blocks, place, FIRST + part, chunk + 1, kept)
            elif part + 1 < OWN_PARTS:
                next_values = _read(blocks, place, FIRST + part + 1, 0, kept)
            dots, values = warpgroup_mma_wait(0, deps=(pending, values))
            values = next_values
        done += (dots,)
    mbarrier.arrive(blocks.empty.index(place), count=1)
    mbarrier.arrive(messages.empty.index(message), count=1)
    return done


@gluon.jit
def _add(NUMBER: gl.constexpr, item, index, inputs, work, results, messages, blocks):
    FIRST: gl.constexpr = NUMBER * OWN_PARTS
    place, turn = item * 0, item * 0
    received, units_before = item * 0, item * 0
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        nothing = gl.zeros([COLUMNS, 64], gl.float32, SUMS)
        sums = (nothing, nothing)
        for block in range(keys.first_block, keys.end_block):
            kept = keys.end - block * 64
            sums = _add_values(messages, received, blocks, place, turn, sums, kept, FIRST)
            place, turn = next_place(blocks, place, turn)
            received += 1
        mbarrier.wait(messages.factor_full, units_before & 1)
        factor = messages.factor.load(gl.SliceLayout(0, SUMS))
        mbarrier.arrive(messages.factor_empty, count=1)
        units_before += 1
        unit = find_place(work, item, index)
        store(unit, results, work.heads, sums, factor, column_of_sum(SUMS), FIRST)
        item, index = next_unit(work, item, index + gl.num_programs(0))


@gluon.jit
def _first_adder(item, index, inputs, work, results, messages, blocks):
    _add(0, item, index, inputs, work, results, messages, blocks)


@gluon.jit
def _second_adder(item, index, inputs, work, results, messages, blocks):
    _add(1, item, index, inputs, work, results, messages, blocks)


@gluon.jit(
    # other strides are 1 nearly always, and take no registers then
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
def mla_decode_e4m3_kernel(
    q,  # descriptors: words, boxes of 64 x 32; where rotated of 64 x 16, or 64 x 64 bfloat16
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
    q_scale,  # float32 of tokens, or None
    stride_q_scale,
    ROWS: gl.constexpr,  # 64
    PAGE_ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    IS_GIVEN: gl.constexpr,  # the plan is not of this kernel: see `_has_room`, `mask_scores`
    ITEM_COLUMNS: gl.constexpr,
    FORMAT: gl.constexpr,
    ROPE_COLUMN: gl.constexpr,  # of the descriptor
    PLACES: gl.constexpr,  # for blocks, two at least
    ADDER_REGISTERS: gl.constexpr,
    SCORER_REGISTERS: gl.constexpr,
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
        IS_GIVEN, ITEM_COLUMNS, False,
    )  # fmt: skip
    results = Results(
        out, lse, partial_out, partial_lse, sink, stride_out_token, stride_out_head,
        stride_lse_token, stride_lse_head, stride_sink,
    )  # fmt: skip
    HAVE_SCALES: gl.constexpr = scales is not None
    blocks = new_blocks(PLACES, inputs, HAVE_SCALES)
    queries = Queries(
        gl.allocate_shared_memory(q.dtype, [PARTS, 64, q.block_shape[1]], q.layout),
        gl.allocate_shared_memory(q_rope.dtype, [1, 64, q_rope.block_shape[1]], q_rope.layout),
        new_barrier(),
    )
    rotated = queries.rope
    if kv_rope.dtype != gl.int32 and q_rope.dtype == gl.int32:
        rotated = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], HALVES)
    messages = new_messages()
    scoring = Scoring(
        queries, rotated, q_scale, stride_q_scale, scale_log2, tensor_scale, SIGN, IS_GIVEN,
        HAVE_SCALES,
    )  # fmt: skip
    WARPS: gl.constexpr = copying_warps(words)
    row_scales = Scales(scales, stride_scales_page, stride_scales_row, 1, WARPS)
    item, index = next_unit(work, gl.load(worker_starts + gl.program_id(1)), gl.program_id(0))
    if item < work.last_item:
        let_merge_start(work, item)
        adding = (item, index, inputs, work, results, messages, blocks)
        gl.warp_specialize(
            [
                (_first_adder, adding),
                (_second_adder, adding),
                (score_blocks, (item, index, inputs, work, results, messages, blocks, scoring)),
                (produce_blocks, (item, index, inputs, work, blocks, row_scales, ROPE_COLUMN)),
            ],
            [4, 4, WARPS],
            [ADDER_REGISTERS, SCORER_REGISTERS, PRODUCER_REGISTERS],
        )
