"""The table of cosines and sines that RoPE rotates by, from a model's config.

    table[t, 2i] = a · cos(position[t] · ω[i])      table[t, 2i + 1] = a · sin(position[t] · ω[i])

ω[i] = theta^(−2i/D_R), changed by the model's scaling; `a`, the attention factor, is 1 except in
yarn and longrope. The rules are those of transformers; angles are computed in float64 and the table
is rounded to float32 once. (An angle in float32 is wrong by up to 5e-3 at position 100 000.)

    rope_type      ω                                                           a
    default        theta^(−2i/D_R)                                             1
    linear         default / factor                                            1
    dynamic        default, with a theta that grows with the length            1
    yarn           default for fast pairs, default / factor for slow ones      mscale ratio
    longrope       default / short_factor[i], or / long_factor[i] when longer  sqrt(1 + ln s / ln L)
    llama3         default for fast pairs, default / factor for slow ones      1
    proportional   default / factor for the first pairs, 0 for the others      1
    none           0: the model rotates nothing                                1
"""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from mlakit.checks import INTEGERS, Dims, as_signed, values_visible
from mlakit.geometry import MLAGeometry, RopeParameters, yarn_mscale

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
    """The angles of a model as `norm_rope_quant_append` and `LayerWeights` take them (`freqs`).

    config     what `MLAGeometry.from_config` takes: a geometry, the name or Hub id of a known
               model, a dict, the path of a config.json or of its folder, a config object
    positions  how many positions from 0 on, or an integer tensor [positions] of them
    length     tokens of the longest context the table serves: `dynamic` and `longrope` rotate
               longer contexts by other angles. The default is the largest position + 1, as
               transformers does it: give the length you serve, so that angles do not depend on how
               many positions you ask for. Other types have no use for it.
    device     of the table; the default is that of `positions`, or torch's default device

    Returns float32 [positions, D_R], columns cos0, sin0, cos1, sin1, … of the D_R/2 pairs. Pass the
    geometry's `rope` along with it: it says which columns of a query make a pair.
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
    """The rope parameters of a geometry, if they can be meant."""
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
        # some configs count in columns of a whole head, others in those of its rotated part
        rotated = {int(part * of) for of in (geometry.qk_rope_head_dim, geometry.qk_head_dim)}
        dims.require(
            geometry.qk_rope_head_dim in rotated,
            "partial_rotary_factor",
            f"rotate all {geometry.qk_rope_head_dim} columns of qk_rope_head_dim",
            part,
        )
    dims.require(p.rope_theta > 1, "rope_theta", "be above 1", p.rope_theta)
    return p


def _longest_context(p: RopeParameters, at: Tensor, length: int | None) -> Tensor:
    """Tokens of the longest context. On the device of the positions: nothing waits for them."""
    if length is not None or p.rope_type not in ("dynamic", "longrope") or not len(at):
        return torch.tensor(length or 0, device=at.device)
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
    """A parameter that the scaling cannot do without."""
    value = getattr(p, name)
    dims.require(value is not None, "rope_parameters", f"have {name} for {p.rope_type}", p)
    number = dims.finite(name, value)
    dims.require(number > 0, name, "be above 0", number)
    return number


def _dynamic(dims: Dims, p: RopeParameters, width: int, context: Tensor) -> Tensor:
    """NTK: contexts beyond the trained ones get a larger theta."""
    factor = _needed(dims, p, "factor")
    trained = _needed(dims, p, "max_position_embeddings")
    dims.require(width > 2, "qk_rope_head_dim", "be above 2 for dynamic", width)
    stretch = factor * context.double().clamp(min=trained) / trained - (factor - 1)
    return _plain_frequencies(p.rope_theta * stretch ** (width / (width - 2)), width)


def _yarn(dims: Dims, p: RopeParameters, width: int, plain: Tensor) -> Tensor:
    """Pairs that turn beta_fast times or more in the trained context keep their frequency, those
    that turn beta_slow times or fewer are slowed down by the factor, with a ramp between them."""
    factor = _needed(dims, p, "factor")
    trained = _needed(dims, p, "original_max_position_embeddings")

    def pair_that_turns(times: float) -> float:
        return width * log(trained / (times * 2 * pi)) / (2 * log(p.rope_theta))

    low = pair_that_turns(_needed(dims, p, "beta_fast"))
    high = pair_that_turns(_needed(dims, p, "beta_slow"))
    if p.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # no ramp: a step
    pair = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    slowed = ((pair - low) / (high - low)).clamp(0, 1)
    return plain * (1 - slowed) + plain / factor * slowed


def _longrope(dims: Dims, p: RopeParameters, plain: Tensor, context: Tensor) -> Tensor:
    """A divisor for each pair; there are two lists, for contexts up to the trained ones and for
    longer ones."""
    trained = _needed(dims, p, "original_max_position_embeddings")
    scaled = []
    for name in ("long_factor", "short_factor"):
        values = getattr(p, name)
        got = "none" if values is None else len(values)
        dims.require(got == len(plain), name, f"have {len(plain)} numbers, one for each pair", got)
        scaled.append(plain / torch.tensor(values, dtype=torch.float64, device="cpu"))
    longer, otherwise = (frequencies.to(context.device) for frequencies in scaled)
    return torch.where(context > trained, longer, otherwise)


def _llama3(dims: Dims, p: RopeParameters, plain: Tensor) -> Tensor:
    """As yarn, with the ramp over the turns in the trained context and not over the pairs."""
    factor = _needed(dims, p, "factor")
    low, high = _needed(dims, p, "low_freq_factor"), _needed(dims, p, "high_freq_factor")
    dims.require(high > low, "high_freq_factor", f"be above low_freq_factor, {low}", high)
    turns = _needed(dims, p, "original_max_position_embeddings") * plain / (2 * pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept)


def _attention_factor(dims: Dims, p: RopeParameters) -> float:
    """What cosines and sines are multiplied by."""
    if p.rope_type not in ("yarn", "longrope"):
        return 1.0
    if p.attention_factor is not None:
        return dims.finite("attention_factor", p.attention_factor)
    factor = _needed(dims, p, "factor")
    if p.rope_type == "longrope":
        trained = _needed(dims, p, "original_max_position_embeddings")
        return sqrt(1 + log(factor) / log(trained)) if factor > 1 else 1.0
    if p.mscale and p.mscale_all_dim:
        return yarn_mscale(factor, p.mscale) / yarn_mscale(factor, p.mscale_all_dim)
    return yarn_mscale(factor, 1.0)
