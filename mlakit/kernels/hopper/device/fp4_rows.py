"""Rows of mxfp4_block32 in registers: loaded as words of eight e2m1, converted to bfloat16, stored.

bfloat16 has the range of the scales, so a value times its scale is exact. The bits of an e2m1, two
of exponent and one of mantissa, are those of a bfloat16 that is 2**126 times too small. The product
with the scale makes up for that, in two factors: one alone would leave the range.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.compat import reinterpret
from mlakit.kernels.hopper.device.primitives import smem_layout

CODE_WORDS = gl.constexpr(32)  # of half a row: 256 columns
SCALE_WORDS = gl.constexpr(4)  # of a row: a byte per 32 columns
NAN_SCALE = gl.constexpr(255)

# a thread has 128 columns of a key, whose four scales are a word
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[32, 0], [0, 16]],
        block_bases=[],
        shape=[64, 32],
    )
)
SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 2]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[32, 0], [0, 1]],
        block_bases=[],
        shape=[64, 4],
    )
)


def _pairs() -> str:
    """PTX: p0 to p3, of which pi has codes i and i + 4 as bfloat16, times 2**-126."""
    lines = []
    for i, (shift, count) in enumerate((("shl", 6), ("shl", 2), ("shr", 2), ("shr", 6))):
        lines += [
            f"shl.b32 x, $4, {12 - 4 * i};",
            f"{shift}.b32 y, $4, {count};",
            "and.b32 y, y, 0x01C001C0;",
            f"lop3.b32 p{i}, x, 0x80008000, y, 0xEA;",  # x & mask | y
            f"mul.rn.bf16x2 p{i}, p{i}, $5;",
            f"mul.rn.bf16x2 p{i}, p{i}, $6;",
        ]
    return "\n".join(lines)


_CONVERT = gl.constexpr(f"""{{
    .reg .b32 x, y, p0, p1, p2, p3;
    {_pairs()}
    prmt.b32 $0, p0, p1, 0x5410;
    prmt.b32 $1, p2, p3, 0x5410;
    prmt.b32 $2, p0, p1, 0x7632;
    prmt.b32 $3, p2, p3, 0x7632;
}}""")


@gluon.jit
def _twice(exponent):
    """2**(exponent − 127) as bfloat16, twice in a word."""
    bits = exponent << 7
    return bits | (bits << 16)


@gluon.jit
def load_factors(scales, HALF: gl.constexpr):
    """Load the two factors of each of 8 groups of columns: [64, 8] in each thread's own groups.

    scales  words [64, 4] in shared memory
    """
    words = scales.load(SCALES)
    halves = words.reshape([64, 2, 2]).permute(0, 2, 1)
    first, second = gl.split(halves)
    own = first if HALF == 0 else second  # [64, 2]
    spread = gl.expand_dims(own, 2).broadcast_to([64, 2, 4])
    BYTE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, spread.type.layout))
    shift = gl.expand_dims(gl.expand_dims(8 * gl.arange(0, 4, BYTE), 0), 0)
    scale = ((spread >> shift) & 0xFF).reshape([64, 8])
    # 2**126 · 2**(scale − 127), as 2**a · 2**b
    a = (scale - 1) >> 1
    b = scale - 1 - a
    large = gl.where(scale == NAN_SCALE, 0x7FFF7FFF, _twice(a + 127))
    return large, _twice(b + 127)


@gluon.jit
def _of_words(factor, words):
    """Factors [64, 8] of groups of four words, in the layout of the words."""
    GROUPS: gl.constexpr = words.reshape([64, 8, 4]).type.layout
    factor = gl.convert_layout(factor, gl.SliceLayout(2, GROUPS), assert_trivial=True)
    spread = gl.expand_dims(factor, 2).broadcast_to([64, 8, 4]).reshape([64, CODE_WORDS])
    return gl.convert_layout(spread, WORDS, assert_trivial=True)


@gluon.jit
def convert_half(codes, factors):
    """Codes [64, 32 words] times the factors of their groups: [64, 128 words] of two bfloat16."""
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        _CONVERT,
        "=&r,=&r,=&r,=&r,r,r,r",
        [codes, _of_words(factors[0], codes), _of_words(factors[1], codes)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )
    values = gl.join(gl.join(v0, v2), gl.join(v1, v3))  # [64, 32, word // 2, word % 2]
    return values.reshape([64, 4 * CODE_WORDS])


@gluon.jit
def store_half(tiles, stage, values):
    """Store 256 columns to the two neighbouring tiles [64, 128] of a stage."""
    STAGES: gl.constexpr = tiles.shape[0] // 2
    words = reinterpret(tiles, gl.int32, [STAGES, 64, 4 * CODE_WORDS], smem_layout(32, 32))
    words.index(stage).store(values)
