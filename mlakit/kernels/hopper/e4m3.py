"""Rows of e4m3 as operands of wgmma, widened to halves exactly in registers on their way there.

Written back to shared memory, rows would pass through it four times as halves. Kept in registers,
they are read once per dot, as words of four bytes. A dot does not mind in which order its columns
are summed, nor its rows come: so each word goes to the thread whose elements it can be.

Halves are float16: to bfloat16 the way is four times as long. What rows are multiplied with may
have a wider range, and is brought to that of halves by a power of two, which float32 sums get back
(`unit_for`). What is lost lies below 2**-38 of the largest.

An element of an operand [64 rows, 16 columns] has row 16·warp + 8u + r and column 8h + 2t + i: of
warps and their lanes 4r + t; u, h and i count a thread's own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.compat import reinterpret
from mlakit.kernels.hopper.primitives import opaque_zero

LARGEST_UNIT = gl.constexpr(2.0**14)  # what units are brought to: halves end at 2**16

_DECLARE = ".reg .b16 e, f; .reg .b32 x, y, a, b;"


def _widen(word: str, first: int) -> str:
    """Four bytes of a word to as many halves, the results from `first` on."""
    return f"""
    mov.b32 {{e, f}}, {word};
    cvt.rn.f16x2.e4m3x2 x, e;
    cvt.rn.f16x2.e4m3x2 y, f;
    mov.b32 {{${first}, ${first + 1}}}, x;
    mov.b32 {{${first + 2}, ${first + 3}}}, y;
    """


WIDEN_WORD = gl.constexpr(f"{{ {_DECLARE} {_widen('$4', 0)} }}")
# byte 0 of $8, byte 0 of $9, byte 1 of $8, …
_ZIP = "prmt.b32 a, $8, $9, 0x5140; prmt.b32 b, $8, $9, 0x7362;"
WIDEN_PAIR = gl.constexpr(f"{{ {_DECLARE} {_ZIP} {_widen('a', 0)} {_widen('b', 4)} }}")
TO_FOUR = gl.constexpr("=&h,=&h,=&h,=&h,r")
TO_EIGHT = gl.constexpr("=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r")


@gluon.jit
def unit_for(largest):
    """(u, LARGEST_UNIT / u) for numbers up to `largest`, which the second makes fit for halves.

    u is the power of two at or below it, 2**-100 at least; of NaN and infinity 2**128, infinite.
    """
    bits = largest.to(gl.uint32, bitcast=True) & 0x7F800000
    bits = gl.maximum(bits, 27 << 23)
    inverse = (268 << 23) - bits  # exponents are biased by 127, and 268 = 127 + 127 + 14
    return bits.to(gl.float32, bitcast=True), inverse.to(gl.float32, bitcast=True)


@gluon.jit
def load_keys(box, LAYOUT: gl.constexpr):
    """Words [64, columns / 4] as the first operand [64, columns] of a dot with sums in LAYOUT.

    Its columns 8h + 2t + i of sixteen are the columns 4t + 2h + i of the row, as `match_keys` has
    it.
    """
    WORDS: gl.constexpr = box.shape[1]
    gl.static_assert(WORDS == 32 or WORDS == 16)
    # u, then the sixteens of columns
    REGISTERS: gl.constexpr = (
        [[8, 0], [0, 4], [0, 8], [0, 16]] if WORDS == 32 else [[8, 0], [0, 4], [0, 8]]
    )
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=REGISTERS,
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, WORDS],
    )
    keys = _in_order_of_keys(widen(box.load(OWN)))
    return gl.convert_layout(keys, gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True)


@gluon.jit
def widen(words):
    """Words [rows, words] as float16 [rows, columns]."""
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        WIDEN_WORD, TO_FOUR, [words], dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True,
        pack=1,
    )  # fmt: skip
    halves = gl.join(gl.join(v0, v2), gl.join(v1, v3))  # [rows, words, byte // 2, byte % 2]
    return halves.reshape([words.shape[0], words.shape[1] * 4]).to(gl.float16, bitcast=True)


@gluon.jit
def _in_order_of_keys(rows):
    """[rows, columns], of sixteen columns 4t + 2h + i at 8h + 2t + i."""
    ROWS: gl.constexpr = rows.shape[0]
    WIDTH: gl.constexpr = rows.shape[1]
    ordered = rows.reshape([ROWS, WIDTH // 16, 4, 2, 2]).permute(0, 1, 3, 2, 4)
    return ordered.reshape([ROWS, WIDTH])


@gluon.jit
def as_halves(boxes):
    """The same memory, seen as float16."""
    return reinterpret(boxes, gl.float16, boxes.shape, boxes.layout)


@gluon.jit
def largest_of(box):
    """|x| of the largest number of each row of queries, [rows, columns]."""
    return gl.max(gl.abs(_load_rows(box).to(gl.float32)), 1)


@gluon.jit
def fit_rows(box, DTYPE: gl.constexpr, factor):
    """Queries [rows, columns] times `factor` [rows] as halves of this type, in the same memory."""
    queries = _load_rows(box).to(gl.float32) * gl.expand_dims(factor, 1)
    reinterpret(box, DTYPE, box.shape, box.layout).store(queries.to(DTYPE))


@gluon.jit
def match_keys(box, target, factor):
    """Queries [rows, columns] times `factor` [rows] as halves, columns as those of `load_keys`.

    target  may be the same memory
    """
    queries = _load_rows(box)
    queries = (queries.to(gl.float32) * gl.expand_dims(factor, 1)).to(gl.float16)
    target.store(_in_order_of_keys(queries))


@gluon.jit
def _load_rows(box):
    # threads that share a row: as many for 64 columns as for 128, so that factors fit both
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    return box.load(LAYOUT)


@gluon.jit
def match_keys_with_bytes(box, target):
    """Queries of e4m3, words [rows, columns / 4], as `match_keys`, of which they need no factor."""
    target.store(_in_order_of_keys(_load_widened(box)))


@gluon.jit
def widen_bytes(box, target):
    """Queries of e4m3, words [rows, columns / 4], as halves of another type, columns in order."""
    target.store(_load_widened(box).to(gl.float32).to(target.dtype))


@gluon.jit
def _load_widened(box):
    # sixteen columns a thread: what keeps together when they change their order
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    return widen(box.load(LAYOUT))


@gluon.jit
def load_values(box, kept, LAYOUT: gl.constexpr):
    """Words [keys, 32] as the first operand [128 columns, keys] of a dot with sums in LAYOUT.

    Only the first `kept` rows are there: others may hold NaN, and are zeros. The columns are in the
    order of `column_of_sum`.
    """
    KEYS: gl.constexpr = box.shape[0]
    gl.static_assert(KEYS == 64 or KEYS == 32)
    REGISTERS: gl.constexpr = (
        [[1, 0], [8, 0], [16, 0], [32, 0]] if KEYS == 64 else [[1, 0], [8, 0], [16, 0]]
    )
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=REGISTERS,
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 16]],
        block_bases=[],
        shape=[KEYS, 32],
    )
    words = box.load(OWN)
    if kept < KEYS:
        if KEYS == 32:
            kept += opaque_zero()  # what is compared with it is then found here, and not kept
        row = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, OWN)), 1)
        if KEYS == 32:
            row += opaque_zero()
        mask = gl.where(row < kept, -1, 0).broadcast_to([KEYS, 32])
        # not pure, or the compiler would rather do it for each block than branch
        words = gl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [words, mask], dtype=gl.int32, is_pure=False, pack=1
        )
    even, odd = gl.split(words.reshape([KEYS // 2, 2, 32]).permute(0, 2, 1))  # rows
    v00, v01, v10, v11, v20, v21, v30, v31 = gl.inline_asm_elementwise(
        WIDEN_PAIR, TO_EIGHT, [even, odd],
        dtype=(
            gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16
        ),
        is_pure=True, pack=1,
    )  # fmt: skip
    first = gl.join(gl.join(v00, v10), gl.join(v20, v30))  # even rows: [rows, 32, byte, byte // 2]
    second = gl.join(gl.join(v01, v11), gl.join(v21, v31))
    # rows are 16q + 8h + 2t + i, columns 32·warp + 4r + 2m + u, where m is a tile of 64 of them
    halves = gl.join(first, second).reshape([KEYS // 2, 4, 8, 2, 2, 2])  # [qht, warp, r, u, m, i]
    halves = halves.permute(4, 1, 3, 2, 0, 5).reshape([128, KEYS]).to(gl.float16, bitcast=True)
    return gl.convert_layout(halves, gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True)


@gluon.jit
def column_of_sum(LAYOUT: gl.constexpr):
    """Which of 128 columns each row of a dot with `load_values` is."""
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    return row // 16 % 4 * 32 + row % 8 * 4 + row // 64 * 2 + row // 8 % 2
