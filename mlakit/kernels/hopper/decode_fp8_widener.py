"""Blocks of e4m3 rows as halves in shared memory: what the widener of `decode_fp8_kernel` does.

Bytes come from the cache to registers, a block ahead of those that are being written: shared memory
has no room for them beside two blocks of halves. Rows past a query's last key are zeros, whatever
the cache holds there, and so are their scales.

A row leaves with one scale at most, for its rotated columns too. Where it has four and not for
those (fp8_block128), it leaves with a power of two. Values are multiplied with the rest of their
own scale, for which two numbers in float16 stand: products are rounded once. Rotated columns are
divided by the power, and keep their digits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.compat import record, reinterpret
from mlakit.kernels.hopper.decode_work import find_keys, next_unit, pages_of
from mlakit.kernels.hopper.e4m3 import LARGEST_UNIT, twice, unit_for, widen, widen_scaled
from mlakit.kernels.hopper.primitives import new_barriers

PARTS = gl.constexpr(4)  # of the latent columns
WORDS = gl.constexpr(32)  # of a part
LEAST_UNIT = gl.constexpr(2.0**-60)  # of a row: divided by less, rotated columns could overflow
SCALE_PAIR = gl.constexpr("mul.rn.bf16x2 $0, $1, $2;")


@record
class Rows:
    """The cache."""

    words: object  # the first of them
    row_quads: object  # four words each, from a row to the next
    rope_word: object
    scales: object  # float32, or None
    stride_scales_page: object
    stride_scales_row: object
    FORMAT: object


@record
class Blocks:
    """Two blocks of halves, on their way from the widener to those who multiply them.

    Block n of a program is in slot n % 2 in turn n // 2. `right` is free when it has been added,
    `left`, `rope` and `scales` together when the left half has.
    """

    left: object  # [2, 64, 256] float16
    right: object
    rope: object  # [2, 64, 64] float16, or bfloat16 as the cache has it
    scales: object  # [2, 64] float32
    left_full: object
    left_empty: object
    right_full: object
    right_empty: object


@record
class Fetched:
    """A block in registers."""

    left: object  # two parts of words
    right: object
    rope: object  # words
    scales: object  # as many as a row has


@gluon.constexpr_function
def _words_layout(width):
    """[64, words]: sixteen bytes a thread, of eight rows at a time, as shared memory likes it."""
    more = [[0, 16]] if width == 32 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [32, 0], *more],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def new_blocks(rope_dtype: gl.constexpr):
    BOX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Blocks(
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], BOX),
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], BOX),
        gl.allocate_shared_memory(rope_dtype, [2, 64, 64], BOX),
        gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN),
        new_barriers(2, 1),
        new_barriers(2, 1),
        new_barriers(2, 1),
        new_barriers(2, 1),
    )


@gluon.jit
def slot_of(number):
    """Of a program's block: its slot, and the parity of its turn."""
    return number & 1, (number >> 1) & 1


@gluon.jit
def num_blocks(keys):
    """Of a unit; one at least, which then has no key."""
    return gl.maximum(keys.end_block - keys.first_block, 1)


