"""What `norm_rope_quant_kernel` does to rows: normalise, rotate, find scales, encode, store.

Maths   y0 = x0·cos − x1·sin, y1 = x0·sin + x1·cos ;  c = x · rsqrt(mean x² + ε) · γ
        The rotation rounds its second product, then the fused sum, to the dtype of `freqs`; the
        result to the dtype of its input. The norm is float32, rounded to γ's dtype before γ.
        Scales are those of `formats`: max(amax / 448, smallest), divided by exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlakit.formats import PageFooterCodec
from mlakit.kernels.triton.primitives import narrow_e4m3

# how the scales of a row are made and where they go
NO_SCALE = tl.constexpr(0)  # bf16, fp16, fp32
TENSOR_SCALE = tl.constexpr(1)  # fp8
TOKEN_SCALE = tl.constexpr(2)  # fp8_token
BLOCK_SCALES = tl.constexpr(3)  # fp8_block128
FOOTER_SCALES = tl.constexpr(4)  # fp8_block64
FOOTER_BYTES = tl.constexpr(PageFooterCodec.footer_bytes)


@triton.jit
def normalise(x, weight, epsilon, D_C: tl.constexpr):
    """x [T, columns] normalised in float32, rounded to γ's dtype, then times γ in that dtype."""
    x = x.to(tl.float32)
    total = tl.sum(x * x, 1)
    mean = tl.div_rn(total, tl.zeros_like(total) + D_C)
    # not rsqrt, whose last bits are the device's own
    inverse = tl.div_rn(tl.zeros_like(mean) + 1.0, tl.sqrt_rn(mean + epsilon))
    normalised = (x * inverse[:, None]).to(weight.dtype).to(tl.float32)
    return (normalised * weight.to(tl.float32)[None, :]).to(weight.dtype).to(tl.float32)


@triton.jit
def load_angles(
    freqs, stride_position, stride_column, position, live, D_R: tl.constexpr, PAIRS: tl.constexpr
):
    """cos and sin [T, 1, PAIRS] of positions, in the dtype of freqs."""
    column = tl.arange(0, 2 * PAIRS)
    # together and then split: every thread reads its pairs in one piece
    cos_sin = tl.load(
        freqs + position[:, None, None] * stride_position + column * stride_column,
        mask=live[:, None, None] & (column < D_R),
        other=0.0,
    )
    return tl.split(tl.reshape(cos_sin, [position.shape[0], 1, PAIRS, 2]))


@triton.jit
def load_pairs(at, inside, D_R: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second elements [T, H, PAIRS] of the pairs of rows `at` [T, H, 1]."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        x = tl.load(at + column, mask=inside & (column < D_R), other=0.0)
        x0, x1 = tl.split(tl.reshape(x, [at.shape[0], at.shape[1], PAIRS, 2]))
    else:
        pair = tl.arange(0, PAIRS)
        inside = inside & (pair < D_R // 2)
        x0 = tl.load(at + pair, mask=inside, other=0.0)
        x1 = tl.load(at + (D_R // 2 + pair), mask=inside, other=0.0)
    return x0, x1


@triton.jit
def store_pairs(
    at,  # [T, H, 1]
    inside,  # [T, H, 1]
    y0,  # [T, H, PAIRS] float32
    y1,
    STORED: tl.constexpr,
    D_R: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Write the pairs of rows `at`, whose elements are STORED, e4m3 for uint8."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, None, :]
        y = tl.reshape(tl.join(y0, y1), [y0.shape[0], y0.shape[1], 2 * PAIRS])
        y = encode(y, STORED, HAS_FP8)
        store_elements(at, column, y, inside & (column < D_R), ALIGNED)
    else:
        pair = tl.arange(0, PAIRS)[None, None, :]
        inside = inside & (pair < D_R // 2)
        store_elements(at, pair, encode(y0, STORED, HAS_FP8), inside, ALIGNED)
        store_elements(at, D_R // 2 + pair, encode(y1, STORED, HAS_FP8), inside, ALIGNED)


@triton.jit
def rotate(x0, x1, cos, sin):
    """Pairs turned by their angles, as float32 that the dtype of x holds."""
    a0, a1 = x0.to(tl.float32).to(cos.dtype).to(tl.float32), x1.to(tl.float32)
    a1 = a1.to(cos.dtype).to(tl.float32)
    c, s = cos.to(tl.float32), sin.to(tl.float32)
    c, s = tl.broadcast_to(c, a0.shape), tl.broadcast_to(s, a0.shape)
    y0 = tl.fma(a0, c, -(a1 * s).to(cos.dtype).to(tl.float32))
    y1 = tl.fma(a0, s, (a1 * c).to(cos.dtype).to(tl.float32))
    y0 = y0.to(cos.dtype).to(tl.float32).to(x0.dtype).to(tl.float32)
    y1 = y1.to(cos.dtype).to(tl.float32).to(x0.dtype).to(tl.float32)
    return y0, y1


@triton.jit
def divide(x, scale):
    """x / scale, rounded once; `scale` broadcasts."""
    return tl.div_rn(x, tl.broadcast_to(scale, x.shape))


@triton.jit
def find_scales(x, SMALLEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """max(amax / 448, SMALLEST) of groups x [T, groups, columns]; NaN if a group has one."""
    # as integers magnitudes have the same order, with NaN above infinity
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(magnitude, 2).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + 448.0)
    scale = tl.where(scale < SMALLEST, SMALLEST, scale)
    if POWER_OF_TWO:
        # a mantissa that is not 0 carries into the exponent
        raised = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale < float("inf"), raised.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def store_scales(
    inline,  # [T] where the scales of a block format are, in their rows
    beside,  # [T] where those of other formats are
    scale,  # [T, groups]
    live,  # [T]
    D_C: tl.constexpr,
    GROUP: tl.constexpr,
    SCALING: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    group = tl.arange(0, scale.shape[1])[None, :]
    used = group < tl.cdiv(D_C, GROUP)
    if SCALING == BLOCK_SCALES:
        store_elements(inline[:, None], group, scale, live[:, None] & used, ALIGNED)
    elif SCALING == FOOTER_SCALES:
        # the exponent field of a float32 power of two, of inf and of NaN is its e8m0 byte
        exponent = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.where(used, exponent, 0).to(tl.uint8)
        tl.store(beside[:, None] + group, exponent, mask=live[:, None] & (group < FOOTER_BYTES))
    else:
        tl.store(beside[:, None] + group, scale, mask=live[:, None])


@triton.jit
def encode(x, STORED: tl.constexpr, HAS_FP8: tl.constexpr):
    """float32 `x` as it is stored: in the dtype STORED, e4m3 bytes for uint8."""
    return narrow_e4m3(x, HAS_FP8) if tl.uint8 == STORED else x.to(STORED)


@triton.jit
def store_elements(at, index, x, mask, ALIGNED: tl.constexpr):
    """Store `x` as elements `index` of an array of its dtype that starts at `at`, maybe a byte."""
    if at.dtype.element_ty == x.dtype:
        tl.store(at + index, x, mask=mask)
    elif ALIGNED:
        tl.store(at.to(tl.pointer_type(x.dtype), bitcast=True) + index, x, mask=mask)
    else:
        BYTES: tl.constexpr = x.dtype.primitive_bitwidth // 8
        bits = x.to(tl.int16 if BYTES == 2 else tl.int32, bitcast=True)
        for byte in tl.static_range(BYTES):
            tl.store(at + (BYTES * index + byte), (bits >> (8 * byte)).to(tl.uint8), mask=mask)
