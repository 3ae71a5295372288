"""Absorbed attention over paged rows of e4m3, 512 values and 64 rotated columns: few heads.

Formats    fp8           one scale for the tensor: it joins the softmax's, and the result
           fp8_token     a scale beside each row: it multiplies scores and weights
           fp8_block128  a scale per part of 128 columns among the bytes of a row, likewise
Work       as `decode_few_kernel`: a program has the 8, 16 or 32 heads (ROWS) of one query over a
           range of its request's keys, 64 keys a block, one such unit after the other
Bound      by bytes in flight, if shared memory is spared: it could not also take rows that are
           written back as halves. So both dots read bytes and widen them in registers (`e4m3`)

             producer, one warp        scorer, four warps              adder, four warps
  a block    wait for free places
             copy five boxes  full ->  Sᵀ = K·Qᵀ, part by part    ->  read a part
                                       m = max(m, Sᵀ)
                                       Pᵀ = exp2(Sᵀ − m)  message ->  Oᵀ = Oᵀ·a + Vᵀ·Pᵀ
                             <- empty: each part, when both have read it
  a unit                               write lse          message ->  write Oᵀ · factor

Channels   the rings of `decode_few_rings`, whose latent boxes have two readers; and two places for
           messages with barriers `full` and `empty`: the weights of a block with the decay of the
           sums before it, or a unit's last factor. Message n goes to place n % 2
Deadlock   none. All walk the same units and blocks. The scorer waits for boxes, and for the adder
           to be done with the message before the last; the adder for boxes and for the message of
           the block whose boxes it reads; the producer for both to have read an earlier box. A
           ring has room for a block, so the earliest block that is not done can always go on
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
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.compat import record
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
from mlakit.kernels.hopper.decode_softmax import FIRST_PEAK, finish, mask_scores, store_lse
from mlakit.kernels.hopper.decode_work import (
    Inputs,
    Results,
    Work,
    count_units,
    find_keys,
    find_place,
    next_unit,
    pages_of,
)
from mlakit.kernels.hopper.e4m3 import (
    LARGEST_UNIT,
    as_halves,
    column_of_sum,
    largest_of,
    load_keys,
    load_values,
    match_keys,
    unit_for,
)
from mlakit.kernels.hopper.primitives import new_barrier, new_barriers, opaque_zero

REGISTERS = gl.constexpr(168)  # of a thread, on average
SCORER_REGISTERS = gl.constexpr(224)
PRODUCER_REGISTERS = gl.constexpr(32)


@record
class Scales:
    """Of rows; `first` is None where there is but one of the tensor."""

    first: object  # float32
    stride_page: object
    stride_row: object
    FORMAT: object


@record
class Messages:
    """From the scorer to the adder; two places."""

    weights: object  # float16 [2 · COPIES, heads, 64 keys]; a copy for each scale that a row has
    factors: object  # [2, heads] float32
    full: object
    empty: object
    COPIES: object


@gluon.jit
def _message_place(count):
    """Of message number `count`: its place, and the parity of its turn."""
    return count & 1, (count >> 1) & 1


@gluon.jit
def _load_scales(scales, inputs, keys, pages, block, LAYOUT: gl.constexpr):
    """float32 [64 keys] of a block: a tuple of as many as a row has; `pages` as of `pages_of`."""
    found = ()
    if scales.first is not None:
        offset = gl.arange(0, 64, LAYOUT)
        is_read = block * 64 + offset < keys.end
        if inputs.PAGE < 64:
            offset %= inputs.PAGE
        else:
            offset += block % (inputs.PAGE // 64) * 64
        at = scales.first + pages.to(gl.int64) * scales.stride_page
        at += offset.to(gl.int64) * scales.stride_row
        if scales.FORMAT == "fp8_token":
            scale = gl.load(at, mask=is_read, other=0.0)
            found += (gl.where(scale < 0, 0.0, scale),)  # a NaN stays one
        else:
            for part in gl.static_range(PARTS):
                found += (gl.load(at + part, mask=is_read, other=0.0),)
    return found


@gluon.jit
def _fit_queries(queries, ROW: gl.constexpr, FORMAT: gl.constexpr):
    """Make queries halves that match `load_keys`. What to multiply their scores with, [heads]."""
    largest = largest_of(queries.latent.index(0))
    for part in gl.static_range(1, PARTS):
        largest = gl.maximum(largest, largest_of(queries.latent.index(part)))
    if FORMAT == "fp8":
        largest = gl.maximum(largest, largest_of(queries.rope.index(0)))
    unit, factor = unit_for(largest)
    for part in gl.static_range(PARTS):
        match_keys(queries.latent.index(part), as_halves(queries.latent).index(part), factor)
    if FORMAT == "fp8":
        match_keys(queries.rope.index(0), as_halves(queries.rope).index(0), factor)
    fence_async_shared()
    return gl.convert_layout(unit * (1.0 / LARGEST_UNIT), ROW)


@gluon.jit
def _scores(
    queries, channels, place, turn, rope_place, rope_turn, unit, scales, LAYOUT: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Of a block, [64 keys, heads], every scale of a row applied. All its boxes are read.

    unit  of the halves that queries are
    """
    latent, rope = channels.latent, channels.rope
    HEADS: gl.constexpr = queries.rope.shape[1]
    zero = opaque_zero()
    nothing = gl.zeros([64, HEADS], gl.float32, LAYOUT)
    mbarrier.wait(rope.full.index(rope_place), rope_turn)
    box = rope.boxes.index(rope_place)
    if FORMAT == "fp8":
        keys = load_keys(box, LAYOUT)
        q = as_halves(queries.rope).index(zero).permute((1, 0))
        dots = warpgroup_mma(keys, q, nothing, use_acc=False, is_async=True)
    else:
        q = queries.rope.index(zero).permute((1, 0))
        dots = warpgroup_mma(box, q, nothing, use_acc=False, is_async=True)
    rotated = nothing
    scores = nothing
    for part in gl.static_range(PARTS):
        mbarrier.wait(latent.full.index(place), turn)
        next_keys = load_keys(latent.boxes.index(place), LAYOUT)
        mbarrier.arrive(latent.empty.index(place), count=1)
        place, turn = after(latent, place, turn)
        # the dots before have had the time of a conversion
        if part == 0:
            if FORMAT == "fp8":
                dots, keys = warpgroup_mma_wait(0, deps=(dots, keys))
            else:
                rotated = warpgroup_mma_wait(0, deps=(dots,))
            mbarrier.arrive(rope.empty.index(rope_place), count=1)
        else:
            dots, keys = warpgroup_mma_wait(0, deps=(dots, keys))
        if FORMAT == "fp8_block128" and part > 0:
            scores += dots * gl.expand_dims(scales[part - 1], 1)
        keys = next_keys
        q = as_halves(queries.latent).index(zero + part).permute((1, 0))
        if FORMAT == "fp8" or (FORMAT == "fp8_token" and part > 0):
            dots = warpgroup_mma(keys, q, dots, is_async=True)
        else:
            dots = warpgroup_mma(keys, q, nothing, use_acc=False, is_async=True)
    dots, keys = warpgroup_mma_wait(0, deps=(dots, keys))
    unit = gl.expand_dims(unit, 0)
    if FORMAT == "fp8_block128":
        scores += dots * gl.expand_dims(scales[PARTS - 1], 1)
        scores = scores * unit + rotated
    elif FORMAT == "fp8_token":
        scores = (dots * unit + rotated) * gl.expand_dims(scales[0], 1)
    else:
        scores = dots * unit
    return scores, place, turn


