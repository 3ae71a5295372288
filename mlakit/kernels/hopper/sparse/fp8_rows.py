"""Blocks of 64 listed FP8 rows: loaded to registers, converted to float16, stored.

What scales do, which are float32:

fp8_block128  a row has a scale per 128 columns, which multiplies values: rounded to float16 once
fp8_block64   a row has a power of two per 64 columns, which multiplies values
fp8_token     a row has one scale, which multiplies scores and probabilities (`key_factor`)
fp8           likewise, the scale of the tensor

All but the products of fp8_block128 are exact. Powers of two keep all of this in float16's range:
of fp8_block128 one per row, which is a key_factor too, of fp8_block64 one per block
(`block_scale`). They follow the scales, whatever these are (`decode.fp8_rows` says why). What
fp8_block64 loses lies below 2**-20 of the block's largest value.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from mlakit.kernels.hopper.device.compat import copy_words, record
from mlakit.kernels.hopper.device.fp8_rows import (
    HEADROOM,
    KEYS,
    WORDS,
    as_words,
    convert,
    convert_half,
    group_factors,
    load_group_scales,
    load_half,
    load_words,
    max_of_rows,
    power_of_two,
    row_layout,
    scale_rope,
    store_half,
)
from mlakit.kernels.hopper.device.primitives import IN_EACH_THREAD
from mlakit.kernels.hopper.sparse.lists import (
    rope_pointers,
    row_pointers,
    split_slots,
    valid_slots,
)

# half as many columns as `WORDS`: two threads have the same ones
HALF_WORDS = gl.constexpr(row_layout([[0, 4], [0, 8], [0, 0]], [[0, 1], [0, 2]], [64, 16]))
# the eight bytes of scales of fp8_block64 in each thread
SCALE_BYTES = gl.constexpr(row_layout([[0, 0], [0, 0], [0, 0]], [[0, 1]], [64, 2]))
# the two scales that 128 columns of fp8_block64 have
SCALE_PAIRS = gl.constexpr(row_layout([[0, 0], [0, 0], [0, 1]], [], [64, 2]))
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
def _scale_pointers(work, row_scales, is_extra, slot):
    """Pointers to the scales of a block's rows."""
    main = row_scales[0]
    page, in_page = split_slots(work.main, slot)
    offset = page * main.stride_page + in_page * main.stride_row
    if work.HAS_EXTRA:
        extra = row_scales[1]
        page, in_page = split_slots(work.extra, slot)
        other = page * extra.stride_page + in_page * extra.stride_row
        # add the distance between the tensors, as `lists.row_pointers` does
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
    if FORMAT.SCALED_BY != "group":
        slot = valid_slots(work, position.blocks, position.block, position.scale_ids)
    if FORMAT.SCALES_AT >= 0:
        start = row_pointers(work, position.blocks, position.block, slot, 4)
        return load_group_scales(start, slot >= 0, FORMAT), slot >= 0
    elif FORMAT.HAS_E8M0_SCALES:
        at = _scale_pointers(work, row_scales, is_extra, slot)
        return load_words(at, slot >= 0, 0, SCALE_BYTES), slot >= 0
    elif FORMAT.SCALED_BY == "row":
        at = _scale_pointers(work, row_scales, is_extra, slot)
        return gl.load(at, mask=slot >= 0, other=0.0), slot >= 0
    else:
        scale = _tensor_scale(row_scales[0])
        if work.HAS_EXTRA:
            scale = gl.where(is_extra, _tensor_scale(row_scales[1]), scale)
        return gl.where(slot >= 0, scale, 0.0), slot >= 0


@gluon.jit
def load_scale_table(work, position, FORMAT: gl.constexpr):
    """Load all four scales that each row holds: [64, 4] in layout `SCALES`."""
    slot = valid_slots(work, position.blocks, position.block, position.scale_ids)
    at = gl.expand_dims(row_pointers(work, position.blocks, position.block, slot, 4), 1)
    at += gl.expand_dims(FORMAT.SCALES_AT // 4 + gl.arange(0, 4, gl.SliceLayout(0, SCALES)), 0)
    scales = gl.load(at, mask=gl.expand_dims(slot >= 0, 1), other=0)
    return scales.to(gl.float32, bitcast=True), slot >= 0


@gluon.jit
def prefetch_rows(work, blocks, block, ids, ROW_BYTES: gl.constexpr):
    """Prefetch a block's rows, which hold their scales, to L2.

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
        "=r,l,r",
        [start.to(gl.int64), gl.where(slot >= 0, ROW_BYTES, 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_left(start, is_valid):
    """Start to load columns 0 to 255 of a block's rows."""
    return load_half(start, is_valid, 0)


@gluon.jit
def load_rope(stages, work, position, start, is_valid, FORMAT: gl.constexpr):
    """Load the rotated columns that are converted with the left half."""
    WORD: gl.constexpr = FORMAT.ROPE_AT // 4
    if stages.rope is None:
        return ()
    elif work.main.rope is not None:
        at = rope_pointers(work.main.rope, position.slot, 4)
        return (load_words(at, is_valid, 0, HALF_WORDS),)
    elif not FORMAT.IS_BF16_ROPE:
        return (load_words(start, is_valid, WORD, HALF_WORDS),)
    elif FORMAT.SCALES_AT >= 0:
        return (load_words(start, is_valid, WORD, WORDS),)
    else:
        return ()


@gluon.jit
def load_right(start, is_valid, FORMAT: gl.constexpr):
    """Load columns 256 to 511; those of fp8_block64 include rotated ones."""
    if FORMAT.HAS_E8M0_SCALES:
        return (
            load_words(start, is_valid, 64, WORDS),
            load_words(start, is_valid, 96, HALF_WORDS),
            load_words(start, is_valid, FORMAT.ROPE_AT // 4, WORDS),
        )
    else:
        return load_half(start, is_valid, 64)


@gluon.jit
def _block_scale64(scales, rope):
    """Return (block_scale, its inverse) of fp8_block64; `rope` are words of two bfloat16."""
    # seven bytes of the eight are scales; each is an exponent
    word = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, SCALE_BYTES)), 0)
    scales = scales & gl.where(word == 1, 0x00FFFFFF, -1)
    largest = gl.maximum(scales & 0xFF, (scales >> 8) & 0xFF)
    largest = gl.maximum(largest, gl.maximum((scales >> 16) & 0xFF, (scales >> 24) & 0xFF))
    largest = gl.max(largest, 1)
    # rotated columns are values too; an e4m3 is up to 2**9 times its scale. As in `max_of_rows`
    # this may be a maximum of other columns of the warp: only that of all is used
    bits = gl.max(gl.maximum(rope & 0x7FFF0000, (rope << 16) & 0x7FFF0000), 1)
    bits = gl.convert_layout(bits, largest.type.layout, assert_trivial=True)
    exponent = max_of_rows(gl.maximum(largest, (bits >> 23) - 8))
    return power_of_two(exponent - HEADROOM)


