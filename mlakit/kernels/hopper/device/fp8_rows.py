"""Blocks of 64 FP8 rows in registers: loaded as words, converted to float16, stored.

Values of fp8_block128 are multiplied by their scales, of which a row has one per 128 columns. A
power of two per row keeps the products in float16's range, and is a factor of its scores and
probabilities. It follows the row's largest scale, whatever that is: a power that stayed 1 over a
range of scales would jump at its end, and the probabilities of rows beyond it would be rounded to
zero beside those of rows before it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.compat import reinterpret
from mlakit.kernels.hopper.device.primitives import smem_layout

# the largest scale of a row, or of what else shares a power of two, becomes 2**6 to 2**7: an e4m3
# is less than 2**9, and float16 reaches 2**16
HEADROOM = gl.constexpr(6)
# exponents of float32, biased by 127
SMALLEST_POWER = gl.constexpr(127 - 60)
LARGEST_POWER = gl.constexpr(127 + 122)


@gluon.constexpr_function
def row_layout(lanes, in_thread, shape):
    """Return [64 rows, …]: each thread has the same four rows, whatever else it has."""
    rows = [0] * (len(shape) - 1)
    return gl.DistributedLinearLayout(
        reg_bases=[*in_thread, [16, *rows], [32, *rows]],
        lane_bases=[lanes[0], lanes[1], [1, *rows], lanes[2], [2, *rows]],
        warp_bases=[[4, *rows], [8, *rows]],
        block_bases=[],
        shape=shape,
    )


# sixteen bytes per thread, 128 bytes of four rows per warp. Eight threads have 64 bytes of two
# rows, which as float16 fill all banks of shared memory
WORDS = gl.constexpr(row_layout([[0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2]], [64, 32]))
KEYS = gl.constexpr(gl.SliceLayout(1, WORDS))


@gluon.jit
def load_words(start, is_valid, WORD: gl.constexpr, LAYOUT: gl.constexpr):
    """Load words of rows from word WORD on; zeros for invalid entries."""
    KEY: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    at = gl.expand_dims(gl.convert_layout(start, KEY, assert_trivial=True), 1)
    at += gl.expand_dims(WORD + gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    mask = gl.expand_dims(gl.convert_layout(is_valid, KEY, assert_trivial=True), 1)
    return gl.load(at, mask=mask, other=0)


@gluon.jit
def load_half(start, is_valid, FIRST: gl.constexpr):
    """Load 256 columns from word FIRST on, as two tiles of words."""
    return load_words(start, is_valid, FIRST, WORDS), load_words(start, is_valid, FIRST + 32, WORDS)


@gluon.jit
def _lane_group():
    """The group of 128 columns whose scale a lane loads, of each row the same number.

    Of the eight lanes that have a row, two have the same group. To the compiler all eight have the
    same number; shuffles undo that (`_of_group`).
    """
    rows = gl.zeros([64], gl.int32, KEYS)
    return gl.inline_asm_elementwise(
        "{ mov.u32 $0, %laneid; and.b32 $0, $0, 3; }",
        "=r,r",
        [rows],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_group_scales(start, is_valid, FORMAT: gl.constexpr):
    """Start to load the scales that rows hold, for `group_factors`."""
    scales = gl.load(start + (FORMAT.SCALES_AT // 4 + _lane_group()), mask=is_valid, other=0)
    return scales.to(gl.float32, bitcast=True)


@gluon.jit
def power_of_two(exponent):
    """Return (2**(exponent − 127), its inverse), from SMALLEST_POWER to LARGEST_POWER."""
    exponent = gl.maximum(gl.minimum(exponent, LARGEST_POWER), SMALLEST_POWER)
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def max_of_rows(numbers, AXIS: gl.constexpr = 0):
    """The largest int32 of [64] in `KEYS`, or along an axis that is in a warp.

    The lanes that have different rows are not neighbours, and Triton 3.6.0 then exchanges numbers
    between other lanes. So each warp takes the maximum of all its lanes first.
    """
    numbers = gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;",
        "=r,r",
        [numbers],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return gl.max(numbers, AXIS)


@gluon.jit
def _row_powers(scales):
    """(powers of two of rows, their inverses, the largest one of each warp [4]) of fp8_block128.

    A lane has the scale of `_lane_group`.
    """
    exponent = gl.inline_asm_elementwise(
        """{
        .reg .b32 x, y;
        shfl.sync.bfly.b32 x, $1, 1, 0x1f, 0xffffffff;
        max.s32 x, x, $1;
        shfl.sync.bfly.b32 y, x, 2, 0x1f, 0xffffffff;
        max.s32 x, x, y;
        shr.u32 $0, x, 23;
        }""",
        "=r,r",
        [scales.to(gl.int32, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    exponent -= HEADROOM
    power, inverse = power_of_two(exponent)
    # [rows of a thread, warp, row]
    of_warps, _ = power_of_two(max_of_rows(gl.max(exponent.reshape([4, 4, 4]), 0), 1))
    return power, inverse, of_warps


@gluon.jit
def _two_parts(scales):
    """Words of two float16 whose sum is the scale."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 large, small; .reg .f32 x;
        cvt.rn.f16.f32 large, $1;
        cvt.f32.f16 x, large;
        sub.f32 x, $1, x;
        cvt.rn.f16.f32 small, x;
        mov.b32 $0, {large, small};
        }""",
        "=r,f",
        [scales],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _of_group(parts, GROUP: gl.constexpr):
    """The large and the small part of a group's scale, each as words of it twice."""
    word = gl.inline_asm_elementwise(
        f"shfl.sync.idx.b32 $0, $1, {GROUP}, 0x1c1f, 0xffffffff;",
        "=r,r",
        [parts],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;",
        "=&r,=r,r",
        [word],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def group_factors(scales):
    """Return (factors of each 128 columns, for `convert`; the power of two of each row, which is a
    factor of its scores; its inverse, for rotated columns; the largest power of each warp [4])

    scales  `load_group_scales`
    """
    scales += scales * 0.0  # inf becomes NaN
    scales = gl.where(scales < 0, 0.0, scales)
    power, inverse, of_warps = _row_powers(scales)
    parts = _two_parts(scales * inverse)
    factors = (_of_group(parts, 0), _of_group(parts, 1), _of_group(parts, 2), _of_group(parts, 3))
    return factors, power, inverse, of_warps


@gluon.jit
def _spread(factor, words):
    """A factor [64] of rows, or [64, 2] of two groups of columns, in the layout of their words."""
    LAYOUT: gl.constexpr = words.type.layout
    if len(factor.shape) == 1:
        factor = gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        return gl.expand_dims(factor, 1).broadcast_to(words.shape)
    else:
        PARTS: gl.constexpr = words.reshape([64, 2, 16]).type.layout
        factor = gl.convert_layout(factor, gl.SliceLayout(2, PARTS), assert_trivial=True)
        spread = gl.expand_dims(factor, 2).broadcast_to([64, 2, 16]).reshape([64, 32])
        return gl.convert_layout(spread, LAYOUT, assert_trivial=True)


@gluon.jit
def convert(words, factors):
    """Words of four e4m3, times the sum of the factors if there are some, as words of two float16.

    With two factors, as `_two_parts`, the product is rounded once, but for the product with the
    smaller one. That is not pure: it would be moved behind a wait, which it is to come before.
    """
    if len(factors) == 2:
        low, high = gl.inline_asm_elementwise(
            """{
            .reg .b16 a, b; .reg .b32 x, y, u, v;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 x, a;
            cvt.rn.f16x2.e4m3x2 y, b;
            mul.f16x2 u, x, $4;
            mul.f16x2 v, y, $4;
            fma.rn.f16x2 $0, x, $3, u;
            fma.rn.f16x2 $1, y, $3, v;
            }""",
            "=&r,=r,r,r,r",
            [words, _spread(factors[0], words), _spread(factors[1], words)],
            dtype=(gl.int32, gl.int32),
            is_pure=False,
            pack=1,
        )
    elif len(factors) == 1:
        low, high = gl.inline_asm_elementwise(
            """{
            .reg .b16 a, b; .reg .b32 x, y;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 x, a;
            cvt.rn.f16x2.e4m3x2 y, b;
            mul.f16x2 $0, x, $3;
            mul.f16x2 $1, y, $3;
            }""",
            "=&r,=r,r,r",
            [words, _spread(factors[0], words)],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = gl.inline_asm_elementwise(
            """{
            .reg .b16 a, b;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=&r,=r,r",
            [words],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    return gl.join(low, high).reshape([64, 2 * words.shape[1]])


@gluon.jit
def as_words(tile):
    return reinterpret(tile, gl.int32, [64, tile.shape[1] // 2], smem_layout(32, 32))


@gluon.jit
def convert_half(half, first, second):
    """256 columns as float16, times factors of 128 columns each."""
    return convert(half[0], first), convert(half[1], second)


@gluon.jit
def store_half(tile, half):
    words = as_words(tile)
    words.slice(0, 64, dim=1).store(half[0])
    words.slice(64, 64, dim=1).store(half[1])


@gluon.jit
def scale_rope(words, inverse):
    """Words of two bfloat16 times the inverse powers of two of their rows."""
    # as bfloat16 a power of two is the upper half of float32
    factor = inverse.to(gl.int32, bitcast=True)
    factor = gl.expand_dims(factor | (factor >> 16), 1).broadcast_to(words.shape)
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;",
        "=r,r,r",
        [words, factor],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
