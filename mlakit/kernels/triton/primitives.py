"""Device functions that several portable kernels share: e4m3, masks, online softmax, cache rows,
merging of splits. None of them is a kernel.

Lineage    own design; ideas: online softmax (Milakov and Gimelshein), FlashAttention's tiling of it
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow_e4m3(x, HAS_FP8: tl.constexpr):
    """Float `x` as e4m3 bytes: to nearest even, saturated at ±448; NaN becomes 0x7F or 0xFF."""
    x = x.to(tl.float32)
    if HAS_FP8:
        byte = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448.0
        # keep 3 of 23 mantissa bits; if they round up to 8, the carry goes to the exponent
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        normal = rounded - ((127 - 7) << 3)
        # float32 values above 2**14 are 2**-9 apart, like e4m3's subnormals: the sum rounds to them
        shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        byte = tl.where(magnitude < 0x3C800000, subnormal, normal)  # 2**-6
        byte = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, byte)
        byte = (byte | ((bits >> 24) & 0x80)).to(tl.uint8)
    return byte


@triton.jit
def find_request(token, is_token, q_starts, q_starts_stride, batch, PROBES: tl.constexpr):
    """The request of each query token, int64 [T]; that of a row that is no token is arbitrary."""
    request = tl.zeros_like(token)
    probe = tl.arange(0, PROBES)[None, :]
    span = batch
    # The request is in [request, request + span): the last one that starts at or before the
    # token, which skips empty requests. Each iteration compares PROBES starts.
    while span > 1:
        step = tl.cdiv(span, PROBES)
        candidate = request[:, None] + probe * step  # [T, PROBES]
        inside = is_token[:, None] & (candidate < batch)
        start = tl.load(q_starts + candidate * q_starts_stride, mask=inside, other=0)
        begun = inside & (start <= token[:, None])
        request += tl.maximum(tl.sum(begun.to(tl.int32), 1) - 1, 0) * step
        span = step
    return request


@triton.jit
def find_rows(
    request,  # int64 [T]
    position,  # int64 [T]
    is_used,  # [T]
    page_table,  # `PageTableArguments`
    stride_table_request,
    PAGE_SIZE: tl.constexpr,
):
    """Return (page, row in the page), int64, of rows at positions in their requests.

    The page of an empty entry is negative; that of a position that is not used is arbitrary.
    """
    if page_table.starts is None:
        entries = page_table.entries + request * stride_table_request
        entry = entries + position // PAGE_SIZE * page_table.stride_entry
        page = tl.load(entry, mask=is_used, other=0).to(tl.int64)
        offset = position % PAGE_SIZE
    else:
        start_at = page_table.starts + request * page_table.stride_starts
        start = tl.load(start_at, mask=is_used, other=0).to(tl.int64)
        entry = page_table.entries + (start + position) * page_table.stride_entry
        slot = tl.load(entry, mask=is_used, other=0).to(tl.int64)
        # `//` truncates, and would put a negative slot into page 0
        page = tl.where(slot < 0, -1, slot // PAGE_SIZE)
        offset = slot % PAGE_SIZE
    return page, offset


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def mask_interval(position, kv_len, window, MASK: tl.constexpr):
    """The keys [first, last) that queries at int32 `position`, a scalar or a block, attend to.

    MASK  `MaskTraits`, of which this knows the `INTERVAL_TRAITS`
    """
    first = position * 0
    last = first + kv_len
    if MASK.IS_SLIDING:
        first = tl.maximum(position - window + 1, 0)
    if MASK.IS_CHUNKED:
        # `//` truncates; before position 0 there is no chunk and no visible key
        first = tl.maximum(position, 0) // window * window
        last = tl.where(position < 0, 0, tl.minimum(first + window, kv_len))
    if MASK.IS_CAUSAL:
        last = tl.minimum(position + 1, last)
    if MASK.IS_COMPRESSED:
        last = last // window
    return first, tl.maximum(last, first)


@triton.jit
def softmax_step(scores, row_max, row_sum, scale_log2):
    """One step of the online softmax, in base 2, over a block of scores.

    scores      [rows, keys] float32; the logit is scores · scale_log2, scale_log2 > 0
    row_max     [rows] largest logit so far, −inf before the first
    row_sum     [rows] Σ 2^(logit − row_max) so far
    Returns (probs [rows, keys] of this block, rescale [rows] of the accumulator, row_max, row_sum).
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # before the first key row_max is −inf, and −inf − (−inf) would be NaN
    anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
    probs = tl.exp2(scores * scale_log2 - anchor[:, None])
    rescale = tl.exp2(row_max - anchor)
    return probs, rescale, new_max, row_sum * rescale + tl.sum(probs, 1)


