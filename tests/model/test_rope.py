"""Tables of cosines and sines against the rotary modules of transformers, and against formulas.

transformers computes in float32. With u = 2^-24, the error of a rounding, its ω[i] = θ^(-2i/D_R) is
wrong by up to ln θ · u, because the exponent is rounded, and by a few u of the operations after it.
Its angle has the relative error of ω and one rounding more. A cosine moves by at most as much as
its angle, and both are multiplied by the attention factor: `tolerance` is that bound.
"""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

import mlakit
from mlakit.model.geometry import PRESETS, MLAGeometry, RopeParameters
from mlakit.model.releases import RELEASES
from mlakit.model.rope import ROPE_TYPES, rope_table

U = 2.0**-24
POSITIONS = torch.tensor([0, 1, 2, 3, 63, 64, 511, 1000, 4095, 4096, 20_000, 163_839])
WIDTH = 64

YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(WIDTH // 2)],
    "long_factor": [1.0 + 0.7 * i for i in range(WIDTH // 2)],
    "original_max_position_embeddings": 4096,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn, no mscale": YARN,
    "yarn, equal mscales": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn, two mscales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, mscale alone": {**YARN, "mscale": 0.707},
    "yarn, mscale_all_dim alone": {**YARN, "mscale_all_dim": 0.707},
    "yarn, attention factor": {**YARN, "attention_factor": 1.25},
    "yarn, one beta": {**YARN, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, factor of the lengths": {**YARN, "factor": None},
    "longrope": LONG,
    "longrope, factor": {**LONG, "factor": 16.0},
    "longrope, attention factor": {**LONG, "attention_factor": 1.25},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}

ROTARY_CLASSES = {
    "axk1": "AXK1RotaryEmbedding",
    "axk2": "AXK2RotaryEmbedding",
    "deepseek_v2": "DeepseekV2RotaryEmbedding",
    "deepseek_v3": "DeepseekV3RotaryEmbedding",
    "deepseek_v32": "DeepseekV32RotaryEmbedding",
    "glm4_moe_lite": "Glm4MoeLiteRotaryEmbedding",
    "glm_moe_dsa": "GlmMoeDsaRotaryEmbedding",
    "hy_v4": "HYV4RotaryEmbedding",
    "longcat_flash": "LongcatFlashRotaryEmbedding",
    "minicpm3": "MiniCPM3RotaryEmbedding",
    "mistral4": "Mistral4RotaryEmbedding",
    "youtu": "YoutuRotaryEmbedding",
}


UNROTATED = ("glm-5.3-flash", "kimi-k3")


def model_config(model_type: str, scaling: dict[str, Any], **fields: Any) -> Any:
    """A config object of transformers with `scaling`, D_R = 64 and an odd theta."""
    sizes = {"qk_rope_head_dim": WIDTH, "max_position_embeddings": 16_384, **fields}
    rope = {"rope_theta": 23_000.0, **scaling}
    return AutoConfig.for_model(model_type, rope_parameters=dict(rope), **sizes)


def transformers_table(config: Any, positions: Tensor) -> Tensor:
    """What the rotary module of a config's model computes, in our layout."""
    name = config.model_type
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if name == "deepseek_v4":  # two sets of angles, one number per pair
        rotary = module.DeepseekV4RotaryEmbedding(config)
        parts = rotary(torch.zeros(1), positions[None], layer_type="compress")
        return torch.stack([part[0] for part in parts], dim=-1).flatten(1)
    rotary = getattr(module, ROTARY_CLASSES[name])(config)
    result = rotary(torch.zeros(1), positions[None])
    if isinstance(result, tuple):
        cos, sin = (half[0, :, : half.shape[-1] // 2] for half in result)
    else:  # DeepSeek-V2 has complex numbers
        cos, sin = result[0].real, result[0].imag
    return torch.stack([cos, sin], dim=-1).flatten(1)


def tolerance(config: Any, positions: Tensor) -> Tensor:
    """How far a float32 computation may be off, per position and column."""
    p = MLAGeometry.from_config(config).rope_parameters
    factor = max(p.attention_factor or 0.0, 2.0)  # no model multiplies by more
    theta = 40 * p.rope_theta if p.rope_type == "dynamic" else p.rope_theta
    width = MLAGeometry.from_config(config).qk_rope_head_dim
    fastest = p.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = (positions[:, None] * fastest).repeat_interleave(2, -1)
    return factor * U * ((math.log(theta) + 8) * angle + 2)


def assert_is_table(actual: Tensor, expected: Tensor, allowed: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    excess = (actual.double() - expected.double()).abs() - allowed
    worst = excess.argmax().item()
    where = divmod(worst, actual.shape[1])
    assert excess.max() <= 0, f"row {where[0]}, column {where[1]}: {excess.max():.2e} too far"


# without `partial_rotary_factor` the module of mistral4 has frequencies for a whole head, more than
# its layers can take
TRIED = [
    (model_type, scaling)
    for model_type in ROTARY_CLASSES
    for scaling in SCALINGS
    if model_type != "mistral4" or scaling not in ("plain", "proportional")
]


@pytest.mark.parametrize(("model_type", "scaling"), TRIED)
def test_every_family_and_scaling_is_that_of_transformers(model_type, scaling):
    config = model_config(model_type, SCALINGS[scaling])
    expected = transformers_table(config, POSITIONS)
    assert_is_table(rope_table(config, POSITIONS), expected, tolerance(config, POSITIONS))


@pytest.mark.parametrize("name", [name for name in RELEASES if name not in UNROTATED])
def test_every_preset_is_that_of_transformers(name):
    published = dict(RELEASES[name])
    model_type = published.pop("model_type").replace("kimi_k2", "deepseek_v3")
    model_type = model_type.replace("longcat_flash_pro", "longcat_flash")
    config = AutoConfig.for_model(model_type, **published)
    positions = POSITIONS.clamp(max=config.max_position_embeddings - 1)
    expected = transformers_table(config, positions)
    assert_is_table(rope_table(name, positions), expected, tolerance(config, positions))


def test_the_presets_without_rotation():
    assert MLAGeometry.preset("glm-5.3-flash").qk_rope_head_dim == 0
    assert MLAGeometry.preset("kimi-k3").rope_parameters.rope_type == "none"


def test_every_rope_type_is_among_the_scalings():
    tried = {scaling["rope_type"] for scaling in SCALINGS.values()}
    assert tried | {"none"} == set(ROPE_TYPES)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "theta": ("plain", {"rope_theta": 23_001.0}),
    "factor": ("linear", {"factor": 8.01}),
    "a theta that does not grow": ("dynamic", {"rope_type": "default"}),
    "no mscale": ("yarn, two mscales", {"mscale": None}),
    "mscales exchanged": ("yarn, two mscales", {"mscale": 0.707, "mscale_all_dim": 1.0}),
    "mscale on the table too": ("yarn, equal mscales", {"mscale_all_dim": None}),
    "no ramp": ("yarn, no mscale", {"beta_fast": 1.0}),
    "a ramp that is not truncated": ("yarn, no mscale", {"truncate": False}),
    "the trained length": ("yarn, no mscale", {"original_max_position_embeddings": 16_384}),
    "lists exchanged": (
        "longrope",
        {"short_factor": tuple(LONG["long_factor"]), "long_factor": tuple(LONG["short_factor"])},
    ),
    "no attention factor": ("longrope", {"attention_factor": 1.0}),
    "the other end of the ramp": ("llama3", {"high_freq_factor": 4.1}),
    "all pairs rotated": ("proportional", {"partial_rotary_factor": 1.0}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_tolerance_shows_a_wrong_rule(fault):
    scaling, change = WRONG[fault]
    config = model_config("deepseek_v3", SCALINGS[scaling])
    geometry = MLAGeometry.from_config(config)
    wrong = replace(
        geometry,
        attention_mscale=1.0,
        rope_parameters=replace(geometry.rope_parameters, **change),
    )
    expected = transformers_table(config, POSITIONS)
    with pytest.raises(AssertionError, match="too far"):
        assert_is_table(rope_table(wrong, POSITIONS), expected, tolerance(config, POSITIONS))


def frequency(p: RopeParameters, pair: int, length: int) -> float:
    """ω of one pair, written out from the papers and the models' own code."""
    plain = p.rope_theta ** (-2 * pair / WIDTH)
    trained = p.original_max_position_embeddings
    match p.rope_type:
        case "linear":
            return plain / p.factor
        case "dynamic":
            longest = max(length, p.max_position_embeddings)
            grown = p.factor * longest / p.max_position_embeddings - p.factor + 1
            theta = p.rope_theta * math.pow(grown, WIDTH / (WIDTH - 2))
            return math.exp(-2 * pair / WIDTH * math.log(theta))
        case "yarn":
            # the pair whose wavelength fits `beta` times into the trained context
            low, high = (
                WIDTH / 2 * math.log(trained / beta / (2 * math.pi)) / math.log(p.rope_theta)
                for beta in (p.beta_fast, p.beta_slow)
            )
            if p.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, WIDTH - 1)
            share = min(max((pair - low) / ((high - low) or 0.001), 0), 1)
            return (1 - share) * plain + share * plain / p.factor
        case "longrope":
            return plain / (p.long_factor if length > trained else p.short_factor)[pair]
        case "llama3":
            wavelength = 2 * math.pi / plain
            if wavelength < trained / p.high_freq_factor:
                return plain
            if wavelength > trained / p.low_freq_factor:
                return plain / p.factor
            smooth = trained / wavelength - p.low_freq_factor
            smooth /= p.high_freq_factor - p.low_freq_factor
            return (1 - smooth) * plain / p.factor + smooth * plain
        case "proportional":
            return plain / p.factor if pair < WIDTH * p.partial_rotary_factor / 2 else 0.0
    return plain


def factor_on_table(p: RopeParameters) -> float:
    if p.rope_type not in ("yarn", "longrope"):
        return 1.0
    if p.attention_factor is not None:
        return p.attention_factor
    if p.rope_type == "longrope":
        return math.sqrt(1 + math.log(p.factor, p.original_max_position_embeddings))
    top, bottom = p.mscale, p.mscale_all_dim
    top, bottom = (top, bottom) if top and bottom else (1.0, 0.0)
    return (0.1 * top * math.log(p.factor) + 1) / (0.1 * bottom * math.log(p.factor) + 1)


@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[:8]], ids=["long", "short"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_is_its_formula_rounded_once(scaling, positions):
    config = model_config("deepseek_v3", SCALINGS[scaling])
    p = MLAGeometry.from_config(config).rope_parameters
    factor, length = factor_on_table(p), int(positions.max()) + 1
    exact = torch.tensor(
        [
            [
                factor * turn(position * frequency(p, pair, length))
                for pair in range(WIDTH // 2)
                for turn in (math.cos, math.sin)
            ]
            for position in positions.tolist()
        ],
        dtype=torch.float64,
    )
    # one rounding to float32, and an angle in float64 whose ω has a few roundings
    allowed = exact.abs() * U + factor * (positions[:, None] * 2.0**-49 + 2.0**-52)
    assert_is_table(rope_table(config, positions), exact, allowed)


@pytest.mark.parametrize("form", ["geometry", "object", "dict", "file", "folder", "str", "nested"])
@pytest.mark.parametrize("style", ["old", "new"])
def test_every_form_of_a_config_gives_the_same_table(tmp_path, form, style):
    content = dict(RELEASES["deepseek-v2"])
    if style == "new":
        scaling = dict(content.pop("rope_scaling"))
        scaling["rope_type"] = scaling.pop("type")
        content["rope_parameters"] = {"rope_theta": content.pop("rope_theta"), **scaling}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = {
        "geometry": MLAGeometry.from_config(content),
        "object": SimpleNamespace(**content),
        "dict": content,
        "file": tmp_path / "config.json",
        "folder": tmp_path,
        "str": str(tmp_path),
        "nested": {"model_type": "wrapper", "text_config": content},
    }[form]
    assert torch.equal(rope_table(config, 100), rope_table("deepseek-v2", 100))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_positions_are_rows_of_the_table(dtype):
    table = rope_table("deepseek-v3", 50)
    assert table.shape == (50, 64)
    some = torch.tensor([49, 0, 7, 7, 31])
    given = some.to(dtype)
    assert torch.equal(rope_table("deepseek-v3", given), table[some])
    assert torch.equal(rope_table("deepseek-v3", some.repeat_interleave(2)[::2]), table[some])
    assert torch.equal(given, some.to(dtype))


def test_no_positions_and_no_rotated_columns():
    assert rope_table("deepseek-v3", 0).shape == (0, 64)
    assert rope_table("minicpm3", torch.tensor([], dtype=torch.int64)).shape == (0, 32)
    unrotated = replace(PRESETS["deepseek-v3"], qk_rope_head_dim=0)
    assert rope_table(unrotated, 3).shape == (3, 0)


def test_a_model_without_rotation_has_the_identity():
    table = rope_table(AutoConfig.for_model("kimi_linear"), 300)
    assert torch.equal(table, torch.tensor([1.0, 0.0]).repeat(300, 32))
    assert torch.equal(rope_table(kimi_linear_file(), 300), table)
    rotating = {**kimi_linear_file(), "mla_use_nope": False}
    assert not torch.equal(rope_table(rotating, 300), table)


def kimi_linear_file() -> dict[str, Any]:
    return {**RELEASES["deepseek-v2-lite"], "model_type": "kimi_linear", "mla_use_nope": True}


def test_the_device_is_that_of_the_positions_or_the_one_asked_for():
    assert rope_table("deepseek-v3", 4).device.type == "cpu"
    assert rope_table("deepseek-v3", 4, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert rope_table("deepseek-v3", 4).device.type == "meta"
        here = torch.arange(4, device="cpu")
        assert torch.equal(
            rope_table("deepseek-v3", here), rope_table("deepseek-v3", 4, device="cpu")
        )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_default_device_does_not_reach_the_computation(scaling):
    config = model_config("deepseek_v3", SCALINGS[scaling])
    expected = rope_table(config, POSITIONS)
    with torch.device("meta"):
        assert torch.equal(rope_table(config, POSITIONS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_a_length_fixes_the_angles_of_a_scaling_that_depends_on_it(scaling):
    config = model_config("deepseek_v3", SCALINGS[scaling], max_position_embeddings=4096)
    short, long = rope_table(config, 100), rope_table(config, 20_000)
    assert (long[:100] - short).abs().max() > 0.1
    assert torch.equal(rope_table(config, 100, length=20_000), long[:100])
    assert torch.equal(rope_table(config, 20_000, length=100)[:100], short)
    assert torch.equal(rope_table(config, 100, length=4096), short)
    assert not torch.equal(rope_table(config, 100, length=4097), short)


def test_a_length_changes_nothing_elsewhere():
    assert torch.equal(rope_table("deepseek-v3", 9, length=100_000), rope_table("deepseek-v3", 9))


def test_vllms_name_of_yarn_is_yarn():
    content = dict(RELEASES["deepseek-v3"])
    content["rope_scaling"] = {**content["rope_scaling"], "rope_type": "deepseek_yarn"}
    assert MLAGeometry.from_config(content) == PRESETS["deepseek-v3"]


def with_rope(**parameters: Any) -> dict[str, Any]:
    return {**RELEASES["glm-5"], "rope_parameters": parameters}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "mrope"},
            "rope_type must be one of default, linear, dynamic, yarn, longrope, llama3, "
            "proportional, none, got 'mrope'",
        ),
        ({"rope_type": "linear"}, "rope_parameters must have factor for linear, got Rope"),
        ({"rope_type": "linear", "factor": 0}, "factor must be above 0, got 0"),
        ({"rope_type": "linear", "factor": math.inf}, "factor must be finite, got inf"),
        ({"rope_type": "yarn", "factor": 2, "beta_slow": -1}, "beta_slow must be above 0, got -1"),
        (
            {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1},
            "rope_parameters must have high_freq_factor for llama3, got Rope",
        ),
        (
            {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor must be above low_freq_factor, 4.0, got 4",
        ),
        (
            {"rope_type": "longrope", "factor": 2, "long_factor": [1.0]},
            "long_factor must have 32 numbers, one per pair, got 1",
        ),
        (
            {"rope_type": "longrope", "factor": 2, "long_factor": [1.0] * 32},
            "short_factor must have 32 numbers, one per pair, got none",
        ),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor must rotate all 64 columns of qk_rope_head_dim, got 0.5",
        ),
        ({"rope_type": "default", "rope_theta": 1.0}, "rope_theta must be above 1, got 1.0"),
    ],
    ids=str,
)
def test_parameters_that_make_no_table_are_refused(parameters, message):
    with pytest.raises(ValueError, match=f"^rope_table: {message}"):
        rope_table(with_rope(**parameters), 4)


def test_missing_lengths_are_named():
    content = {**with_rope(rope_type="yarn", factor=2.0), "max_position_embeddings": None}
    with pytest.raises(ValueError, match="must have original_max_position_embeddings for yarn"):
        rope_table(content, 4)
    content = {**with_rope(rope_type="dynamic", factor=2.0), "max_position_embeddings": None}
    with pytest.raises(ValueError, match="must have max_position_embeddings for dynamic"):
        rope_table(content, 4)
    narrow = {**with_rope(rope_type="dynamic", factor=2.0), "qk_rope_head_dim": 2}
    with pytest.raises(ValueError, match="qk_rope_head_dim must be above 2 for dynamic, got 2"):
        rope_table(narrow, 4)


def test_a_scale_of_yarn_with_plain_angles_is_refused():
    sizes = {**vars(PRESETS["deepseek-v3"]), "rope_parameters": RopeParameters()}
    del sizes["row"]
    with pytest.raises(
        ValueError, match=r"rope_parameters must be given with an attention_mscale of 1\.36.* plain"
    ):
        rope_table(MLAGeometry(**sizes), 4)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (-1, ValueError, "positions must be at least 0, got -1"),
        (True, TypeError, "positions must be an integer or a tensor, got bool"),
        (4.0, TypeError, "positions must be an integer or a tensor, got float"),
        ([1, 2], TypeError, "positions must be an integer or a tensor, got list"),
        (torch.tensor([0, -2]), ValueError, "positions must not be negative, got -2"),
        (torch.tensor([0.0]), TypeError, "positions must be int32 or int64 or uint32, got float32"),
        (torch.tensor([[1]]), ValueError, r"positions must have axes \(positions\), got shape"),
        (torch.tensor(3), ValueError, r"positions must have axes \(positions\), got shape"),
    ],
    ids=str,
)
def test_positions_that_make_no_sense_are_refused(positions, error, message):
    with pytest.raises(error, match=f"^rope_table: {message}"):
        rope_table("deepseek-v3", positions)


def test_a_length_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"^rope_table: length must be at least 1, got 0"):
        rope_table("deepseek-v3", 4, length=0)
    with pytest.raises(TypeError, match=r"^rope_table: length must be an integer, got float"):
        rope_table("deepseek-v3", 4, length=4096.0)


def test_it_is_a_name_of_the_package():
    assert mlakit.rope_table is rope_table
