"""Absorbed attention over paged rows of e4m3, 512 values and 64 rotated columns: many heads.

Formats    fp8           one scale for the tensor: it joins the softmax's, and the result
           fp8_token     a scale beside each row: it multiplies scores and weights
Queries    bf16 or fp16; those of e4m3 have `decode_e4m3_kernel`
Work       as `decode_kernel`: a program has 64 heads of one query over a range of its request's
           keys, 64 keys a block, one such unit after the other
Bound      by tensor cores, if rows are widened once for all 64 heads: so a warpgroup of its own
           writes them to shared memory as halves

             widener                    scorer (columns 0 to 255)     adder (256 to 511)
  a block    bytes of block n + 1
             right half of n   full ->  S = Q·Kᵀ of n
             left half of n    full ->  m' = next_peak(m, S)
                                        P = exp2(S − m')   message ->  O = O·a + P·V right
                                        O = O·a + P·V left        <-  empty
                       <- left empty    and meanwhile S of n + 1
                       <- right empty ----------------------------
  a unit                                write lse, O       factor ->  write O

Channels   `Blocks` of halves, two slots, to which TMA copies rotated columns where they are bf16;
           one message, with the weights P and the decay a of the sums before. Blocks are counted
           through all units
Phases     the scorer writes factors when the adder is done with the unit's last message, and so has
           read the factors before
Deadlock   none. All walk the same units and blocks. The widener waits for block n − 2 to be added;
           the scorer for block n + 1 while it holds n, so for what waits for n − 1 at most; and for
           the adder, who waits for messages only
Memory     228 KB of shared memory, all registers; partials as in `decode_kernel`
Numbers    as `decode_few_fp8_kernel`: rows and queries are widened exactly, P, times the row's
           scale, is rounded to float16. fp8_block128, with four scales a row, is left to that
           kernel: here products with them would be rounded
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.compat import record, reinterpret, tma_load
from mlakit.kernels.hopper.decode_copies import await_rows
from mlakit.kernels.hopper.decode_fp8_widener import (
    HALVES,
    Rows,
    new_blocks,
    num_blocks,
    slot_of,
    widen_blocks,
)
from mlakit.kernels.hopper.decode_softmax import (
    FIRST_PEAK,
    LARGEST_WEIGHT,
    PATIENCE,
    SMALLEST_SCALE,
    finish,
    mask_scores,
    next_peak,
    store_lse,
)
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
from mlakit.kernels.hopper.e4m3 import LARGEST_UNIT, fit_rows, largest_of, unit_for
from mlakit.kernels.hopper.primitives import new_barrier, opaque_zero, scale_rows

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
LEAST_OF_ROPE = gl.constexpr(2.0**-30)  # of rotated queries, what others have a unit for at least
PATIENCE_WITH_SCALES = gl.constexpr(0.9)  # weights are up to 2**15 then, and halves end at 2**16


@record
class Queries:
    left: object  # [1, 64, 256] float16
    right: object
    rope: object  # [1, 64, 64], of the type of the rotated columns of blocks
    arrival: object


@record
class Message:
    """From the scorer to the adder: of a block, and of the end of a unit."""

    weights: object  # [64 heads, 64 keys] float16
    decay: object  # [64] float32, of the sums before
    full: object
    empty: object
    factor: object  # [64] float32, of a unit's sums
    factor_full: object


@record
class Softmax:
    """What a scorer knows of its rows."""

    peak: object  # [64]
    total: object
    unit: object  # of the weights


@record
class Scoring:
    """What is known when the kernel is compiled."""

    HAS_SCALES: object  # have rows?
    SIGN: object  # of the softmax's scale
    IS_GIVEN: object  # as of the kernel


@gluon.jit
def _as_they_come(buffer, box):
    """The memory of queries, as a descriptor's box."""
    return reinterpret(buffer, box.dtype, [1, 64, box.block_shape[1]], box.layout).index(0)


