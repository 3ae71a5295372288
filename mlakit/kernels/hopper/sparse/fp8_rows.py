"""Blocks of 64 listed FP8 rows: loaded to registers, converted to float16, stored.

The conversion is exact. Scales are float32 and are not rounded to 16 bits:

fp8_block128  a row has a scale per 128 columns. It multiplies what these columns add to scores, and
              the probabilities that multiply them (`GroupScales`)
fp8_block64   a row has a power of two per 64 columns, which multiplies values
fp8_token     a row has one scale, which multiplies scores and probabilities (`key_factor`)
fp8           likewise, the scale of the tensor

A power of two per block (`block_scale`) keeps all of this in float16's range. With fp8_block64 it
is 1 unless the block's largest scale is far from 1; what is lost lies below 2**-20 of the block's
largest value.

Lineage    own design
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from mlakit.kernels.hopper.compat import copy_words, record, reinterpret
from mlakit.kernels.hopper.primitives import IN_EACH_THREAD, smem_layout
from mlakit.kernels.hopper.sparse.lists import row_pointers, split_slots, valid_slots


@gluon.constexpr_function
def _layout(lanes, in_thread, shape):
    """[64 rows, …]: each thread has the same four rows, whatever else it has."""
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
WORDS = gl.constexpr(_layout([[0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2]], [64, 32]))
# half as many columns: two threads have the same ones
HALF_WORDS = gl.constexpr(_layout([[0, 4], [0, 8], [0, 0]], [[0, 1], [0, 2]], [64, 16]))
# the eight bytes of scales of fp8_block64 in each thread
SCALE_BYTES = gl.constexpr(_layout([[0, 0], [0, 0], [0, 0]], [[0, 1]], [64, 2]))
# the two scales that 128 columns of fp8_block64 have
SCALE_PAIRS = gl.constexpr(_layout([[0, 0], [0, 0], [0, 1]], [], [64, 2]))
KEYS = gl.constexpr(gl.SliceLayout(1, WORDS))
# all scales of a block in each warp, two rows per thread: no warp waits for another
SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [32, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)
SCALE_KEYS = gl.constexpr(gl.SliceLayout(1, SCALES))
SMALLEST_GROUP = gl.constexpr(2.0**-40)  # of a row's largest scale: their ratios stay finite

# exponents of float32, biased by 127. block_scale is 1 where the largest scale lies between these
SMALLEST_USUAL = gl.constexpr(127 - 14)
LARGEST_USUAL = gl.constexpr(127 + 6)
SMALLEST_BLOCK_SCALE = gl.constexpr(127 - 60)
LARGEST_BLOCK_SCALE = gl.constexpr(127 + 122)
SMALLEST_SCALE = gl.constexpr(2.0**-126)
NEG_INF = gl.constexpr(float("-inf"))


@record
class RowScales:
    """Scales that are not inside the rows of a cache."""

    first: object  # float32 [pages, page_size, 1] (fp8_token), the bytes of fp8_block64 as int32
    # [pages, page_size, 2], the tensor's float32 (fp8) on the device, or None
    stride_page: object
    stride_row: object
    tensor_scale: object  # where it is on the host (fp8)


@record
class GroupScales:
    """The scales of fp8_block128 in shared memory, as ratios [2 stages, 64] float32.

    A row has s0 of columns 0 to 127, …, s3 of columns 384 to 511. Scores are
    (((QK of s3) · s3/s2 + QK of s2) · s2/s1 + …) · s0 + QK of rotated columns.
    """

    first: object  # s3 / s2
    second: object  # s2 / s1
    third: object  # s1 / s0
    last: object  # s0; negative for an entry that does not count


@gluon.jit
def _load(start, is_valid, WORD: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of rows from word WORD on; zeros of entries that do not count."""
    KEY: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    at = gl.expand_dims(gl.convert_layout(start, KEY, assert_trivial=True), 1)
    at += gl.expand_dims(WORD + gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    mask = gl.expand_dims(gl.convert_layout(is_valid, KEY, assert_trivial=True), 1)
    return gl.load(at, mask=mask, other=0)


@gluon.jit
def _scale_pointers(work, row_scales, is_extra, slot):
    """Pointers to the scales of a block's rows."""
    main = row_scales[0]
    page, in_page = split_slots(work.main, slot)
    offset = page * main.stride_page + in_page * main.stride_row
    if work.HAS_EXTRA:
        extra = row_scales[1]
        page, in_page = split_slots(work.extra, slot)
        other = page * extra.stride_page + in_page * extra.stride_row
        # from the first tensor to the second, as `lists.row_pointers`
        apart = (extra.first.to(gl.int64) - main.first.to(gl.int64)) // 4
        offset = gl.where(is_extra, other + apart, offset)
    return main.first + offset


@gluon.jit
def _tensor_scale(row_scales):
    scale = row_scales.tensor_scale
    if row_scales.first is not None:
        scale = gl.load(row_scales.first).to(gl.float32)
    return scale


@gluon.jit
def load_scales(work, row_scales, position, FORMAT: gl.constexpr):
    """Start to load the scales of a block's rows; nothing is computed from them here."""
    slot = position.slot
    is_extra = position.block >= position.blocks.main_blocks
    if FORMAT != "fp8_block64":
        slot = valid_slots(work, position.blocks, position.block, position.scale_ids)
    if FORMAT == "fp8_block128":
        at = gl.expand_dims(row_pointers(work, position.blocks, position.block, slot, 4), 1)
        at += gl.expand_dims(128 + gl.arange(0, 4, gl.SliceLayout(0, SCALES)), 0)
        scales = gl.load(at, mask=gl.expand_dims(slot >= 0, 1), other=0)
        return scales.to(gl.float32, bitcast=True), slot >= 0
    elif FORMAT == "fp8_block64":  # noqa: RET505
        at = _scale_pointers(work, row_scales, is_extra, slot)
        return _load(at, slot >= 0, 0, SCALE_BYTES), slot >= 0
    elif FORMAT == "fp8_token":
        at = _scale_pointers(work, row_scales, is_extra, slot)
        return gl.load(at, mask=slot >= 0, other=0.0), slot >= 0
    else:
        scale = _tensor_scale(row_scales[0])
        if work.HAS_EXTRA:
            scale = gl.where(is_extra, _tensor_scale(row_scales[1]), scale)
        return gl.where(slot >= 0, scale, 0.0), slot >= 0


@gluon.jit
def load_left(start, is_valid):
    """Start to load columns 0 to 255 of a block's rows."""
    return (_load(start, is_valid, 0, WORDS), _load(start, is_valid, 32, WORDS))


@gluon.jit
def load_right(start, is_valid, FORMAT: gl.constexpr):
    """Columns 256 to 511, and rotated columns that are converted."""
    words = (_load(start, is_valid, 64, WORDS),)
    if FORMAT == "fp8_block64":
        words += (_load(start, is_valid, 96, HALF_WORDS), _load(start, is_valid, 112, WORDS))
    else:
        words += (_load(start, is_valid, 96, WORDS),)
    if FORMAT == "fp8":
        words += (_load(start, is_valid, 128, HALF_WORDS),)
    return words


@gluon.jit
def _power_of_two(exponent):
    """(2**(exponent − 127), its inverse), within what block_scale may be."""
    exponent = gl.maximum(gl.minimum(exponent, LARGEST_BLOCK_SCALE), SMALLEST_BLOCK_SCALE)
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _max_of_rows(numbers):
    """The largest of int32 [64] in `KEYS`.

    The lanes that have different rows are not neighbours, and Triton 3.6.0 then exchanges numbers
    between other lanes. So each warp takes the maximum of all its lanes first.
    """
    numbers = gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [numbers], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    return gl.max(numbers, 0)


@gluon.jit
def _block_scale64(scales, rope):
    """(block_scale, its inverse) of fp8_block64; `rope` are words of two bfloat16."""
    # seven bytes of the eight are scales; each is an exponent
    word = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, SCALE_BYTES)), 0)
    scales = scales & gl.where(word == 1, 0x00FFFFFF, -1)
    largest = gl.maximum(scales & 0xFF, (scales >> 8) & 0xFF)
    largest = gl.maximum(largest, gl.maximum((scales >> 16) & 0xFF, (scales >> 24) & 0xFF))
    largest = gl.max(largest, 1)
    # rotated columns are values too; an e4m3 is up to 2**9 times its scale. As in `_max_of_rows`
    # this may be a maximum of other columns of the warp: only that of all is used
    bits = gl.max(gl.maximum(rope & 0x7FFF0000, (rope << 16) & 0x7FFF0000), 1)
    bits = gl.convert_layout(bits, largest.type.layout, assert_trivial=True)
    exponent = _max_of_rows(gl.maximum(largest, (bits >> 23) - 8))
    is_usual = (exponent >= SMALLEST_USUAL) & (exponent <= LARGEST_USUAL)
    return _power_of_two(gl.where(is_usual | (exponent == 0), 127, exponent - 6))


