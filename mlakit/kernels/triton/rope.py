"""RoPE as device functions: load angles and pairs of elements, rotate, store.

Maths      y0 = x0·cos − x1·sin ;  y1 = x0·sin + x1·cos
Numbers    the second product is rounded to the dtype of freqs, then the fused sum, then the result
           to the dtype of x: the same bits as the CPU kernel
Limits     interleaved pairs (2i, 2i + 1) or half-split pairs (i, D_R/2 + i); PAIRS is D_R / 2
           padded to a power of two
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlakit.kernels.triton.norm_quant import encode, store_elements


@triton.jit
def load_angles(angles, position, has_angle, D_R: tl.constexpr, PAIRS: tl.constexpr):
    """cos and sin [T, 1, PAIRS] of positions, in the dtype of freqs.

    angles  freqs, stride_position and stride_column
    """
    column = tl.arange(0, 2 * PAIRS)
    # loaded together and then split: each thread reads its pairs contiguously
    mask = has_angle[:, None, None] & (column < D_R)
    at = position[:, None, None] * angles.stride_position
    cos_sin = tl.load(angles.freqs + at + column * angles.stride_column, mask=mask, other=0.0)
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
def rotate(x0, x1, cos, sin):
    """The rotated pairs, as float32 values that the dtype of x holds exactly."""
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
    """Store the pairs of rows `at` in the dtype STORED; uint8 stands for e4m3."""
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
