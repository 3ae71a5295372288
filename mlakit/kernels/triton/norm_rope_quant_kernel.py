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

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.kernels.triton.norm_quant import rms_norm
from mlakit.kernels.triton.primitives import find_request, find_rows
from mlakit.kernels.triton.rope import load_angles, load_pairs, rotate, store_pairs
from mlakit.kernels.triton.store_rows import store_latent, store_rope


class QueryArguments(NamedTuple):
    """The rotated part of the queries, before and after."""

    q: Tensor  # [tokens, heads, D_R]
    out: Tensor  # [tokens, heads, D_R], e4m3 as uint8
    stride_token: int
    stride_head: int
    stride_out_token: int
    stride_out_head: int


class LatentArguments(NamedTuple):
    """The latents and their norm."""

    kv: Tensor  # [tokens, D_C + D_R]
    gamma: Tensor | None  # [D_C]; None: no norm
    epsilon: float
    stride_token: int
    stride_gamma: int


class AngleArguments(NamedTuple):
    """The angles of all positions, and the positions of tokens."""

    freqs: Tensor  # [positions, D_R]
    positions: Tensor | None  # [tokens] rows of freqs; None: the positions of kv_lens
    stride_position: int
    stride_column: int
    stride_positions: int


class SlotArguments(NamedTuple):
    """The slots of tokens; None: those of the page table."""

    slots: Tensor | None  # [tokens]; -1: no row is written
    stride: int


class Traits(NamedTuple):
    """The constants that the kernel is compiled for, besides those of rows."""

    IS_SHARDED: bool
    INTERLEAVED: bool
    ROWS: int
    HEADS: int
    PROBES: int
    PDL: bool


class Numbers(NamedTuple):
    """The arguments that are no tuples, in the kernel."""

    tokens: tl.tensor
    heads: tl.tensor
    num_requests: tl.tensor
    num_positions: tl.tensor
    stride_table_request: tl.tensor


# differ from call to call: specialised, each would compile further kernels
VARYING = [
    *("tokens", "heads", "num_requests", "num_positions", "norm_programs"),
    "stride_table_request",
]


