"""Online softmax in base 2 of a consumer warpgroup's 64 queries.

row_max and row_sum are relative to scores · scale_log2: exp2 is what the hardware has. The row_sum
of a query stays spread over 8 columns, two per thread, until the tile ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.softmax import next_row_max
from mlakit.kernels.hopper.prefill import configs

SUM_COLUMNS = gl.constexpr(8)
INITIAL_ROW_MAX = gl.constexpr(configs.INITIAL_ROW_MAX)


@gluon.jit
def _spread_sum(probs):
    """[64, SUM_COLUMNS] sums of every eighth column, which need no exchange between threads."""
    return gl.sum(gl.reshape(probs, [64, probs.shape[1] // SUM_COLUMNS, SUM_COLUMNS]), 1)


@gluon.jit
def rescale_threshold(row_sum, LARGEST: gl.constexpr):
    """Return by how much (log2) a score of each row may exceed row_max; row_sum is [rows].

    Its probability is then more than 1 and is rounded, where that of row_max is exactly 1. So it
    may be a quarter of the row's sum, and rows of a few large weights would lose accuracy.
    """
    # the exponent field, less its bias and 2: gl.log2 takes 35 instructions
    exponent = (row_sum.to(gl.int32, bitcast=True) >> 23) - (127 + 2)
    return gl.minimum(gl.maximum(exponent, 0), LARGEST).to(gl.float32)


@gluon.jit
def softmax_of_top(scores, scale_log2):
    """Return (probabilities, row_max, row_sum) of the top block: there is nothing to rescale."""
    row_max = gl.maximum(gl.max(scores, 1) * scale_log2, INITIAL_ROW_MAX)
    probs = gl.exp2(scores * scale_log2 - gl.expand_dims(row_max, 1))
    return probs, row_max, _spread_sum(probs)


@gluon.jit
def softmax_step(scores, row_max, row_sum, scale_log2, RESCALE_THRESHOLD: gl.constexpr):
    """Return (probabilities, row_max, row_sum, what acc is to be rescaled by)."""
    block_max = gl.max(scores, 1) * scale_log2
    total = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    threshold = rescale_threshold(total, RESCALE_THRESHOLD)
    new_max = next_row_max(row_max, block_max, threshold)
    rescale = gl.exp2(row_max - new_max)
    probs = gl.exp2(scores * scale_log2 - gl.expand_dims(new_max, 1))
    block_sum = _spread_sum(probs)
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))
    row_sum = row_sum * gl.expand_dims(factor, 1) + block_sum
    return probs, new_max, row_sum, rescale
