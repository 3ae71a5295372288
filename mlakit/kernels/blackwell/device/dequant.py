"""FP8 rows that hold their scales, as bfloat16 stages of `keys_as_m`: a producer in registers.

Rows are loaded two parts of 128 columns ahead of their use. A value times its scale is rounded to
bfloat16.

Lineage    own design; ideas: the dequantising warpgroup of FlashMLA's FP8 sparse decode
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from mlakit.kernels.blackwell.device.gathers import GATHERED
from mlakit.kernels.blackwell.device.keys_as_m import D_R, KEYS, PARTS, stage_of, wait_for_values
from mlakit.kernels.hopper.device.compat import record, reinterpret
from mlakit.kernels.hopper.device.fp8_convert import to_fp16
from mlakit.kernels.hopper.device.fp8_rows import WORDS, load_words
from mlakit.kernels.hopper.device.primitives import smem_layout


@record
class Half:
    """64 rows, half of a block; those that are not valid become zeros."""

    start: object  # pointers to their words, in `fp8_rows.KEYS`
    is_valid: object


@gluon.jit
def _load_part(half, part, FORMAT: gl.constexpr):
    """Start to load 128 columns of 64 rows and their scales; zeros where a row is not valid."""
    words = load_words(half.start, half.is_valid, part * 32, WORDS)
    scale = gl.load(half.start + (FORMAT.SCALES_AT // 4 + part), mask=half.is_valid, other=0)
    return words, scale


@gluon.jit
def _store_part(part, tile, HALF: gl.constexpr):
    """Store 128 columns of 64 rows, multiplied by their scales, in the rows of a tile."""
    words, scale = part
    values = to_fp16(words).to(gl.float32)
    scale = scale.to(gl.float32, bitcast=True)
    scale = gl.convert_layout(scale, gl.SliceLayout(1, values.type.layout), assert_trivial=True)
    values = (values * gl.expand_dims(scale, 1)).to(tile.dtype)
    tile.slice(HALF * GATHERED, GATHERED, 0).store(values)


@gluon.jit
def _store_block(low, high, pending, block, FORMAT: gl.constexpr, smem, barriers):
    """Store a block whose first two parts are `pending`, and load the others meanwhile."""
    for part in gl.static_range(PARTS):
        loaded = pending[part]
        if part + 2 < PARTS:
            ahead = (_load_part(low, part + 2, FORMAT), _load_part(high, part + 2, FORMAT))
            pending += (ahead,)
        stage, phase = stage_of(smem, block, part)
        mbarrier.wait(barriers.latent_empty.index(stage), phase ^ 1)
        _store_part(loaded[0], smem.latent.index(stage), 0)
        _store_part(loaded[1], smem.latent.index(stage), 1)
        fence_async_shared()
        mbarrier.arrive(barriers.latent_full.index(stage), count=1)


@gluon.jit
def _load_rope(low, high, FORMAT: gl.constexpr):
    WORD: gl.constexpr = FORMAT.ROPE_AT // 4
    first = load_words(low.start, low.is_valid, WORD, WORDS)
    return first, load_words(high.start, high.is_valid, WORD, WORDS)


@gluon.jit
def _store_rope(words, smem, barriers):
    tile = reinterpret(smem.rope, gl.int32, [1, KEYS, D_R // 2], smem_layout(32, 32)).index(0)
    tile.slice(0, GATHERED, 0).store(words[0])
    tile.slice(GATHERED, GATHERED, 0).store(words[1])
    fence_async_shared()
    mbarrier.arrive(barriers.rope_full, count=1)


@gluon.jit
def dequant_block(low, high, block, FORMAT: gl.constexpr, smem, barriers):
    """Convert a block, of which `low` and `high` are halves."""
    first = (_load_part(low, 0, FORMAT), _load_part(high, 0, FORMAT))
    second = (_load_part(low, 1, FORMAT), _load_part(high, 1, FORMAT))
    _store_block(low, high, (first, second), block, FORMAT, smem, barriers)
    if smem.q_rope is not None:
        rope = _load_rope(low, high, FORMAT)
        wait_for_values(block - 1, barriers)
        _store_rope(rope, smem, barriers)
