"""Scores and weights of blocks of e4m3 rows: what the scorer of `decode_e4m3_kernel` does.

A warp that begins a dot waits while the one before the last is being computed. So the dots of the
next block are begun one by one, and between them a part of this block's softmax is found.
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
from mlakit.kernels.hopper.decode_e4m3_channels import (
    CHUNK,
    CHUNKS,
    as_bytes,
    next_place,
)
from mlakit.kernels.hopper.decode_few_rings import PARTS, load_queries, message_place
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
    count_units,
    find_keys,
    find_place,
    find_q_scale,
    next_unit,
)
from mlakit.kernels.hopper.e4m3 import LARGEST_UNIT, unit_for, widen_bytes
from mlakit.kernels.hopper.primitives import opaque_zero

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
HALF_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
CHUNK_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32]))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FAR_APART = gl.constexpr(2.0**12)  # scales: weights then need all of the range of halves


@record
class Scoring:
    """What a scorer reads, and what it knows when the kernel is compiled."""

    queries: object
    rotated: object  # queries' rotated columns, as those of rows are
    q_scale: object  # float32 of each token, or None
    stride_q_scale: object
    scale: object  # of the softmax, for exponents of 2
    tensor_scale: object
    SIGN: object
    IS_GIVEN: object
    HAVE_SCALES: object  # rows


@record
class Softmax:
    """What the scorer knows of its rows."""

    peak: object  # [64]
    total: object
    unit: object  # of the largest scale of a row
    least: object  # of those scales
    inverse: object  # of what weights are multiplied with beside their row's scale


@gluon.jit
def _begin_rotated(scoring, blocks, place):
    """Dots of the rotated columns of a block, [64 heads, 64 keys]."""
    zero = opaque_zero()
    box = blocks.rope.index(place)
    if box.dtype == gl.int32:
        q = as_bytes(scoring.rotated.index(zero))
        nothing = gl.zeros([64, 64], gl.float32, SCORES)
        keys = as_bytes(box).permute((1, 0))
        return warpgroup_mma(q, keys, nothing, use_acc=False, is_async=True)
    else:  # noqa: RET505
        q = scoring.rotated.index(zero)
        nothing = gl.zeros([64, 64], gl.float32, HALF_SCORES)
        dots = warpgroup_mma(q, box.permute((1, 0)), nothing, use_acc=False, is_async=True)
        # not waited for: the next dot is added to them in the same registers
        dots = warpgroup_mma_wait(1, deps=(dots,))
        return gl.convert_layout(dots, SCORES, assert_trivial=True)


@gluon.jit
def _begin_part(scoring, blocks, place, part: gl.constexpr, dots):
    """With the dots of a part of the other columns."""
    keys = as_bytes(blocks.latent.index(place * PARTS + part)).permute((1, 0))
    q = as_bytes(scoring.queries.latent.index(opaque_zero() + part))
    return warpgroup_mma(q, keys, dots, is_async=True)


@gluon.jit
def _first_scores(inputs, scoring, blocks, place, turn):
    """Of a unit's first block."""
    await_rows(inputs, blocks.full.index(place), turn)
    dots = _begin_rotated(scoring, blocks, place)
    for part in gl.static_range(PARTS):
        dots = _begin_part(scoring, blocks, place, part, dots)
    return warpgroup_mma_wait(0, deps=(dots,))


@gluon.jit
def _chunks(scores):
    """The first and the second half of a block's keys."""
    first, second = gl.split(scores.reshape([64, CHUNKS, CHUNK]).permute(0, 2, 1))
    first = gl.convert_layout(first, CHUNK_SCORES, assert_trivial=True)
    return first, gl.convert_layout(second, CHUNK_SCORES, assert_trivial=True)


@gluon.jit
def _exponentials(scores, scale, peak):
    peak = gl.convert_layout(peak, gl.SliceLayout(1, CHUNK_SCORES), assert_trivial=True)
    return gl.exp2(scores * scale - gl.expand_dims(peak, 1))


