"""Scoring the keys of few heads over rows of e4m3: what a scorer of `decode_few_fp8_kernel` does.

Two scorers take turns: of all blocks of a program, unit after unit, block n goes to scorer n % 2.
Weights and sums are relative to a peak that never falls from a block to the next, so scorers tell
it to each other, before they find exponentials; and with it the unit of the weights. Each sums its
own exponentials. At the end of a unit the second gives its sum to the first, which joins them, and
also fits the queries of a unit for both.

Barriers   what a scorer tells of a block is told once a block of its own; it may be told anew once
           the other has told of the block between, for it has heard before. The end of the second
           scorer's blocks and that queries are fitted is told once a unit: the end when it needs
           queries no more, and queries are fitted when that end has been heard
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
from mlakit.kernels.hopper.decode_copies import await_rows
from mlakit.kernels.hopper.decode_few_rings import (
    PARTS,
    after,
    load_queries,
    message_place,
    release,
)
from mlakit.kernels.hopper.decode_softmax import FIRST_PEAK, finish, mask_scores, store_lse
from mlakit.kernels.hopper.decode_work import (
    count_units,
    find_keys,
    find_place,
    find_q_scale,
    next_unit,
)
from mlakit.kernels.hopper.e4m3 import (
    LARGEST_UNIT,
    as_halves,
    largest_of,
    load_keys,
    match_keys,
    match_keys_with_bytes,
    unit_for,
    widen_bytes,
)
from mlakit.kernels.hopper.primitives import new_barrier, new_barriers, opaque_zero

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
HALVES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@record
class Messages:
    """From scorers to all adders: of block n in place n % 2, and of the end of a unit."""

    weights: object  # float16 [2, heads, 64 keys], as many of them as a row has scales
    decays: object  # [2, heads] float32, of the sums before
    full: object
    empty: object
    factor: object  # [heads] float32, of a unit's sums
    factor_full: object
    factor_empty: object
    COPIES: object


@record
class Scoring:
    """What scorers have in common."""

    copied: object  # queries as they come, and the same as halves: in the same memory if they are
    queries: object
    q_scale: object  # float32 of each token, for those of e4m3, or None
    stride_q_scale: object
    messages: object
    channels: object
    scale: object  # of the softmax, for exponents of 2
    tensor_scale: object
    SIGN: object
    IS_GIVEN: object
    FORMAT: object


@record
class Standing:
    """Of a sequence of blocks, told by one scorer to the other."""

    peak: object  # [heads] float32
    unit: object  # [1] float32, of the weights
    is_told: object  # a barrier


@record
class Fitted:
    """That queries are halves, told by the first scorer to the second."""

    unit: object  # [heads] float32, of scores
    is_told: object  # a barrier


@record
class Turns:
    """Which blocks a scorer has, and what it shares with the other one."""

    NUMBER: object
    maxima: object
    before: object  # Standing, as the other one tells it
    own: object
    end: object  # Standing, of the second scorer's blocks of a unit
    end_total: object  # [heads] float32, likewise
    fitted: object


@gluon.jit
def new_heads(ROWS: gl.constexpr):
    """A number of each head."""
    return gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)


@gluon.jit
def new_messages(ROWS: gl.constexpr, COPIES: gl.constexpr, ADDERS: gl.constexpr):
    weights = ()
    # each of its own: between two of them the compiler then needs no block-wide barrier
    for _ in gl.static_range(COPIES):
        weights += (gl.allocate_shared_memory(gl.float16, [2, ROWS, 64], HALVES),)
    return Messages(
        weights,
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
        new_barriers(2, 1),
        new_barriers(2, ADDERS),
        new_heads(ROWS),
        new_barrier(),
        new_barrier(ADDERS),
        COPIES,
    )


@gluon.jit
def new_standing(ROWS: gl.constexpr):
    unit = gl.allocate_shared_memory(gl.float32, [1], FLAT)
    return Standing(new_heads(ROWS), unit, new_barrier())


@gluon.jit
def new_maxima(ROWS: gl.constexpr):
    """What the four warps of a scorer tell each other: their largest scores."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [4, ROWS], LAYOUT)


@gluon.jit
def new_fitted(ROWS: gl.constexpr):
    return Fitted(new_heads(ROWS), new_barrier())


@gluon.jit
def _fit_queries(queries, unit_of_scores, FORMAT: gl.constexpr):
    """Make queries halves that match `load_keys`, and find what to multiply their scores with."""
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
    unit_of_scores.store(unit * (1.0 / LARGEST_UNIT))
    fence_async_shared()


