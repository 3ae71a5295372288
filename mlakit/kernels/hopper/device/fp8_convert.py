"""FP8 (e4m3) values as float16 operands of wgmma, converted exactly in registers.

Written back to shared memory, rows would pass through it four times as 16-bit values. In registers
they are read once per wgmma, as words of four bytes. A dot product does not depend on the order in
which its columns are summed, nor its rows computed: so each word goes to the thread that can use it
as it is, and queries and results are permuted instead.

The 16-bit type is float16: the conversion to bfloat16 takes four times as many instructions. The
other operand may have a wider range; a power of two brings it to that of float16, and the float32
accumulator is multiplied back (`pow2_scale`). What is lost lies below 2**-38 of the largest value.

Element (row, column) of a wgmma A operand [64, 16] is at row 16·warp + 8u + r and column
8h + 2t + i, in lane 4r + t; u, h and i count a thread's own elements.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.decode import configs
from mlakit.kernels.hopper.device.compat import reinterpret
from mlakit.kernels.hopper.device.primitives import opaque_zero

FP16_TARGET = gl.constexpr(configs.FP16_TARGET)

_DECLARE = ".reg .b16 e, f; .reg .b32 x, y, a, b;"


def _to_fp16(word: str, first: int) -> str:
    """PTX: the four bytes of a word to float16, the results from `first` on."""
    return f"""
    mov.b32 {{e, f}}, {word};
    cvt.rn.f16x2.e4m3x2 x, e;
    cvt.rn.f16x2.e4m3x2 y, f;
    mov.b32 {{${first}, ${first + 1}}}, x;
    mov.b32 {{${first + 2}, ${first + 3}}}, y;
    """


CONVERT_WORD = gl.constexpr(f"{{ {_DECLARE} {_to_fp16('$4', 0)} }}")
# byte 0 of $8, byte 0 of $9, byte 1 of $8, …
_ZIP = "prmt.b32 a, $8, $9, 0x5140; prmt.b32 b, $8, $9, 0x7362;"
CONVERT_PAIR = gl.constexpr(f"{{ {_DECLARE} {_ZIP} {_to_fp16('a', 0)} {_to_fp16('b', 4)} }}")
TO_FOUR = gl.constexpr("=&h,=&h,=&h,=&h,r")
TO_EIGHT = gl.constexpr("=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r")


@gluon.jit
def pow2_scale(amax):
    """(s, FP16_TARGET / s) for numbers up to `amax`, which the second brings to float16's range.

    s is the power of two at or below amax, at least 2**-100; for NaN and infinity it is infinite.
    """
    bits = amax.to(gl.uint32, bitcast=True) & 0x7F800000
    bits = gl.maximum(bits, 27 << 23)
    inverse = (268 << 23) - bits  # exponents are biased by 127, and 268 = 127 + 127 + 14
    return bits.to(gl.float32, bitcast=True), inverse.to(gl.float32, bitcast=True)


@gluon.jit
def load_keys(smem, LAYOUT: gl.constexpr):
    """Load words [64, columns / 4] as the A operand [64, columns] of a wgmma with acc in LAYOUT.

    Of sixteen columns, 8h + 2t + i of the operand is column 4t + 2h + i of the row: queries have
    the same order (`permute_query`).
    """
    WORDS: gl.constexpr = smem.shape[1]
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
    keys = _in_key_order(to_fp16(smem.load(OWN)))
    return gl.convert_layout(keys, gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True)


@gluon.jit
def to_fp16(words):
    """Words [rows, words] as float16 [rows, columns]."""
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        CONVERT_WORD,
        TO_FOUR,
        [words],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    values = gl.join(gl.join(v0, v2), gl.join(v1, v3))  # [rows, words, byte // 2, byte % 2]
    return values.reshape([words.shape[0], words.shape[1] * 4]).to(gl.float16, bitcast=True)


@gluon.jit
def _in_key_order(rows):
    """Return [rows, columns], of sixteen columns 4t + 2h + i at 8h + 2t + i."""
    ROWS: gl.constexpr = rows.shape[0]
    WIDTH: gl.constexpr = rows.shape[1]
    ordered = rows.reshape([ROWS, WIDTH // 16, 4, 2, 2]).permute(0, 1, 3, 2, 4)
    return ordered.reshape([ROWS, WIDTH])


@gluon.jit
def as_fp16(smem):
    """The same shared memory, seen as float16."""
    return reinterpret(smem, gl.float16, smem.shape, smem.layout)


@gluon.jit
def row_amax(smem):
    """max |x| of each row of queries, [rows, columns]."""
    return gl.max(gl.abs(load_rows(smem).to(gl.float32)), 1)


@gluon.jit
def scale_query(smem, DTYPE: gl.constexpr, factor):
    """Scale queries [rows, columns] by factor [rows], as a 16-bit type in the same memory."""
    queries = load_rows(smem).to(gl.float32) * gl.expand_dims(factor, 1)
    reinterpret(smem, DTYPE, smem.shape, smem.layout).store(queries.to(DTYPE))


@gluon.jit
def permute_query(smem, target, factor):
    """Store queries [rows, columns] · factor [rows] as float16, in the column order of `load_keys`.

    target  may be the same memory
    """
    queries = load_rows(smem)
    queries = (queries.to(gl.float32) * gl.expand_dims(factor, 1)).to(gl.float16)
    target.store(_in_key_order(queries))


@gluon.jit
def load_rows(smem):
    # as many threads share a row of 64 columns as of 128, so that factors fit both
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    return smem.load(LAYOUT)


@gluon.jit
def permute_fp8_query(smem, target):
    """Permute FP8 queries, words [rows, columns / 4], like `permute_query`; they need no factor."""
    target.store(_in_key_order(_load_fp8(smem)))


@gluon.jit
def convert_fp8_query(smem, target):
    """Convert FP8 queries, words [rows, columns / 4], to the type of `target`, columns in order."""
    target.store(_load_fp8(smem).to(gl.float32).to(target.dtype))


@gluon.jit
def _load_fp8(smem):
    # sixteen columns per thread: what stays together when columns are permuted
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    return to_fp16(smem.load(LAYOUT))


@gluon.jit
def load_values(smem, num_valid, LAYOUT: gl.constexpr):
    """Load words [keys, 32] as the A operand [128 columns, keys] of a wgmma with acc in LAYOUT.

    Rows from `num_valid` on may hold NaN, and become zeros. Columns are in the order of
    `acc_columns`.
    """
    KEYS: gl.constexpr = smem.shape[0]
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
    words = smem.load(OWN)
    if num_valid < KEYS:
        if KEYS == 32:
            num_valid += opaque_zero()  # the comparison is then computed here, not kept
        row = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, OWN)), 1)
        if KEYS == 32:
            row += opaque_zero()
        mask = gl.where(row < num_valid, -1, 0).broadcast_to([KEYS, 32])
        # not pure: the compiler would otherwise mask every block instead of branching
        words = gl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [words, mask], dtype=gl.int32, is_pure=False, pack=1
        )
    even, odd = gl.split(words.reshape([KEYS // 2, 2, 32]).permute(0, 2, 1))  # rows
    v00, v01, v10, v11, v20, v21, v30, v31 = gl.inline_asm_elementwise(
        CONVERT_PAIR,
        TO_EIGHT,
        [even, odd],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    first = gl.join(gl.join(v00, v10), gl.join(v20, v30))  # even rows: [rows, 32, byte, byte // 2]
    second = gl.join(gl.join(v01, v11), gl.join(v21, v31))
    # rows are 16q + 8h + 2t + i, columns 32·warp + 4r + 2m + u, where m is a tile of 64 of them
    values = gl.join(first, second).reshape([KEYS // 2, 4, 8, 2, 2, 2])  # [qht, warp, r, u, m, i]
    values = values.permute(4, 1, 3, 2, 0, 5).reshape([128, KEYS]).to(gl.float16, bitcast=True)
    return gl.convert_layout(values, gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True)


@gluon.jit
def acc_columns(LAYOUT: gl.constexpr):
    """Return which of 128 columns each row of an accumulator of `load_values` is."""
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    return row // 16 % 4 * 32 + row % 8 * 4 + row // 64 * 2 + row // 8 % 2
