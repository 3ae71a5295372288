"""Scales of e4m3: of each query, and of each block of keys and of values.

A softmax warpgroup reads them itself. Those of a block are numbers: with a stride of 0 all blocks
have the same. The scale of values multiplies probabilities before these are rounded, as a logarithm
that is added to logits; row_max has it, row_sum has not. What is negative, and what is not finite,
is rare, and is applied in tensor memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.formats import SMALLEST_SCALE as _SMALLEST_SCALE
from mlakit.kernels.blackwell.prefill.pipeline import KEYS, QUERIES
from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.primitives import log2
from mlakit.kernels.hopper.prefill import fp8_values

SMALLEST_SCALE = gl.constexpr(_SMALLEST_SCALE)
NO_SCALE = gl.constexpr(fp8_values.NO_SCALE)


@record
class Scales:
    """Pointers to the scales, float32 or None, and their strides."""

    q: object  # [tokens, heads]
    k: object  # [blocks]
    v: object  # [blocks, heads]
    stride_q_token: object
    stride_q_head: object
    stride_k: object
    stride_v_token: object
    stride_v_head: object
    HAS_BLOCKS: object  # for `fp8_non_finite`


@record
class BlockScales:
    """The scales of a block; without scales `factor` is that of all blocks, and the rest None."""

    factor: object  # logits, in base 2, are scores · factor: a number, or float32 of each query
    of_scores: object  # what scores are multiplied by in tensor memory
    log2_values: object  # is added to logits
    inverse: object  # of the size of the values' scale
    of_values: object  # the scale itself


@gluon.jit
def query_factors(scales, scale_log2, tile, ROW0: gl.constexpr, ROW: gl.constexpr):
    """Return what makes logits of scores: scale_log2, with scales [128] in the layout ROW."""
    factors = scale_log2
    if scales is not None:
        factors = gl.full([QUERIES], 0.0, gl.float32, ROW) + scale_log2
        if scales.q is not None:
            row = ROW0 + gl.arange(0, QUERIES, ROW)
            token = (tile.q_row + row).to(gl.int64)
            head = scales.q + tile.head.to(gl.int64) * scales.stride_q_head
            is_there = row < tile.num_rows
            factors *= gl.load(head + token * scales.stride_q_token, mask=is_there, other=0.0)
    return factors


@gluon.jit
def load_block_scales(scales, factors, tile, start):
    """Return the `BlockScales` of the block that begins at key `start` of its request."""
    of_scores = None
    log2_values = None
    inverse = None
    of_values = None
    if scales is not None:
        number = tile.kv_row // KEYS + tile.request + start // KEYS
        number = number.to(gl.int64)
        is_there = tile.kv_len > 0
        if scales.k is not None:
            k_scale = gl.load(scales.k + number * scales.stride_k, mask=is_there, other=1.0)
            size = gl.abs(k_scale)
            is_finite = size < float("inf")
            factors = factors * gl.where(is_finite, size, 1.0)
            of_scores = gl.where(is_finite, gl.where(k_scale < 0.0, -1.0, 1.0), k_scale)
        if scales.v is not None:
            at = scales.v + tile.head.to(gl.int64) * scales.stride_v_head
            of_values = gl.load(at + number * scales.stride_v_token, mask=is_there, other=1.0)
            size = gl.abs(of_values)
            size = gl.where((size > NO_SCALE) & (size < float("inf")), size, NO_SCALE)
            log2_values = log2(size)
            inverse = 1.0 / size
        # a scale of 0 would turn the −inf of a hidden key into NaN
        factors = gl.where(factors < SMALLEST_SCALE, SMALLEST_SCALE, factors)
    return BlockScales(factors, of_scores, log2_values, inverse, of_values)