@gluon.jit
def store_scales(stages, stage, scales, right, FORMAT: gl.constexpr):
    """Store what consumers need of a block's scales; returns what its values are multiplied by:
    of each 128 columns a tuple, which is empty where they are not.

    After both halves of the stage have been released.
    """
    values, is_valid = scales
    factors = ((), (), (), ())
    inverse = 1.0
    if FORMAT == "fp8_block128":
        values += values * 0.0  # inf becomes NaN
        largest = gl.max(values, 1)
        smallest = gl.maximum(largest * SMALLEST_GROUP, SMALLEST_SCALE)
        values = gl.where(values < gl.expand_dims(smallest, 1), gl.expand_dims(smallest, 1), values)
        s0, s1, s2, s3 = columns_of(values)
        groups = stages.groups
        groups.first.index(stage).store(s3 / s2)
        groups.second.index(stage).store(s2 / s1)
        groups.third.index(stage).store(s1 / s0)
        is_valid = gl.convert_layout(is_valid, s0.type.layout, assert_trivial=True)
        groups.last.index(stage).store(gl.where(is_valid, s0, -1.0))
        block_scale, _ = _power_of_two(gl.max(largest, 0).to(gl.int32, bitcast=True) >> 23)
    else:
        stages.bias.index(stage).store(gl.where(is_valid, 0.0, NEG_INF))
    if FORMAT == "fp8_block64":
        block_scale, inverse = _block_scale64(values, right[2])
        low, high = gl.split(values)
        factors = (
            _exponents(low, inverse, 0),
            _exponents(low, inverse, 16),
            _exponents(high, inverse, 0),
            (_power(gl.convert_layout(high, KEYS, assert_trivial=True) >> 16, inverse),),
        )
    if FORMAT == "fp8_token" or FORMAT == "fp8":
        values = gl.where(values < 0, 0.0, values)  # a NaN stays one
        bits = gl.max(values.to(gl.int32, bitcast=True), 0)
        block_scale, inverse = _power_of_two(bits >> 23)
        stages.key_factor.index(stage).store(values * inverse)
    stages.block_scale.index(stage).store(
        gl.full([4], 1.0, gl.float32, IN_EACH_THREAD) * block_scale
    )
    return factors, inverse


