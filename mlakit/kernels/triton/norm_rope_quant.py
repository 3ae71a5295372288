"""RoPE on queries and keys, RMSNorm on the latent, quantise, append: one launch for a step.

Maths   y0 = x0·cos − x1·sin, y1 = x0·sin + x1·cos ;  c = x · rsqrt(mean x² + ε) · γ
        The rotation rounds its second product, then the fused sum, to the dtype of `freqs`; the
        result to the dtype of its input. The norm is float32, rounded to γ's dtype before γ.
        Scales are those of `formats`: max(amax / 448, smallest), divided by exactly.
Work    the first programs make the cache rows of ROWS tokens each, latent and key; the others
        rotate HEADS queries of a token. Each finds the requests of its own tokens, with its
        inputs already under way.
Memory  reads q_rope, kv, and per token a row of freqs; writes q_rope_out and the tokens' rows
Limits  none: widths are padded to powers of two, rows of any stride and alignment are written
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.cache import CacheLayer, PageTable
from mlakit.formats import SMALLEST_SCALE, SMALLEST_TOKEN_SCALE, BlockScaleCodec, PageFooterCodec
from mlakit.kernels.triton.configs import pick_append_config
from mlakit.kernels.triton.launch import launch, target
from mlakit.kernels.triton.primitives import narrow_e4m3
from mlakit.kernels.triton.rows import as_bytes, rows_are_aligned

# how the scales of a row are made and where they go
NO_SCALE = tl.constexpr(0)  # bf16, fp16, fp32
TENSOR_SCALE = tl.constexpr(1)  # fp8
TOKEN_SCALE = tl.constexpr(2)  # fp8_token
BLOCK_SCALES = tl.constexpr(3)  # fp8_block128
FOOTER_SCALES = tl.constexpr(4)  # fp8_block64
_SCALING = {
    "fp8": TENSOR_SCALE,
    "fp8_token": TOKEN_SCALE,
    "fp8_block128": BLOCK_SCALES,
    "fp8_block64": FOOTER_SCALES,
}
FOOTER_BYTES = tl.constexpr(PageFooterCodec.footer_bytes)


def norm_rope_quant_append(
    q_rope: Tensor,  # [tokens, heads, D_R]
    kv: Tensor,  # [tokens, D_C + D_R] raw latents
    freqs: Tensor,  # [positions, D_R]
    gamma: Tensor,  # [D_C]
    layer: CacheLayer,
    page_table: PageTable,  # [batch, max_pages] or (kv_starts, slots)
    kv_lens: Tensor,  # [batch] tokens cached before this step
    q_starts: Tensor,  # [batch + 1]
    *,
    epsilon: float,
    rope: str,
    power_of_two_scales: bool,
    q_rope_out: Tensor,  # [tokens, heads, D_R], may alias q_rope
) -> None:
    tokens, heads, d_r = q_rope.shape
    d_c = gamma.shape[0]
    facts = target(q_rope.device)
    config = pick_append_config(
        tokens=tokens,
        heads=heads,
        kv_lora_rank=d_c,
        rope=d_r,
        itemsize=q_rope.element_size(),
        num_sms=facts.num_sms,
    )
    q_rope_out, payload = as_bytes(q_rope_out), as_bytes(layer.payload)
    flat = isinstance(page_table, tuple)
    kv_starts, pages = page_table if isinstance(page_table, tuple) else (None, page_table)
    scales = layer.scales
    scaling = _SCALING.get(layer.codec.name, NO_SCALE)
    group, latent_tile = _tile_of_latent(scaling, d_c)
    pdl = config.pdl and facts.arch >= 90
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    norm_programs = triton.cdiv(tokens, config.rows)
    rope_programs = 0
    if d_r:
        rope_programs = tokens * triton.cdiv(heads, config.heads)
    launch(
        _append_kernel,
        (norm_programs + rope_programs,),
        q_rope,
        kv,
        freqs,
        gamma,
        payload,
        scales,
        *_tensor_scale(layer),
        kv_starts,
        pages,
        kv_lens,
        q_starts,
        q_rope_out,
        tokens,
        heads,
        kv_lens.shape[0],
        float(epsilon),
        norm_programs,
        q_rope.stride(0),
        q_rope.stride(1),
        kv.stride(0),
        freqs.stride(0),
        freqs.stride(1),
        gamma.stride(0),
        payload.stride(0),
        payload.stride(1),
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        0 if kv_starts is None else kv_starts.stride(0),
        0 if flat else pages.stride(0),
        pages.stride(-1),
        kv_lens.stride(0),
        q_starts.stride(0),
        q_rope_out.stride(0),
        q_rope_out.stride(1),
        D_C=d_c,
        D_R=d_r,
        PAGE_SIZE=layer.page_size,
        SCALING=scaling.value,
        GROUP=group,
        POWER_OF_TWO=power_of_two_scales or bool(scaling == FOOTER_SCALES),
        SMALLEST=SMALLEST_TOKEN_SCALE if scaling == TOKEN_SCALE else SMALLEST_SCALE,
        ALIGNED=rows_are_aligned(layer),
        INTERLEAVED=rope == "interleaved",
        HAS_FP8=facts.has_fp8,
        LATENT_TILE=latent_tile,
        PAIRS=triton.next_power_of_2(max(d_r // 2, 1)),
        ROWS=config.rows,
        HEADS=config.heads,
        PROBES=config.probes,
        PDL=pdl,
        num_warps=config.num_warps,
        # there the assembler would rather spill two words than use more than 40 registers
        **({"maxnreg": 128} if facts.arch == 120 else {}),
        **options,
    )


def _tensor_scale(layer: CacheLayer) -> tuple[float, Tensor | None]:
    """The scale as a number, or where on the device it is."""
    scale = layer.tensor_scale
    if isinstance(scale, Tensor):
        return 1.0, scale.to(layer.payload.device)
    return float(scale), None


def _tile_of_latent(scaling: Any, d_c: int) -> tuple[int, int]:
    """(columns that share a scale, columns of the tile), powers of two."""
    width = triton.next_power_of_2(d_c)
    if scaling == BLOCK_SCALES:
        return BlockScaleCodec.group, max(width, BlockScaleCodec.group)
    if scaling == FOOTER_SCALES:  # as many groups as a footer has bytes
        return PageFooterCodec.group, PageFooterCodec.group * PageFooterCodec.footer_bytes
    return width, width


@triton.jit(
    do_not_specialize=[
        "tokens",
        "heads",
        "batch",
        "norm_programs",
        "kv_starts_stride",
        "table_stride_request",
        "kv_lens_stride",
        "q_starts_stride",
    ]
)
def _append_kernel(
    q_rope,  # [tokens, heads, D_R]
    kv,  # [tokens, D_C + D_R]
    freqs,  # [positions, D_R]
    gamma,  # [D_C]
    payload,  # [pages, PAGE_SIZE, row], e4m3 as uint8
    scales,  # [pages, PAGE_SIZE, 1 or FOOTER_BYTES]; None where no scale is beside the row
    tensor_scale,
    tensor_scale_at,  # where it is instead, or None
    kv_starts,  # [batch + 1]; None if `table` names pages
    table,  # [batch, max_pages] pages, or [slots]
    kv_lens,  # [batch]
    q_starts,  # [batch + 1]
    q_rope_out,  # [tokens, heads, D_R], e4m3 as uint8
    tokens,
    heads,
    batch,
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
            tokens,
            batch,
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
            q_rope_out,
            tokens,
            heads,
            batch,
            q_stride_token,
            q_stride_head,
            freqs_stride_position,
            freqs_stride_column,
            kv_lens_stride,
            q_starts_stride,
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
    tokens,
    batch,
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
    """Normalise and rotate the latents of tokens, and store them in the cache."""
    STORED: tl.constexpr = tl.uint8 if SCALING != NO_SCALE else payload.dtype.element_ty
    ROPE_STORED: tl.constexpr = tl.bfloat16 if SCALING >= TOKEN_SCALE else STORED
    ROPE_IS_SCALED: tl.constexpr = SCALING >= TENSOR_SCALE and SCALING <= TOKEN_SCALE
    # inline scales of a block format lie between the latent and the rope, other scales elsewhere
    INLINE_BYTES: tl.constexpr = 4 * ((D_C + GROUP - 1) // GROUP) if SCALING == BLOCK_SCALES else 0
    live = token < tokens
    column = tl.arange(0, LATENT_TILE)
    inside = live[:, None] & (column < D_C)[None, :]
    at = kv + token * kv_stride_token  # [T]
    x = tl.load(at[:, None] + column[None, :], mask=inside, other=0.0)  # [T, LATENT_TILE]
    weight = tl.load(gamma + column * gamma_stride, mask=column < D_C, other=0.0)
    if D_R > 0:
        k0, k1 = _load_pairs(
            (at + D_C)[:, None, None], live[:, None, None], D_R, PAIRS, INTERLEAVED
        )

    request, position = _places(
        token, live, q_starts, q_starts_stride, kv_lens, kv_lens_stride, batch, PROBES
    )
    page, offset = _slots(
        request,
        position,
        live,
        kv_starts,
        kv_starts_stride,
        table,
        table_stride_request,
        table_stride_column,
        PAGE_SIZE,
    )
    row = payload + page * payload_stride_page + offset * payload_stride_row  # [T]

    latent = _normalised(x, weight, epsilon, D_C)
    if D_C < LATENT_TILE:
        # x is 0 there, but its row may be multiplied by infinity
        latent = tl.where((column < D_C)[None, :], latent, 0.0)
    rope_scale = tl.zeros_like(token).to(tl.float32)[:, None, None]
    if SCALING == TENSOR_SCALE:
        rope_scale += tensor_scale
        if tensor_scale_at is not None:
            rope_scale = tl.zeros_like(rope_scale) + tl.load(tensor_scale_at).to(tl.float32)
        latent = _divided(latent, tl.reshape(rope_scale, [token.shape[0], 1]))
    elif SCALING >= TOKEN_SCALE:
        grouped = tl.reshape(latent, [token.shape[0], LATENT_TILE // GROUP, GROUP])
        scale = _scales_of(grouped, SMALLEST, POWER_OF_TWO)  # [T, groups]
        grouped = _divided(grouped, scale[:, :, None])
        latent = tl.reshape(grouped, [token.shape[0], LATENT_TILE])
        beside = row
        if scales is not None:
            beside = scales + page * scales_stride_page + offset * scales_stride_row
        _store_scales(row + D_C, beside, scale, live, D_C, GROUP, SCALING, ALIGNED)
        if SCALING == TOKEN_SCALE:
            rope_scale = scale[:, :, None]
    _put(row[:, None], column[None, :], _encoded(latent, STORED, HAS_FP8), inside, ALIGNED)

    if D_R > 0:
        cos, sin = _angles(
            freqs, freqs_stride_position, freqs_stride_column, position, live, D_R, PAIRS
        )
        y0, y1 = _rotated(k0, k1, cos, sin)
        y0, y1 = y0.to(Q_DTYPE).to(tl.float32), y1.to(Q_DTYPE).to(tl.float32)
        if ROPE_IS_SCALED:
            y0, y1 = _divided(y0, rope_scale), _divided(y1, rope_scale)
        _store_pairs(
            (row + D_C + INLINE_BYTES)[:, None, None],
            live[:, None, None],
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
    q_rope_out,
    tokens,
    heads,
    batch,
    q_stride_token,
    q_stride_head,
    freqs_stride_position,
    freqs_stride_column,
    kv_lens_stride,
    q_starts_stride,
    out_stride_token,
    out_stride_head,
    D_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    PROBES: tl.constexpr,
):
    """Rotate the queries of some tokens and heads; they are read before any is written."""
    live = token < tokens
    inside = (live[:, None] & (head < heads)[None, :])[:, :, None]  # [T, H, 1]
    token_at, head_at = token[:, None, None], head[None, :, None]
    at = q_rope + token_at * q_stride_token + head_at * q_stride_head
    x0, x1 = _load_pairs(at, inside, D_R, PAIRS, INTERLEAVED)
    _, position = _places(
        token, live, q_starts, q_starts_stride, kv_lens, kv_lens_stride, batch, PROBES
    )
    cos, sin = _angles(
        freqs, freqs_stride_position, freqs_stride_column, position, live, D_R, PAIRS
    )
    y0, y1 = _rotated(x0, x1, cos, sin)
    _store_pairs(
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
def _places(
    token,  # int64 [T]
    live,  # [T]
    q_starts,
    q_starts_stride,
    kv_lens,
    kv_lens_stride,
    batch,
    PROBES: tl.constexpr,
):
    """(request, position in it) of each token, int64; of one that is not live, any request."""
    probe = tl.arange(0, PROBES)[None, :]
    request = tl.zeros_like(token)
    span = batch
    # the request is in [request, request + span): the last one that starts at or before the token,
    # which passes over empty ones; PROBES starts at a time narrow the span
    while span > 1:
        step = tl.cdiv(span, PROBES)
        candidate = request[:, None] + probe * step  # [T, PROBES]
        inside = live[:, None] & (candidate < batch)
        start = tl.load(q_starts + candidate * q_starts_stride, mask=inside, other=0)
        begun = inside & (start <= token[:, None])
        request += tl.maximum(tl.sum(begun.to(tl.int32), 1) - 1, 0) * step
        span = step
    start = tl.load(q_starts + request * q_starts_stride, mask=live, other=0)
    before = tl.load(kv_lens + request * kv_lens_stride, mask=live, other=0)
    return request, before.to(tl.int64) + (token - start)


@triton.jit
def _slots(
    request,  # int64 [T]
    position,  # int64 [T]
    live,  # [T]
    kv_starts,
    kv_starts_stride,
    table,
    table_stride_request,
    table_stride_column,
    PAGE_SIZE: tl.constexpr,
):
    """(page, row in the page) int64 of tokens."""
    if kv_starts is None:
        column = position // PAGE_SIZE
        entry = table + request * table_stride_request + column * table_stride_column
        page = tl.load(entry, mask=live, other=0).to(tl.int64)
        offset = position % PAGE_SIZE
    else:
        start = tl.load(kv_starts + request * kv_starts_stride, mask=live, other=0).to(tl.int64)
        slot = tl.load(table + (start + position) * table_stride_column, mask=live, other=0)
        page = slot.to(tl.int64) // PAGE_SIZE
        offset = slot.to(tl.int64) % PAGE_SIZE
    return page, offset


@triton.jit
def _normalised(x, weight, epsilon, D_C: tl.constexpr):
    """x [T, columns] normalised in float32, rounded to γ's dtype, then times γ in that dtype."""
    x = x.to(tl.float32)
    total = tl.sum(x * x, 1)
    mean = tl.div_rn(total, tl.zeros_like(total) + D_C)
    # not rsqrt, whose last bits are the device's own
    inverse = tl.div_rn(tl.zeros_like(mean) + 1.0, tl.sqrt_rn(mean + epsilon))
    normalised = (x * inverse[:, None]).to(weight.dtype).to(tl.float32)
    return (normalised * weight.to(tl.float32)[None, :]).to(weight.dtype).to(tl.float32)