@gluon.jit
def _unit_of_weights(unit, scales):
    """Of weights times these scales and those before: (u, LARGEST_UNIT / u)."""
    if len(scales) == 0:
        return unit, LARGEST_UNIT
    else:  # noqa: RET505
        largest = scales[0]
        for part in gl.static_range(1, len(scales)):
            largest = gl.maximum(largest, scales[part])
        return unit_for(gl.maximum(unit, gl.max(largest, 0)))


@gluon.jit
def _send_weights(messages, count, exponentials, decay, factor, scales):
    """exponentials · scales · factor as halves."""
    place, turn = _message_place(count)
    mbarrier.wait(messages.empty.index(place), turn ^ 1)
    for copy in gl.static_range(messages.COPIES):
        if len(scales) > 0:
            weights = exponentials * gl.expand_dims(scales[copy] * factor, 1)
        else:
            weights = exponentials * factor
        buffer = messages.weights.index(place * messages.COPIES + copy)
        buffer.permute((1, 0)).store(weights.to(gl.float16))
    messages.factors.index(place).store(decay)
    fence_async_shared()
    mbarrier.arrive(messages.full.index(place), count=1)


@gluon.jit
def _scorer(
    item, index, inputs, work, results, queries, messages, channels, scales, scale, tensor_scale,
    IS_NEGATIVE: gl.constexpr, IS_GIVEN: gl.constexpr,
):  # fmt: skip
    HEADS: gl.constexpr = work.ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    KEY: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    place, turn, rope_place, rope_turn = item * 0, item * 0, item * 0, item * 0
    units_before = item * 0  # its parity is the phase of the queries' barrier
    sent = item * 0
    load_queries(inputs, work, item, index, queries)
    # addresses of a thread's elements are found in each turn: kept, they would be spilled
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        pages = pages_of(inputs, keys, keys.first_block, KEY)
        next_scales = _load_scales(scales, inputs, keys, pages, keys.first_block, KEY)
        pages = pages_of(inputs, keys, keys.first_block + 1, KEY)
        peak = gl.full([HEADS], FIRST_PEAK, gl.float32, ROW)
        total = gl.zeros([64, HEADS], gl.float32, LAYOUT)  # of every 64th key, until the end
        # of rows with scales none yet: `unit_for` knows a least one
        weight_unit = gl.to_tensor(1.0 if scales.first is None else 0.0)
        mbarrier.wait(queries.arrival, units_before & 1)
        query_unit = _fit_queries(queries, ROW, scales.FORMAT)
        for block in range(keys.first_block, keys.end_block):
            row_scales = next_scales
            # on their way while this block is worked on
            next_scales = _load_scales(scales, inputs, keys, pages, block + 1, KEY)
            pages = pages_of(inputs, keys, block + 2, KEY)
            next_weight_unit, weight_factor = _unit_of_weights(weight_unit, row_scales)
            scores, place, turn = _scores(
                queries, channels, place, turn, rope_place, rope_turn, query_unit, row_scales,
                LAYOUT, scales.FORMAT,
            )  # fmt: skip
            rope_place, rope_turn = after(channels.rope, rope_place, rope_turn)
            scores = mask_scores(scores, block, keys, 0, IS_NEGATIVE, IS_GIVEN)
            new_peak = gl.maximum(peak, gl.max(scores, 0) * scale)
            decay = gl.exp2(peak - new_peak)
            exponentials = gl.exp2(scores * scale - gl.expand_dims(new_peak, 0))
            change = weight_unit * weight_factor * (1.0 / LARGEST_UNIT)
            _send_weights(messages, sent, exponentials, decay * change, weight_factor, row_scales)
            weight_unit = next_weight_unit
            total = total * gl.expand_dims(decay, 0) + exponentials
            peak = new_peak
            sent += 1
        next_item, next_index = next_unit(work, item, index + gl.num_programs(0))
        if next_item < work.last_item:
            load_queries(inputs, work, next_item, next_index, queries)
        unit = find_place(work, item, index)
        row = gl.arange(0, HEADS, ROW)
        lse, factor = finish(
            unit, results, work.heads, unit.first_head + row, peak, gl.sum(total, 0)
        )
        store_lse(unit, results, work.heads, row, lse)
        factor *= tensor_scale * (1.0 / LARGEST_UNIT)
        _send_factor(messages, sent, factor * weight_unit)
        sent += 1
        units_before += 1
        item = next_item
        index = next_index


