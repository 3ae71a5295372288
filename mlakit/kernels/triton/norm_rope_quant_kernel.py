"""RoPE on queries and keys, RMSNorm on the latent, quantise, append: one kernel per step.

Maths      `rope` and `norm_quant` have the equations
Work       the first programs write the cache rows of ROWS tokens each; the others rotate HEADS
           queries of one token. A program issues the loads of its inputs first. Then it finds the
           positions and slots of its tokens: they are given, or a search in q_starts finds the
           request of each token
Memory     reads q_rope, kv and one row of freqs per token; writes q_rope_out and one cache row per
           token, none for a token with slot -1
Limits     none: widths are padded to powers of two, rows may have any stride and alignment
Lineage    own design; ideas: the fused kernel of Modular MAX, which rotates queries and normalises
           latents in separate blocks of one grid. Ours also finds positions and slots itself, and
           writes every cache format
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.kernels.triton.norm_quant import rms_norm
from mlakit.kernels.triton.primitives import find_request
from mlakit.kernels.triton.rope import load_angles, load_pairs, rotate, store_pairs
from mlakit.kernels.triton.store_rows import store_latent, store_rope


@triton.jit(
    do_not_specialize=[
        "tokens",
        "heads",
        "batch",
        "num_positions",
        "rank",
        "world",
        "interleave",
        "norm_programs",
        "kv_starts_stride",
        "table_stride_request",
        "kv_lens_stride",
        "q_starts_stride",
        "slots_stride",
        "positions_stride",
    ]
)
def norm_rope_quant_kernel(
    q_rope,  # [tokens, heads, D_R]
    kv,  # [tokens, D_C + D_R]
    freqs,  # [positions, D_R]
    gamma,  # [D_C]; None: no norm
    payload,  # [pages, PAGE_SIZE, row], e4m3 as uint8
    scales,  # [pages, PAGE_SIZE, 1 or FOOTER_BYTES]; None if all scales are inside the row
    tensor_scale,
    tensor_scale_at,  # pointer to the tensor scale on the device, or None
    kv_starts,  # [batch + 1]; None if `table` holds pages
    table,  # [batch, max_pages] pages, or [slots]; None, like kv_lens and q_starts, with `slots`
    kv_lens,  # [batch], the new tokens included
    q_starts,  # [batch + 1]
    slots,  # [tokens] or None; -1: no row is written
    positions,  # [tokens] rows of freqs; None: the positions of kv_lens
    q_rope_out,  # [tokens, heads, D_R], e4m3 as uint8
    tokens,
    heads,
    batch,
    num_positions,  # rows of freqs
    epsilon,
    rank,  # of a context-parallel group, as are the next two
    world,
    interleave,
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
    IS_SHARDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    LATENT_TILE: tl.constexpr,  # D_C padded
    PAIRS: tl.constexpr,  # D_R / 2 padded
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PROBES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cache rows of ROWS tokens (the first programs), or HEADS rotated queries of one token."""
    if PDL:
        gdc_launch_dependents()  # the next kernel waits for this one
        gdc_wait()
    batch_of = (
        q_starts, q_starts_stride, kv_lens, kv_lens_stride, positions, positions_stride, batch,
        num_positions,
    )  # fmt: skip
    angles = (freqs, freqs_stride_position, freqs_stride_column)
    program = tl.program_id(0)
    if program < norm_programs:
        _append_rows(
            program.to(tl.int64) * ROWS + tl.arange(0, ROWS), tokens,
            (kv, kv_stride_token), (gamma, gamma_stride, epsilon), angles, batch_of,
            (
                kv_starts, kv_starts_stride, table, table_stride_request, table_stride_column,
                slots, slots_stride, rank, world, interleave,
            ),
            (payload, payload_stride_page, payload_stride_row),
            (scales, scales_stride_page, scales_stride_row), (tensor_scale, tensor_scale_at),
            D_C, D_R, PAGE_SIZE, SCALING, GROUP, POWER_OF_TWO, SMALLEST, ALIGNED,
            IS_SHARDED, INTERLEAVED, HAS_FP8, LATENT_TILE, PAIRS, PROBES, q_rope.dtype.element_ty,
        )  # fmt: skip
    elif D_R > 0:
        block = program - norm_programs
        head_blocks = tl.cdiv(heads, HEADS)
        _rotate_queries(
            (block // head_blocks).to(tl.int64) + tl.arange(0, 1), tokens,
            (block % head_blocks).to(tl.int64) * HEADS + tl.arange(0, HEADS), heads,
            (q_rope, q_stride_token, q_stride_head), angles, batch_of,
            (q_rope_out, out_stride_token, out_stride_head),
            D_R, INTERLEAVED, HAS_FP8, PAIRS, PROBES,
        )  # fmt: skip


@triton.jit
def _append_rows(
    token,  # int64 [T]
    tokens,
    kv,  # these are tuples of a tensor and what belongs to it; see the kernel
    gamma,
    angles,
    batch_of,
    slots_of,
    payload,
    scales,
    tensor_scale,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SMALLEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    IS_SHARDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    LATENT_TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    PROBES: tl.constexpr,
    Q_DTYPE: tl.constexpr,
):
    """Normalise and rotate the latents of tokens; store those that have a slot in the cache."""
    kv, kv_stride_token = kv
    gamma, gamma_stride, epsilon = gamma
    payload, payload_stride_page, payload_stride_row = payload
    is_token = token < tokens
    column = tl.arange(0, LATENT_TILE)
    in_row = (column < D_C)[None, :]
    at = kv + token * kv_stride_token  # [T]
    x = tl.load(at[:, None] + column[None, :], mask=is_token[:, None] & in_row, other=0.0)
    if gamma is not None:
        weight = tl.load(gamma + column * gamma_stride, mask=column < D_C, other=0.0)
    if D_R > 0:
        k0, k1 = load_pairs(
            (at + D_C)[:, None, None], is_token[:, None, None], D_R, PAIRS, INTERLEAVED
        )

    request, position, angle, has_angle, is_token = _find_positions(
        token, is_token, batch_of, PROBES
    )
    page, offset, is_stored = _find_slots(
        token, request, position, is_token, slots_of, PAGE_SIZE, IS_SHARDED
    )
    row = payload + page * payload_stride_page + offset * payload_stride_row  # [T]

    latent = x.to(tl.float32)
    if gamma is not None:
        latent = rms_norm(x, weight, epsilon, D_C)
    if D_C < LATENT_TILE:
        # x is 0 there, but the norm may multiply its row by infinity
        latent = tl.where(in_row, latent, 0.0)
    rope = None
    if D_R > 0:
        cos, sin = load_angles(angles, angle, has_angle, D_R, PAIRS)
        y0, y1 = rotate(k0, k1, cos, sin)
        rope = (y0.to(Q_DTYPE).to(tl.float32), y1.to(Q_DTYPE).to(tl.float32))
    rope_scale = store_latent(
        latent, rope, row, page, offset, is_stored, scales, tensor_scale,
        D_C, SCALING, GROUP, POWER_OF_TWO, SMALLEST, ALIGNED, HAS_FP8,
    )  # fmt: skip
    if D_R > 0:
        store_rope(
            rope[0], rope[1], row, is_stored, rope_scale,
            D_C, D_R, PAIRS, SCALING, GROUP, POWER_OF_TWO, SMALLEST, ALIGNED, INTERLEAVED, HAS_FP8,
        )  # fmt: skip


@triton.jit
def _rotate_queries(
    token,  # int64 [T]
    tokens,
    head,  # int64 [H]
    heads,
    q_rope,  # tuples, as of `_append_rows`
    angles,
    batch_of,
    q_rope_out,
    D_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    PROBES: tl.constexpr,
):
    """Rotate the queries of some tokens and heads; all are read before any is written.

    A query becomes 0 where the given position of its token is no row of freqs.
    """
    q_rope, q_stride_token, q_stride_head = q_rope
    q_rope_out, out_stride_token, out_stride_head = q_rope_out
    _, _, _, _, positions, _, _, _ = batch_of
    is_token = token < tokens
    inside = (is_token[:, None] & (head < heads)[None, :])[:, :, None]  # [T, H, 1]
    token_at, head_at = token[:, None, None], head[None, :, None]
    at = q_rope + token_at * q_stride_token + head_at * q_stride_head
    x0, x1 = load_pairs(at, inside, D_R, PAIRS, INTERLEAVED)
    _, _, angle, has_angle, is_token = _find_positions(token, is_token, batch_of, PROBES)
    inside = inside & is_token[:, None, None]
    cos, sin = load_angles(angles, angle, has_angle, D_R, PAIRS)
    y0, y1 = rotate(x0, x1, cos, sin)
    if positions is not None:
        y0 = tl.where(has_angle[:, None, None], y0, 0.0)
        y1 = tl.where(has_angle[:, None, None], y1, 0.0)
    out_at = q_rope_out + token_at * out_stride_token + head_at * out_stride_head
    store_pairs(
        out_at, inside, y0, y1, q_rope_out.dtype.element_ty, D_R, PAIRS, INTERLEAVED, True, HAS_FP8
    )


@triton.jit
def _find_positions(token, is_token, batch_of, PROBES: tl.constexpr):
    """Return (request, position in it, row of freqs, is there such a row?, is it a token?) of each
    token; the first three are int64.

    Without `kv_lens` the request is unknown, and both positions are the given one. The request of a
    row that is no token is arbitrary.
    """
    (
        q_starts, q_starts_stride, kv_lens, kv_lens_stride, positions, positions_stride, batch,
        num_positions,
    ) = batch_of  # fmt: skip
    request = tl.zeros_like(token)
    if kv_lens is not None:
        request = find_request(token, is_token, q_starts, q_starts_stride, batch, PROBES)
        # the last token of a request is its newest: it is at position kv_len - 1
        end = tl.load(q_starts + (request + 1) * q_starts_stride, mask=is_token, other=0)
        kv_len = tl.load(kv_lens + request * kv_lens_stride, mask=is_token, other=0)
        # rows after the last request are padding; only now, so that no load waits for another one
        is_token = is_token & (token < end)
        position = kv_len.to(tl.int64) - (end - token)
        # the host does not check kv_lens: if they leave out new tokens, a position is negative,
        # and nothing before the tables may be read
        angle = position
        has_angle = is_token & (position >= 0)
    if positions is not None:
        at = positions + token * positions_stride
        angle = tl.load(at, mask=is_token, other=0).to(tl.int64)
        has_angle = is_token & (angle >= 0) & (angle < num_positions)
        if kv_lens is None:
            position = angle
    return request, position, angle, has_angle, is_token


@triton.jit
def _find_slots(
    token,
    request,
    position,
    is_token,
    slots_of,
    PAGE_SIZE: tl.constexpr,
    IS_SHARDED: tl.constexpr,
):
    """Return (page, row in the page, is a row stored?) of each token, the first two int64."""
    (
        kv_starts, kv_starts_stride, table, table_stride_request, table_stride_column, slots,
        slots_stride, rank, world, interleave,
    ) = slots_of  # fmt: skip
    is_stored = is_token & (position >= 0)
    if IS_SHARDED:
        is_stored = is_stored & (position // interleave % world == rank)
        # the place among this rank's tokens
        period = interleave * world
        position = position // period * interleave + position % interleave
    if slots is not None:
        slot = tl.load(slots + token * slots_stride, mask=is_token, other=-1).to(tl.int64)
        is_stored = (slot >= 0) & is_stored if IS_SHARDED else slot >= 0
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
    elif kv_starts is None:
        column = position // PAGE_SIZE
        entry = table + request * table_stride_request + column * table_stride_column
        page = tl.load(entry, mask=is_stored, other=0).to(tl.int64)
        offset = position % PAGE_SIZE
    else:
        start = tl.load(kv_starts + request * kv_starts_stride, mask=is_token, other=0).to(tl.int64)
        slot = tl.load(table + (start + position) * table_stride_column, mask=is_stored, other=0)
        page = slot.to(tl.int64) // PAGE_SIZE
        offset = slot.to(tl.int64) % PAGE_SIZE
    return page, offset, is_stored
