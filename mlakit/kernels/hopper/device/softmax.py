"""Online softmax in base 2, for scores with keys along either axis.

row_max and row_sum are relative to scores · scale_log2: exp2 is what the hardware has. Rescaling is
lazy: row_max stays until a score exceeds it by a threshold.

Lineage    own design; ideas: online softmax, FlashAttention-4's lazy rescaling
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.decode import configs
from mlakit.kernels.hopper.device.compat import record

NEG_INF = gl.constexpr(float("-inf"))
INITIAL_ROW_MAX = gl.constexpr(configs.INITIAL_ROW_MAX)
RESCALE_THRESHOLD = gl.constexpr(configs.RESCALE_THRESHOLD)
PROB_SCALE = gl.constexpr(configs.PROB_SCALE)
SMALLEST_SCALE = gl.constexpr(configs.SMALLEST_SCALE)


class ScoreTraits(NamedTuple):
    """Constants by which a decode kernel makes logits of scores."""

    SIGN: int  # of softmax_scale: 1, 0 or −1
    IS_EXTERNAL_PLAN: bool  # the plan was not made for this kernel's tiles


@record
class Logits:
    """What makes logits of scores, in base 2: a score times `scale` is one."""

    scale: object  # of all rows, or float32 of each
    TRAITS: object  # `ScoreTraits`


@gluon.jit
def apply_sign(scores, SIGN: gl.constexpr):
    """Return scores · SIGN: kernels get |softmax_scale| and its sign."""
    if SIGN < 0:
        scores = -scores
    if SIGN == 0:
        scores = scores * 0.0  # a NaN stays one; |softmax_scale| is no 0, so that −inf stays −inf
    return scores


@gluon.jit
def visible_scores(scores, logits):
    """Return the scores of a block that hides no key: times `logits.scale` they are logits."""
    return apply_sign(scores, logits.TRAITS.SIGN)


@gluon.jit
def mask_scores(scores, block, keys, KEY_AXIS: gl.constexpr, logits):
    """Return `visible_scores`, with −inf for the keys of a block outside [keys.low, keys.end).

    Splits of an external plan may begin inside a block.
    """
    LAYOUT: gl.constexpr = scores.type.layout
    ROW_AXIS: gl.constexpr = 1 - KEY_AXIS
    scores = visible_scores(scores, logits)
    is_inside = block * 64 + 64 <= keys.end
    if logits.TRAITS.IS_EXTERNAL_PLAN:
        is_inside = is_inside & (block * 64 >= keys.low)
    if not is_inside:
        key = block * 64 + gl.arange(0, 64, gl.SliceLayout(ROW_AXIS, LAYOUT))
        key = gl.expand_dims(key, ROW_AXIS)
        is_seen = key < keys.end
        if logits.TRAITS.IS_EXTERNAL_PLAN:
            is_seen = is_seen & (key >= keys.low)
        scores = gl.where(is_seen, scores, NEG_INF)
    return scores


@gluon.jit
def next_row_max(row_max, block_max, threshold=RESCALE_THRESHOLD):
    """Keep the old row_max until a score exceeds it by `threshold` (log2).

    Probabilities are then at most 2**threshold, and most rescales of acc are skipped.
    """
    return gl.where(block_max > row_max + threshold, block_max, row_max)