@gluon.jit
def _widen_queries(copied, queries, q_scale, unit_of_scores, FORMAT: gl.constexpr):
    """Likewise of e4m3, exactly; what scores are multiplied with is the scale of the token."""
    for part in gl.static_range(PARTS):
        match_keys_with_bytes(copied.latent.index(part), queries.latent.index(part))
    if FORMAT == "fp8":
        match_keys_with_bytes(copied.rope.index(0), queries.rope.index(0))
    elif copied.rope.dtype == gl.int32:
        widen_bytes(copied.rope.index(0), queries.rope.index(0))
    HEAD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    unit_of_scores.store(gl.full([unit_of_scores.shape[0]], q_scale, gl.float32, HEAD))
    fence_async_shared()


@gluon.jit
def _in_units(scores, query_unit):
    return scores * gl.expand_dims(query_unit.load(gl.SliceLayout(0, scores.type.layout)), 0)


@gluon.jit
def _scales_of(channels, place, part: gl.constexpr, LAYOUT: gl.constexpr):
    """Of the rows of a block, for a part of their columns: [64 keys, 1]. Not kept in registers."""
    box = channels.scales.values.index(place * channels.scales.COUNT + part)
    return gl.expand_dims(box.load(gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def _scores(
    inputs, queries, channels, place, turn, rope_place, rope_turn, query_unit,
    LAYOUT: gl.constexpr, FORMAT: gl.constexpr, IS_UNIT_OF_ROPE: gl.constexpr,
):  # fmt: skip
    """Of a block, [64 keys, heads], every scale of a row applied. All its boxes are read.

    They are given back, but for the rotated columns of rows with scales: weights need those, too.

    query_unit       [heads] of the halves that queries are, in shared memory
    IS_UNIT_OF_ROPE  rotated queries are in that unit too
    """
    latent, rope = channels.latent, channels.rope
    HEADS: gl.constexpr = queries.rope.shape[1]
    zero = opaque_zero()
    nothing = gl.zeros([64, HEADS], gl.float32, LAYOUT)
    rope_box = rope.boxes.index(rope_place)
    scores, dots = nothing, nothing
    if FORMAT != "fp8_token":  # whose scale comes last
        await_rows(inputs, rope.full.index(rope_place), rope_turn)
    if FORMAT == "fp8":
        keys = load_keys(rope_box, LAYOUT)
        q = as_halves(queries.rope).index(zero).permute((1, 0))
        dots = warpgroup_mma(keys, q, nothing, use_acc=False, is_async=True)
        release(rope, rope_place)
    for part in gl.static_range(PARTS):
        if part % latent.BOXES == 0:
            mbarrier.wait(latent.full.index(place), turn)
        box = latent.boxes.index(place * latent.BOXES + part % latent.BOXES)
        next_keys = load_keys(box, LAYOUT)
        # the dots before have had the time of a conversion
        if FORMAT == "fp8" or part > 0:
            dots, keys = warpgroup_mma_wait(0, deps=(dots, keys))
        if FORMAT == "fp8_block128" and part > 0:
            scores += dots * _scales_of(channels, rope_place, part - 1, LAYOUT)
        keys = next_keys
        q = as_halves(queries.latent).index(zero + part).permute((1, 0))
        if FORMAT == "fp8" or (FORMAT == "fp8_token" and part > 0):
            dots = warpgroup_mma(keys, q, dots, is_async=True)
        else:
            dots = warpgroup_mma(keys, q, nothing, use_acc=False, is_async=True)
        if part % latent.BOXES == latent.BOXES - 1:
            release(latent, place)
            place, turn = after(latent, place, turn)
    dots, keys = warpgroup_mma_wait(0, deps=(dots, keys))
    if FORMAT == "fp8_block128":
        dots = scores + dots * _scales_of(channels, rope_place, PARTS - 1, LAYOUT)
    scores = dots
    if not IS_UNIT_OF_ROPE:
        scores = _in_units(scores, query_unit)
    if FORMAT != "fp8":
        # last, for what it is added to takes no registers of its own
        if FORMAT == "fp8_token":
            await_rows(inputs, rope.full.index(rope_place), rope_turn)
        q = queries.rope.index(zero).permute((1, 0))
        scores = warpgroup_mma(rope_box, q, scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
    if FORMAT == "fp8_token":
        scores *= _scales_of(channels, rope_place, 0, LAYOUT)
    if IS_UNIT_OF_ROPE:
        scores = _in_units(scores, query_unit)
    return scores, place, turn


@gluon.jit
def _largest_scores(maxima, scores):
    """Of each head, among all keys of a block.

    By way of shared memory, written and read but once: `gl.max` would do that twice.
    """
    HEADS: gl.constexpr = scores.shape[1]
    # heads as a thread has them of the scores, warps as its own elements
    HEAD_BASES: gl.constexpr = (
        [[0, 1]] if HEADS == 8 else [[0, 1], [0, 8]] if HEADS == 16 else [[0, 1], [0, 8], [0, 16]]
    )
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=HEAD_BASES + [[1, 0], [2, 0]],  # noqa: RUF005
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[4, HEADS],
    )
    maxima.store(gl.max(scores.reshape([4, 16, HEADS]), 1))
    largest = gl.max(maxima.load(ALL), 0)
    return gl.convert_layout(largest, gl.SliceLayout(0, scores.type.layout), assert_trivial=True)


@gluon.jit
def _unit_of_weights(before, channels, place):
    """Of weights times the scales of a block and those before: (u, LARGEST_UNIT / u)."""
    if channels.scales is None:
        return before, LARGEST_UNIT
    else:  # noqa: RET505
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        largest = gl.max(channels.scales.largest.index(place).load(ONE), 0)
        return unit_for(gl.maximum(before, largest))


@gluon.jit
def _factors(channels, rope_place, part: gl.constexpr, factor, LAYOUT: gl.constexpr):
    """Of weights: a factor, times the scales of rows if they have any."""
    if channels.scales is not None:
        factor = _scales_of(channels, rope_place, part, LAYOUT) * factor
    return factor


@gluon.jit
def _send_weights(messages, number, exponentials, decay, factor, channels, rope_place):
    """exponentials · scales · factor as halves."""
    LAYOUT: gl.constexpr = exponentials.type.layout
    place, turn = message_place(number)
    factors = _factors(channels, rope_place, 0, factor, LAYOUT)
    mbarrier.wait(messages.empty.index(place), turn ^ 1)
    for copy in gl.static_range(messages.COPIES):
        weights = (exponentials * factors).to(gl.float16)
        if copy + 1 < messages.COPIES:
            factors = _factors(channels, rope_place, copy + 1, factor, LAYOUT)
        messages.weights[copy].index(place).permute((1, 0)).store(weights)
    messages.decays.index(place).store(decay)
    fence_async_shared()
    mbarrier.arrive(messages.full.index(place), count=1)
    if channels.scales is not None:
        release(channels.rope, rope_place)


@gluon.jit
def _sum_pairs(exponentials):
    """Of the two keys that a thread has, [32, heads]: the sum of all can wait until the end."""
    HEADS: gl.constexpr = exponentials.shape[1]
    return gl.sum(exponentials.reshape([4, 2, 8, HEADS]), 1).reshape([32, HEADS])


@gluon.jit
def _tell(standing, peak, unit, HAS_UNITS: gl.constexpr):
    standing.peak.store(peak)
    if HAS_UNITS:
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        standing.unit.store(gl.full([1], unit, gl.float32, ONE))
    mbarrier.arrive(standing.is_told, count=1)


@gluon.jit
def _hear(standing, turn, ROW: gl.constexpr, HAS_UNITS: gl.constexpr):
    mbarrier.wait(standing.is_told, turn)
    return _recall(standing, ROW, HAS_UNITS)


@gluon.jit
def _recall(standing, ROW: gl.constexpr, HAS_UNITS: gl.constexpr):
    """(peak, unit)"""
    unit = gl.to_tensor(1.0)
    if HAS_UNITS:
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        unit = gl.max(standing.unit.load(ONE), 0)
    return standing.peak.load(ROW), unit


@gluon.jit
def score(turns, item, index, inputs, work, results, scoring):
    """All that a scorer does."""
    copied, queries = scoring.copied, scoring.queries
    messages, channels, scale = scoring.messages, scoring.channels, scoring.scale
    HEADS: gl.constexpr = work.ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    NUMBER: gl.constexpr = turns.NUMBER
    fitted = turns.fitted
    ARE_BYTES: gl.constexpr = copied.latent.dtype == gl.int32
    FORMAT: gl.constexpr = scoring.FORMAT
    IS_UNIT_OF_ROPE: gl.constexpr = ARE_BYTES or FORMAT == "fp8"
    HAS_UNITS: gl.constexpr = channels.scales is not None
    FIRST_UNIT: gl.constexpr = 0.0 if HAS_UNITS else 1.0  # none yet: `unit_for` knows a least one
    zero = item * 0
    FILLS: gl.constexpr = PARTS // channels.latent.BOXES
    place, turn = after(channels.latent, zero, zero, NUMBER * FILLS)
    rope_place, rope_turn = after(channels.rope, zero, zero, NUMBER)
    units_before = item * 0  # its parity is the phase of what happens once a unit
    blocks_before = item * 0
    if NUMBER == 0:
        load_queries(inputs, work, item, index, copied)
    # addresses of a thread's elements are found in each turn: kept, they would be spilled
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        first_block = keys.first_block + ((blocks_before + NUMBER) & 1)
        total = _sum_pairs(gl.zeros([64, HEADS], gl.float32, LAYOUT))
        if NUMBER == 0:
            if ARE_BYTES:
                q_scale = find_q_scale(scoring, work, item, index)
                mbarrier.wait(copied.arrival, units_before & 1)
                _widen_queries(copied, queries, q_scale, fitted.unit, FORMAT)
            else:
                mbarrier.wait(copied.arrival, units_before & 1)
                _fit_queries(queries, fitted.unit, FORMAT)
            mbarrier.arrive(fitted.is_told, count=1)
        else:
            mbarrier.wait(fitted.is_told, units_before & 1)
        for own_block in range(first_block, keys.end_block, 2):
            # opaque: the compiler would count blocks, keys and messages in registers of their own
            block = own_block + opaque_zero()
            number = blocks_before + block - keys.first_block
            scores, place, turn = _scores(
                inputs, queries, channels, place, turn, rope_place, rope_turn, fitted.unit, LAYOUT,
                FORMAT, IS_UNIT_OF_ROPE,
            )  # fmt: skip
            place, turn = after(channels.latent, place, turn, FILLS)
            scores = mask_scores(scores, block, keys, 0, scoring.SIGN, scoring.IS_GIVEN)
            # not kept in registers; here, for warps then wait for each other before it is told anew
            own_peak = turns.own.peak.load(ROW)
            largest = _largest_scores(turns.maxima, scores) * scale
            peak_before, unit_before = _hear(turns.before, ((number - 1) >> 1) & 1, ROW, HAS_UNITS)
            is_first = block == keys.first_block
            peak_before = gl.where(is_first, FIRST_PEAK, peak_before)
            unit_before = gl.where(is_first, FIRST_UNIT, unit_before)
            peak = gl.maximum(peak_before, largest)
            weight_unit, weight_factor = _unit_of_weights(unit_before, channels, rope_place)
            _tell(turns.own, peak, weight_unit, HAS_UNITS)
            exponentials = gl.exp2(scores * scale - gl.expand_dims(peak, 0))
            decay = gl.exp2(peak_before - peak)
            decay *= unit_before * weight_factor * (1.0 / LARGEST_UNIT)
            _send_weights(
                messages, number, exponentials, decay, weight_factor, channels, rope_place
            )
            rope_place, rope_turn = after(channels.rope, rope_place, rope_turn, 2)
            # at most 1, also of a unit's first: it is of nothing then, but must be a number
            own_decay = gl.exp2(gl.minimum(own_peak - peak, 0.0))
            own_decay = gl.convert_layout(
                own_decay, gl.SliceLayout(0, total.type.layout), assert_trivial=True
            )
            total = total * gl.expand_dims(own_decay, 0) + _sum_pairs(exponentials)
        total = gl.convert_layout(gl.sum(total, 0), ROW)
        has_none = first_block >= keys.end_block
        peak, weight_unit = _recall(turns.own, ROW, HAS_UNITS)
        peak = gl.where(has_none, FIRST_PEAK, peak)
        weight_unit = gl.where(has_none, FIRST_UNIT, weight_unit)
        next_item, next_index = next_unit(work, item, index + gl.num_programs(0))
        if NUMBER == 0:
            other_peak, other_unit = _hear(turns.end, units_before & 1, ROW, HAS_UNITS)
            last_peak = gl.maximum(peak, other_peak)
            total = total * gl.exp2(peak - last_peak)
            total += turns.end_total.load(ROW) * gl.exp2(other_peak - last_peak)
            peak = last_peak
            weight_unit = gl.maximum(weight_unit, other_unit)
            if next_item < work.last_item:
                load_queries(inputs, work, next_item, next_index, copied)
            unit = find_place(work, item, index)
            row = gl.arange(0, HEADS, ROW)
            lse, factor = finish(unit, results, work.heads, unit.first_head + row, peak, total)
            store_lse(unit, results, work.heads, row, lse)
            factor *= scoring.tensor_scale * (1.0 / LARGEST_UNIT)
            _send_factor(messages, units_before, factor * weight_unit)
        else:
            turns.end_total.store(total)
            _tell(turns.end, peak, weight_unit, HAS_UNITS)
        units_before += 1
        blocks_before += gl.maximum(keys.end_block - keys.first_block, 0)
        item = next_item
        index = next_index


@gluon.jit
def _send_factor(messages, units_before, factor):
    mbarrier.wait(messages.factor_empty, (units_before & 1) ^ 1)
    messages.factor.store(factor)
    mbarrier.arrive(messages.factor_full, count=1)
