"""A softmax warpgroup: probabilities of the scores of a query tile, and its results.

A thread has a query: all of its scores of a block, so no exchange between threads is needed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from mlakit.kernels.blackwell.prefill.pipeline import KEYS, PART, QUERIES, slot_of, turn
from mlakit.kernels.blackwell.prefill.products import probs_of
from mlakit.kernels.blackwell.prefill.scales import load_block_scales, query_factors
from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.primitives import lane_layout
from mlakit.kernels.hopper.device.softmax import apply_sign, next_row_max
from mlakit.kernels.hopper.prefill import fp8_non_finite
from mlakit.kernels.hopper.prefill.epilogue import finish_rows, store_lse, store_rows
from mlakit.kernels.hopper.prefill.fp8_softmax import SHIFT
from mlakit.kernels.hopper.prefill.pipeline import read_tile, release_tile, wait_tile
from mlakit.kernels.hopper.prefill.softmax import INITIAL_ROW_MAX, rescale_threshold
from mlakit.kernels.hopper.prefill.tiles import block_start, is_masked, seen_keys
from mlakit.kernels.hopper.prefill.values import add_non_finite

CHUNK = gl.constexpr(64)  # columns of scores or acc at a time: half a block
RESCALED = gl.constexpr(16)  # columns of acc at a time: 128 registers hold the scores of a block


@record
class Values:
    """The values themselves; columns are adjacent."""

    v: object
    stride_token: object
    stride_head: object
    stride_column: object


@record
class Results:
    """What a softmax warpgroup needs beside the pipeline."""

    outputs: object  # `hopper.prefill.epilogue.Outputs`
    values: object  # `Values`
    scales: object  # `scales.Scales` of e4m3, else None
    scale_log2: object
    SIGN: object
    RESCALE_THRESHOLD: object


@gluon.jit
def _mask(
    place,
    of_scores,
    COLUMN: gl.constexpr,
    schedule,
    tile,
    start,
    ROW0: gl.constexpr,
    SIGN: gl.constexpr,
):
    """Hide the keys that a query does not see, in CHUNK columns of a block's scores.

    In tensor memory: branches that leave scores in registers make ptxas copy and spill them.
    of_scores  what scores are multiplied by first, or None
    start  first key of the block
    """
    HIDDEN: gl.constexpr = float("inf") if SIGN < 0 else float("-inf")
    columns = place.slice(COLUMN, CHUNK)
    scores = columns.load()
    if SIGN == 0:
        scores = apply_sign(scores, SIGN)
    if of_scores is not None:
        scores *= of_scores
    LAYOUT: gl.constexpr = scores.type.layout
    row = gl.arange(0, QUERIES, gl.SliceLayout(1, LAYOUT))
    first, end = seen_keys(schedule, tile.position + ROW0 + row, tile.kv_len)
    # what differs between threads is in the limits: keys are constants, and take no registers
    key = gl.expand_dims(COLUMN + gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT)), 0)
    scores = gl.where(key < gl.expand_dims(end - start, 1), scores, HIDDEN)
    columns.store(gl.where(key >= gl.expand_dims(first - start, 1), scores, HIDDEN))


@gluon.jit
def _load_scores(place, COLUMN: gl.constexpr, SIGN: gl.constexpr):
    """Load CHUNK columns of scores · SIGN; a SIGN of 0 has been applied (`_mask`)."""
    scores = place.slice(COLUMN, CHUNK).load()
    return apply_sign(scores, SIGN) if SIGN < 0 else scores


@gluon.jit
def _store_probs(probs, COLUMN: gl.constexpr, scores, factor, shift):
    """Store probabilities of [128, CHUNK] scores; return their sums.

    factor, shift  the logarithm of a probability is the score times the first less the second
    """
    exponentials = gl.exp2(scores * factor - gl.expand_dims(shift, 1))
    to = probs.slice(COLUMN, CHUNK)
    to.store(gl.convert_layout(exponentials.to(probs.dtype), to.get_reg_layout()))
    return gl.sum(exponentials, 1)


@gluon.jit
def _negate(place):
    """Negate the probabilities of e4m3 in the place of scores, as words of four."""
    words = place.slice(0, KEYS // 4)
    bits = words.load().to(gl.int32, bitcast=True) ^ -0x7F7F7F80
    words.store(bits.to(gl.float32, bitcast=True))


@gluon.jit
def _rescale(tmem, TILE: gl.constexpr, SIZES, rescale):
    """acc · rescale, [128] in the rows of the scores."""
    for part in gl.static_range(SIZES.VALUE_PARTS):
        for i in gl.static_range(PART // RESCALED):
            acc = tmem.acc.index(TILE * SIZES.VALUE_PARTS + part).slice(i * RESCALED, RESCALED)
            values = acc.load()
            factors = gl.convert_layout(rescale, gl.SliceLayout(1, values.type.layout))
            acc.store(values * gl.expand_dims(factors, 1))


@gluon.jit
def _store_columns(
    tile, acc, is_flagged, out_scale, ROW0: gl.constexpr, COLUMN: gl.constexpr, schedule, results
):
    """Store acc [128, CHUNK] · out_scale [128], the columns from COLUMN on."""
    if is_flagged:
        values = results.values
        v = values.v + COLUMN
        if results.scales is None:
            acc = add_non_finite(
                acc, schedule, tile, ROW0, v, values.stride_token, values.stride_head
            )
        else:
            acc = fp8_non_finite.add_non_finite(
                acc, schedule, tile, ROW0, values.replace(v=v), results.scales
            )
    factors = gl.convert_layout(out_scale, gl.SliceLayout(1, acc.type.layout))
    values = (acc * gl.expand_dims(factors, 1)).to(results.outputs.out.dtype.element_ty)
    store_rows(results.outputs, tile, ROW0, COLUMN, values)


@gluon.jit
def _store_results(tile, is_flagged, out_scale, TILE: gl.constexpr, schedule, SIZES, tmem, results):
    """Store the results of a query tile: acc · out_scale, [128]."""
    for part in gl.static_range(SIZES.VALUE_PARTS):
        for i in gl.static_range(PART // CHUNK):
            acc = tmem.acc.index(TILE * SIZES.VALUE_PARTS + part).slice(i * CHUNK, CHUNK).load()
            _store_columns(
                tile,
                acc,
                is_flagged,
                out_scale,
                TILE * QUERIES,
                part * PART + i * CHUNK,
                schedule,
                results,
            )


@gluon.jit
def softmax_warps(TILE: gl.constexpr, schedule, tiles, SIZES, smem, tmem, barriers, results):
    """Run the softmax warpgroup of a query tile of every work tile."""
    ROW0: gl.constexpr = TILE * QUERIES
    ROW: gl.constexpr = gl.SliceLayout(1, tmem.scores.index(0).slice(0, CHUNK).get_reg_layout())
    values_done = barriers.values_done.index(TILE)
    tiles_done = gl.to_tensor(0)
    block = gl.to_tensor(0)
    wait_tile(tiles, tiles_done)
    tile = read_tile(tiles, schedule, tiles_done, 4)
    while tile.num_blocks > 0:
        row_max = gl.full([QUERIES], INITIAL_ROW_MAX, gl.float32, ROW)
        row_sum = gl.zeros([QUERIES], gl.float32, ROW)
        factors = query_factors(results.scales, results.scale_log2, tile, ROW0, ROW)
        is_special = gl.to_tensor(False)  # a block has a scale of values that is not finite
        for i in range(tile.num_blocks):
            slot, phase = slot_of(SIZES, block, TILE)
            start = block_start(schedule, tile, i)
            scales = load_block_scales(results.scales, factors, tile, start)
            mbarrier.wait(barriers.scores_full.index(slot), phase)
            place = tmem.scores.index(slot)
            is_rare = is_masked(schedule, tile, start) | (results.SIGN == 0)
            if scales.of_scores is not None:
                is_rare |= scales.of_scores != 1.0
            if is_rare:
                of_scores = scales.of_scores
                _mask(place, of_scores, 0, schedule, tile, start, ROW0, results.SIGN)
                _mask(place, of_scores, CHUNK, schedule, tile, start, ROW0, results.SIGN)
            low = _load_scores(place, 0, results.SIGN)
            high = _load_scores(place, CHUNK, results.SIGN)
            block_max = gl.maximum(gl.max(low, 1), gl.max(high, 1)) * scales.factor
            if scales.log2_values is not None:
                block_max += scales.log2_values
            threshold = rescale_threshold(row_sum, results.RESCALE_THRESHOLD)
            next_max = next_row_max(row_max, block_max, threshold)
            rescale = gl.exp2(row_max - next_max)
            row_max = next_max
            mbarrier.wait(values_done, (block & 1) ^ 1)
            if (i > 0) & (gl.max((rescale != 1.0).to(gl.int32), 0) > 0):
                _rescale(tmem, TILE, SIZES, rescale)
            probs = probs_of(tmem, slot, smem.parts.dtype)
            row_sum *= rescale
            shift = row_max
            factor = scales.factor
            if results.scales is not None:
                shift -= SHIFT
                factor = gl.expand_dims(factor, 1)
            if scales.log2_values is None:
                row_sum += _store_probs(probs, 0, low, factor, shift)
                row_sum += _store_probs(probs, CHUNK, high, factor, shift)
            else:
                shift -= scales.log2_values
                block_sum = _store_probs(probs, 0, low, factor, shift)
                block_sum += _store_probs(probs, CHUNK, high, factor, shift)
                row_sum += block_sum * scales.inverse
                if scales.of_values < 0.0:
                    _negate(place)
                is_special |= ~(gl.abs(scales.of_values) < float("inf"))
            mbarrier.arrive(barriers.probs_full.index(slot), count=1)
            block += 1
        if results.scales is not None:
            row_max -= SHIFT
        lse, out_scale = finish_rows(results.outputs, tile, row_max, row_sum)
        store_lse(results.outputs, tile, ROW0, lse)
        mbarrier.wait(values_done, (block & 1) ^ 1)
        # a commit says nothing of what the masking warps did
        index, phase = turn(smem, block - 1)
        mbarrier.wait(barriers.clean.index(index), phase)
        flag = gl.max(smem.flags.index(tiles_done & 1).load(lane_layout(4)), 0)
        release_tile(tiles, tiles_done)
        is_flagged = (flag == tiles_done) | is_special
        _store_results(tile, is_flagged, out_scale, TILE, schedule, SIZES, tmem, results)
        tiles_done += 1
        wait_tile(tiles, tiles_done)
        tile = read_tile(tiles, schedule, tiles_done, 4)