@gluon.jit
def _row_in_page(inputs, block, offset):
    if inputs.PAGE < 64:
        return offset % inputs.PAGE
    else:  # noqa: RET505
        return offset + block % (inputs.PAGE // 64) * 64


@gluon.jit
def _load_words(rows, inputs, keys, pages, block, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Words [64, WIDTH] of a block's rows, from word FIRST of each on."""
    LAYOUT: gl.constexpr = _words_layout(WIDTH)
    KEY: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    offset = gl.arange(0, 64, KEY)
    is_there = gl.expand_dims(block * 64 + offset < keys.end, 1)
    if inputs.PAGE < 64:
        pages = gl.convert_layout(pages, KEY)
    row = pages.to(gl.int64) * inputs.PAGE_ROWS + _row_in_page(inputs, block, offset)
    # the factor of four is there to be seen: sixteen bytes are read at once
    start = gl.expand_dims(row * rows.row_quads * 4, 1)
    word = gl.expand_dims(FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(rows.words + (start + word), mask=is_there, other=0, cache_modifier=".cg")


@gluon.jit
def _load_half(rows, inputs, keys, pages, block, FIRST: gl.constexpr):
    """Two parts of a block's latent columns, from word FIRST on."""
    return (
        _load_words(rows, inputs, keys, pages, block, FIRST, WORDS),
        _load_words(rows, inputs, keys, pages, block, FIRST + WORDS, WORDS),
    )


@gluon.jit
def _load_rope(rows, inputs, keys, pages, block):
    WIDTH: gl.constexpr = 16 if rows.FORMAT == "fp8" else 32
    return _load_words(rows, inputs, keys, pages, block, rows.rope_word, WIDTH)


@gluon.jit
def _load_scales(rows, inputs, keys, pages, block):
    """float32 [64 keys], as many as a row has."""
    KEY: gl.constexpr = gl.SliceLayout(1, _words_layout(32))
    found = ()
    if rows.scales is not None:
        offset = gl.arange(0, 64, KEY)
        is_read = block * 64 + offset < keys.end
        at = rows.scales + pages.to(gl.int64) * rows.stride_scales_page
        at += _row_in_page(inputs, block, offset).to(gl.int64) * rows.stride_scales_row
        if rows.FORMAT == "fp8_token":
            scale = gl.load(at, mask=is_read, other=0.0)
            found += (gl.where(scale < 0, 0.0, scale),)  # a NaN stays one
        else:
            for part in gl.static_range(PARTS):
                found += (gl.load(at + part, mask=is_read, other=0.0),)
    return found


@gluon.jit
def _split_scales(scales):
    """Of four scales of a row (their unit u, 1 / u, the rest of each as a sum of two float16)."""
    largest = gl.abs(scales[0])
    for part in gl.static_range(1, PARTS):
        largest = gl.maximum(largest, gl.abs(scales[part]))
    unit, factor = unit_for(gl.maximum(largest, LEAST_UNIT))
    factor *= 1.0 / LARGEST_UNIT
    rests = ()
    for part in gl.static_range(PARTS):
        rest = scales[part] * factor
        first = rest.to(gl.float16)
        rests += ((first, (rest - first.to(gl.float32)).to(gl.float16)),)
    return unit, factor, rests


@gluon.jit
def _store_half(buffer, words, rests, FIRST: gl.constexpr):
    """Two parts as halves; with `rests` of their rows' scales, from part FIRST on."""
    panels = reinterpret(buffer, gl.float16, [4, 64, 64], buffer.layout)
    for part in gl.static_range(2):
        if len(rests) > 0:
            halves = widen_scaled(words[part], rests[FIRST + part][0], rests[FIRST + part][1])
        else:
            halves = widen(words[part])
        # a panel of 64 columns each
        first, second = gl.split(halves.reshape([64, 2, 64]).permute(0, 2, 1))
        panels.index(2 * part).store(first)
        panels.index(2 * part + 1).store(second)


@gluon.jit
def _store_rope(box, words, factor, FORMAT: gl.constexpr):
    if FORMAT == "fp8":
        box.store(widen(words))
    else:
        if FORMAT == "fp8_block128":
            factor = gl.expand_dims(twice(factor.to(gl.bfloat16)), 1).broadcast_to(words.shape)
            words = gl.inline_asm_elementwise(
                SCALE_PAIR, "=r,r,r", [words, factor], dtype=gl.int32, is_pure=True, pack=1
            )
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=32, rank=2
        )
        reinterpret(box, gl.int32, [64, 32], LAYOUT).store(words)


@gluon.jit
def widen_blocks(item, index, inputs, work, rows, blocks):
    """All that the widener does."""
    KEY: gl.constexpr = gl.SliceLayout(1, _words_layout(32))
    number = item * 0
    while item < work.last_item:
        keys = find_keys(inputs, work, item, index)
        first_block = keys.first_block
        pages = pages_of(inputs, keys, first_block, KEY)
        right = _load_half(rows, inputs, keys, pages, first_block, 2 * WORDS)
        left = _load_half(rows, inputs, keys, pages, first_block, 0)
        rope = _load_rope(rows, inputs, keys, pages, first_block)
        scales = _load_scales(rows, inputs, keys, pages, first_block)
        pages = pages_of(inputs, keys, first_block + 1, KEY)
        for block in range(first_block, first_block + num_blocks(keys)):
            slot, turn = slot_of(number)
            unit, factor, rests = None, None, ()
            if rows.FORMAT == "fp8_block128":
                unit, factor, rests = _split_scales(scales)
            elif rows.FORMAT == "fp8_token":
                unit = scales[0]
            mbarrier.wait(blocks.right_empty.index(slot), turn ^ 1)
            _store_half(blocks.right.index(slot), right, rests, 2)
            fence_async_shared()
            mbarrier.arrive(blocks.right_full.index(slot), count=1)
            right = _load_half(rows, inputs, keys, pages, block + 1, 2 * WORDS)
            mbarrier.wait(blocks.left_empty.index(slot), turn ^ 1)
            _store_half(blocks.left.index(slot), left, rests, 0)
            _store_rope(blocks.rope.index(slot), rope, factor, rows.FORMAT)
            if rows.scales is not None:
                blocks.scales.index(slot).store(unit)
            fence_async_shared()
            mbarrier.arrive(blocks.left_full.index(slot), count=1)
            left = _load_half(rows, inputs, keys, pages, block + 1, 0)
            rope = _load_rope(rows, inputs, keys, pages, block + 1)
            scales = _load_scales(rows, inputs, keys, pages, block + 1)
            pages = pages_of(inputs, keys, block + 2, KEY)
            number += 1
        item, index = next_unit(work, item, index + gl.num_programs(0))