@gluon.jit
def _load_queries(inputs, work, item, index, queries):
    place = find_place(work, item, index)
    row = place.token * inputs.q_token_rows + place.first_head
    rope_row = place.token * inputs.q_rope_token_rows + place.first_head
    WIDTH: gl.constexpr = inputs.q.block_shape[1]
    BITS: gl.constexpr = (
        2 * WIDTH * inputs.q.dtype.primitive_bitwidth
        + inputs.q_rope.block_shape[1] * inputs.q_rope.dtype.primitive_bitwidth
    )
    mbarrier.expect(queries.arrival, 64 * BITS // 8)
    right = _as_they_come(queries.right, inputs.q)
    tma_load(inputs.q, [row, WIDTH], queries.arrival, right)
    tma_load(inputs.q, [row, 0], queries.arrival, _as_they_come(queries.left, inputs.q))
    rope = _as_they_come(queries.rope, inputs.q_rope)
    tma_load(inputs.q_rope, [rope_row, 0], queries.arrival, rope)


@gluon.jit
def _fit_queries(inputs, queries, FORMAT: gl.constexpr):
    """Bring queries to the range of halves, and make them such. What to multiply scores with."""
    PANELS: gl.constexpr = [4, 64, 64]
    DTYPE: gl.constexpr = inputs.q.dtype
    BOX: gl.constexpr = queries.left.layout
    left = reinterpret(queries.left, DTYPE, PANELS, BOX)
    right = reinterpret(queries.right, DTYPE, PANELS, BOX)
    rope = _as_they_come(queries.rope, inputs.q_rope)
    largest = largest_of(rope)
    if FORMAT != "fp8":
        largest *= LEAST_OF_ROPE  # bfloat16 has the range, sums have not
    # one panel after the other: less code
    for panel in range(4):
        largest = gl.maximum(largest, largest_of(left.index(panel)))
        largest = gl.maximum(largest, largest_of(right.index(panel)))
    unit, factor = unit_for(largest)
    for panel in range(4):
        fit_rows(left.index(panel), gl.float16, factor)
        fit_rows(right.index(panel), gl.float16, factor)
    fit_rows(rope, queries.rope.dtype, factor)
    fence_async_shared()
    return gl.convert_layout(unit * (1.0 / LARGEST_UNIT), gl.SliceLayout(1, SCORES))


@gluon.jit
def _begin_scores(inputs, queries, blocks, number):
    """Of a block, [64 heads, 64 keys], as soon as its halves are there."""
    slot, turn = slot_of(number)
    zero = opaque_zero()
    nothing = gl.zeros([64, 64], gl.float32, SCORES)
    mbarrier.wait(blocks.right_full.index(slot), turn)
    keys = blocks.right.index(slot).permute((1, 0))
    dots = warpgroup_mma(queries.right.index(zero), keys, nothing, use_acc=False, is_async=True)
    mbarrier.wait(blocks.left_full.index(slot), turn)
    keys = blocks.left.index(slot).permute((1, 0))
    dots = warpgroup_mma(queries.left.index(zero), keys, dots, is_async=True)
    if blocks.rope_full is not None:
        await_rows(inputs, blocks.rope_full.index(slot), turn)
    keys = blocks.rope.index(slot).permute((1, 0))
    return warpgroup_mma(queries.rope.index(zero), keys, dots, is_async=True)


@gluon.jit
def _weigh(scores, block, number, keys, softmax, row_scale, scales, scoring):
    """(weights as halves, decay of the sums before, softmax with this block taken in)"""
    weight_unit, factor = softmax.unit, LARGEST_WEIGHT
    OWN_PATIENCE: gl.constexpr = PATIENCE_WITH_SCALES if scoring.HAS_SCALES else PATIENCE
    if scoring.HAS_SCALES:
        slot, _ = slot_of(number)
        key_scale = scales.index(slot).load(gl.SliceLayout(0, SCORES))
        scores *= gl.expand_dims(key_scale, 0)
        weight_unit, factor = unit_for(gl.maximum(softmax.unit, gl.max(key_scale, 0)))
    scores = mask_scores(scores, block, keys, 1, scoring.SIGN, scoring.IS_GIVEN)
    peak = next_peak(softmax.peak, gl.max(scores, 1) * row_scale, OWN_PATIENCE)
    exponentials = gl.exp2(scores * gl.expand_dims(row_scale, 1) - gl.expand_dims(peak, 1))
    decay = gl.exp2(softmax.peak - peak)
    total = softmax.total * decay + gl.sum(exponentials, 1)
    if scoring.HAS_SCALES:
        exponentials *= gl.expand_dims(key_scale * factor, 0)
        decay *= softmax.unit * factor * (1.0 / LARGEST_UNIT)
    else:
        exponentials *= factor
    return exponentials.to(gl.float16), decay, Softmax(peak, total, weight_unit)


@gluon.jit
def _send(message, weights, decay):
    """Once both have read the message before."""
    message.weights.store(weights)
    message.decay.store(decay)
    fence_async_shared()
    mbarrier.arrive(message.full, count=1)


@gluon.jit
def _take_in(scores, block, number, keys, softmax, row_scale, pending, blocks, message, scoring):
    """Weigh a block and tell the adder: (sums of those before, decayed; softmax with this one).

    pending  sums that the block before is being added to
    """
    weights, decay, softmax = _weigh(
        scores, block, number, keys, softmax, row_scale, blocks.scales, scoring
    )
    # not the other way round: weights are found while values are being added, and only the loop in
    # which a barrier is waited for keeps the assembler from waiting before
    mbarrier.wait(message.empty, (number & 1) ^ 1)
    acc, weights = warpgroup_mma_wait(0, deps=(pending, weights))
    if block > keys.first_block:
        mbarrier.arrive(blocks.left_empty.index((number & 1) ^ 1), count=1)
    _send(message, weights, decay)
    return scale_rows(acc, decay), softmax


@gluon.jit
def _store(place, results, heads, acc, factor, FIRST: gl.constexpr):
    """A half of a unit's result, or of its partial in float32."""
    acc = scale_rows(acc, factor)
    row = gl.arange(0, 64, gl.SliceLayout(1, VALUES))
    head = place.first_head + row
    column = FIRST + gl.arange(0, 256, gl.SliceLayout(0, VALUES))
    is_row = gl.expand_dims(head < heads, 1)
    if place.slot < 0:
        token = results.out + place.token.to(gl.int64) * results.stride_out_token
        # int64: where heads come first, each is all tokens apart
        _store_rows(token, head.to(gl.int64) * results.stride_out_head, column, acc, is_row)
    else:
        slot = results.partial_out + place.slot_row * 512
        _store_rows(slot, row * 512, column, acc, is_row)


@gluon.jit
def _store_rows(first, row_starts, column, values, is_row):
    at = gl.expand_dims(row_starts, 1) + gl.expand_dims(column, 0)
    gl.store(first + at, values.to(first.dtype.element_ty), mask=is_row)


@gluon.jit
def _scorer(
    item, index, inputs, work, results, queries, message, blocks, scale, tensor_scale, scoring,
    FORMAT: gl.constexpr,
):  # fmt: skip
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    number = item * 0
    units_before = item * 0
    _load_queries(inputs, work, item, index, queries)
    # addresses of a thread's elements are found in each turn: kept, they would be spilled
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        mbarrier.wait(queries.arrival, units_before & 1)
        row_scale = gl.maximum(_fit_queries(inputs, queries, FORMAT) * scale, SMALLEST_SCALE)
        softmax = Softmax(
            gl.full([64], FIRST_PEAK, gl.float32, ROW),
            gl.zeros([64], gl.float32, ROW),
            # none yet, for `unit_for` knows a least one; or that of weights without scales
            gl.to_tensor(0.0 if scoring.HAS_SCALES else LARGEST_UNIT / LARGEST_WEIGHT),
        )
        pending = warpgroup_mma_init(gl.zeros([64, 256], gl.float32, VALUES))
        dots = _begin_scores(inputs, queries, blocks, number)
        scores = warpgroup_mma_wait(0, deps=(dots,))
        last_block = keys.first_block + num_blocks(keys) - 1
        for block in range(keys.first_block, last_block):
            acc, softmax = _take_in(
                scores, block, number, keys, softmax, row_scale, pending, blocks, message, scoring,
            )  # fmt: skip
            dots = _begin_scores(inputs, queries, blocks, number + 1)
            values = blocks.left.index(number & 1)
            pending = warpgroup_mma(message.weights, values, acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(dots,))
            number += 1
        next_item, next_index = next_unit(work, item, index + gl.num_programs(0))
        if next_item < work.last_item:
            _load_queries(inputs, work, next_item, next_index, queries)
        acc, softmax = _take_in(
            scores, last_block, number, keys, softmax, row_scale, pending, blocks, message, scoring,
        )  # fmt: skip
        values = blocks.left.index(number & 1)
        pending = warpgroup_mma(message.weights, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(pending,))
        mbarrier.arrive(blocks.left_empty.index(number & 1), count=1)
        # found again: kept through the loop, it would take registers that that needs
        place = find_place(work, item, index)
        row = gl.arange(0, 64, ROW)
        lse, factor = finish(
            place, results, work.heads, place.first_head + row, softmax.peak, softmax.total
        )
        store_lse(place, results, work.heads, row, lse)
        factor *= tensor_scale * (1.0 / LARGEST_UNIT) * softmax.unit
        mbarrier.wait(message.empty, number & 1)
        message.factor.store(factor)
        mbarrier.arrive(message.factor_full, count=1)
        _store(place, results, work.heads, acc, factor, 0)
        number += 1
        units_before += 1
        item = next_item
        index = next_index


@gluon.jit
def _adder(item, index, inputs, work, results, message, blocks):
    SUMS: gl.constexpr = gl.SliceLayout(1, VALUES)
    number = item * 0
    units_before = item * 0
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        acc = gl.zeros([64, 256], gl.float32, VALUES)
        for _ in range(num_blocks(keys)):
            slot = number & 1
            mbarrier.wait(message.full, number & 1)
            acc = scale_rows(acc, message.decay.load(SUMS))
            # the scorer has waited for these values
            pending = warpgroup_mma(message.weights, blocks.right.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(pending,))
            mbarrier.arrive(message.empty, count=1)
            mbarrier.arrive(blocks.right_empty.index(slot), count=1)
            number += 1
        mbarrier.wait(message.factor_full, units_before & 1)
        factor = message.factor.load(SUMS)
        place = find_place(work, item, index)
        _store(place, results, work.heads, acc, factor, 256)
        units_before += 1
        item, index = next_unit(work, item, index + gl.num_programs(0))


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
def mla_decode_fp8_kernel(
    q,  # descriptors: boxes of 64 x 256, of 64 x 64 where rotated
    q_rope,
    kv,  # the cache's first word
    kv_rope,  # a descriptor: boxes of 64 x 64 bfloat16, of PAGE rows where that are fewer; or of
    # words (fp8), which come with the others
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
    words,  # the same, if rows are copied one by one, or None
    scales,  # float32 of rows, or None
    stride_scales_page,
    stride_scales_row,
    row_quads,  # four words each, from a row of the cache to the next
    tensor_scale,
    device_scale,  # the tensor's, where it is on the device, or None
    ROWS: gl.constexpr,  # 64
    PAGE_ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    SIGN: gl.constexpr,
    IS_GIVEN: gl.constexpr,  # the plan is not of this kernel: see `_has_room`, `mask_scores`
    ITEM_COLUMNS: gl.constexpr,
    FORMAT: gl.constexpr,
    ROPE_COLUMN: gl.constexpr,  # of the descriptor
    SIDE_BY_SIDE: gl.constexpr,
    ADDER_REGISTERS: gl.constexpr,  # of a thread
    WIDENER_REGISTERS: gl.constexpr,
):
    """grid: (units of a request that are worked on at once, workers of the plan)"""
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    NONE: gl.constexpr = None
    if device_scale is not None:
        tensor_scale = gl.load(device_scale).to(gl.float32)
        scale_log2 *= tensor_scale
    inputs = Inputs(
        q, q_rope, NONE, kv_rope, q_token_rows, q_rope_token_rows, table, stride_table_request,
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
    rows = Rows(
        kv, ROPE_COLUMN, SIDE_BY_SIDE, scales, stride_scales_page, stride_scales_row,
        FORMAT,
    )  # fmt: skip
    blocks = new_blocks(gl.float16 if FORMAT == "fp8" else gl.bfloat16, words)
    queries = Queries(
        gl.allocate_shared_memory(gl.float16, [1, 64, 256], HALVES),
        gl.allocate_shared_memory(gl.float16, [1, 64, 256], HALVES),
        gl.allocate_shared_memory(blocks.rope.dtype, [1, 64, 64], HALVES),
        new_barrier(),
    )
    message = Message(
        gl.allocate_shared_memory(gl.float16, [64, 64], HALVES),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
        new_barrier(),
        new_barrier(),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
        new_barrier(),
    )
    scoring = Scoring(scales is not None, SIGN, IS_GIVEN)
    item, index = next_unit(work, gl.load(worker_starts + gl.program_id(1)), gl.program_id(0))
    if item < work.last_item:
        let_merge_start(work, item)
        gl.warp_specialize(
            [
                (
                    _scorer,
                    (
                        item, index, inputs, work, results, queries, message, blocks, scale_log2,
                        tensor_scale, scoring, FORMAT,
                    ),
                ),
                (_adder, (item, index, inputs, work, results, message, blocks)),
                (widen_blocks, (item, index, inputs, work, rows, blocks)),
            ],
            [4, 4],
            [ADDER_REGISTERS, WIDENER_REGISTERS],
        )  # fmt: skip