@gluon.jit
def columns_of(table):
    """The four columns of [64, 4], as [64] each."""
    even, odd = gl.split(table.reshape([64, 2, 2]))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    return c0, c1, c2, c3


@gluon.jit
def _exponents(word, inverse, FIRST: gl.constexpr):
    """The bytes from bit FIRST on and the next one of each word [64], as factors [64, 2]."""
    word = gl.convert_layout(word, gl.SliceLayout(1, SCALE_PAIRS), assert_trivial=True)
    shift = FIRST + 8 * gl.arange(0, 2, gl.SliceLayout(0, SCALE_PAIRS))
    return (_power(gl.expand_dims(word, 1) >> gl.expand_dims(shift, 0), inverse),)


@gluon.jit
def _power(exponent, inverse):
    """2**(lowest byte − 127) · inverse, as words of a float16 twice."""
    exponent = exponent & 0xFF
    bits = gl.where(exponent == 255, 0x7FC00000, exponent << 23)  # NaN
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [bits.to(gl.float32, bitcast=True) * inverse],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _spread(factor, words):
    """A factor [64] of rows, or [64, 2] of two groups of columns, in the layout of their words."""
    LAYOUT: gl.constexpr = words.type.layout
    if len(factor.shape) == 1:
        factor = gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        return gl.expand_dims(factor, 1).broadcast_to(words.shape)
    else:  # noqa: RET505
        PARTS: gl.constexpr = words.reshape([64, 2, 16]).type.layout
        factor = gl.convert_layout(factor, gl.SliceLayout(2, PARTS), assert_trivial=True)
        spread = gl.expand_dims(factor, 2).broadcast_to([64, 2, 16]).reshape([64, 32])
        return gl.convert_layout(spread, LAYOUT, assert_trivial=True)


