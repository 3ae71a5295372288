"""RoPE on queries and keys, RMSNorm on the latent, quantise, append: the new tokens of a step.

Maths      y0 = x0·cos − x1·sin, y1 = x0·sin + x1·cos ;  c = x · rsqrt(mean x² + ε) · γ
Numbers    the second product of the rotation is rounded to the dtype of `freqs`, then the fused
           sum, then the result to the dtype of x. The norm is float32, rounded to γ's dtype before
           it is multiplied by γ
Work       a few operations for each block of tokens, which torch shares out among its threads
Memory     writes q_rope_out [tokens, heads, D_R] and the tokens' cache rows. A token with slot -1
           has no row, and its query becomes 0 where its position is no row of `freqs`. A rank of a
           context-parallel group stores only its own tokens
Lineage    own design; ideas: the fused step of Modular MAX
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.cache import token_positions, token_slots
from mlakit.formats import saturating_cast
from mlakit.kernels.arguments import AppendArguments, filled
from mlakit.kernels.cpu.append_rows import store_rows
from mlakit.kernels.cpu.workspace import row_blocks


def rotate(x: Tensor, cos_sin: Tensor, *, rope: str) -> Tensor:
    """Rotate the pairs of x [..., D_R] by cos_sin [..., D_R] (cos0, sin0, cos1, …) in its dtype."""
    # products of 16-bit or float32 values are exact in float64: each fused sum is rounded once
    cos, sin = cos_sin.double().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = (-1, 2) if rope == "interleaved" else (2, -1)
    pair_axis = -1 if rope == "interleaved" else -2
    x0, x1 = x.to(cos_sin.dtype).double().unflatten(-1, pairs).unbind(pair_axis)
    y0 = x0 * cos - (x1 * sin).to(cos_sin.dtype).double()
    y1 = x0 * sin + (x1 * cos).to(cos_sin.dtype).double()
    y = torch.stack([y0, y1], dim=pair_axis).flatten(-2)
    return y.to(cos_sin.dtype).to(x.dtype)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """x [tokens, D_C] normalised in float32, rounded to γ's dtype, then times γ in that dtype."""
    x = x.float()
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return normalised.to(gamma.dtype) * gamma


class Places(NamedTuple):
    """The cache slots of the new tokens, and their angles of rotation."""

    slots: Tensor  # int64 [tokens without padding], -1: no row is written
    positions: Tensor  # int64 [tokens] rows of freqs
    has_angle: Tensor | None  # where some tokens are padding, with arbitrary positions


def places(a: AppendArguments) -> Places:
    num_positions = len(a.freqs)
    if a.slots is None:
        shard, tokens = a.shard, int(filled(a.q_starts)[-1])
        request, position = token_positions(filled(a.kv_lens), filled(a.q_starts), tokens)
        assert a.page_table is not None
        is_own = shard.owner(position) == shard.rank
        own = token_slots(
            a.page_table, a.layer.page_size, request[is_own], shard.local_position(position[is_own])
        )
        slots = torch.full_like(position, -1).masked_scatter_(is_own, own)
        return Places(slots, position if a.positions is None else a.positions[:tokens].long(), None)
    slots, positions = a.slots.long(), filled(a.positions).long()
    has_angle: Tensor | None = None
    if bool((slots < 0).any()):
        has_angle = (positions >= 0) & (positions < num_positions)
        positions = torch.where(has_angle, positions, 0)
    is_own = a.shard.owner(positions) == a.shard.rank
    return Places(torch.where(is_own, slots, -1), positions, has_angle)


def norm_rope_quant_append(a: AppendArguments, q_rope_out: Tensor) -> None:
    q_rope, kv, freqs, gamma, layer = a.q_rope, a.kv, a.freqs, a.gamma, a.layer
    d_c = layer.codec.row.kv_lora_rank
    slots, positions, has_angle = places(a)
    rope = a.rope
    if has_angle is not None and not len(freqs):
        freqs = freqs.new_zeros(1, freqs.shape[1])
    tokens = len(slots)
    q_rope, kv, q_rope_out = q_rope[:tokens], kv[:tokens], q_rope_out[:tokens]
    heads, d_r = q_rope.shape[1:]
    # the rotation is in float64, with about six values per input
    per_token = heads * d_r + kv.shape[1]
    for block in row_blocks(tokens, max(heads * d_r, kv.shape[1]), 8 * 6 * per_token):
        cos_sin = freqs[positions[block]]
        latent = kv[block, :d_c]
        if gamma is not None:
            latent = rms_norm(latent, gamma, a.epsilon)
        rotated_k = rotate(kv[block, d_c:], cos_sin, rope=rope).to(q_rope.dtype)
        store_rows(
            layer, slots[block], latent, rotated_k, power_of_two_scales=a.power_of_two_scales
        )
        rotated_q = rotate(q_rope[block], cos_sin[:, None, :], rope=rope)
        if has_angle is not None:
            rotated_q = torch.where(has_angle[block, None, None], rotated_q, 0)
        q_rope_out[block] = saturating_cast(rotated_q, q_rope_out.dtype)
