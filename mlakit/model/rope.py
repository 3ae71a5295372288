"""The RoPE table of cosines and sines, from a model's config.

    table[t, 2i] = a · cos(position[t] · ω[i])      table[t, 2i + 1] = a · sin(position[t] · ω[i])

ω[i] = theta^(−2i/D_R), modified by the model's scaling; `a`, the attention factor, is 1 except in
yarn and longrope. The rules are those of transformers. Angles are computed in float64, and the
table is rounded to float32 once: a float32 angle has an error of up to 5e-3 at position 100 000.

    rope_type      ω                                                           a
    default        theta^(−2i/D_R)                                             1
    linear         default / factor                                            1
    dynamic        default, with a theta that grows with the length            1
    yarn           default for fast pairs, default / factor for slow ones      mscale ratio
    longrope       default / short_factor[i], or / long_factor[i] when longer  sqrt(1 + ln s / ln L)
    llama3         default for fast pairs, default / factor for slow ones      1
    proportional   default / factor for the first pairs, 0 for the others      1
    none           0: no rotation                                              1
"""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from mlakit.dispatch.checks import INTEGERS, Dims, as_signed, values_visible
from mlakit.model.geometry import MLAGeometry, RopeParameters, yarn_mscale

ROPE_TYPES = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "proportional",
    "none",
)