@gluon.jit
def _send_factor(messages, count, factor):
    place, turn = _message_place(count)
    mbarrier.wait(messages.empty.index(place), turn ^ 1)
    messages.factors.index(place).store(factor)
    mbarrier.arrive(messages.full.index(place), count=1)


@gluon.jit
def _read_values(latent, place, turn, kept, LAYOUT: gl.constexpr):
    mbarrier.wait(latent.full.index(place), turn)
    values = load_values(latent.boxes.index(place), kept, LAYOUT)
    mbarrier.arrive(latent.empty.index(place), count=1)
    return values


@gluon.jit
def _add_values(messages, count, latent, place, turn, sums, kept, LAYOUT: gl.constexpr):
    """The sums with a block taken in, whose first `kept` keys there are. All its boxes are read.

    sums  of the columns of each part, [COLUMNS, heads]
    """
    values = _read_values(latent, place, turn, kept, LAYOUT)
    message, message_turn = _message_place(count)
    mbarrier.wait(messages.full.index(message), message_turn)
    decay = messages.factors.index(message).load(gl.SliceLayout(0, LAYOUT))
    decay = gl.expand_dims(decay, 0)
    done = ()
    for part in gl.static_range(PARTS):
        copy = message * messages.COPIES + (part if messages.COPIES > 1 else 0)
        weights = messages.weights.index(copy).permute((1, 0))
        dots = warpgroup_mma(values, weights, sums[part] * decay, is_async=True)
        place, turn = after(latent, place, turn)
        next_values = values
        if part + 1 < PARTS:
            next_values = _read_values(latent, place, turn, kept, LAYOUT)
        dots, values = warpgroup_mma_wait(0, deps=(dots, values))
        done += (dots,)
        values = next_values
    mbarrier.arrive(messages.empty.index(message), count=1)
    return done, place, turn


