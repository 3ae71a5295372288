"""Windows of tokens pooled to one row each, normalised, rotated, quantised and stored: one kernel.

Maths      pooled[c] = Σ_j softmax_j(z[j, c]) · x[j, c]
           row = R(pooled · rsqrt(mean pooled² + ε) · γ)
Numbers    float32; the order of each sum is that of the window, however a prompt is split
Work       one program per TOKENS new tokens: it stores their states if later windows read them,
           then writes the rows of the windows that end among them, one after the other
Memory     reads kv and gate of new tokens, and states of older ones only. No program reads what
           another one of the launch writes, so one launch suffices; where pages of states repeat,
           a second one stores the states
Limits     none: widths are padded to powers of two, rows may have any stride and alignment
Lineage    own design; ideas: the compressor of DeepSeek-V4, and its layout of states in vLLM
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mlakit.kernels.arguments import CompressArguments, stride_of
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.arguments import cache_arguments, length_arguments, page_table_arguments
from mlakit.kernels.triton.configs import pick_compress_config
from mlakit.kernels.triton.primitives import find_request, find_rows
from mlakit.kernels.triton.rope import load_angles, rotate
from mlakit.kernels.triton.store_rows import store_latent, store_rope, store_traits


def compress_rows(a: CompressArguments) -> None:
    stages = [(True, False), (False, True)] if a.state_pages_repeat else [(True, True)]
    for pools, stores in stages:
        _launch(a, pools=pools, stores=stores)


def _launch(a: CompressArguments, *, pools: bool, stores: bool) -> None:
    layer, freqs, rate = a.layer, a.freqs, a.rate
    tokens, columns = a.kv.shape
    device = target(a.kv.device)
    config = pick_compress_config(tokens=tokens, rate=rate, columns=columns, num_sms=device.num_sms)
    table, stride_table_request = page_table_arguments(a.page_table)
    state_table, stride_state_request = page_table_arguments(a.state_table)
    launch(
        compress_rows_kernel,
        (triton.cdiv(tokens, config.tokens),),
        tokens=tokens,
        num_requests=a.kv_lens.shape[0],
        keep=a.keep,
        stride_table_request=stride_table_request,
        stride_state_request=stride_state_request,
        inputs=InputArguments(
            *(a.kv, a.gate, a.bias, a.gamma, float(a.epsilon)),
            *(a.kv.stride(0), a.gate.stride(0), a.bias.stride(0), stride_of(a.gamma, 0)),
        ),
        angles=AngleArguments(freqs, stride_of(freqs, 0), stride_of(freqs, 1)),
        lengths=length_arguments(a.q_starts, a.kv_lens),
        page_table=table,
        state_table=state_table,
        cache=cache_arguments(layer),
        state=StateArguments(a.state.payload, *a.state.payload.stride()[:2]),
        ROW=store_traits(layer, power_of_two=a.power_of_two_scales, has_fp8=device.has_fp8),
        TRAITS=Traits(
            RATE=rate,
            OVERLAP=a.overlap,
            POOLS=pools,
            STORES=stores,
            COLUMNS=columns,
            ANGLES=0 if freqs is None else freqs.shape[1],
            STATE_PAGE=a.state.page_size,
            TOKENS=config.tokens,
            BLOCK=config.block,
            STATE_COLUMNS=config.state_columns,
            PROBES=config.probes,
        ),
        num_warps=config.num_warps,
        # the choices of `norm_rope_quant_kernel`
        **({"maxnreg": 128} if device.arch == 120 else {}),
    )


class InputArguments(NamedTuple):
    """The new tokens, and the weights of the compressor."""

    kv: Tensor  # [tokens, COLUMNS]
    gate: Tensor  # [tokens, COLUMNS]
    bias: Tensor  # [RATE, COLUMNS]
    gamma: Tensor | None  # [D_C + D_R]
    epsilon: float
    stride_kv: int
    stride_gate: int
    stride_bias: int
    stride_gamma: int


class AngleArguments(NamedTuple):
    """The angles of all positions."""

    freqs: Tensor | None  # [positions, ANGLES]
    stride_position: int
    stride_column: int


class StateArguments(NamedTuple):
    """The states of tokens."""

    payload: Tensor  # [pages, STATE_PAGE, 2 · COLUMNS] float32
    stride_page: int
    stride_row: int


class Traits(NamedTuple):
    """The constants that the kernel is compiled for, besides those of rows."""

    RATE: int
    OVERLAP: bool
    POOLS: bool  # windows to rows
    STORES: bool  # states
    COLUMNS: int  # of kv and gate
    ANGLES: int  # rotated columns; 0: none
    STATE_PAGE: int
    TOKENS: int  # of a program
    BLOCK: int  # tokens of a window that are loaded together
    STATE_COLUMNS: int  # of a tile of states
    PROBES: int


class Window(NamedTuple):
    """A window that is completed, in the kernel. Row `token + shift` of kv is a new token."""

    index: tl.tensor  # of the window in its request
    request: tl.tensor
    shift: tl.tensor
    first_row: tl.tensor  # of the request's new tokens


VARYING = ["tokens", "num_requests", "keep", "stride_table_request", "stride_state_request"]


@triton.jit(do_not_specialize=VARYING)
def compress_rows_kernel(
    tokens,
    num_requests,
    keep,
    stride_table_request,
    stride_state_request,
    inputs,  # `InputArguments`
    angles,  # `AngleArguments`
    lengths,  # `LengthArguments`, the new tokens included
    page_table,  # `PageTableArguments` of windows
    state_table,  # `PageTableArguments` of tokens
    cache,  # `CacheArguments`
    state,  # `StateArguments`
    ROW: tl.constexpr,  # `StoreTraits`
    TRAITS: tl.constexpr,  # `Traits`
):
    """States of TOKENS new tokens, and the rows of the windows that end among them."""
    RATE: tl.constexpr = TRAITS.RATE
    TOKENS: tl.constexpr = TRAITS.TOKENS
    index = tl.arange(0, TOKENS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + index
    is_token = token < tokens
    request = find_request(
        token, is_token, lengths.q_starts, lengths.stride_q_starts, num_requests, TRAITS.PROBES
    )
    start_at = lengths.q_starts + request * lengths.stride_q_starts
    start = tl.load(start_at, mask=is_token, other=0).to(tl.int64)
    end = tl.load(start_at + lengths.stride_q_starts, mask=is_token, other=0).to(tl.int64)
    kv_len_at = lengths.kv_lens + request * lengths.stride_kv_lens
    kv_len = tl.load(kv_len_at, mask=is_token, other=0).to(tl.int64)
    shift = end - kv_len
    position = token - shift
    # rows after the last request are padding; the host does not check kv_lens
    is_token = is_token & (token < end) & (position >= 0)

    if TRAITS.STORES:
        # later windows read their own tokens and, with overlap, those of the window before
        EARLIER: tl.constexpr = RATE if TRAITS.OVERLAP else 0
        needed_from = tl.maximum(kv_len - keep, 0) // RATE * RATE - EARLIER
        is_kept = is_token & (position >= needed_from)
        if tl.max(is_kept.to(tl.int32), 0) > 0:
            _store_states(
                *(token, request, position, is_kept, inputs, state_table, stride_state_request),
                *(state, TRAITS),
            )
    if TRAITS.POOLS:
        is_last = is_token & (position % RATE == RATE - 1)
        at = tl.min(tl.where(is_last, index, TOKENS), 0)
        while at < TOKENS:
            is_this = index == at
            window = Window(
                tl.sum(tl.where(is_this, position, 0), 0) // RATE,
                tl.sum(tl.where(is_this, request, 0), 0),
                tl.sum(tl.where(is_this, shift, 0), 0),
                tl.sum(tl.where(is_this, start, 0), 0),
            )
            _write_window(
                *(window, inputs, angles, page_table, stride_table_request, state_table),
                *(stride_state_request, cache, state, ROW, TRAITS),
            )
            at = tl.min(tl.where(is_last & (index > at), index, TOKENS), 0)


@triton.jit
def _store_states(
    token,  # int64 [T]
    request,
    position,
    is_kept,
    inputs,
    state_table,
    stride_state_request,
    state,
    TRAITS: tl.constexpr,
):
    """Store [kv | gate + bias] of some tokens."""
    COLUMNS: tl.constexpr = TRAITS.COLUMNS
    page, offset = find_rows(
        request, position, is_kept, state_table, stride_state_request, TRAITS.STATE_PAGE
    )
    is_kept = is_kept & (page >= 0)
    to = state.payload + page * state.stride_page + offset * state.stride_row
    bias_at = inputs.bias + position % TRAITS.RATE * inputs.stride_bias
    for first in range(0, COLUMNS, TRAITS.STATE_COLUMNS):
        column = first + tl.arange(0, TRAITS.STATE_COLUMNS)[None, :]
        mask = is_kept[:, None] & (column < COLUMNS)
        kv_at = (inputs.kv + token * inputs.stride_kv)[:, None]
        gate_at = (inputs.gate + token * inputs.stride_gate)[:, None]
        x = tl.load(kv_at + column, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(gate_at + column, mask=mask, other=0.0).to(tl.float32)
        z += tl.load(bias_at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(to[:, None] + column, x, mask=mask)
        tl.store(to[:, None] + COLUMNS + column, z, mask=mask)


@triton.jit
def _write_window(
    window,  # `Window`
    inputs,
    angles,
    page_table,
    stride_table_request,
    state_table,
    stride_state_request,
    cache,
    state,
    ROW: tl.constexpr,
    TRAITS: tl.constexpr,
):
    """Pool, normalise, rotate and store one window."""
    D_C: tl.constexpr = ROW.D_C
    D_R: tl.constexpr = ROW.D_R
    PAIRS: tl.constexpr = ROW.PAIRS
    column = tl.arange(0, ROW.LATENT_TILE)
    in_latent = column < D_C
    latent = _pool(
        column, in_latent, window, inputs, state_table, stride_state_request, state, ROW, TRAITS
    )
    if D_R > 0:
        rope_column = tl.arange(0, 2 * PAIRS)
        in_rope = rope_column < D_R
        rope = _pool(
            *(D_C + rope_column, in_rope, window, inputs, state_table, stride_state_request),
            *(state, ROW, TRAITS),
        )
    if inputs.gamma is not None:
        sum_of_squares = tl.sum(latent * latent, 0)
        if D_R > 0:
            sum_of_squares += tl.sum(rope * rope, 0)
        mean = sum_of_squares / (D_C + D_R)
        # not rsqrt: its last bits differ between devices
        inverse = 1.0 / tl.sqrt_rn(mean + inputs.epsilon)
        latent = _scaled(latent, column, in_latent, inverse, inputs)
        if D_R > 0:
            rope = _scaled(rope, D_C + rope_column, in_rope, inverse, inputs)
    position = window.index * TRAITS.RATE + tl.zeros([1], tl.int64)
    if TRAITS.ANGLES > 0 and D_R == 0:
        latent = _rotate_end(latent, position, angles, D_C, TRAITS.ANGLES)
    pairs = None
    if D_R > 0:
        y0, y1 = tl.split(tl.reshape(rope, [1, 1, PAIRS, 2]))
        if TRAITS.ANGLES > 0:
            cos, sin = load_angles(angles, position, position >= 0, D_R, PAIRS)
            y0, y1 = rotate(y0, y1, cos.to(tl.float32), sin.to(tl.float32))
        pairs = (y0, y1)

    request = window.request + tl.zeros([1], tl.int64)
    index = window.index + tl.zeros([1], tl.int64)
    page, offset = find_rows(
        request, index, index >= 0, page_table, stride_table_request, ROW.PAGE_SIZE
    )
    is_stored = page >= 0
    row = cache.payload + page * cache.stride_page + offset * cache.stride_row  # [1]
    rope_scale = store_latent(latent[None, :], pairs, row, page, offset, is_stored, cache, ROW)
    if D_R > 0:
        store_rope(pairs[0], pairs[1], row, is_stored, rope_scale, ROW, True)


@triton.jit
def _pool(
    column,  # [C] of the row
    is_column,  # [C]
    window,
    inputs,
    state_table,
    stride_state_request,
    state,
    ROW: tl.constexpr,
    TRAITS: tl.constexpr,
):
    """Columns of a row before its norm, float32 [C]; 0 where it has no such column."""
    RATE: tl.constexpr = TRAITS.RATE
    BLOCK: tl.constexpr = TRAITS.BLOCK
    SPAN: tl.constexpr = 2 * RATE if TRAITS.OVERLAP else RATE
    D: tl.constexpr = ROW.D_C + ROW.D_R
    largest = tl.full([column.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([column.shape[0]], tl.float32)
    pooled = tl.zeros([column.shape[0]], tl.float32)
    for first in range(0, SPAN, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        token = (window.index + 1) * RATE - SPAN + slot  # int64
        exists = (slot < SPAN) & (token >= 0)  # window 0 has no window before it
        row = token + window.shift
        is_new = exists & (row >= window.first_row)
        is_old = exists & (row < window.first_row)
        at = column[None, :]
        if TRAITS.OVERLAP:
            # earlier tokens have the first columns of a row, own tokens the last
            at += tl.where(slot >= RATE, D, 0)[:, None]
        else:
            at += tl.zeros([BLOCK, 1], tl.int32)
        mask = is_new[:, None] & is_column[None, :]
        x = tl.load(inputs.kv + row[:, None] * inputs.stride_kv + at, mask=mask, other=0.0)
        z = tl.load(inputs.gate + row[:, None] * inputs.stride_gate + at, mask=mask, other=0.0)
        bias_at = inputs.bias + (slot % RATE)[:, None] * inputs.stride_bias + at
        z = z.to(tl.float32) + tl.load(bias_at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        if tl.max(is_old.to(tl.int32), 0) > 0:
            request = window.request + tl.zeros([BLOCK], tl.int64)
            page, offset = find_rows(
                request, token, is_old, state_table, stride_state_request, TRAITS.STATE_PAGE
            )
            mask = (is_old & (page >= 0))[:, None] & is_column[None, :]
            state_at = state.payload + page * state.stride_page + offset * state.stride_row
            x += tl.load(state_at[:, None] + at, mask=mask, other=0.0)
            z += tl.load(state_at[:, None] + TRAITS.COLUMNS + at, mask=mask, other=0.0)
        z = tl.where(exists[:, None], z, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(z, 0))
        # before the first token it is -inf, and -inf - (-inf) would be NaN
        anchor = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weight = tl.exp(z - anchor[None, :])
        rescale = tl.exp(largest - anchor)
        total = total * rescale + tl.sum(weight, 0)
        pooled = pooled * rescale + tl.sum(weight * x, 0)
        largest = new_largest
    return pooled / total


@triton.jit
def _scaled(x, column, is_column, inverse, inputs):
    """x · inverse · γ, 0 where a row has no such column."""
    gamma_at = inputs.gamma + column * inputs.stride_gamma
    gamma = tl.load(gamma_at, mask=is_column, other=0.0).to(tl.float32)
    # x is 0 there, but the norm may multiply its row by infinity
    return tl.where(is_column, x * inverse * gamma, 0.0)


@triton.jit
def _rotate_end(
    latent,  # float32 [LATENT_TILE]
    position,  # int64 [1]
    angles,
    D_C: tl.constexpr,
    ANGLES: tl.constexpr,
):
    """Rotate the last ANGLES of D_C columns, in interleaved pairs."""
    PAIRS: tl.constexpr = latent.shape[0] // 2
    pair = tl.arange(0, PAIRS)
    angle = pair - (D_C - ANGLES) // 2
    is_rotated = (angle >= 0) & (pair < D_C // 2)
    at = angles.freqs + position * angles.stride_position + 2 * angle * angles.stride_column
    cos = tl.load(at, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(at + angles.stride_column, mask=is_rotated, other=0.0).to(tl.float32)
    x0, x1 = tl.split(tl.reshape(latent, [PAIRS, 2]))
    y0, y1 = rotate(x0, x1, cos, sin)
    return tl.reshape(tl.join(y0, y1), [2 * PAIRS])
