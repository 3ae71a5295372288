"""The softmax of a decode kernel, whichever way its scores lie: what is masked, what comes of sums.

Peaks and sums are of scores in base 2: exp2 is what the hardware has.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NOTHING = gl.constexpr(float("-inf"))
FIRST_PEAK = gl.constexpr(-3.0e38)  # finite: the difference of two peaks is never inf − inf
PATIENCE = gl.constexpr(8.0)
# float16 weight of a score at the peak: with PATIENCE what `LARGEST_UNIT` leaves room for
LARGEST_WEIGHT = gl.constexpr(2.0**6)
SMALLEST_SCALE = gl.constexpr(2.0**-126)  # with one of 0 the −inf of a hidden key would be NaN
LN2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def with_sign(scores, SIGN: gl.constexpr):
    """Times the sign of the softmax's scale, of which the kernels get the size only."""
    if SIGN < 0:
        scores = -scores
    if SIGN == 0:
        scores = scores * 0.0  # a NaN stays one; the size is no 0, for −inf has to stay −inf
    return scores


@gluon.jit
def mask_scores(
    scores, block, keys, KEY_AXIS: gl.constexpr, SIGN: gl.constexpr, IS_GIVEN: gl.constexpr
):
    """−inf for keys of a block that are not to be seen."""
    LAYOUT: gl.constexpr = scores.type.layout
    ROW_AXIS: gl.constexpr = 1 - KEY_AXIS
    scores = with_sign(scores, SIGN)
    is_inside = block * 64 + 64 <= keys.end
    if IS_GIVEN:
        is_inside = is_inside & (block * 64 >= keys.low)
    if not is_inside:
        key = block * 64 + gl.arange(0, 64, gl.SliceLayout(ROW_AXIS, LAYOUT))
        key = gl.expand_dims(key, ROW_AXIS)
        is_seen = key < keys.end
        if IS_GIVEN:
            is_seen = is_seen & (key >= keys.low)
        scores = gl.where(is_seen, scores, NOTHING)
    return scores


@gluon.jit
def next_peak(peak, largest, patience=PATIENCE):
    """What exponents are relative to, once scores up to `largest` have been seen.

    It stays what it was until a score is so far above it: exponentials are 2**patience then, and
    sums of values need not be multiplied with what is but a little less than 1.
    """
    return gl.where(largest > peak + patience, largest, peak)


@gluon.jit
def finish(place, results, heads, head, peak, total):
    """Of rows' peaks and sums: (lse, what to multiply the rows' sums of values with)."""
    is_empty = total == 0.0
    lse = (peak + gl.log2(gl.where(is_empty, 1.0, total))) * LN2
    lse = gl.where(is_empty, NOTHING, lse)
    # an infinite score: the weights are NaN, the sum of the exponentials is not
    lse = gl.where(peak == float("inf"), peak, lse)
    denominator = total
    if results.sink is not None:
        sink = gl.load(
            results.sink + head.to(gl.int64) * results.stride_sink, mask=head < heads, other=0.0
        )
        with_sink = denominator + gl.exp2(sink * LOG2_E - peak)
        denominator = gl.where(place.slot < 0, with_sink, denominator)  # a merge adds it once
    return lse, gl.where(is_empty, 0.0, 1.0 / denominator)


@gluon.jit
def store_lse(place, results, heads, row, lse):
    head = place.first_head + row
    if place.slot < 0:
        lse_row = results.lse + place.token.to(gl.int64) * results.stride_lse_token
        at = head.to(gl.int64) * results.stride_lse_head
        gl.store(lse_row + at, lse, mask=head < heads)
    else:
        gl.store(results.partial_lse + place.slot_row + row, lse, mask=head < heads)