@triton.jit(do_not_specialize=VARYING)
def norm_rope_quant_kernel(
    tokens,
    heads,
    num_requests,
    num_positions,  # rows of freqs
    norm_programs,
    stride_table_request,
    queries,  # `QueryArguments`
    latents,  # `LatentArguments`
    angles,  # `AngleArguments`
    slots,  # `SlotArguments`
    page_table,  # `PageTableArguments`; None, as are lengths, with `slots`
    lengths,  # `LengthArguments`, the new tokens included
    shard,  # `KVShard`
    cache,  # `CacheArguments`
    ROW: tl.constexpr,  # `StoreTraits`
    TRAITS: tl.constexpr,
):
    """Cache rows of ROWS tokens (the first programs), or HEADS rotated queries of one token."""
    ROWS: tl.constexpr = TRAITS.ROWS
    HEADS: tl.constexpr = TRAITS.HEADS
    if TRAITS.PDL:
        gdc_launch_dependents()  # the next kernel waits for this one
        gdc_wait()
    numbers = Numbers(tokens, heads, num_requests, num_positions, stride_table_request)
    program = tl.program_id(0)
    if program < norm_programs:
        # a name that the other branch has too must have the same type there
        row_token = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        _append_rows(
            *(row_token, numbers, latents, angles, slots, page_table, lengths, shard, cache),
            *(ROW, TRAITS, queries.q.dtype.element_ty),
        )
    elif ROW.D_R > 0:
        block = program - norm_programs
        head_blocks = tl.cdiv(heads, HEADS)
        token = (block // head_blocks).to(tl.int64) + tl.arange(0, 1)
        head = (block % head_blocks).to(tl.int64) * HEADS + tl.arange(0, HEADS)
        _rotate_queries(token, head, numbers, queries, angles, lengths, ROW, TRAITS)


@triton.jit
def _append_rows(
    token,  # int64 [T]
    numbers,
    latents,
    angles,
    slots,
    page_table,
    lengths,
    shard,
    cache,
    ROW: tl.constexpr,
    TRAITS: tl.constexpr,
    Q_DTYPE: tl.constexpr,
):
    """Normalise and rotate the latents of tokens; store those that have a slot in the cache."""
    D_C: tl.constexpr = ROW.D_C
    D_R: tl.constexpr = ROW.D_R
    LATENT_TILE: tl.constexpr = ROW.LATENT_TILE
    PAIRS: tl.constexpr = ROW.PAIRS
    INTERLEAVED: tl.constexpr = TRAITS.INTERLEAVED
    is_token = token < numbers.tokens
    column = tl.arange(0, LATENT_TILE)
    in_row = (column < D_C)[None, :]
    at = latents.kv + token * latents.stride_token  # [T]
    x = tl.load(at[:, None] + column[None, :], mask=is_token[:, None] & in_row, other=0.0)
    if latents.gamma is not None:
        is_weight = column < D_C
        weight_at = latents.gamma + column * latents.stride_gamma
        weight = tl.load(weight_at, mask=is_weight, other=0.0)
    if D_R > 0:
        k0, k1 = load_pairs(
            (at + D_C)[:, None, None], is_token[:, None, None], D_R, PAIRS, INTERLEAVED
        )

    request, position, angle, has_angle, is_token = _find_positions(
        token, is_token, numbers, angles, lengths, TRAITS
    )
    page, offset, is_stored = _find_slots(
        *(token, request, position, is_token, numbers, slots, page_table, shard),
        *(ROW, TRAITS),
    )
    row = cache.payload + page * cache.stride_page + offset * cache.stride_row  # [T]

    latent = x.to(tl.float32)
    if latents.gamma is not None:
        latent = rms_norm(x, weight, latents.epsilon, D_C)
    if D_C < LATENT_TILE:
        # x is 0 there, but the norm may multiply its row by infinity
        latent = tl.where(in_row, latent, 0.0)
    rope = None
    if D_R > 0:
        cos, sin = load_angles(angles, angle, has_angle, D_R, PAIRS)
        y0, y1 = rotate(k0, k1, cos, sin)
        rope = (y0.to(Q_DTYPE).to(tl.float32), y1.to(Q_DTYPE).to(tl.float32))
    rope_scale = store_latent(latent, rope, row, page, offset, is_stored, cache, ROW)
    if D_R > 0:
        store_rope(rope[0], rope[1], row, is_stored, rope_scale, ROW, INTERLEAVED)


@triton.jit
def _rotate_queries(
    token,  # int64 [T]
    head,  # int64 [H]
    numbers,
    queries,
    angles,
    lengths,
    ROW: tl.constexpr,
    TRAITS: tl.constexpr,
):
    """Rotate the queries of some tokens and heads; all are read before any is written.

    A query becomes 0 where the given position of its token is no row of freqs.
    """
    D_R: tl.constexpr = ROW.D_R
    PAIRS: tl.constexpr = ROW.PAIRS
    INTERLEAVED: tl.constexpr = TRAITS.INTERLEAVED
    is_token = token < numbers.tokens
    inside = (is_token[:, None] & (head < numbers.heads)[None, :])[:, :, None]  # [T, H, 1]
    token_at, head_at = token[:, None, None], head[None, :, None]
    at = queries.q + token_at * queries.stride_token + head_at * queries.stride_head
    x0, x1 = load_pairs(at, inside, D_R, PAIRS, INTERLEAVED)
    _, _, angle, has_angle, is_token = _find_positions(
        token, is_token, numbers, angles, lengths, TRAITS
    )
    inside = inside & is_token[:, None, None]
    cos, sin = load_angles(angles, angle, has_angle, D_R, PAIRS)
    y0, y1 = rotate(x0, x1, cos, sin)
    if angles.positions is not None:
        y0 = tl.where(has_angle[:, None, None], y0, 0.0)
        y1 = tl.where(has_angle[:, None, None], y1, 0.0)
    out_at = queries.out + token_at * queries.stride_out_token + head_at * queries.stride_out_head
    store_pairs(
        *(out_at, inside, y0, y1, queries.out.dtype.element_ty),
        *(D_R, PAIRS, INTERLEAVED, True, ROW.HAS_FP8),
    )


@triton.jit
def _find_positions(token, is_token, numbers, angles, lengths, TRAITS: tl.constexpr):
    """Return (request, position in it, row of freqs, is there such a row?, is it a token?) of each
    token; the first three are int64.

    Without `kv_lens` the request is unknown, and both positions are the given one. The request of a
    row that is no token is arbitrary.
    """
    request = tl.zeros_like(token)
    if lengths.kv_lens is not None:
        request = find_request(
            *(token, is_token, lengths.q_starts, lengths.stride_q_starts, numbers.num_requests),
            TRAITS.PROBES,
        )
        # the last token of a request is its newest: it is at position kv_len - 1
        end_at = lengths.q_starts + (request + 1) * lengths.stride_q_starts
        end = tl.load(end_at, mask=is_token, other=0)
        kv_len_at = lengths.kv_lens + request * lengths.stride_kv_lens
        kv_len = tl.load(kv_len_at, mask=is_token, other=0)
        # rows after the last request are padding; only now, so that no load waits for another one
        is_token = is_token & (token < end)
        position = kv_len.to(tl.int64) - (end - token)
        # the host does not check kv_lens: if they leave out new tokens, a position is negative,
        # and nothing before the tables may be read
        angle = position
        has_angle = is_token & (position >= 0)
    if angles.positions is not None:
        at = angles.positions + token * angles.stride_positions
        angle = tl.load(at, mask=is_token, other=0).to(tl.int64)
        has_angle = is_token & (angle >= 0) & (angle < numbers.num_positions)
        if lengths.kv_lens is None:
            position = angle
    return request, position, angle, has_angle, is_token


@triton.jit
def _find_slots(
    token,
    request,
    position,
    is_token,
    numbers,
    slots,
    page_table,
    shard,
    ROW: tl.constexpr,
    TRAITS: tl.constexpr,
):
    """Return (page, row in the page, is a row stored?) of each token, the first two int64."""
    IS_SHARDED: tl.constexpr = TRAITS.IS_SHARDED
    PAGE_SIZE: tl.constexpr = ROW.PAGE_SIZE
    is_stored = is_token & (position >= 0)
    if IS_SHARDED:
        rank, world, interleave = shard
        is_stored = is_stored & (position // interleave % world == rank)
        # the place among this rank's tokens
        period = interleave * world
        position = position // period * interleave + position % interleave
    if slots.slots is not None:
        slot_at = slots.slots + token * slots.stride
        slot = tl.load(slot_at, mask=is_token, other=-1).to(tl.int64)
        is_stored = (slot >= 0) & is_stored if IS_SHARDED else slot >= 0
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
    else:
        page, offset = find_rows(
            request, position, is_stored, page_table, numbers.stride_table_request, PAGE_SIZE
        )
    return page, offset, is_stored
