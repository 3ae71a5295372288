"""Online softmax of FP8 scores, whose probabilities are rounded to e4m3.

Probabilities, and so row_sum, are multiplied by 2 to the power of SHIFT: e4m3 reaches 448 and loses
precision below 1/64. row_max is the largest score: its probability is a power of two, which rounds
to itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.formats import SMALLEST_SCALE as _SMALLEST_SCALE
from mlakit.kernels.hopper.device.compat import reinterpret
from mlakit.kernels.hopper.device.primitives import IN_EACH_THREAD, SMEM_VECTOR, opaque_zero
from mlakit.kernels.hopper.device.softmax import NEG_INF, apply_sign
from mlakit.kernels.hopper.prefill import configs
from mlakit.kernels.hopper.prefill.masks import keys_left
from mlakit.kernels.hopper.prefill.pipeline import read_tile
from mlakit.kernels.hopper.prefill.tiles import seen_keys

SHIFT = gl.constexpr(configs.FP8_PROB_SHIFT)
SMALLEST_SCALE = gl.constexpr(_SMALLEST_SCALE)


@gluon.jit
def column_of(rows, like):
    """Return [64] as [64, 1], in the layout of `like`, whose rows threads have alike."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.expand_dims(gl.convert_layout(rows, LAYOUT, assert_trivial=True), 1)