@triton.jit
def _angles(
    freqs, stride_position, stride_column, position, live, D_R: tl.constexpr, PAIRS: tl.constexpr
):
    """cos and sin [T, 1, PAIRS] of positions, in the dtype of freqs."""
    column = tl.arange(0, 2 * PAIRS)
    # together and then split: every thread reads its pairs in one piece
    cos_sin = tl.load(
        freqs + position[:, None, None] * stride_position + column * stride_column,
        mask=live[:, None, None] & (column < D_R),
        other=0.0,
    )
    return tl.split(tl.reshape(cos_sin, [position.shape[0], 1, PAIRS, 2]))


@triton.jit
def _load_pairs(at, inside, D_R: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second elements [T, H, PAIRS] of the pairs of rows `at` [T, H, 1]."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        x = tl.load(at + column, mask=inside & (column < D_R), other=0.0)
        x0, x1 = tl.split(tl.reshape(x, [at.shape[0], at.shape[1], PAIRS, 2]))
    else:
        pair = tl.arange(0, PAIRS)
        inside = inside & (pair < D_R // 2)
        x0 = tl.load(at + pair, mask=inside, other=0.0)
        x1 = tl.load(at + (D_R // 2 + pair), mask=inside, other=0.0)
    return x0, x1


@triton.jit
def _store_pairs(
    at,  # [T, H, 1]
    inside,  # [T, H, 1]
    y0,  # [T, H, PAIRS] float32
    y1,
    STORED: tl.constexpr,
    D_R: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Write the pairs of rows `at`, whose elements are STORED, e4m3 for uint8."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, None, :]
        y = tl.reshape(tl.join(y0, y1), [y0.shape[0], y0.shape[1], 2 * PAIRS])
        y = _encoded(y, STORED, HAS_FP8)
        _put(at, column, y, inside & (column < D_R), ALIGNED)
    else:
        pair = tl.arange(0, PAIRS)[None, None, :]
        inside = inside & (pair < D_R // 2)
        _put(at, pair, _encoded(y0, STORED, HAS_FP8), inside, ALIGNED)
        _put(at, D_R // 2 + pair, _encoded(y1, STORED, HAS_FP8), inside, ALIGNED)


@triton.jit
def _rotated(x0, x1, cos, sin):
    """Pairs turned by their angles, as float32 that the dtype of x holds."""
    a0, a1 = x0.to(tl.float32).to(cos.dtype).to(tl.float32), x1.to(tl.float32)
    a1 = a1.to(cos.dtype).to(tl.float32)
    c, s = cos.to(tl.float32), sin.to(tl.float32)
    c, s = tl.broadcast_to(c, a0.shape), tl.broadcast_to(s, a0.shape)
    y0 = tl.fma(a0, c, -(a1 * s).to(cos.dtype).to(tl.float32))
    y1 = tl.fma(a0, s, (a1 * c).to(cos.dtype).to(tl.float32))
    y0 = y0.to(cos.dtype).to(tl.float32).to(x0.dtype).to(tl.float32)
    y1 = y1.to(cos.dtype).to(tl.float32).to(x0.dtype).to(tl.float32)
    return y0, y1


@triton.jit
def _divided(x, scale):
    """x / scale, rounded once; `scale` broadcasts."""
    return tl.div_rn(x, tl.broadcast_to(scale, x.shape))


@triton.jit
def _scales_of(x, SMALLEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """max(amax / 448, SMALLEST) of groups x [T, groups, columns]; NaN if a group has one."""
    # as integers magnitudes have the same order, with NaN above infinity
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(magnitude, 2).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + 448.0)
    scale = tl.where(scale < SMALLEST, SMALLEST, scale)
    if POWER_OF_TWO:
        # a mantissa that is not 0 carries into the exponent
        raised = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale < float("inf"), raised.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def _store_scales(
    inline,  # [T] where the scales of a block format are, in their rows
    beside,  # [T] where those of other formats are
    scale,  # [T, groups]
    live,  # [T]
    D_C: tl.constexpr,
    GROUP: tl.constexpr,
    SCALING: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    group = tl.arange(0, scale.shape[1])[None, :]
    used = group < tl.cdiv(D_C, GROUP)
    if SCALING == BLOCK_SCALES:
        _put(inline[:, None], group, scale, live[:, None] & used, ALIGNED)
    elif SCALING == FOOTER_SCALES:
        # the exponent field of a float32 power of two, of inf and of NaN is its e8m0 byte
        exponent = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.where(used, exponent, 0).to(tl.uint8)
        tl.store(beside[:, None] + group, exponent, mask=live[:, None] & (group < FOOTER_BYTES))
    else:
        tl.store(beside[:, None] + group, scale, mask=live[:, None])


@triton.jit
def _encoded(x, STORED: tl.constexpr, HAS_FP8: tl.constexpr):
    """float32 `x` as it is stored: in the dtype STORED, e4m3 bytes for uint8."""
    return narrow_e4m3(x, HAS_FP8) if tl.uint8 == STORED else x.to(STORED)


@triton.jit
def _put(at, index, x, mask, ALIGNED: tl.constexpr):
    """Store `x` as elements `index` of an array of its dtype that starts at `at`, maybe a byte."""
    if at.dtype.element_ty == x.dtype:
        tl.store(at + index, x, mask=mask)
    elif ALIGNED:
        tl.store(at.to(tl.pointer_type(x.dtype), bitcast=True) + index, x, mask=mask)
    else:
        BYTES: tl.constexpr = x.dtype.primitive_bitwidth // 8
        bits = x.to(tl.int16 if BYTES == 2 else tl.int32, bitcast=True)
        for byte in tl.static_range(BYTES):
            tl.store(at + (BYTES * index + byte), (bits >> (8 * byte)).to(tl.uint8), mask=mask)