@gluon.jit
def _convert(words, factors):
    """Words of four e4m3, times a factor if there is one, as words of two float16."""
    if len(factors) == 1:
        low, high = gl.inline_asm_elementwise(
            """{
            .reg .b16 a, b; .reg .b32 x, y;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 x, a;
            cvt.rn.f16x2.e4m3x2 y, b;
            mul.f16x2 $0, x, $3;
            mul.f16x2 $1, y, $3;
            }""",
            "=&r,=r,r,r", [words, _spread(factors[0], words)],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            """{
            .reg .b16 a, b;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=&r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return gl.join(low, high).reshape([64, 2 * words.shape[1]])


@gluon.jit
def _as_words(tile):
    return reinterpret(tile, gl.int32, [64, tile.shape[1] // 2], smem_layout(32, 32))


@gluon.jit
def store_left(stages, stage, left, factors):
    """Store columns 0 to 255 of a block."""
    half = _as_words(stages.left.index(stage))
    for i in gl.static_range(2):
        half.slice(64 * i, 64, dim=1).store(_convert(left[i], factors[i]))


@gluon.jit
def store_right(stages, stage, right, factors, inverse, FORMAT: gl.constexpr):
    """Store columns 256 to 511."""
    half = _as_words(stages.right.index(stage))
    half.slice(0, 64, dim=1).store(_convert(right[0], factors[2]))
    last = _convert(right[1], factors[3])
    half.slice(64, last.shape[1], dim=1).store(last)
    if FORMAT == "fp8_block64":
        # two bfloat16 are the upper and the lower half of a word
        upper = (right[2] & -65536).to(gl.float32, bitcast=True) * inverse
        lower = (right[2] << 16).to(gl.float32, bitcast=True) * inverse
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [upper, lower], dtype=gl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
        half.slice(96, 32, dim=1).store(pairs)


@gluon.jit
def store_rope(stages, stage, start, is_valid, right, FORMAT: gl.constexpr):
    """Start to copy the rotated columns of a block; those of fp8 come with the left half."""
    if FORMAT == "fp8":
        _as_words(stages.rope.index(stage)).store(_convert(right[2], ()))
    elif FORMAT != "fp8_block64":
        WORD: gl.constexpr = 132 if FORMAT == "fp8_block128" else 128
        word = gl.expand_dims(WORD + gl.arange(0, 32, gl.SliceLayout(0, WORDS)), 0)
        at = gl.expand_dims(start, 1) + word
        copy_words(_as_words(stages.rope.index(stage)), at, mask=gl.expand_dims(is_valid, 1))
        async_copy.mbarrier_arrive(stages.rope_full.index(stage), increment_count=False)