@triton.jit
def finish_softmax(row_max, row_sum, sink_log2):
    """Return (denominator of out, natural-log lse) of an online softmax; `sink_log2` or None."""
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
def load_sink(outputs, head, is_row):
    """The attention sink of each row's head in base 2, [rows]; outputs is `OutputArguments`."""
    sink = tl.load(outputs.sink + head * outputs.stride_sink, mask=is_row, other=0.0)
    return sink * 1.4426950408889634  # log2(e)


@triton.jit
def widen_e4m3(stored, dtype: tl.constexpr, HAS_FP8: tl.constexpr):
    """e4m3 bytes as values of `dtype`, exactly; 0x7F and 0xFF are NaN."""
    if HAS_FP8:
        # through float16: for a direct cast to bfloat16 some Triton versions emit an instruction of
        # sm_90 on sm_89
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    # float16 with the same bits is 2**8 too small: its exponent bias is 15, that of e4m3 is 7
    bits = stored.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(dtype)


@triton.jit
def pack_e2m1(x):
    """float32 x [rows, columns] as e2m1, two in a byte, uint8 [rows, columns / 2]: to nearest even,
    saturated at ±6; NaN and −0 become 0."""
    magnitude = tl.abs(x)
    # a value between two codes belongs to the even one
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
    code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    code |= (x < 0).to(tl.int32) << 3
    first, second = tl.split(tl.reshape(code, [x.shape[0], x.shape[1] // 2, 2]))
    return (first | (second << 4)).to(tl.uint8)


@triton.jit
def unpack_e2m1(stored):
    """Bytes [rows, columns] as float32 [rows, 2 · columns], exactly: the first of two values is in
    the lower half of a byte."""
    code = tl.interleave(stored & 0xF, stored >> 4).to(tl.uint16)
    # float16 with the same bits is 2**14 too small: its exponent bias is 15, that of e2m1 is 1
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


# Cache rows. `rows` are pointers [keys] to payload rows (FP8 as uint8), `beside` to what is beside
# them, scales or rotated columns, or None. ROW is a `rows.RowTraits`: latent columns come in
# ROW.PIECES tiles of ROW.WIDTH columns, a power of two. In a format with one scale per group of
# columns a piece is at most a group: each piece then has one scale per key, which multiplies dot
# products over the piece instead of its columns. If such groups have rotated columns too, these are
# the last pieces.


@triton.jit
def load_latent(rows, scales, is_read, PIECE: tl.constexpr, ROW: tl.constexpr):
    """Latent columns of one piece, [keys, ROW.WIDTH] in ROW.DTYPE: as stored, to be multiplied by
    `load_factor`. Only columns with e8m0 scales are dequantised: these are powers of two. A piece
    of rotated columns is in ROW.ROPE_DTYPE.

    is_read  [keys]; other rows, and columns past D_C, are 0
    """
    DTYPE: tl.constexpr = ROW.DTYPE if PIECE * ROW.WIDTH < ROW.Q_COLUMNS else ROW.ROPE_DTYPE
    # columns in an element of a row
    PER_ELEMENT: tl.constexpr = 2 if ROW.FORMAT.IS_E2M1 else 1
    WIDTH: tl.constexpr = ROW.WIDTH // PER_ELEMENT
    column = PIECE * WIDTH + tl.arange(0, WIDTH)
    mask = is_read[:, None]
    if (PIECE + 1) * ROW.WIDTH > ROW.D_C:
        mask = mask & (column < ROW.D_C // PER_ELEMENT)[None, :]
    stored = tl.load(rows[:, None] + column[None, :], mask=mask, other=0)
    if ROW.FORMAT.IS_E2M1:
        values = unpack_e2m1(stored)
        columns = _dequant_e8m0(values, rows + ROW.FORMAT.SCALES_AT, is_read, PIECE, ROW)
    elif not ROW.FORMAT.IS_E4M3:
        columns = stored.to(DTYPE)
    elif ROW.FORMAT.HAS_E8M0_SCALES:
        values = widen_e4m3(stored, tl.float32, ROW.HAS_FP8)
        columns = _dequant_e8m0(values, scales, is_read, PIECE, ROW)
    else:
        columns = widen_e4m3(stored, DTYPE, ROW.HAS_FP8)
    return columns


@triton.jit
def _dequant_e8m0(values, scales, is_read, PIECE: tl.constexpr, ROW: tl.constexpr):
    """float32 values [keys, WIDTH] times their e8m0 scales, in ROW.DTYPE."""
    WIDTH: tl.constexpr = ROW.WIDTH
    GROUP: tl.constexpr = min(ROW.FORMAT.GROUP, WIDTH)
    GROUPS: tl.constexpr = WIDTH // GROUP
    first = PIECE * WIDTH + GROUP * tl.arange(0, GROUPS)
    mask = is_read[:, None] & (first < ROW.D_C)[None, :]
    # e8m0 has the exponent bias of float32; 255 is NaN, 0 is 2**-127, a subnormal
    code = tl.load(scales[:, None] + (first // ROW.FORMAT.GROUP)[None, :], mask=mask, other=127).to(
        tl.int32
    )
    bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
    scale = bits.to(tl.float32, bitcast=True)  # [keys, GROUPS]
    KEYS: tl.constexpr = values.shape[0]
    grouped = tl.reshape(values, [KEYS, GROUPS, GROUP])
    return tl.reshape((grouped * scale[:, :, None]).to(ROW.DTYPE), [KEYS, WIDTH])


@triton.jit
def load_rope(rows, beside, is_read, ROW: tl.constexpr):
    """Rotated columns [keys, ROW.ROPE_WIDTH] in ROW.ROPE_DTYPE as stored; 0 past D_R and in rows
    that are not read."""
    DTYPE: tl.constexpr = ROW.ROPE_DTYPE
    column = tl.arange(0, ROW.ROPE_WIDTH)
    mask = is_read[:, None]
    if ROW.ROPE_WIDTH > ROW.D_R:
        mask = mask & (column < ROW.D_R)[None, :]
    if ROW.FORMAT.ROPE_AT < 0:
        stored = tl.load(beside[:, None] + column[None, :], mask=mask, other=0)
        return widen_e4m3(stored, DTYPE, ROW.HAS_FP8) if ROW.FORMAT.IS_E4M3 else stored.to(DTYPE)
    if not ROW.FORMAT.IS_BF16_ROPE:
        stored = tl.load(rows[:, None] + (ROW.D_C + column)[None, :], mask=mask, other=0)
        return widen_e4m3(stored, DTYPE, ROW.HAS_FP8) if ROW.FORMAT.IS_E4M3 else stored.to(DTYPE)
    AT: tl.constexpr = ROW.FORMAT.ROPE_AT
    if ROW.IS_ALIGNED:
        values = (rows + AT).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        return tl.load(values[:, None] + column[None, :], mask=mask, other=0).to(DTYPE)
    at = rows[:, None] + (AT + 2 * column)[None, :]
    low = tl.load(at, mask=mask, other=0).to(tl.uint16)
    high = tl.load(at + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.bfloat16, bitcast=True).to(DTYPE)


@triton.jit
def load_factor(rows, scales, is_read, PIECE: tl.constexpr, ROW: tl.constexpr):
    """float32 [keys] that multiplies the columns of a piece; only where ROW.FACTORS is not ""."""
    if ROW.FORMAT.HIDES_NEGATIVE:
        factor = tl.load(scales, mask=is_read, other=0.0)
        return tl.where(factor < 0, 0.0, factor)  # a NaN stays one
    if ROW.FORMAT.SCALES_AT < 0:
        return tl.load(scales + PIECE, mask=is_read, other=0.0)
    at = rows + (ROW.FORMAT.SCALES_AT + 4 * PIECE)
    if ROW.IS_ALIGNED:
        return tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True), mask=is_read, other=0.0)
    bits = tl.load(at, mask=is_read, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(at + byte, mask=is_read, other=0).to(tl.int32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_block_factors(rows, is_read, ROW: tl.constexpr):
    """float32 [keys, PIECES padded]: the factors of all pieces, which rows hold, in one load."""
    PIECES: tl.constexpr = ROW.PIECES
    COLUMNS: tl.constexpr = triton.next_power_of_2(PIECES)
    column = tl.arange(0, COLUMNS)
    mask = is_read[:, None]
    if COLUMNS > PIECES:
        mask = mask & (column < PIECES)[None, :]
    at = (rows + ROW.FORMAT.SCALES_AT).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(at[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_row_tile(rows, beside, is_read, ROW: tl.constexpr, HAS_FACTOR_TILE: tl.constexpr = False):
    """Return (latent, rope, factors) of a tile of keys.

    latent   a tuple of ROW.PIECES [keys, ROW.WIDTH] in ROW.DTYPE, as stored
    rope     [keys, ROW.ROPE_WIDTH] in ROW.ROPE_DTYPE, as stored; unused where ROPE_WIDTH is 0
    factors  a tuple of float32 [keys], as many as ROW.FACTORS says

    HAS_FACTOR_TILE: all factors that a row holds come with one load, which takes fewer
    registers. Loads of single factors are repeated by every thread that needs one.
    """
    latent = ()
    factors = ()
    PIECES: tl.constexpr = ROW.PIECES
    AT_ONCE: tl.constexpr = HAS_FACTOR_TILE and ROW.FORMAT.SCALES_AT >= 0 and ROW.IS_ALIGNED
    if AT_ONCE:
        block_factors = _load_block_factors(rows, is_read, ROW)
        column = tl.arange(0, block_factors.shape[1])[None, :]
    for piece in tl.static_range(PIECES):
        latent += (load_latent(rows, beside, is_read, piece, ROW),)
        if AT_ONCE:
            factors += (tl.sum(tl.where(column == piece, block_factors, 0.0), 1),)
        elif ROW.FACTORS == "piece":
            factors += (load_factor(rows, beside, is_read, piece, ROW),)
    if ROW.FACTORS == "row":
        factors = (load_factor(rows, beside, is_read, 0, ROW),)
    rope = latent[0]  # not None: a returned tuple cannot hold it
    if ROW.ROPE_WIDTH > 0:
        rope = load_rope(rows, beside, is_read, ROW)
    return latent, rope, factors


@triton.jit
def zero_acc(ROWS: tl.constexpr, ROW: tl.constexpr):
    """Accumulators of ROWS query rows: a tuple of [ROWS, ROW.WIDTH], one per piece of values."""
    # in Triton 3.6 a shape and a static_range take no member of a constexpr
    VALUE_PIECES: tl.constexpr = ROW.VALUE_PIECES
    WIDTH: tl.constexpr = ROW.WIDTH
    acc = ()
    for _ in tl.static_range(VALUE_PIECES):
        acc += (tl.zeros([ROWS, WIDTH], tl.float32),)
    return acc


@triton.jit
def score_keys(
    q,  # a tuple of ROW.PIECES [rows, ROW.WIDTH], in the type of `latent`
    q_rope,  # [rows, ROW.ROPE_WIDTH] in the type of `rope`, or None
    latent,
    rope,
    factors,
    ROW: tl.constexpr,
    scale=None,
):
    """q·row, float32 [rows, keys], times the scales of a row, but not times the tensor's scale.

    With `scale` the result is multiplied by it, and latent and rotated columns are summed
    separately.
    """
    scores = tl.dot(q[0], tl.trans(latent[0]), input_precision="ieee")
    if ROW.FACTORS == "piece":
        scores *= factors[0][None, :]
    PIECES: tl.constexpr = ROW.PIECES
    for piece in tl.static_range(1, PIECES):
        if ROW.FACTORS == "piece":
            piece_scores = tl.dot(q[piece], tl.trans(latent[piece]), input_precision="ieee")
            scores += piece_scores * factors[piece][None, :]
        else:
            scores = tl.dot(q[piece], tl.trans(latent[piece]), scores, input_precision="ieee")
    if q_rope is not None:
        if scale is None:
            scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        else:
            # a product on both sides: the compiler would fuse a plain sum into one chain of dots
            rotated = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
            scores = scores * scale + rotated * scale
    elif scale is not None:
        scores *= scale
    if ROW.FACTORS == "row":
        scores *= factors[0][None, :]
    return scores


@triton.jit
def accumulate_pv(
    acc,  # a tuple of [rows, WIDTH] float32
    probs,  # [rows, keys] float32
    rescale,  # [rows], of acc
    latent,
    factors,
    ROW: tl.constexpr,
):
    """acc · rescale + P·V, times ROW.VALUE_UNIT.

    P is rounded once, to the type of the columns. P times the factors may be small: float16 then
    needs a VALUE_UNIT above 1 (`rows.value_unit`).
    """
    result = ()
    VALUE_PIECES: tl.constexpr = ROW.VALUE_PIECES
    for piece in tl.static_range(VALUE_PIECES):
        scaled = probs
        if ROW.FACTORS == "piece":
            scaled = probs * (factors[piece] * ROW.VALUE_UNIT)[None, :]
        elif ROW.FACTORS == "row":
            scaled = probs * (factors[0] * ROW.VALUE_UNIT)[None, :]
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
    ROW: tl.constexpr,
):
    """`accumulate_pv` of rotated columns, in float32 where their type is not that of P.

    VALUE_UNIT multiplies them only where a factor belongs to a whole row.
    """
    if ROW.FACTORS == "row":
        probs = probs * (factors[0] * ROW.VALUE_UNIT)[None, :]
    acc = acc * rescale[:, None]
    if rope.dtype == ROW.DTYPE:
        acc = tl.dot(probs.to(ROW.DTYPE), rope, acc, input_precision="ieee")
    else:
        acc = tl.dot(probs, rope.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def merge_split(row_max, row_sum, acc, split_lse, split_out):
    """Merge one split, with lse [rows] and out [rows, columns], into the running merge.

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
    """Return (out, lse) of a running merge."""
    denominator, lse = finish_softmax(row_max, row_sum, sink_log2)
    return acc / denominator[:, None], lse


@triton.jit
def store_merged(
    row_max,
    row_sum,
    acc,  # [rows, COLUMNS]
    outputs,  # `OutputArguments`
    head,  # [rows]
    out_rows,  # pointers [rows]
    lse_at,  # pointers [rows]
    is_row,  # [rows]
    V_WIDTH: tl.constexpr,
):
    """Store (out, lse) of a running merge, with the sink of each row's head."""
    sink_log2 = None
    if outputs.sink is not None:
        sink_log2 = load_sink(outputs, head, is_row)
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
    """Columns [FIRST, FIRST + WIDTH) of queries in DTYPE, 0 from LAST on; uint8 is e4m3."""
    column = FIRST + tl.arange(0, WIDTH)
    mask = is_row[:, None]
    if FIRST + WIDTH > LAST:
        mask = mask & (column < LAST)[None, :]
    stored = tl.load(rows[:, None] + column[None, :], mask=mask, other=0)
    IS_BYTES: tl.constexpr = stored.dtype == tl.uint8
    return widen_e4m3(stored, DTYPE, HAS_FP8) if IS_BYTES else stored.to(DTYPE)


@triton.jit
def load_latent_query(rows, rope_rows, is_row, ROW: tl.constexpr):
    """The columns of queries that all pieces need: a tuple of ROW.PIECES [rows, ROW.WIDTH].

    rope_rows  pointers [rows] to the rotated query, for pieces of rotated columns
    """
    q = ()
    PIECES: tl.constexpr = ROW.PIECES
    ROTATED: tl.constexpr = ROW.D_C - ROW.Q_COLUMNS
    for piece in tl.static_range(PIECES):
        if piece * ROW.WIDTH < ROW.Q_COLUMNS:
            columns = load_query(
                rows, is_row, piece * ROW.WIDTH, ROW.WIDTH, ROW.Q_COLUMNS, ROW.DTYPE, ROW.HAS_FP8
            )
        else:
            # the first column has no name: a loop over two such pieces would define it twice
            columns = load_query(
                rope_rows,
                is_row,
                piece * ROW.WIDTH - ROW.Q_COLUMNS,
                ROW.WIDTH,
                ROTATED,
                ROW.ROPE_DTYPE,
                ROW.HAS_FP8,
            )
        q += (columns,)
    return q
