"""Device helpers that several portable kernels share; none of them is a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow_e4m3(x, HAS_FP8: tl.constexpr):
    """Float `x` as the bytes of e4m3: to nearest even, ±448 at most, 0x7F (or 0xFF) for NaN."""
    x = x.to(tl.float32)
    if HAS_FP8:
        byte = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448.0
        # 3 of 23 mantissa bits stay; where they round up to 8, the exponent takes the carry
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        normal = rounded - ((127 - 7) << 3)
        # floats above 2**14 are 2**-9 apart, as the subnormals of e4m3 are: the sum rounds to them
        shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        byte = tl.where(magnitude < 0x3C800000, subnormal, normal)  # 2**-6
        byte = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, byte)
        byte = (byte | ((bits >> 24) & 0x80)).to(tl.uint8)
    return byte


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def mask_interval(
    position,
    kv_len,
    window,
    IS_CAUSAL: tl.constexpr,
    IS_SLIDING: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """The keys [first, last) that queries at int32 `position`, a number or a block, see."""
    first = position * 0
    last = first + kv_len
    if IS_SLIDING:
        first = tl.maximum(position - window + 1, 0)
    if IS_CHUNKED:
        # `//` truncates; before position 0 there is no chunk, and nothing is seen
        first = tl.maximum(position, 0) // window * window
        last = tl.where(position < 0, 0, tl.minimum(first + window, kv_len))
    if IS_CAUSAL:
        last = tl.minimum(position + 1, last)
    return first, tl.maximum(last, first)


@triton.jit
def softmax_step(scores, row_max, row_sum, scale_log2):
    """Online softmax in base 2: take in a block of scores.

    scores      [rows, keys] float32; the logit is scores · scale_log2, scale_log2 > 0
    row_max     [rows] largest logit so far, −inf before the first
    row_sum     [rows] Σ 2^(logit − row_max) so far
    Returns (probs [rows, keys] of these keys, rescale [rows] of what was accumulated before,
    row_max, row_sum).
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # before the first key row_max is −inf, and −inf − (−inf) would be NaN
    anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
    probs = tl.exp2(scores * scale_log2 - anchor[:, None])
    rescale = tl.exp2(row_max - anchor)
    return probs, rescale, new_max, row_sum * rescale + tl.sum(probs, 1)


@triton.jit
def finish_softmax(row_max, row_sum, sink_log2):
    """(denominator of out, natural-log lse) of an online softmax; `sink_log2` or None."""
    anchor = tl.where(row_max == -float("inf"), 0.0, row_max)
    denominator = row_sum
    if sink_log2 is not None:
        denominator += tl.exp2(sink_log2 - anchor)
    is_empty = row_sum == 0.0
    lse = (anchor + tl.log2(tl.where(is_empty, 1.0, row_sum))) * 0.6931471805599453  # log(2)
    lse = tl.where(is_empty, -float("inf"), lse)
    # an infinite score: the probabilities are NaN, row_sum is not
    lse = tl.where(row_max == float("inf"), row_max, lse)
    return tl.where(denominator == 0.0, 1.0, denominator), lse


@triton.jit
def widen_e4m3(stored, dtype: tl.constexpr, HAS_FP8: tl.constexpr):
    """Bytes of e4m3 as floats of `dtype`, exactly; 0x7F and 0xFF are NaN."""
    if HAS_FP8:
        # by way of a half: straight to bfloat16 some versions use an instruction of sm_90 on sm_89
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    # the same bits in the fields of a half are 2**8 too small: its exponent is biased by 15, not 7
    bits = stored.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(dtype)


# Cache rows. A kernel has `rows`, pointers [keys] to rows of the payload (bytes as uint8), and
# `scales`, pointers [keys] to what is kept beside them, or None. Latent columns come in PIECES of
# WIDTH, a power of two; a format with one scale per 128 columns has pieces of (at most) that, so
# that a piece has one factor per key, which multiplies sums over the piece and never its columns.