@gluon.jit
def _adder(item, index, inputs, work, results, messages, channels):
    HEADS: gl.constexpr = work.ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    latent = channels.latent
    place, turn, received = item * 0, item * 0, item * 0
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        nothing = gl.zeros([COLUMNS, HEADS], gl.float32, LAYOUT)
        sums = (nothing, nothing, nothing, nothing)
        for block in range(keys.first_block, keys.end_block):
            sums, place, turn = _add_values(
                messages, received, latent, place, turn, sums, keys.end - block * 64, LAYOUT
            )
            received += 1
        message, message_turn = _message_place(received)
        mbarrier.wait(messages.full.index(message), message_turn)
        factor = messages.factors.index(message).load(gl.SliceLayout(0, LAYOUT))
        mbarrier.arrive(messages.empty.index(message), count=1)
        received += 1
        unit = find_place(work, item, index)
        store(unit, results, work.heads, sums, factor, column_of_sum(LAYOUT))
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
    q,  # descriptors: boxes of ROWS x 128, of ROWS x 64 where rotated
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
    scales,  # float32 of rows, or None
    stride_scales_page,
    stride_scales_row,
    tensor_scale,
    device_scale,  # the tensor's, where it is on the device, or None
    ROWS: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    IS_NEGATIVE: gl.constexpr,
    IS_GIVEN: gl.constexpr,  # the plan is not of this kernel: see `_has_room`, `mask_scores`
    ITEM_COLUMNS: gl.constexpr,
    FORMAT: gl.constexpr,
    ROPE_COLUMN: gl.constexpr,  # of the descriptor
    PLACES: gl.constexpr,
    ROPE_PLACES: gl.constexpr,
):
    """grid: (units of a request that are worked on at once, workers of the plan)"""
    if device_scale is not None:
        tensor_scale = gl.load(device_scale).to(gl.float32)
        scale_log2 *= tensor_scale
    inputs = Inputs(
        q, q_rope, kv, kv_rope, q_token_rows, q_rope_token_rows, table, stride_table_request,
        stride_table_entry, PAGE_ROWS, PAGE,
    )  # fmt: skip
    work = Work(
        items, partial_starts, q_starts, kv_lens, stride_q_starts, stride_kv_lens, heads,
        head_blocks, ROWS, slot_rows, gl.load(worker_starts + gl.program_id(1) + 1), IS_CAUSAL,
        IS_GIVEN, ITEM_COLUMNS,
    )  # fmt: skip
    results = Results(
        out, lse, partial_out, partial_lse, sink, stride_out_token, stride_out_head,
        stride_lse_token, stride_lse_head, stride_sink,
    )  # fmt: skip
    row_scales = Scales(scales, stride_scales_page, stride_scales_row, FORMAT)
    channels = Channels(
        new_ring(PLACES, COLUMNS // 4, kv, READERS=2),
        new_ring(ROPE_PLACES, kv_rope.block_shape[1], kv_rope, READERS=1),
    )
    queries = Queries(
        gl.allocate_shared_memory(q.dtype, [PARTS, ROWS, COLUMNS], q.layout),
        gl.allocate_shared_memory(q.dtype, [1, ROWS, 64], q.layout),
        new_barrier(),
    )
    COPIES: gl.constexpr = PARTS if FORMAT == "fp8_block128" else 1
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    messages = Messages(
        gl.allocate_shared_memory(gl.float16, [2 * COPIES, ROWS, 64], q.layout),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
        new_barriers(2, 1),
        new_barriers(2, 1),
        COPIES,
    )
    item, index = next_unit(work, gl.load(worker_starts + gl.program_id(1)), gl.program_id(0))
    if item < work.last_item:
        gl.warp_specialize(
            [
                (_adder, (item, index, inputs, work, results, messages, channels)),
                (
                    _scorer,
                    (
                        item, index, inputs, work, results, queries, messages, channels, row_scales,
                        scale_log2, tensor_scale, IS_NEGATIVE, IS_GIVEN,
                    ),
                ),
                (produce, (item, index, inputs, work, channels, ROPE_COLUMN)),
            ],
            [4, 1],
            [SCORER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