@gluon.constexpr_function
def _max_asm(count):
    """PTX: the largest float32 of each of a thread's two rows, in all elements of that row.

    As integers three at a time (VIMNMX3), which is the order of floats unless all are negative:
    then, which is rare, as floats.
    """
    # two chains per row: an instruction waits for the one before it
    chains = {
        f"{name}{half}": [count + i for i in range(count) if (i & 2) == row][half::2]
        for name, row in (("top", 0), ("low", 2))
        for half in (0, 1)
    }
    steps = {}
    for kind in ("s32", "f32"):
        lines = [f"max.{kind} {name}, ${c[0]}, ${c[1]}; " for name, c in chains.items()]
        for i in range(2, count // 4):
            lines += [f"max.{kind} {name}, {name}, ${c[i]}; " for name, c in chains.items()]
        lines += [f"max.{kind} {name}0, {name}0, {name}1; " for name in ("top", "low")]
        steps[kind] = "".join(lines)
    outputs = "".join(f"mov.b32 ${i}, {'low0' if i & 2 else 'top0'}; " for i in range(count))
    return f"""{{
        .reg .b32 top0, top1, low0, low1, least;
        .reg .pred is_negative;
        {steps["s32"]}
        min.s32 least, top0, low0;
        setp.lt.s32 is_negative, least, 0;
        vote.sync.any.pred is_negative, is_negative, 0xFFFFFFFF;
        @!is_negative bra.uni DONE;
        {steps["f32"]}
    DONE:
        {outputs}
    }}"""


@gluon.constexpr_function
def _max_constraints(count):
    return ",".join(["=r"] * count + ["r"] * count)


@gluon.jit
def _row_max(scores):
    """Return [64] largest of each row."""
    COUNT: gl.constexpr = scores.shape[1] // 2
    ROW: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    bits = scores.to(gl.int32, bitcast=True)
    bits = gl.inline_asm_elementwise(
        _max_asm(COUNT), _max_constraints(COUNT), [bits], dtype=gl.int32, is_pure=True, pack=COUNT
    )
    # keep one element per thread of a quad: all four are alike
    each, _ = gl.split(gl.reshape(bits, [64, scores.shape[1] // 8, 4, 2]))
    each = gl.permute(each, (0, 2, 1))
    each, _ = gl.split(gl.reshape(each, [64, 4, 8, 2]))
    each, _ = gl.split(gl.reshape(each, [64, 4, 4, 2]))
    each, _ = gl.split(gl.reshape(each, [64, 4, 2, 2]))
    each, _ = gl.split(each)
    largest = gl.max(each.to(gl.float32, bitcast=True), 1)
    return gl.convert_layout(largest, ROW, assert_trivial=True)


@gluon.jit
def spread_sum(probs):
    """[64, 4] sums of every fourth pair of columns, which need no exchange between threads."""
    pairs = gl.sum(gl.reshape(probs, [64, probs.shape[1] // 8, 8]), 1)
    return gl.sum(gl.reshape(pairs, [64, 4, 2]), 2)


@gluon.jit
def _sign_of_keys(scales):
    """−1 if the scale of all keys is negative, else 1."""
    return gl.where(gl.load(scales.k) < 0.0, -1.0, 1.0)


@gluon.jit
def row_scales(scales, scale_log2, tile, ROW0: gl.constexpr, ROW: gl.constexpr):
    """Return ([64] factors of scores besides the scales of each key, whether `mask_scores` negates
    the scores)."""
    scale = scale_log2
    is_negated = gl.to_tensor(False)
    if scales.k is not None and not scales.HAS_KEYS:
        of_all_keys = gl.load(scales.k)
        scale *= gl.abs(of_all_keys)
        if not scales.HAS_VALUES:
            is_negated = of_all_keys < 0.0
    if scales.q is not None:
        row = ROW0 + gl.arange(0, 64, ROW)
        token = (tile.q_row + row).to(gl.int64)
        head = scales.q + tile.head.to(gl.int64) * scales.stride_q_head
        factor = gl.load(head + token * scales.stride_q_token, mask=row < tile.num_rows, other=0.0)
        factor *= scale
    else:
        factor = gl.full([64], 0.0, gl.float32, ROW) + scale
    # a scale of 0 would turn the −inf of a hidden key into NaN
    return gl.where(factor < SMALLEST_SCALE, SMALLEST_SCALE, factor), is_negated


@gluon.constexpr_function
def _vector_layout(keys):
    """Return [keys] of which a thread has 4t to 4t + 3 of each 16; t is its place in a quad."""
    more = [[1 << bit] for bit in range(4, keys.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], *more],
        lane_bases=[[4], [8], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[keys],
    )


@gluon.jit
def _key_vector(scales, stage, NUMBER: gl.constexpr, like):
    """Return [1, BLOCK_K] of a stage: 0 k_scale, 1 the logarithms of v_scale, 2 their inverses."""
    BLOCK_K: gl.constexpr = like.shape[1]
    COLUMN: gl.constexpr = gl.SliceLayout(0, like.type.layout)
    # swizzled before TMA swizzled them: plain vectors
    vectors = reinterpret(scales.tiles.index(stage), gl.float32, [4, BLOCK_K], SMEM_VECTOR)
    vector = vectors.index(NUMBER).load(_vector_layout(BLOCK_K))
    # [groups, t, h, b] as [groups, h, t, b]
    vector = gl.permute(gl.reshape(vector, [BLOCK_K // 16, 4, 2, 2]), (0, 2, 1, 3))
    vector = gl.reshape(vector, [BLOCK_K])
    return gl.expand_dims(gl.convert_layout(vector, COLUMN, assert_trivial=True), 0)


@gluon.jit
def load_block_scales(scales, stage):
    """Return (k_scale, log2 of v_scale, its inverse) of a block's keys."""
    copies = reinterpret(scales.tiles.index(stage), gl.float32, [16, 4], SMEM_VECTOR)
    even, odd = gl.split(gl.reshape(copies.index(0).load(IN_EACH_THREAD), [2, 2]))
    k_scale, inverse = gl.split(gl.reshape(even, [1, 2]))
    log2_scale, _ = gl.split(gl.reshape(odd, [1, 2]))
    return gl.max(k_scale, 0), gl.max(log2_scale, 0), gl.max(inverse, 0)


@gluon.jit
def scale_scores(scores, scales, stage, row_scale, SIGN: gl.constexpr):
    """scores · SIGN times the scales of each key. If values have scales: times row_scale, and the
    logarithms of these scales are added.
    """
    scores = apply_sign(scores, SIGN)
    if scales.HAS_KEYS:
        scores *= _key_vector(scales, stage, 0, scores)
    if scales.HAS_VALUES:
        if scales.k is not None and not scales.HAS_KEYS:
            scores *= _sign_of_keys(scales)
        scores = scores * gl.expand_dims(row_scale, 1) + _key_vector(scales, stage, 1, scores)
    return scores


@gluon.jit
def mask_scores(scores, inputs, k_scale, tiles_done, start, all_first, all_end, ROW0: gl.constexpr):
    """scores, −inf where a query does not see a key. The work tile is read again where it is
    needed: kept, it would take registers.

    k_scale  of the block, or None
    start  first key of the block, a multiple of BLOCK_K: any block may have the diagonal, or the
           request's last key
    all_first, all_end  keys that all queries of the warpgroup see. all_end is 0 if the scale of all
           keys is negative, which is as rare as masked blocks: one branch for both
    """
    scales, schedule, tiles = inputs.scales, inputs.schedule, inputs.tiles
    LAYOUT: gl.constexpr = scores.type.layout
    BLOCK_K: gl.constexpr = scores.shape[1]
    scores = gl.reshape(scores, [64, BLOCK_K // 8, 4, 2])
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    is_rare = start + BLOCK_K > all_end
    if k_scale is not None:
        is_rare |= k_scale < 0.0
    if is_rare:
        tile = read_tile(tiles, schedule, tiles_done, 4)
        if scales.k is not None and not (scales.HAS_KEYS or scales.HAS_VALUES):
            scores *= _sign_of_keys(scales)
        if k_scale is not None:
            scores *= gl.where(k_scale < 0.0, -1.0, 1.0)
        position = tile.position + (row + (ROW0 + opaque_zero()))
        _, end = seen_keys(schedule, position, tile.kv_len)
        key, limit = keys_left(scores, end - start)
        scores = gl.where(key < limit, scores, NEG_INF)
    if schedule.MASK.IS_SLIDING or schedule.MASK.IS_CHUNKED:  # noqa: SIM102  # known when compiled
        if start < all_first:
            tile = read_tile(tiles, schedule, tiles_done, 4)
            position = tile.position + (row + (ROW0 + opaque_zero()))
            first, _ = seen_keys(schedule, position, tile.kv_len)
            key, limit = keys_left(scores, first - start)
            scores = gl.where(key >= limit, scores, NEG_INF)
    return gl.convert_layout(gl.reshape(scores, [64, BLOCK_K]), LAYOUT, assert_trivial=True)


_PACK = gl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@gluon.jit
def to_e4m3(probs):
    """Return [64, keys / 4] words of a thread's columns 8h + 2t + b of each 16: a loop would keep
    each byte in a register of its own."""
    GROUPS: gl.constexpr = probs.shape[1] // 16
    # [64, groups, h, t, b] as [64, groups, t, b, h]
    parts = gl.permute(gl.reshape(probs, [64, GROUPS, 2, 4, 2]), (0, 1, 3, 4, 2))
    low, high = gl.split(parts)
    first, second = gl.split(low)
    third, fourth = gl.split(high)
    words = gl.inline_asm_elementwise(
        _PACK, "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.reshape(words, [64, GROUPS * 4])


@gluon.jit
def as_a_operand(words, PROBS: gl.constexpr):
    """Words of e4m3 as [64, keys] in the layout of an A operand; nothing moves.

    By halves: the compiler then sees that they are the word.
    """
    low, high = words.to(gl.int16), (words >> 16).to(gl.int16)
    first, second = low.to(gl.int8), (low >> 8).to(gl.int8)
    third, fourth = high.to(gl.int8), (high >> 8).to(gl.int8)
    joined = gl.join(gl.join(first, second), gl.join(third, fourth))
    probs = gl.reshape(gl.permute(joined, (0, 1, 3, 2)), [64, 4 * words.shape[1]])
    probs = probs.to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(probs, PROBS, assert_trivial=True)


@gluon.jit
def softmax_step(scores, scales, of_block, stage, row_max, row_sum, row_scale):
    """Return (words of e4m3, row_max, row_sum, what acc is to be rescaled by) of `scale_scores`.

    of_block  `load_block_scales`: row_max has the logarithm of v_scale in it, row_sum has not
    """
    if scales.HAS_BLOCKS:
        k_scale, log2_scale, _ = of_block
        row_scale *= gl.abs(k_scale)
        row_scale = gl.where(row_scale < SMALLEST_SCALE, SMALLEST_SCALE, row_scale)
        new_max = gl.maximum(row_max, _row_max(scores) * row_scale + log2_scale)
        shift = new_max - (SHIFT + log2_scale)
        probs = gl.exp2(scores * gl.expand_dims(row_scale, 1) - gl.expand_dims(shift, 1))
        weights = probs
    elif scales.HAS_VALUES:
        new_max = gl.maximum(row_max, _row_max(scores))
        probs = gl.exp2(scores - gl.expand_dims(new_max - SHIFT, 1))
        weights = probs * _key_vector(scales, stage, 2, scores)
    else:
        new_max = gl.maximum(row_max, _row_max(scores) * row_scale)
        probs = gl.exp2(scores * gl.expand_dims(row_scale, 1) - gl.expand_dims(new_max - SHIFT, 1))
        weights = probs
    rescale = gl.exp2(row_max - new_max)
    block_sum = spread_sum(weights)
    if scales.HAS_BLOCKS:
        block_sum *= of_block[2]
    row_sum = row_sum * column_of(rescale, row_sum) + block_sum
    return to_e4m3(probs), new_max, row_sum, rescale