@triton.jit
def load_latent(
    rows,
    scales,
    is_read,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    D_C: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Latent columns of one piece, [keys, WIDTH] in DTYPE: as stored, to be multiplied by
    `load_factor`. Only fp8_block64 is decoded, its scales being powers of two.

    is_read  [keys]; rows that are not read, and columns past D_C, are 0
    """
    column = PIECE * WIDTH + tl.arange(0, WIDTH)
    mask = is_read[:, None]
    if (PIECE + 1) * WIDTH > D_C:
        mask = mask & (column < D_C)[None, :]
    stored = tl.load(rows[:, None] + column[None, :], mask=mask, other=0)
    if FORMAT == "bf16" or FORMAT == "fp16" or FORMAT == "fp32":
        columns = stored.to(DTYPE)
    elif FORMAT == "fp8_block64":
        columns = _times_power_of_two(stored, scales, is_read, PIECE, WIDTH, D_C, DTYPE, HAS_FP8)
    else:
        columns = widen_e4m3(stored, DTYPE, HAS_FP8)
    return columns


@triton.jit
def _times_power_of_two(
    stored,  # [keys, WIDTH]
    scales,
    is_read,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    D_C: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    GROUP: tl.constexpr = 64 if WIDTH > 64 else WIDTH
    GROUPS: tl.constexpr = WIDTH // GROUP
    first = PIECE * WIDTH + GROUP * tl.arange(0, GROUPS)
    mask = is_read[:, None] & (first < D_C)[None, :]
    # e8m0, biased as the exponent of a float32 is; 255 is NaN, 0 is 2**-127, a subnormal
    code = tl.load(scales[:, None] + (first // 64)[None, :], mask=mask, other=127).to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
    scale = bits.to(tl.float32, bitcast=True)  # [keys, GROUPS]
    KEYS: tl.constexpr = stored.shape[0]
    grouped = tl.reshape(widen_e4m3(stored, tl.float32, HAS_FP8), [KEYS, GROUPS, GROUP])
    return tl.reshape((grouped * scale[:, :, None]).to(DTYPE), [KEYS, WIDTH])


@triton.jit
def load_rope(
    rows,
    is_read,
    WIDTH: tl.constexpr,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_FP8: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Rotated columns [keys, WIDTH] in DTYPE as stored; 0 past D_R and for rows that are not read.

    IS_ALIGNED  16-bit and float32 values in a row are aligned to their size
    """
    column = tl.arange(0, WIDTH)
    mask = is_read[:, None]
    if WIDTH > D_R:
        mask = mask & (column < D_R)[None, :]
    if FORMAT == "bf16" or FORMAT == "fp16" or FORMAT == "fp32":
        return tl.load(rows[:, None] + (D_C + column)[None, :], mask=mask, other=0).to(DTYPE)
    if FORMAT == "fp8":
        stored = tl.load(rows[:, None] + (D_C + column)[None, :], mask=mask, other=0)
        return widen_e4m3(stored, DTYPE, HAS_FP8)
    AT: tl.constexpr = D_C + (4 * ((D_C + 127) // 128) if FORMAT == "fp8_block128" else 0)
    if IS_ALIGNED:
        values = (rows + AT).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        return tl.load(values[:, None] + column[None, :], mask=mask, other=0).to(DTYPE)
    at = rows[:, None] + (AT + 2 * column)[None, :]
    low = tl.load(at, mask=mask, other=0).to(tl.uint16)
    high = tl.load(at + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.bfloat16, bitcast=True).to(DTYPE)


@triton.jit
def load_factor(
    rows,
    scales,
    is_read,
    PIECE: tl.constexpr,
    D_C: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """float32 [keys] that multiplies the columns of a piece; of fp8_token and fp8_block128 only."""
    if FORMAT == "fp8_token":
        factor = tl.load(scales, mask=is_read, other=0.0)
        return tl.where(factor < 0, 0.0, factor)  # a NaN stays one
    at = rows + (D_C + 4 * PIECE)
    if IS_ALIGNED:
        return tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True), mask=is_read, other=0.0)
    bits = tl.load(at, mask=is_read, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(at + byte, mask=is_read, other=0).to(tl.int32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_row_tile(
    rows,
    scales,
    is_read,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,  # 0 where rows have no rotated columns
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    HAS_FP8: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """(latent, rope, factors) of a tile of keys.

    latent   a tuple of PIECES [keys, WIDTH] in DTYPE, as stored
    rope     [keys, ROPE_WIDTH] in ROPE_DTYPE, as stored; not to be used where that is 0
    factors  a tuple of float32 [keys]: one per piece (fp8_block128), one (fp8_token), or empty
    """
    latent = ()
    factors = ()
    for piece in tl.static_range(PIECES):
        tile = load_latent(rows, scales, is_read, piece, WIDTH, D_C, FORMAT, DTYPE, HAS_FP8)
        latent += (tile,)
        if FORMAT == "fp8_block128":
            factor = load_factor(rows, scales, is_read, piece, D_C, FORMAT, IS_ALIGNED)
            factors += (factor,)
    if FORMAT == "fp8_token":
        factors = (load_factor(rows, scales, is_read, 0, D_C, FORMAT, IS_ALIGNED),)
    rope = latent[0]  # not None, which no tuple can hold
    if ROPE_WIDTH > 0:
        rope = load_rope(
            rows, is_read, ROPE_WIDTH, D_C, D_R, FORMAT, ROPE_DTYPE, HAS_FP8, IS_ALIGNED
        )
    return latent, rope, factors


@triton.jit
def score_keys(
    q,  # a tuple of PIECES [rows, WIDTH], in the type of `latent`
    q_rope,  # [rows, ROPE_WIDTH] in the type of `rope`, or None
    latent,
    rope,
    factors,
    PIECES: tl.constexpr,
    FORMAT: tl.constexpr,
    scale=None,
):
    """q·row, float32 [rows, keys], with every scale of a row applied; a tensor's one is not.

    With a `scale` the result is multiplied by it; latent and rotated columns are then summed apart.
    """
    scores = tl.dot(q[0], tl.trans(latent[0]), input_precision="ieee")
    if FORMAT == "fp8_block128":
        scores *= factors[0][None, :]
    for piece in tl.static_range(1, PIECES):
        if FORMAT == "fp8_block128":
            piece_scores = tl.dot(q[piece], tl.trans(latent[piece]), input_precision="ieee")
            scores += piece_scores * factors[piece][None, :]
        else:
            scores = tl.dot(q[piece], tl.trans(latent[piece]), scores, input_precision="ieee")
    if q_rope is not None:
        if scale is None:
            scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        else:
            # a product on both sides: a plain sum would become one chain of dots again
            rotated = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
            scores = scores * scale + rotated * scale
    elif scale is not None:
        scores *= scale
    if FORMAT == "fp8_token":
        scores *= factors[0][None, :]
    return scores


@triton.jit
def accumulate_pv(
    acc,  # a tuple of [rows, WIDTH] float32
    probs,  # [rows, keys] float32
    rescale,  # [rows], of acc
    latent,
    factors,
    VALUE_PIECES: tl.constexpr,
    FORMAT: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
):
    """acc · rescale + P·V, times VALUE_UNIT.

    P is rounded to the type of the columns, once. Times the factors it may be small: float16 then
    needs a VALUE_UNIT above 1 (`value_unit`).
    """
    result = ()
    for piece in tl.static_range(VALUE_PIECES):
        scaled = probs
        if FORMAT == "fp8_block128":
            scaled = probs * (factors[piece] * VALUE_UNIT)[None, :]
        elif FORMAT == "fp8_token":
            scaled = probs * (factors[0] * VALUE_UNIT)[None, :]
        columns = latent[piece]
        rescaled = acc[piece] * rescale[:, None]
        result += (tl.dot(scaled.to(columns.dtype), columns, rescaled, input_precision="ieee"),)
    return result


@triton.jit
def accumulate_rope_pv(
    acc,  # [rows, ROPE_WIDTH] float32
    probs,
    rescale,
    rope,
    factors,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,  # of P for the latent columns
    VALUE_UNIT: tl.constexpr,  # of fp8_token only: other formats do not scale these columns
):
    """`accumulate_pv` for rotated columns; in float32 where their type is another one."""
    if FORMAT == "fp8_token":
        probs = probs * (factors[0] * VALUE_UNIT)[None, :]
    acc = acc * rescale[:, None]
    if rope.dtype == DTYPE:
        acc = tl.dot(probs.to(DTYPE), rope, acc, input_precision="ieee")
    else:
        acc = tl.dot(probs, rope.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def merge_split(row_max, row_sum, acc, split_lse, split_out):
    """Take one split into a running merge: its lse [rows] and its out [rows, columns].

    row_max [rows] is the largest lse so far, in base 2; row_sum [rows] and acc [rows, columns] are
    Σ 2^(lse − row_max) over the splits, alone and times their out.
    """
    split_log2 = split_lse * 1.4426950408889634  # log2(e)
    new_max = tl.maximum(row_max, split_log2)
    # before the first split with a key row_max is −inf, and −inf − (−inf) would be NaN
    anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - anchor)
    scale = tl.exp2(split_log2 - anchor)
    acc = acc * rescale[:, None] + split_out.to(tl.float32) * scale[:, None]
    return new_max, row_sum * rescale + scale, acc


@triton.jit
def merge_splits(row_max, row_sum, acc, split_lse, split_outs):
    """`merge_split` for several at once: lse [splits, rows], out [splits, rows, columns]."""
    split_log2 = split_lse * 1.4426950408889634  # log2(e)
    new_max = tl.maximum(row_max, tl.max(split_log2, 0))
    anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - anchor)
    scale = tl.exp2(split_log2 - anchor[None, :])
    # the out of a split without keys is never written
    split_outs = tl.where((split_lse == -float("inf"))[:, :, None], 0.0, split_outs)
    acc = acc * rescale[:, None] + tl.sum(split_outs * scale[:, :, None], 0)
    return new_max, row_sum * rescale + tl.sum(scale, 0), acc


@triton.jit
def finish_merge(row_max, row_sum, acc, sink_log2):
    """(out, lse) of a running merge."""
    denominator, lse = finish_softmax(row_max, row_sum, sink_log2)
    return acc / denominator[:, None], lse


@triton.jit
def store_merged(
    row_max,
    row_sum,
    acc,  # [rows, COLUMNS]
    sink,  # [heads] float32, or None
    stride_sink,
    head,  # [rows]
    out_rows,  # pointers [rows]
    lse_at,  # pointers [rows]
    is_row,  # [rows]
    V_WIDTH: tl.constexpr,
):
    """Write (out, lse) of a running merge, with the sink of each row's head."""
    sink_log2 = None
    if sink is not None:
        sink_log2 = tl.load(sink + head * stride_sink, mask=is_row, other=0.0)
        sink_log2 *= 1.4426950408889634  # log2(e)
    merged, merged_lse = finish_merge(row_max, row_sum, acc, sink_log2)
    column = tl.arange(0, acc.shape[1])
    tl.store(
        out_rows[:, None] + column[None, :],
        merged.to(out_rows.dtype.element_ty),
        mask=is_row[:, None] & (column < V_WIDTH)[None, :],
    )
    tl.store(lse_at, merged_lse, mask=is_row)


@triton.jit
def load_query(
    rows,  # pointers [rows]
    is_row,  # [rows]
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Columns [FIRST, FIRST + WIDTH) of queries in DTYPE, 0 from LAST on; bytes are e4m3."""
    column = FIRST + tl.arange(0, WIDTH)
    mask = is_row[:, None]
    if FIRST + WIDTH > LAST:
        mask = mask & (column < LAST)[None, :]
    stored = tl.load(rows[:, None] + column[None, :], mask=mask, other=0)
    IS_BYTES: tl.constexpr = stored.dtype == tl.uint8
    return widen_e4m3(stored, DTYPE, HAS_FP8) if IS_BYTES else stored.to(DTYPE)
