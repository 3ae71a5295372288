"""References of the append: RoPE on q and k, RMSNorm on the latent, the cache row.

Each function has two versions. The plain one is exact: float64, no intermediate rounding. The
`_stepwise` one makes the documented roundings of the fused kernel, in the same order, and returns
the final dtypes. A kernel may differ from it only in the order of a sum and the precision of rsqrt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.formats import saturating_cast
from mlakit.model.geometry import Rope


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

    kv_lens  tokens of each request, including those of the step
    q_lens   new tokens of each request
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
    gamma: Tensor | None,  # [D_C]; None: the latents are not normalised
    positions: Sequence[int],
    *,
    epsilon: float,
    rope: Rope = "interleaved",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Rotated queries and cache rows, one token at a time, before quantisation.

        q_rope_out[t, h] = rotate(q_rope[t, h], freqs[positions[t]])
        rows[t]          = rms_norm(kv[t, :D_C]) | rotate(kv[t, D_C:], freqs[positions[t]])

    Returns q_rope_out [tokens, heads, D_R] and rows [tokens, D_C + D_R]. A position outside of
    freqs marks a padding token: its query is 0, and its row, which is not cached, is NaN.
    """
    d_c = kv.shape[1] - q_rope.shape[2]
    q_rope_out = torch.empty(q_rope.shape, dtype=dtype, device=q_rope.device)
    rows = torch.empty(kv.shape, dtype=dtype, device=kv.device)
    for token, cos_sin in _angles(positions, freqs, q_rope_out, rows):
        q_rope_out[token] = rotate(q_rope[token], cos_sin, rope=rope, dtype=dtype)
        latent = kv[token, :d_c]
        rows[token, :d_c] = latent if gamma is None else rms_norm(latent, gamma, epsilon, dtype)
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
    # kernels differ in the order of the sum: this is the float64 sum, rounded
    mean = x.double().square().mean(-1, keepdim=True).float()
    inverse = (mean + epsilon).double().rsqrt().float()
    return (x * inverse).to(gamma.dtype) * gamma


@without_autocast
def norm_rope_quant_stepwise(
    q_rope: Tensor,
    kv: Tensor,
    freqs: Tensor,
    gamma: Tensor | None,
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
    d_c = kv.shape[1] - q_rope.shape[2]
    q_rope_out = torch.empty(q_rope.shape, dtype=out_dtype, device=q_rope.device)
    rows = torch.empty(kv.shape, dtype=cache_dtype, device=kv.device)
    for token, cos_sin in _angles(positions, freqs, q_rope_out, rows):
        q_rotated = rotate_stepwise(q_rope[token], cos_sin, rope=rope)
        k_rotated = rotate_stepwise(kv[token, d_c:], cos_sin, rope=rope).to(q_rope.dtype)
        latent = kv[token, :d_c]
        if gamma is not None:
            latent = rms_norm_stepwise(latent, gamma, epsilon)
        q_rope_out[token] = saturating_cast(q_rotated, out_dtype)
        rows[token, :d_c] = saturating_cast(latent, cache_dtype)
        rows[token, d_c:] = saturating_cast(k_rotated, cache_dtype)
    return q_rope_out, rows


def _angles(
    positions: Sequence[int], freqs: Tensor, q_rope_out: Tensor, rows: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Return (token, its row of freqs); writes the results of padding tokens and skips them."""
    for token, position in enumerate(positions):
        if 0 <= position < len(freqs):
            yield token, freqs[position]
        else:
            q_rope_out[token], rows[token] = 0, torch.nan


def _pair_columns(rope: Rope, width: int) -> tuple[slice, slice]:
    """The columns of the first and of the second elements of all pairs."""
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
    # torch converts float64 to 16-bit types through float32, which would round twice
    single = total.float()
    return _to_odd(single, total - single.double()).to(a.dtype)


def _to_odd(x: Tensor, error: Tensor) -> Tensor:
    """x + error rounded to odd: the neighbour with an odd last bit, or x itself if it is exact.

    A later rounding to a shorter type is then correct: an odd last bit is never a tie.
    """
    even = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32) % 2 == 0
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(x.dtype)
    return torch.where(even & (error != 0), torch.nextafter(x, towards), x)