@gluon.jit
def _weights(exponentials, scales, factor, chunk: gl.constexpr, HAVE_SCALES: gl.constexpr):
    """As halves: times `factor` and the rows' scales, if they have any."""
    if HAVE_SCALES:
        scale = scales.slice(chunk * CHUNK, CHUNK, 0).load(gl.SliceLayout(0, CHUNK_SCORES))
        exponentials *= gl.expand_dims(scale * factor, 0)
    else:
        exponentials *= factor
    return exponentials.to(gl.float16)


@gluon.jit
def _seen_scores(scores, block, keys, q_scale, scales, scoring):
    """Scaled, and −inf for keys that are not to be seen."""
    if scoring.HAVE_SCALES:
        scores *= gl.expand_dims(scales.load(gl.SliceLayout(0, SCORES)) * q_scale, 0)
    else:
        scores *= q_scale
    return mask_scores(scores, block, keys, 1, scoring.SIGN, scoring.IS_GIVEN)


@gluon.jit
def _units(softmax, blocks, place, HAVE_SCALES: gl.constexpr):
    """With the scales of a block: (unit, least scale, what weights are multiplied with, patience).

    Where scales are far apart, weights of rows with small ones are so too, and peaks do not wait.
    """
    if HAVE_SCALES:
        largest = gl.max(blocks.scales.largest.index(place).load(ONE), 0)
        least = gl.min(blocks.least_scale.index(place).load(ONE), 0)
        least = gl.minimum(softmax.least, least)
        unit, factor = unit_for(gl.maximum(softmax.unit, largest))
        are_close = unit < least * FAR_APART
        factor *= gl.where(are_close, LARGEST_WEIGHT / LARGEST_UNIT, 1.0)
        return unit, least, factor, gl.where(are_close, PATIENCE, 0.0)
    else:  # noqa: RET505
        return softmax.unit, softmax.least, LARGEST_WEIGHT, PATIENCE


@gluon.jit
def _take_in(
    inputs, scores, block, keys, softmax, q_scale, scoring, blocks, place, turn,
    IS_LAST: gl.constexpr,
):  # fmt: skip
    """Weigh a block: (weights as two chunks of halves, decay of the sums before, softmax, dots).

    The dots are those of the block in the next place; there is none after the last.
    """
    scale = gl.maximum(scoring.scale, SMALLEST_SCALE)
    scales = blocks.scales.values.index(place)
    unit, least, factor, patience = _units(softmax, blocks, place, scoring.HAVE_SCALES)
    place, turn = next_place(blocks, place, turn)
    dots = scores
    if not IS_LAST:
        await_rows(inputs, blocks.full.index(place), turn)
        dots = _begin_rotated(scoring, blocks, place)
    seen = _seen_scores(scores, block, keys, q_scale, scales, scoring)
    if not IS_LAST:
        dots = _begin_part(scoring, blocks, place, 0, dots)
    largest = gl.max(seen, 1) * scale
    peak = next_peak(softmax.peak, largest, patience)
    decay = gl.exp2(softmax.peak - peak)
    first, second = _chunks(seen)
    if not IS_LAST:
        dots = _begin_part(scoring, blocks, place, 1, dots)
    first = _exponentials(first, scale, peak)
    if not IS_LAST:
        dots = _begin_part(scoring, blocks, place, 2, dots)
    second = _exponentials(second, scale, peak)
    if not IS_LAST:
        dots = _begin_part(scoring, blocks, place, 3, dots)
    added = gl.convert_layout(gl.sum(first + second, 1), peak.type.layout, assert_trivial=True)
    total = softmax.total * decay + added
    inverse = softmax.inverse
    if scoring.HAVE_SCALES:
        decay *= softmax.inverse * factor
        inverse = 1.0 / factor  # a power of two
    first = _weights(first, scales, factor, 0, scoring.HAVE_SCALES)
    second = _weights(second, scales, factor, 1, scoring.HAVE_SCALES)
    return (first, second), decay, Softmax(peak, total, unit, least, inverse), dots


