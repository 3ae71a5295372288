"""RoPE on queries and keys, RMSNorm on the latent, quantise, append: one kernel for a step.

Work    the first programs make the cache rows of ROWS tokens each, latent and key; the others
        rotate HEADS queries of a token. Each finds the positions and slots of its own tokens,
        with its inputs already under way: it is given them, or finds the request of each token
        and looks them up there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.kernels.triton.norm_rope_quant_steps import (
    BLOCK_SCALES,
    NO_SCALE,
    TENSOR_SCALE,
    TOKEN_SCALE,
    divide,
    encode,
    find_scales,
    load_angles,
    load_pairs,
    normalise,
    rotate,
    store_elements,
    store_pairs,
    store_scales,
)


@triton.jit(
    do_not_specialize=[
        "tokens",
        "heads",
        "batch",
        "num_positions",
        "norm_programs",
        "kv_starts_stride",
        "table_stride_request",
        "kv_lens_stride",
        "q_starts_stride",
        "slots_stride",
        "positions_stride",
    ]
)
def append_kernel(
    q_rope,  # [tokens, heads, D_R]
    kv,  # [tokens, D_C + D_R]
    freqs,  # [positions, D_R]
    gamma,  # [D_C]
    payload,  # [pages, PAGE_SIZE, row], e4m3 as uint8
    scales,  # [pages, PAGE_SIZE, 1 or FOOTER_BYTES]; None where no scale is beside the row
    tensor_scale,
    tensor_scale_at,  # where it is instead, or None
    kv_starts,  # [batch + 1]; None if `table` names pages
    table,  # [batch, max_pages] pages, or [slots]; None, as the next two, if `slots` is given
    kv_lens,  # [batch], the new tokens included
    q_starts,  # [batch + 1]
    slots,  # [tokens] or None; -1: no row is written
    positions,  # [tokens] or None; anything where `slots` is -1
    q_rope_out,  # [tokens, heads, D_R], e4m3 as uint8
    tokens,
    heads,
    batch,
    num_positions,  # of freqs
    epsilon,
    norm_programs,
    q_stride_token,
    q_stride_head,
    kv_stride_token,
    freqs_stride_position,
    freqs_stride_column,
    gamma_stride,
    payload_stride_page,
    payload_stride_row,
    scales_stride_page,
    scales_stride_row,
    kv_starts_stride,
    table_stride_request,
    table_stride_column,
    kv_lens_stride,
    q_starts_stride,
    slots_stride,
    positions_stride,
    out_stride_token,
    out_stride_head,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,  # columns of the tile that share a scale
    POWER_OF_TWO: tl.constexpr,
    SMALLEST: tl.constexpr,  # scale
    ALIGNED: tl.constexpr,  # rows start at multiples of 4 bytes
    INTERLEAVED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    LATENT_TILE: tl.constexpr,  # D_C padded
    PAIRS: tl.constexpr,  # D_R / 2 padded
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PROBES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cache rows of ROWS tokens (the first programs), or HEADS rotated queries of a token."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < norm_programs:
        _append_rows(
            program.to(tl.int64) * ROWS + tl.arange(0, ROWS),
            kv,
            freqs,
            gamma,
            payload,
            scales,
            tensor_scale,
            tensor_scale_at,
            kv_starts,
            table,
            kv_lens,
            q_starts,
            slots,
            positions,
            tokens,
            batch,
            num_positions,
            epsilon,
            kv_stride_token,
            freqs_stride_position,
            freqs_stride_column,
            gamma_stride,
            payload_stride_page,
            payload_stride_row,
            scales_stride_page,
            scales_stride_row,
            kv_starts_stride,
            table_stride_request,
            table_stride_column,
            kv_lens_stride,
            q_starts_stride,
            slots_stride,
            positions_stride,
            D_C,
            D_R,
            PAGE_SIZE,
            SCALING,
            GROUP,
            POWER_OF_TWO,
            SMALLEST,
            ALIGNED,
            INTERLEAVED,
            HAS_FP8,
            LATENT_TILE,
            PAIRS,
            PROBES,
            q_rope.dtype.element_ty,
        )
    elif D_R > 0:
        block = program - norm_programs
        head_blocks = tl.cdiv(heads, HEADS)
        _rotate_queries(
            (block // head_blocks).to(tl.int64) + tl.arange(0, 1),
            (block % head_blocks).to(tl.int64) * HEADS + tl.arange(0, HEADS),
            q_rope,
            freqs,
            kv_lens,
            q_starts,
            positions,
            q_rope_out,
            tokens,
            heads,
            batch,
            num_positions,
            q_stride_token,
            q_stride_head,
            freqs_stride_position,
            freqs_stride_column,
            kv_lens_stride,
            q_starts_stride,
            positions_stride,
            out_stride_token,
            out_stride_head,
            D_R,
            INTERLEAVED,
            HAS_FP8,
            PAIRS,
            PROBES,
        )


@triton.jit
def _append_rows(
    token,  # int64 [T]
    kv,
    freqs,
    gamma,
    payload,
    scales,
    tensor_scale,
    tensor_scale_at,
    kv_starts,
    table,
    kv_lens,
    q_starts,
    slots,
    positions,
    tokens,
    batch,
    num_positions,
    epsilon,
    kv_stride_token,
    freqs_stride_position,
    freqs_stride_column,
    gamma_stride,
    payload_stride_page,
    payload_stride_row,
    scales_stride_page,
    scales_stride_row,
    kv_starts_stride,
    table_stride_request,
    table_stride_column,
    kv_lens_stride,
    q_starts_stride,
    slots_stride,
    positions_stride,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SMALLEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    LATENT_TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    PROBES: tl.constexpr,
    Q_DTYPE: tl.constexpr,
):
    """Normalise and rotate the latents of tokens, and store those that have a slot in the cache."""
    STORED: tl.constexpr = tl.uint8 if SCALING != NO_SCALE else payload.dtype.element_ty
    ROPE_STORED: tl.constexpr = tl.bfloat16 if SCALING >= TOKEN_SCALE else STORED
    ROPE_IS_SCALED: tl.constexpr = SCALING >= TENSOR_SCALE and SCALING <= TOKEN_SCALE
    # inline scales of a block format lie between the latent and the rope, other scales elsewhere
    INLINE_BYTES: tl.constexpr = 4 * ((D_C + GROUP - 1) // GROUP) if SCALING == BLOCK_SCALES else 0
    live = token < tokens
    column = tl.arange(0, LATENT_TILE)
    in_row = (column < D_C)[None, :]
    at = kv + token * kv_stride_token  # [T]
    x = tl.load(at[:, None] + column[None, :], mask=live[:, None] & in_row, other=0.0)
    weight = tl.load(gamma + column * gamma_stride, mask=column < D_C, other=0.0)
    if D_R > 0:
        k0, k1 = load_pairs((at + D_C)[:, None, None], live[:, None, None], D_R, PAIRS, INTERLEAVED)

    request, position, has_angle = _find_positions(
        token,
        live,
        q_starts,
        q_starts_stride,
        kv_lens,
        kv_lens_stride,
        positions,
        positions_stride,
        batch,
        num_positions,
        PROBES,
    )
    page, offset, is_stored = _find_slots(
        token,
        request,
        position,
        live,
        kv_starts,
        kv_starts_stride,
        table,
        table_stride_request,
        table_stride_column,
        slots,
        slots_stride,
        PAGE_SIZE,
    )
    row = payload + page * payload_stride_page + offset * payload_stride_row  # [T]

    latent = normalise(x, weight, epsilon, D_C)
    if D_C < LATENT_TILE:
        # x is 0 there, but its row may be multiplied by infinity
        latent = tl.where(in_row, latent, 0.0)
    rope_scale = tl.zeros_like(token).to(tl.float32)[:, None, None]
    if SCALING == TENSOR_SCALE:
        rope_scale += tensor_scale
        if tensor_scale_at is not None:
            rope_scale = tl.zeros_like(rope_scale) + tl.load(tensor_scale_at).to(tl.float32)
        latent = divide(latent, tl.reshape(rope_scale, [token.shape[0], 1]))
    elif SCALING >= TOKEN_SCALE:
        grouped = tl.reshape(latent, [token.shape[0], LATENT_TILE // GROUP, GROUP])
        scale = find_scales(grouped, SMALLEST, POWER_OF_TWO)  # [T, groups]
        grouped = divide(grouped, scale[:, :, None])
        latent = tl.reshape(grouped, [token.shape[0], LATENT_TILE])
        beside = row
        if scales is not None:
            beside = scales + page * scales_stride_page + offset * scales_stride_row
        store_scales(row + D_C, beside, scale, is_stored, D_C, GROUP, SCALING, ALIGNED)
        if SCALING == TOKEN_SCALE:
            rope_scale = scale[:, :, None]
    encoded = encode(latent, STORED, HAS_FP8)
    inside = is_stored[:, None] & in_row
    store_elements(row[:, None], column[None, :], encoded, inside, ALIGNED)

    if D_R > 0:
        cos, sin = load_angles(
            freqs, freqs_stride_position, freqs_stride_column, position, has_angle, D_R, PAIRS
        )
        y0, y1 = rotate(k0, k1, cos, sin)
        y0, y1 = y0.to(Q_DTYPE).to(tl.float32), y1.to(Q_DTYPE).to(tl.float32)
        if ROPE_IS_SCALED:
            y0, y1 = divide(y0, rope_scale), divide(y1, rope_scale)
        store_pairs(
            (row + D_C + INLINE_BYTES)[:, None, None],
            is_stored[:, None, None],
            y0,
            y1,
            ROPE_STORED,
            D_R,
            PAIRS,
            INTERLEAVED,
            ALIGNED,
            HAS_FP8,
        )


@triton.jit
def _rotate_queries(
    token,  # int64 [T]
    head,  # int64 [H]
    q_rope,
    freqs,
    kv_lens,
    q_starts,
    positions,
    q_rope_out,
    tokens,
    heads,
    batch,
    num_positions,
    q_stride_token,
    q_stride_head,
    freqs_stride_position,
    freqs_stride_column,
    kv_lens_stride,
    q_starts_stride,
    positions_stride,
    out_stride_token,
    out_stride_head,
    D_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    PROBES: tl.constexpr,
):
    """Rotate the queries of some tokens and heads; they are read before any is written.

    A query becomes 0 where the given position of its token is no row of freqs.
    """
    live = token < tokens
    inside = (live[:, None] & (head < heads)[None, :])[:, :, None]  # [T, H, 1]
    token_at, head_at = token[:, None, None], head[None, :, None]
    at = q_rope + token_at * q_stride_token + head_at * q_stride_head
    x0, x1 = load_pairs(at, inside, D_R, PAIRS, INTERLEAVED)
    _, position, has_angle = _find_positions(
        token,
        live,
        q_starts,
        q_starts_stride,
        kv_lens,
        kv_lens_stride,
        positions,
        positions_stride,
        batch,
        num_positions,
        PROBES,
    )
    cos, sin = load_angles(
        freqs, freqs_stride_position, freqs_stride_column, position, has_angle, D_R, PAIRS
    )
    y0, y1 = rotate(x0, x1, cos, sin)
    if positions is not None:
        y0 = tl.where(has_angle[:, None, None], y0, 0.0)
        y1 = tl.where(has_angle[:, None, None], y1, 0.0)
    store_pairs(
        q_rope_out + token_at * out_stride_token + head_at * out_stride_head,
        inside,
        y0,
        y1,
        q_rope_out.dtype.element_ty,
        D_R,
        PAIRS,
        INTERLEAVED,
        True,
        HAS_FP8,
    )


@triton.jit
def _find_positions(
    token,  # int64 [T]
    live,  # [T]
    q_starts,
    q_starts_stride,
    kv_lens,
    kv_lens_stride,
    positions,
    positions_stride,
    batch,
    num_positions,
    PROBES: tl.constexpr,
):
    """(request, position in it, has the position an angle?) of each token, the first two int64.

    With `positions` the request is not known, nor is it that of a token that is not live.
    """
    request = tl.zeros_like(token)
    if positions is None:
        probe = tl.arange(0, PROBES)[None, :]
        span = batch
        # the request is in [request, request + span): the last one that starts at or before the
        # token, which passes over empty ones; PROBES starts at a time narrow the span
        while span > 1:
            step = tl.cdiv(span, PROBES)
            candidate = request[:, None] + probe * step  # [T, PROBES]
            inside = live[:, None] & (candidate < batch)
            start = tl.load(q_starts + candidate * q_starts_stride, mask=inside, other=0)
            begun = inside & (start <= token[:, None])
            request += tl.maximum(tl.sum(begun.to(tl.int32), 1) - 1, 0) * step
            span = step
        # the last token of a request is its newest: it is at position kv_len - 1
        end = tl.load(q_starts + (request + 1) * q_starts_stride, mask=live, other=0)
        kv_len = tl.load(kv_lens + request * kv_lens_stride, mask=live, other=0)
        position = kv_len.to(tl.int64) - (end - token)
        # no host looked at the lengths: where they leave out new tokens, memory before the tables
        # must still be left alone
        has_angle = live & (position >= 0)
    else:
        position = tl.load(positions + token * positions_stride, mask=live, other=0).to(tl.int64)
        has_angle = live & (position >= 0) & (position < num_positions)
    return request, position, has_angle


@triton.jit
def _find_slots(
    token,  # int64 [T]
    request,  # int64 [T]
    position,  # int64 [T]
    live,  # [T]
    kv_starts,
    kv_starts_stride,
    table,
    table_stride_request,
    table_stride_column,
    slots,
    slots_stride,
    PAGE_SIZE: tl.constexpr,
):
    """(page, row in the page, is there a row to store?) of each token, the first two int64."""
    is_stored = live & (position >= 0)
    if slots is not None:
        slot = tl.load(slots + token * slots_stride, mask=live, other=-1).to(tl.int64)
        is_stored = slot >= 0
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
    elif kv_starts is None:
        column = position // PAGE_SIZE
        entry = table + request * table_stride_request + column * table_stride_column
        page = tl.load(entry, mask=is_stored, other=0).to(tl.int64)
        offset = position % PAGE_SIZE
    else:
        start = tl.load(kv_starts + request * kv_starts_stride, mask=live, other=0).to(tl.int64)
        slot = tl.load(table + (start + position) * table_stride_column, mask=is_stored, other=0)
        page = slot.to(tl.int64) // PAGE_SIZE
        offset = slot.to(tl.int64) % PAGE_SIZE
    return page, offset, is_stored