@gluon.jit
def scale_factors(scales, right, FORMAT: gl.constexpr):
    """Return (what a block's values are multiplied by, of each 128 columns a tuple, which is empty
    where they are not; what its rotated columns are multiplied by; what `store_scales` takes)"""
    values, is_valid = scales
    factors = ((), (), (), ())
    inverse = 1.0
    if FORMAT.HAS_E8M0_SCALES:
        block_scale, inverse = _block_scale64(values, right[2])
        low, high = gl.split(values)
        factors = (
            _exponents(low, inverse, 0),
            _exponents(low, inverse, 16),
            _exponents(high, inverse, 0),
            (_power(gl.convert_layout(high, KEYS, assert_trivial=True) >> 16, inverse),),
        )
        return factors, inverse, (gl.where(is_valid, 0.0, NEG_INF), block_scale)
    elif FORMAT.SCALES_AT >= 0:
        factors, key_factor, inverse, block_scale = group_factors(values)
        return factors, inverse, (gl.where(is_valid, key_factor, -1.0), block_scale)
    else:
        values += values * 0.0  # inf becomes NaN
        values = gl.where(values < 0, 0.0, values)
        block_scale, _ = power_of_two(gl.max(values.to(gl.int32, bitcast=True), 0) >> 23)
        return factors, inverse, (gl.where(is_valid, values, -1.0), block_scale)


@gluon.jit
def store_scales(stages, stage, consumer_scales, FORMAT: gl.constexpr):
    """Store what consumers need of a block's scales, after the left half has been released."""
    of_entries, block_scale = consumer_scales
    if FORMAT.HAS_E8M0_SCALES:
        stages.bias.index(stage).store(of_entries)
    else:
        stages.key_factor.index(stage).store(of_entries)
    if FORMAT.SCALES_AT < 0:
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
        "cvt.rn.f16x2.f32 $0, $1, $1;",
        "=r,f",
        [bits.to(gl.float32, bitcast=True) * inverse],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def convert_left(left, factors):
    """Convert columns 0 to 255 of a block to float16."""
    return convert_half(left, factors[0], factors[1])


@gluon.jit
def store_left(stages, stage, left):
    store_half(stages.left.index(stage), left)


@gluon.jit
def store_right(stages, stage, right, factors, inverse, FORMAT: gl.constexpr):
    """Store columns 256 to 511."""
    half = as_words(stages.right.index(stage))
    half.slice(0, 64, dim=1).store(convert(right[0], factors[2]))
    last = convert(right[1], factors[3])
    half.slice(64, last.shape[1], dim=1).store(last)
    if FORMAT.HAS_E8M0_SCALES:
        # two bfloat16 are the upper and the lower half of a word
        upper = (right[2] & -65536).to(gl.float32, bitcast=True) * inverse
        lower = (right[2] << 16).to(gl.float32, bitcast=True) * inverse
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;",
            "=r,f,f",
            [upper, lower],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
        half.slice(96, 32, dim=1).store(pairs)


@gluon.jit
def convert_rope(rope, inverse, FORMAT: gl.constexpr):
    """Rotated columns as the tile of a stage has them, in a tuple, which may be empty."""
    if len(rope) == 0:
        return rope
    elif not FORMAT.IS_BF16_ROPE:
        return (convert(rope[0], ()),)
    else:
        return (scale_rope(rope[0], inverse),)


@gluon.jit
def store_rope(stages, stage, start, is_valid, rope, FORMAT: gl.constexpr):
    """Store the rotated columns of a block, or start to copy them."""
    if len(rope) == 1:
        as_words(stages.rope.index(stage)).store(rope[0])
    if stages.rope_full is not None:
        at = gl.expand_dims(start, 1)
        at += gl.expand_dims(FORMAT.ROPE_AT // 4 + gl.arange(0, 32, gl.SliceLayout(0, WORDS)), 0)
        copy_words(as_words(stages.rope.index(stage)), at, mask=gl.expand_dims(is_valid, 1))
        async_copy.mbarrier_arrive(stages.rope_full.index(stage), increment_count=False)
