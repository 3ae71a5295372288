"""Blocks of 64 listed FP8 rows: loaded to registers, converted to float16, stored.

What scales do, which are float32:

fp8_block128  a row has a scale per 128 columns, which multiplies values: rounded to float16 once
fp8_block64   a row has a power of two per 64 columns, which multiplies values
fp8_token     a row has one scale, which multiplies scores and probabilities (`key_factor`)
fp8           likewise, the scale of the tensor

All but the products of fp8_block128 are exact. Powers of two keep all of this in float16's range:
of fp8_block128 one per row, which is a key_factor too, of fp8_block64 one per block
(`block_scale`). They follow the scales, whatever these are: a power that stayed 1 over a range of
scales would jump at its end, and the probabilities of rows beyond it would be rounded to zero
beside those of rows before it. What fp8_block64 loses lies below 2**-20 of the block's largest
value.

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

# each row in two lanes
PREFETCHED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0], [1], [2], [4], [8]],
        warp_bases=[[16], [32]],
        block_bases=[],
        shape=[64],
    )
)

# the largest scale of a block (fp8_block64) or of a row (fp8_block128) becomes 2**6 to 2**7: an
# e4m3 is less than 2**9, and float16 reaches 2**16
HEADROOM = gl.constexpr(6)
# exponents of float32, biased by 127
SMALLEST_BLOCK_SCALE = gl.constexpr(127 - 60)
LARGEST_BLOCK_SCALE = gl.constexpr(127 + 122)
NEG_INF = gl.constexpr(float("-inf"))


@record
class RowScales:
    """Scales that are not inside the rows of a cache."""

    first: object  # float32 [pages, page_size, 1] (fp8_token), the bytes of fp8_block64 as int32
    # [pages, page_size, 2], the tensor's float32 (fp8) on the device, or None
    stride_page: object
    stride_row: object
    tensor_scale: object  # where it is on the host (fp8)


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
    if FORMAT == "fp8_token" or FORMAT == "fp8":
        slot = valid_slots(work, position.blocks, position.block, position.scale_ids)
    if FORMAT == "fp8_block128":
        at = row_pointers(work, position.blocks, position.block, slot, 4) + (
            128 + _lane_group(slot)
        )
        return gl.load(at, mask=slot >= 0, other=0).to(gl.float32, bitcast=True), slot >= 0
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
def _lane_group(slot):
    """The group of 128 columns whose scale a lane loads: of the eight lanes that have a row, two
    have the same one. To the compiler all eight have the same number; shuffles undo that.
    """
    return gl.inline_asm_elementwise(
        "{ mov.u32 $0, %laneid; and.b32 $0, $0, 3; }", "=r,r", [slot], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_scale_table(work, position):
    """As `load_scales`, all four scales of fp8_block128, [64, 4] in `SCALES`."""
    slot = valid_slots(work, position.blocks, position.block, position.scale_ids)
    at = gl.expand_dims(row_pointers(work, position.blocks, position.block, slot, 4), 1)
    at += gl.expand_dims(128 + gl.arange(0, 4, gl.SliceLayout(0, SCALES)), 0)
    scales = gl.load(at, mask=gl.expand_dims(slot >= 0, 1), other=0)
    return scales.to(gl.float32, bitcast=True), slot >= 0


@gluon.jit
def prefetch_rows(work, blocks, block, ids):
    """Prefetch a block's rows of fp8_block128 to L2.

    ids  in `PREFETCHED`: a lane prefetches half a row, three lines of 128 bytes
    """
    slot = valid_slots(work, blocks, block, ids)
    start = row_pointers(work, blocks, block, slot, 4)
    gl.inline_asm_elementwise(
        """{
        .reg .b32 byte; .reg .b64 at; .reg .pred is_read;
        mov.u32 byte, %laneid;
        and.b32 byte, byte, 1;
        mul.lo.u32 byte, byte, 384;
        cvt.u64.u32 at, byte;
        add.u64 at, at, $1;
        setp.lt.u32 is_read, byte, $2;
        @is_read prefetch.global.L2 [at];
        @is_read prefetch.global.L2 [at + 128];
        add.u32 byte, byte, 256;
        setp.lt.u32 is_read, byte, $2;
        @is_read prefetch.global.L2 [at + 256];
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [start.to(gl.int64), gl.where(slot >= 0, 656, 0)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_left(start, is_valid):
    """Start to load columns 0 to 255 of a block's rows."""
    return (_load(start, is_valid, 0, WORDS), _load(start, is_valid, 32, WORDS))


@gluon.jit
def load_rope(start, is_valid, FORMAT: gl.constexpr):
    """Rotated columns that are converted with the left half."""
    if FORMAT == "fp8":
        return (_load(start, is_valid, 128, HALF_WORDS),)
    elif FORMAT == "fp8_block128":  # noqa: RET505
        return (_load(start, is_valid, 132, WORDS),)
    else:
        return ()


@gluon.jit
def load_right(start, is_valid, FORMAT: gl.constexpr):
    """Columns 256 to 511; those of fp8_block64 include rotated ones."""
    words = (_load(start, is_valid, 64, WORDS),)
    if FORMAT == "fp8_block64":
        words += (_load(start, is_valid, 96, HALF_WORDS), _load(start, is_valid, 112, WORDS))
    else:
        words += (_load(start, is_valid, 96, WORDS),)
    return words


@gluon.jit
def _power_of_two(exponent):
    """(2**(exponent − 127), its inverse), within what block_scale may be."""
    exponent = gl.maximum(gl.minimum(exponent, LARGEST_BLOCK_SCALE), SMALLEST_BLOCK_SCALE)
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _max_of_rows(numbers, AXIS: gl.constexpr = 0):
    """The largest int32 of [64] in `KEYS`, or along an axis that is in a warp.

    The lanes that have different rows are not neighbours, and Triton 3.6.0 then exchanges numbers
    between other lanes. So each warp takes the maximum of all its lanes first.
    """
    numbers = gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [numbers], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    return gl.max(numbers, AXIS)


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
    return _power_of_two(exponent - HEADROOM)


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
        "=r,r", [scales.to(gl.int32, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    exponent -= HEADROOM
    power, inverse = _power_of_two(exponent)
    # [rows of a thread, warp, row]
    of_warps, _ = _power_of_two(_max_of_rows(gl.max(exponent.reshape([4, 4, 4]), 0), 1))
    return power, inverse, of_warps


@gluon.jit
def scale_factors(scales, right, FORMAT: gl.constexpr):
    """(what a block's values are multiplied by, of each 128 columns a tuple, which is empty where
    they are not; what its rotated columns are multiplied by; what `store_scales` takes)
    """
    values, is_valid = scales
    factors = ((), (), (), ())
    inverse = 1.0
    if FORMAT == "fp8_block64":
        block_scale, inverse = _block_scale64(values, right[2])
        low, high = gl.split(values)
        factors = (
            _exponents(low, inverse, 0),
            _exponents(low, inverse, 16),
            _exponents(high, inverse, 0),
            (_power(gl.convert_layout(high, KEYS, assert_trivial=True) >> 16, inverse),),
        )
        return factors, inverse, (gl.where(is_valid, 0.0, NEG_INF), block_scale)
    else:  # noqa: RET505
        values += values * 0.0  # inf becomes NaN
        values = gl.where(values < 0, 0.0, values)
        key_factor = values
        if FORMAT == "fp8_block128":
            key_factor, inverse, block_scale = _row_powers(values)
            parts = _two_parts(values * inverse)
            factors = (
                _of_group(parts, 0), _of_group(parts, 1), _of_group(parts, 2), _of_group(parts, 3),
            )  # fmt: skip
        else:
            bits = gl.max(values.to(gl.int32, bitcast=True), 0)
            block_scale, _ = _power_of_two(bits >> 23)
        return factors, inverse, (gl.where(is_valid, key_factor, -1.0), block_scale)


@gluon.jit
def store_scales(stages, stage, others, FORMAT: gl.constexpr):
    """Store what consumers need of a block's scales, after the left half has been released."""
    of_entries, block_scale = others
    if FORMAT == "fp8_block64":
        stages.bias.index(stage).store(of_entries)
    else:
        stages.key_factor.index(stage).store(of_entries)
    if FORMAT != "fp8_block128":
        block_scale = gl.full([4], 1.0, gl.float32, IN_EACH_THREAD) * block_scale
    stages.block_scale.index(stage).store(block_scale)


@gluon.jit
def columns_of(table):
    """The four columns of [64, 4], as [64] each."""
    even, odd = gl.split(table.reshape([64, 2, 2]))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    return c0, c1, c2, c3


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
        "=r,f", [scales], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _of_group(parts, GROUP: gl.constexpr):
    """The large and the small part of a group's scale, each as words of it twice."""
    word = gl.inline_asm_elementwise(
        f"shfl.sync.idx.b32 $0, $1, {GROUP}, 0x1c1f, 0xffffffff;", "=r,r", [parts], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;", "=&r,=r,r", [word],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


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
            dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
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
def convert_left(left, factors):
    """Columns 0 to 255 of a block as float16."""
    return _convert(left[0], factors[0]), _convert(left[1], factors[1])


@gluon.jit
def store_left(stages, stage, left):
    half = _as_words(stages.left.index(stage))
    half.slice(0, 64, dim=1).store(left[0])
    half.slice(64, 64, dim=1).store(left[1])


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
def convert_rope(rope, inverse, FORMAT: gl.constexpr):
    """Rotated columns as the tile of a stage has them, in a tuple, which may be empty."""
    if FORMAT == "fp8":
        return (_convert(rope[0], ()),)
    elif FORMAT == "fp8_block128":  # noqa: RET505
        # powers of two: as bfloat16 they are the upper half of float32
        factor = inverse.to(gl.int32, bitcast=True)
        factor = gl.expand_dims(factor | (factor >> 16), 1).broadcast_to(rope[0].shape)
        words = gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [rope[0], factor], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        return (words,)
    else:
        return rope


@gluon.jit
def store_rope(stages, stage, start, is_valid, rope, FORMAT: gl.constexpr):
    """Store the rotated columns of a block, or start to copy them."""
    if len(rope) == 1:
        _as_words(stages.rope.index(stage)).store(rope[0])
    if FORMAT == "fp8_token":
        at = gl.expand_dims(start, 1)
        at += gl.expand_dims(128 + gl.arange(0, 32, gl.SliceLayout(0, WORDS)), 0)
        copy_words(_as_words(stages.rope.index(stage)), at, mask=gl.expand_dims(is_valid, 1))
        async_copy.mbarrier_arrive(stages.rope_full.index(stage), increment_count=False)
