"""Oracles of the step before attention: RoPE on q and k, RMSNorm on the latent, cache row.

Each comes twice. The plain one is exact: float64, no rounding on the way. The `_stepwise` one makes
the documented roundings of the fused kernel, in their order, and returns the final dtypes; a kernel
may differ from it only where the order of a sum or the quality of rsqrt is its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlakit.autocast import without_autocast
from mlakit.formats import saturating_cast
from mlakit.geometry import Rope


@without_autocast
def rotate(
    x: Tensor,  # [..., D_R]
    cos_sin: Tensor,  # [D_R]: cos_0, sin_0, cos_1, sin_1, ...
    *,
    rope: Rope = "interleaved",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Rotate every pair p of columns by its angle.

        y_first  = x_first · cos_p − x_second · sin_p
        y_second = x_first · sin_p + x_second · cos_p

    Pair p is columns (2p, 2p + 1) when "interleaved", (p, p + D_R / 2) when "half"; the result
    keeps the layout of `x`. `cos_sin` has one layout for both.
    """
    first, second = _pair_columns(rope, x.shape[-1])
    x, cos, sin = x.to(dtype), cos_sin[0::2].to(dtype), cos_sin[1::2].to(dtype)
    y = torch.empty_like(x)
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


@without_autocast
def rms_norm(
    x: Tensor,  # [..., D_C]
    gamma: Tensor,  # [D_C]
    epsilon: float,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """y = x / sqrt(mean(x²) + epsilon) · gamma."""
    x = x.to(dtype)
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma.to(dtype)


def append_positions(kv_lens: Sequence[int], q_lens: Sequence[int]) -> list[int]:
    """The position of every new token in its request, request by request.

        position[i] = kv_len − q_len + i

    kv_lens  tokens of each request once the step's are in the cache; q_lens are the new ones
    """
    positions = []
    for kv_len, q_len in zip(kv_lens, q_lens, strict=True):
        for i in range(q_len):
            positions.append(kv_len - q_len + i)
    return positions


@without_autocast
def norm_rope_quant(
    q_rope: Tensor,  # [tokens, heads, D_R]
    kv: Tensor,  # [tokens, D_C + D_R], raw
    freqs: Tensor,  # [positions, D_R], rows of cos_sin
    gamma: Tensor,  # [D_C]
    positions: Sequence[int],
    *,
    epsilon: float,
    rope: Rope = "interleaved",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Queries rotated and cache rows made, one token at a time, before any quantisation.

        q_rope_out[t, h] = rotate(q_rope[t, h], freqs[positions[t]])
        rows[t]          = rms_norm(kv[t, :D_C]) | rotate(kv[t, D_C:], freqs[positions[t]])

    Returns q_rope_out [tokens, heads, D_R] and rows [tokens, D_C + D_R]. A position that is no row
    of freqs is that of a padding token: its query becomes 0, and its row, which no cache stores, is
    NaN.
    """
    d_c = gamma.shape[0]
    q_rope_out = torch.empty(q_rope.shape, dtype=dtype, device=q_rope.device)
    rows = torch.empty(kv.shape, dtype=dtype, device=kv.device)
    for token, position in enumerate(positions):
        if not 0 <= position < len(freqs):
            q_rope_out[token], rows[token] = 0, torch.nan
            continue
        cos_sin = freqs[position]
        q_rope_out[token] = rotate(q_rope[token], cos_sin, rope=rope, dtype=dtype)
        rows[token, :d_c] = rms_norm(kv[token, :d_c], gamma, epsilon, dtype)
        rows[token, d_c:] = rotate(kv[token, d_c:], cos_sin, rope=rope, dtype=dtype)
    return q_rope_out, rows


@without_autocast
def rotate_stepwise(x: Tensor, cos_sin: Tensor, *, rope: Rope = "interleaved") -> Tensor:
    """`rotate` in the dtype of `cos_sin`, two roundings per output, then rounded to x's dtype.

    y_first  = round(x_first · cos_p − round(x_second · sin_p))
    y_second = round(x_first · sin_p + round(x_second · cos_p))
    """
    first, second = _pair_columns(rope, x.shape[-1])
    rotated = x.to(cos_sin.dtype)
    x_first, x_second = rotated[..., first], rotated[..., second]
    cos, sin = cos_sin[0::2], cos_sin[1::2]
    y = torch.empty_like(rotated)
    y[..., first] = _fused_multiply_add(x_first, cos, -(x_second * sin))
    y[..., second] = _fused_multiply_add(x_first, sin, x_second * cos)
    return y.to(x.dtype)


@without_autocast
def rms_norm_stepwise(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` with the statistics in float32 and a rounding to gamma's dtype before gamma.

    y = round_gamma(round_gamma(x · rsqrt(mean(x²) + epsilon)) · gamma)
    """
    x = x.float()
    # the order of a kernel's sum is its own: the float64 sum, rounded, favours none
    mean = x.double().square().mean(-1, keepdim=True).float()
    inverse = (mean + epsilon).double().rsqrt().float()
    return (x * inverse).to(gamma.dtype) * gamma


@without_autocast
def norm_rope_quant_stepwise(
    q_rope: Tensor,
    kv: Tensor,
    freqs: Tensor,
    gamma: Tensor,
    positions: Sequence[int],
    *,
    epsilon: float,
    rope: Rope = "interleaved",
    out_dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`norm_rope_quant` with every documented rounding; e4m3 results saturate, at unit scale.

    The rotation runs in the dtype of `freqs`, the product with gamma in gamma's dtype; the rotated
    key passes through q_rope's dtype. Returns q_rope_out in `out_dtype` and rows in `cache_dtype`.
    """
    d_c = gamma.shape[0]
    q_rope_out = torch.empty(q_rope.shape, dtype=out_dtype, device=q_rope.device)
    rows = torch.empty(kv.shape, dtype=cache_dtype, device=kv.device)
    for token, position in enumerate(positions):
        if not 0 <= position < len(freqs):
            q_rope_out[token], rows[token] = 0, torch.nan
            continue
        cos_sin = freqs[position]
        q_rotated = rotate_stepwise(q_rope[token], cos_sin, rope=rope)
        k_rotated = rotate_stepwise(kv[token, d_c:], cos_sin, rope=rope).to(q_rope.dtype)
        latent = rms_norm_stepwise(kv[token, :d_c], gamma, epsilon)
        q_rope_out[token] = saturating_cast(q_rotated, out_dtype)
        rows[token, :d_c] = saturating_cast(latent, cache_dtype)
        rows[token, d_c:] = saturating_cast(k_rotated, cache_dtype)
    return q_rope_out, rows


def _pair_columns(rope: Rope, width: int) -> tuple[slice, slice]:
    """Where the first and the second elements of all pairs are."""
    if rope == "interleaved":
        return slice(0, None, 2), slice(1, None, 2)
    if rope == "half":
        return slice(0, width // 2), slice(width // 2, None)
    raise ValueError(f'rope must be "interleaved" or "half", got {rope!r}')


def _fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c with one rounding, to a's dtype (of at most 24 significant bits)."""
    product, addend = a.double() * b.double(), c.double()  # the product is exact
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    total = _to_odd(total, error)
    if a.dtype == torch.float32:
        return total.float()
    # torch goes from float64 to the half types through float32, which would round twice
    single = total.float()
    return _to_odd(single, total - single.double()).to(a.dtype)


def _to_odd(x: Tensor, error: Tensor) -> Tensor:
    """Of the two neighbours of x + error the one with an odd last bit; x itself where it is exact.

    A tie of a shorter type has an even last bit, so no later rounding mistakes the result for one.
    """
    even = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32) % 2 == 0
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(x.dtype)
    return torch.where(even & (error != 0), torch.nextafter(x, towards), x)