def rope_table(
    config: Any,
    positions: int | Tensor,
    *,
    length: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The RoPE table of a model: `freqs` of `norm_rope_quant_append` and `LayerWeights`.

    config     what `MLAGeometry.from_config` takes: a geometry, the name or Hub id of a known
               model, a dict, the path of a config.json or of its folder, a config object
    positions  a number of positions, starting at 0, or an integer tensor [positions]
    length     tokens of the longest context that uses the table: the angles of `dynamic` and
               `longrope` depend on it. The default is the largest position + 1, as in transformers;
               give the maximum context length, so that angles do not depend on `positions`. Other
               types ignore it
    device     of the table; the default is the device of `positions`, or torch's default device

    Returns float32 [positions, D_R], columns cos0, sin0, cos1, sin1, … of the D_R/2 pairs. The
    geometry's `rope` gives the column pairs; pass both to the op.
    """
    dims = Dims("rope_table")
    geometry = MLAGeometry.from_config(config)
    at = _positions(dims, positions, device)
    parameters = _checked(dims, geometry)
    if length is not None:
        dims.integer("length", length, 1)
    context = _longest_context(parameters, at, length)
    frequencies = _frequencies(dims, parameters, geometry.qk_rope_head_dim, context)
    angle = at.double()[:, None] * frequencies.to(at.device)
    factor = _attention_factor(dims, parameters)
    table = torch.stack([angle.cos(), angle.sin()], dim=-1).mul_(factor)
    return table.flatten(1).float()


def check_rope(op: str, geometry: MLAGeometry) -> None:
    """Raise what `rope_table` would raise for the parameters of a geometry, as an error of `op`."""
    dims = Dims(op)
    parameters = _checked(dims, geometry)
    nothing = torch.zeros((), dtype=torch.int64, device="cpu")
    _frequencies(dims, parameters, geometry.qk_rope_head_dim, nothing)
    _attention_factor(dims, parameters)


def _positions(dims: Dims, positions: object, device: torch.device | str | None) -> Tensor:
    if not isinstance(positions, Tensor):
        if isinstance(positions, bool) or not hasattr(positions, "__index__"):
            got = type(positions).__name__
            raise TypeError(f"rope_table: positions must be an integer or a tensor, got {got}")
        return torch.arange(dims.integer("positions", positions, 0), device=device)
    dims.match("positions", positions, "positions", dtypes=INTEGERS)
    if values_visible(positions) and len(positions):
        least = int(as_signed(positions).min())
        dims.require(least >= 0, "positions", "not be negative", least)
    return as_signed(positions).to(device=device, dtype=torch.int64)


def _checked(dims: Dims, geometry: MLAGeometry) -> RopeParameters:
    """The rope parameters of a geometry, checked."""
    p = geometry.rope_parameters
    dims.require(
        p.rope_type in ROPE_TYPES,
        "rope_type",
        f"be one of {', '.join(ROPE_TYPES)}",
        repr(p.rope_type),
    )
    dims.require(
        p.rope_type != "default" or geometry.attention_mscale == 1,
        "rope_parameters",
        f"be given with an attention_mscale of {geometry.attention_mscale}",
        "plain RoPE",
    )
    part = p.partial_rotary_factor
    if part is not None and p.rope_type != "proportional":
        # some configs mean a fraction of the head, others of its rotated columns
        rotated = {int(part * of) for of in (geometry.qk_rope_head_dim, geometry.qk_head_dim)}
        dims.require(
            geometry.qk_rope_head_dim in rotated,
            "partial_rotary_factor",
            f"rotate all {geometry.qk_rope_head_dim} columns of qk_rope_head_dim",
            part,
        )
    theta = dims.finite("rope_theta", p.rope_theta)
    dims.require(theta > 1, "rope_theta", "be above 1", theta)
    return p


def _longest_context(p: RopeParameters, at: Tensor, length: int | None) -> Tensor:
    """Tokens of the longest context, on the device of the positions: no synchronisation."""
    if length is not None or p.rope_type not in ("dynamic", "longrope") or not len(at):
        return torch.tensor(length or 0, dtype=torch.int64, device=at.device)
    return at.max() + 1


def _frequencies(dims: Dims, p: RopeParameters, width: int, context: Tensor) -> Tensor:
    """ω of each pair, float64 [D_R / 2]."""
    plain = _plain_frequencies(p.rope_theta, width)
    if p.rope_type == "linear":
        return plain / _needed(dims, p, "factor")
    if p.rope_type == "dynamic":
        return _dynamic(dims, p, width, context)
    if p.rope_type == "yarn":
        return _yarn(dims, p, width, plain)
    if p.rope_type == "longrope":
        return _longrope(dims, p, plain, context)
    if p.rope_type == "llama3":
        return _llama3(dims, p, plain)
    if p.rope_type == "proportional":
        rotated = int((1.0 if p.partial_rotary_factor is None else p.partial_rotary_factor) * width)
        keep = torch.arange(width // 2, device="cpu") < rotated // 2
        return torch.where(keep, plain / (p.factor or 1.0), 0.0)
    return torch.zeros_like(plain) if p.rope_type == "none" else plain


def _plain_frequencies(theta: float | Tensor, width: int) -> Tensor:
    on = theta.device if isinstance(theta, Tensor) else torch.device("cpu")
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=on) / max(width, 1)
    return 1.0 / theta**exponent


def _needed(dims: Dims, p: RopeParameters, name: str) -> float:
    """A parameter that the scaling requires."""
    value = getattr(p, name)
    dims.require(value is not None, "rope_parameters", f"have {name} for {p.rope_type}", p)
    number = dims.finite(name, value)
    dims.require(number > 0, name, "be above 0", number)
    return number


def _dynamic(dims: Dims, p: RopeParameters, width: int, context: Tensor) -> Tensor:
    """NTK: contexts longer than in training get a larger theta."""
    factor = _needed(dims, p, "factor")
    original = _needed(dims, p, "max_position_embeddings")
    dims.require(width > 2, "qk_rope_head_dim", "be above 2 for dynamic", width)
    stretch = factor * context.double().clamp(min=original) / original - (factor - 1)
    return _plain_frequencies(p.rope_theta * stretch ** (width / (width - 2)), width)


def _yarn(dims: Dims, p: RopeParameters, width: int, plain: Tensor) -> Tensor:
    """Pairs with at least beta_fast rotations in the original context keep their frequency, pairs
    with at most beta_slow are divided by the factor, with a linear ramp between."""
    factor = _needed(dims, p, "factor")
    original = _needed(dims, p, "original_max_position_embeddings")

    def pair_with(rotations: float) -> float:
        return width * log(original / (rotations * 2 * pi)) / (2 * log(p.rope_theta))

    low = pair_with(_needed(dims, p, "beta_fast"))
    high = pair_with(_needed(dims, p, "beta_slow"))
    if p.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    pair = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    ramp = ((pair - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp


def _longrope(dims: Dims, p: RopeParameters, plain: Tensor, context: Tensor) -> Tensor:
    """One divisor per pair, from `short_factor` up to the original context length and from
    `long_factor` beyond it."""
    original = _needed(dims, p, "original_max_position_embeddings")
    scaled = []
    for name in ("long_factor", "short_factor"):
        values = getattr(p, name)
        got = "none" if values is None else len(values)
        dims.require(got == len(plain), name, f"have {len(plain)} numbers, one per pair", got)
        scaled.append(plain / torch.tensor(values, dtype=torch.float64, device="cpu"))
    long, short = (frequencies.to(context.device) for frequencies in scaled)
    return torch.where(context > original, long, short)


def _llama3(dims: Dims, p: RopeParameters, plain: Tensor) -> Tensor:
    """Scale like yarn, with a ramp over rotations in the original context instead of pairs."""
    factor = _needed(dims, p, "factor")
    low, high = _needed(dims, p, "low_freq_factor"), _needed(dims, p, "high_freq_factor")
    dims.require(high > low, "high_freq_factor", f"be above low_freq_factor, {low}", high)
    rotations = _needed(dims, p, "original_max_position_embeddings") * plain / (2 * pi)
    ramp = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain * ramp + plain / factor * (1 - ramp)


def _attention_factor(dims: Dims, p: RopeParameters) -> float:
    """The factor on cosines and sines."""
    if p.rope_type not in ("yarn", "longrope"):
        return 1.0
    if p.attention_factor is not None:
        return dims.finite("attention_factor", p.attention_factor)
    factor = _needed(dims, p, "factor")
    if p.rope_type == "longrope":
        original = _needed(dims, p, "original_max_position_embeddings")
        return sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    if p.mscale and p.mscale_all_dim:
        return yarn_mscale(factor, p.mscale) / yarn_mscale(factor, p.mscale_all_dim)
    return yarn_mscale(factor, 1.0)
