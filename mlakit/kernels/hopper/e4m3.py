"""Rows of e4m3 as operands of wgmma, widened exactly in registers on their way there.

The hardware multiplies halves with halves. Written back to shared memory as such, rows would pass
through it four times; kept in registers, they are read once per dot, as words of four bytes. A dot
does not mind in which order its columns are summed, nor its rows come: so each word goes to the
thread whose elements it can be.

An element of an operand [64 rows, 16 columns] has row 16·warp + 8u + r and column 8h + 2t + i: of
warps and their lanes 4r + t; u, h and i count a thread's own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_TO_HALVES = """
    mov.b32 {{e, f}}, {word};
    cvt.rn.f16x2.e4m3x2 x, e;
    cvt.rn.f16x2.e4m3x2 y, f;
    {narrow_x}
    {narrow_y}
"""
# a half has a bit less of range than bfloat16, and all bits that e4m3 has
_NARROW = {
    "fp16": "mov.b32 {{{0}, {1}}}, {2};",
    "bf16": """
    mov.b32 {{g, h}}, {2};
    cvt.f32.f16 v, g;
    cvt.f32.f16 w, h;
    cvt.rn.bf16x2.f32 z, w, v;
    mov.b32 {{{0}, {1}}}, z;
    """,
}


def _widen(word: str, first: int, dtype: str) -> str:
    """Bytes of a word to the results from `first` on."""
    narrow_x = _NARROW[dtype].format(f"${first}", f"${first + 1}", "x")
    narrow_y = _NARROW[dtype].format(f"${first + 2}", f"${first + 3}", "y")
    return _TO_HALVES.format(word=word, narrow_x=narrow_x, narrow_y=narrow_y)


def _assembly(body: str) -> str:
    registers = ".reg .b16 e, f, g, h; .reg .b32 x, y, z, a, b; .reg .f32 v, w;"
    return f"{{ {registers} {body} }}"


def _word(dtype: str) -> gl.constexpr:
    """Four bytes $4 to as many halves."""
    return gl.constexpr(_assembly(_widen("$4", 0, dtype)))


def _pair(dtype: str) -> gl.constexpr:
    """Bytes 0 to 3 of $8 and of $9: first those of number 0, then 1, …"""
    zipped = "prmt.b32 a, $8, $9, 0x5140; prmt.b32 b, $8, $9, 0x7362;"
    return gl.constexpr(_assembly(zipped + _widen("a", 0, dtype) + _widen("b", 4, dtype)))


BF16_WORD, FP16_WORD = _word("bf16"), _word("fp16")
BF16_PAIR, FP16_PAIR = _pair("bf16"), _pair("fp16")
TO_FOUR = gl.constexpr("=&h,=&h,=&h,=&h,r")
TO_EIGHT = gl.constexpr("=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r")


@gluon.jit
def load_keys(box, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [64, columns / 4] as the first operand [64, columns] of a dot with sums in LAYOUT.

    Its columns 8h + 2t + i of sixteen are the columns 4t + 2h + i of the row: see `match_keys`.
    """
    WORDS: gl.constexpr = box.shape[1]
    gl.static_assert(WORDS == 32 or WORDS == 16)
    SIXTEENS: gl.constexpr = (
        [[0, 4], [0, 8], [0, 16]] if WORDS == 32 else [[0, 4], [0, 8]]
    )  # of columns
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[8, 0]] + SIXTEENS,
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, WORDS],
    )
    words = box.load(OWN)
    WIDEN: gl.constexpr = FP16_WORD if gl.float16 == DTYPE else BF16_WORD
    v00, v01, v10, v11 = gl.inline_asm_elementwise(
        WIDEN, TO_FOUR, [words], dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True,
        pack=1,
    )  # fmt: skip
    halves = gl.join(gl.join(v00, v10), gl.join(v01, v11))  # [64, words, h, i]
    halves = halves.reshape([64, WORDS // 4, 4, 2, 2]).permute(0, 1, 3, 2, 4)
    halves = halves.reshape([64, WORDS * 4]).to(DTYPE, bitcast=True)
    return gl.convert_layout(halves, gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True)


@gluon.jit
def match_keys(box):
    """Order the columns of a box of queries, [rows, columns], as those of `load_keys` are."""
    ROWS: gl.constexpr = box.shape[0]
    WIDTH: gl.constexpr = box.shape[1]
    THREADS: gl.constexpr = WIDTH // 8  # that share a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    columns = box.load(LAYOUT).reshape([ROWS, WIDTH // 16, 4, 2, 2]).permute(0, 1, 3, 2, 4)
    box.store(columns.reshape([ROWS, WIDTH]))


@gluon.jit
def load_values(box, kept, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [64, 32] as the first operand [128 columns, 64] of a dot with sums in LAYOUT.

    Only the first `kept` rows are there: others may hold NaN, and are zeros. The columns are in the
    order of `column_of_sum`.
    """
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], [16, 0], [32, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 16]],
        block_bases=[],
        shape=[64, 32],
    )
    words = box.load(OWN)
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, OWN)), 1)
    words = gl.where(row < kept, words, 0)
    even, odd = gl.split(words.reshape([32, 2, 32]).permute(0, 2, 1))  # rows
    WIDEN: gl.constexpr = FP16_PAIR if gl.float16 == DTYPE else BF16_PAIR
    v00, v01, v10, v11, v20, v21, v30, v31 = gl.inline_asm_elementwise(
        WIDEN, TO_EIGHT, [even, odd],
        dtype=(
            gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16
        ),
        is_pure=True, pack=1,
    )  # fmt: skip
    first = gl.join(gl.join(v00, v10), gl.join(v20, v30))  # of even rows, [32, 32, byte, byte // 2]
    second = gl.join(gl.join(v01, v11), gl.join(v21, v31))
    # rows are 16q + 8h + 2t + i, columns 32·warp + 4r + 2m + u, where m is a tile of 64 of them
    halves = gl.join(first, second).reshape([32, 4, 8, 2, 2, 2])  # [qht, warp, r, u, m, i]
    halves = halves.permute(4, 1, 3, 2, 0, 5).reshape([128, 64]).to(DTYPE, bitcast=True)
    return gl.convert_layout(halves, gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True)


@gluon.jit
def column_of_sum(LAYOUT: gl.constexpr):
    """Which of 128 columns each row of a dot with `load_values` is."""
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    return row // 16 % 4 * 32 + row % 8 * 4 + row // 64 * 2 + row // 8 % 2
