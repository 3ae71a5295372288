"""RMSNorm of latents, and their quantisation to cache rows, as device functions.

Maths      c = x · rsqrt(mean x² + ε) · γ ;  scale = max(amax / 448, smallest) ;  stored = c / scale
Numbers    the norm is float32, rounded to γ's dtype before it is multiplied by γ. Scales are those
           of `mlakit.formats`, and the division is exact: the same bits as the CPU kernel
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlakit.kernels.triton.primitives import narrow_e4m3

# How the scales of a row are computed and where they are stored. In order: up to TOKEN_SCALE latent
# and rotated columns share a scale, and from TOKEN_SCALE to FOOTER_SCALES rotated columns are bf16.
NO_SCALE = tl.constexpr(0)  # bf16, fp16, fp32
TENSOR_SCALE = tl.constexpr(1)  # fp8
ROW_SCALE = tl.constexpr(2)  # fp8_row
TOKEN_SCALE = tl.constexpr(3)  # fp8_token
BLOCK_SCALES = tl.constexpr(4)  # fp8_block128
FOUR_BIT_SCALES = tl.constexpr(5)  # mxfp4_block32
FOOTER_SCALES = tl.constexpr(6)  # fp8_block64
MOST_UNUSED = tl.constexpr(16)  # bytes that hold no e8m0 scale
GROUP_SCALES = tl.constexpr(7)  # fp8_group32, fp8_group64, fp8_group128


@triton.jit
def rms_norm(x, weight, epsilon, D_C: tl.constexpr):
    """x [T, columns] normalised in float32, rounded to γ's dtype, then times γ in that dtype."""
    x = x.to(tl.float32)
    sum_of_squares = tl.sum(x * x, 1)
    mean = tl.div_rn(sum_of_squares, tl.zeros_like(sum_of_squares) + D_C)
    # not rsqrt: its last bits differ between devices
    inverse = tl.div_rn(tl.zeros_like(mean) + 1.0, tl.sqrt_rn(mean + epsilon))
    normalised = (x * inverse[:, None]).to(weight.dtype).to(tl.float32)
    return (normalised * weight.to(tl.float32)[None, :]).to(weight.dtype).to(tl.float32)


@triton.jit
def divide(x, scale):
    """x / scale, rounded once; `scale` broadcasts."""
    return tl.div_rn(x, tl.broadcast_to(scale, x.shape))


@triton.jit
def largest_magnitude(x):
    """The bits of the largest magnitude of groups x [T, groups, columns], int32 [T, groups].

    As integers, magnitudes have the same order, with NaN above infinity.
    """
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)


@triton.jit
def find_scales(
    magnitude, SMALLEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, LARGEST: tl.constexpr = 448.0
):
    """max(amax / LARGEST, SMALLEST) for the bits of amax; NaN if amax is."""
    amax = magnitude.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + LARGEST)
    scale = tl.where(scale < SMALLEST, SMALLEST, scale)
    if POWER_OF_TWO:
        # round up: a mantissa other than 0 carries into the exponent
        raised = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale < float("inf"), raised.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def store_scales(
    inline,  # pointers [T] to the scales inside the rows, of fp8_block128 and mxfp4_block32
    beside,  # pointers [T] to the scales beside the rows, of other formats
    scale,  # [T, groups]
    is_stored,  # [T]
    D_C: tl.constexpr,
    GROUP: tl.constexpr,
    SCALING: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_BYTES: tl.constexpr,  # of e8m0 scales, with bytes that hold none
):
    group = tl.arange(0, scale.shape[1])[None, :]
    used = group < tl.cdiv(D_C, GROUP)
    if SCALING == BLOCK_SCALES:
        store_elements(inline[:, None], group, scale, is_stored[:, None] & used, ALIGNED)
    elif SCALING >= FOUR_BIT_SCALES and SCALING <= FOOTER_SCALES:
        # e8m0 is the exponent field of a float32 power of two, inf or NaN
        exponent = ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)
        at = beside if SCALING == FOOTER_SCALES else inline
        tl.store(at[:, None] + group, exponent, mask=is_stored[:, None] & used)
        GROUPS: tl.constexpr = (D_C + GROUP - 1) // GROUP
        if SCALE_BYTES > GROUPS:
            unused = GROUPS + tl.arange(0, MOST_UNUSED)[None, :]
            mask = is_stored[:, None] & (unused < SCALE_BYTES)
            tl.store(at[:, None] + unused, 0, mask=mask)
    else:
        tl.store(beside[:, None] + group, scale, mask=is_stored[:, None] & used)


@triton.jit
def encode(x, STORED: tl.constexpr, HAS_FP8: tl.constexpr):
    """Return float32 `x` in the dtype STORED; uint8 stands for e4m3."""
    return narrow_e4m3(x, HAS_FP8) if tl.uint8 == STORED else x.to(STORED)


@triton.jit
def store_elements(at, index, x, mask, ALIGNED: tl.constexpr):
    """Store `x` as elements `index` of an array of its dtype that starts at `at`.

    ALIGNED  `at` is a multiple of the element size; otherwise elements are stored byte by byte
    """
    if at.dtype.element_ty == x.dtype:
        tl.store(at + index, x, mask=mask)
    elif ALIGNED:
        tl.store(at.to(tl.pointer_type(x.dtype), bitcast=True) + index, x, mask=mask)
    else:
        BYTES: tl.constexpr = x.dtype.primitive_bitwidth // 8
        bits = x.to(tl.int16 if BYTES == 2 else tl.int32, bitcast=True)
        for byte in tl.static_range(BYTES):
            tl.store(at + (BYTES * index + byte), (bits >> (8 * byte)).to(tl.uint8), mask=mask)