@gluon.jit
def _send(messages, number, weights, decay):
    place, turn = message_place(number)
    mbarrier.wait(messages.empty.index(place), turn ^ 1)
    for chunk in gl.static_range(CHUNKS):
        messages.weights.index(place * CHUNKS + chunk).store(weights[chunk])
    messages.decays.index(place).store(decay)
    is_other = gl.where(decay == 1.0, 0.0, 1.0)
    messages.have_decays.index(place).store(gl.max(is_other.reshape([4, 16]), 1))
    fence_async_shared()
    mbarrier.arrive(messages.full.index(place), count=1)


@gluon.jit
def score_blocks(item, index, inputs, work, results, messages, blocks, scoring):
    """All that the scorer does."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    queries = scoring.queries
    place, turn = item * 0, item * 0
    number = item * 0
    units_before = item * 0
    load_queries(inputs, work, item, index, queries)
    # addresses of a thread's elements are found in each turn: kept, they would be spilled
    for _ in tl.range(0, count_units(work, item, index), disable_licm=True):
        keys = find_keys(inputs, work, item, index)
        q_scale = find_q_scale(scoring, work, item, index)
        mbarrier.wait(queries.arrival, units_before & 1)
        if scoring.rotated.dtype != gl.int32 and queries.rope.dtype == gl.int32:
            widen_bytes(queries.rope.index(0), scoring.rotated.index(0))
            fence_async_shared()
        softmax = Softmax(
            gl.full([64], FIRST_PEAK, gl.float32, ROW),
            gl.zeros([64], gl.float32, ROW),
            gl.to_tensor(0.0),  # `unit_for` knows a least one
            gl.to_tensor(float("inf")),
            gl.to_tensor(1.0 / LARGEST_WEIGHT),
        )
        last_block = keys.end_block - 1
        if keys.first_block < keys.end_block:
            scores = _first_scores(inputs, scoring, blocks, place, turn)
            for block in range(keys.first_block, last_block):
                weights, decay, softmax, dots = _take_in(
                    inputs, scores, block, keys, softmax, q_scale, scoring, blocks, place, turn,
                    False,
                )  # fmt: skip
                _send(messages, number, weights, decay)
                # only now: the message has been made of the scales, so they have been read
                mbarrier.arrive(blocks.empty.index(place), count=1)
                place, turn = next_place(blocks, place, turn)
                number += 1
                # here, and not where they are needed: under way from one turn of the loop to the
                # next, their registers would be copied, for which the assembler waits each time
                scores = warpgroup_mma_wait(0, deps=(dots,))
            weights, decay, softmax, scores = _take_in(
                inputs, scores, last_block, keys, softmax, q_scale, scoring, blocks, place, turn,
                True,
            )  # fmt: skip
            _send(messages, number, weights, decay)
            mbarrier.arrive(blocks.empty.index(place), count=1)
            place, turn = next_place(blocks, place, turn)
            number += 1
        next_item, next_index = next_unit(work, item, index + gl.num_programs(0))
        if next_item < work.last_item:
            load_queries(inputs, work, next_item, next_index, queries)
        # found again: kept through the loop, it would take registers that that needs
        unit = find_place(work, item, index)
        row = gl.arange(0, 64, ROW)
        lse, factor = finish(
            unit, results, work.heads, unit.first_head + row, softmax.peak, softmax.total
        )
        store_lse(unit, results, work.heads, row, lse)
        factor *= scoring.tensor_scale * softmax.inverse
        mbarrier.wait(messages.factor_empty, (units_before & 1) ^ 1)
        messages.factor.store(factor)
        mbarrier.arrive(messages.factor_full, count=1)
        units_before += 1
        item = next_item
        index = next_index
