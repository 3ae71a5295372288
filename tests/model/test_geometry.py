"""Sizes and softmax scales against the configs and attention modules of transformers."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from mlakit.model import geometry
from mlakit.model.geometry import PRESETS, MLAGeometry, RopeParameters, RowShape, yarn_mscale
from mlakit.model.releases import ALIASES, RELEASES


def published_yarn(
    factor: float, mscale: float, theta: float = 10_000, beta_fast: float = 32
) -> dict[str, Any]:
    """`rope_scaling` as the DeepSeek and Kimi checkpoints write it."""
    return {
        "max_position_embeddings": int(4096 * factor),
        "rope_theta": theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": factor,
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "original_max_position_embeddings": 4096,
            "beta_fast": beta_fast,
            "beta_slow": 1,
        },
    }


V3_YARN = published_yarn(40, 1.0)
V2_YARN = published_yarn(40, 0.707)
V2 = {**V2_YARN, "num_attention_heads": 128, "hidden_size": 5120}
V2_LITE = {**V2_YARN, "num_attention_heads": 16, "hidden_size": 2048, "q_lora_rank": None}
KIMI_K2 = {**published_yarn(32, 1.0, 50_000, 1), "num_attention_heads": 64}
KIMI_K2_0905 = {**published_yarn(64, 1.0, 50_000, 1), "num_attention_heads": 64}
KIMI_K25 = {**published_yarn(64, 1.0, 50_000, 32), "num_attention_heads": 64}
GLM_52 = {"rope_theta": 8_000_000, "max_position_embeddings": 1_048_576}
KIMI_K3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "max_position_embeddings": 1_048_576,
}
HY4 = {
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "index_n_heads": 32,
    "rope_theta": 10_000_000,
    "max_position_embeddings": 1_048_576,
}
LONGCAT_2 = {  # transformers has the dense model only
    "hidden_size": 8192,
    "num_layers": 38,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 262_144,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
V4_FLASH = {"rope_scaling": RELEASES["deepseek-v4-flash"]["rope_scaling"]}
V4_PRO = {
    **V4_FLASH,
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
}
MINICPM3 = {
    "rope_scaling": {
        "rope_type": "longrope",
        "factor": 1.0,  # transformers 5.17 asks for what the checkpoint leaves out
        "original_max_position_embeddings": 32768,
        **{
            name: RELEASES["minicpm3"]["rope_scaling"][name]
            for name in ("short_factor", "long_factor")
        },
    }
}

# preset: (model type of transformers, what the checkpoint's config says beside its defaults)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("deepseek_v2", V2),
    "deepseek-v2-lite": ("deepseek_v2", V2_LITE),
    "deepseek-v3": ("deepseek_v3", V3_YARN),
    "deepseek-v3.2": ("deepseek_v32", V3_YARN),
    "deepseek-v4-flash": ("deepseek_v4", V4_FLASH),
    "deepseek-v4-pro": ("deepseek_v4", V4_PRO),
    "kimi-k2": ("deepseek_v3", KIMI_K2),
    "kimi-k2-0905": ("deepseek_v3", KIMI_K2_0905),
    "kimi-k2.5": ("deepseek_v3", KIMI_K25),
    "glm-4.7-flash": ("glm4_moe_lite", {"rope_theta": 1_000_000, "partial_rotary_factor": 1.0}),
    "glm-5": ("glm_moe_dsa", {"rope_theta": 1_000_000}),
    "glm-5.2": ("glm_moe_dsa", GLM_52),
    "glm-5.3-flash": ("glm5_next_text", {"index_kpool": 4}),
    "kimi-k3": ("kimi_linear", KIMI_K3),
    "hy4-preview": ("hy_v4", HY4),
    "longcat-2.0": ("longcat_flash", LONGCAT_2),
    "mistral-small-4": ("mistral4", {}),
    "minicpm3": ("minicpm3", MINICPM3),
}

ATTENTION_CLASSES = {
    "deepseek_v2": "DeepseekV2Attention",
    "deepseek_v3": "DeepseekV3Attention",
    "deepseek_v32": "DeepseekV32Attention",
    "glm4_moe_lite": "Glm4MoeLiteAttention",
    "glm_moe_dsa": "GlmMoeDsaAttention",
    "glm5_next_text": "Glm5NextTextAttention",
    "hy_v4": "HYV4Attention",
    "mistral4": "Mistral4Attention",
    "minicpm3": "MiniCPM3Attention",
    "kimi_linear": "KimiLinearAttention",
    "longcat_flash": "LongcatFlashMLA",
    "youtu": "YoutuAttention",
}

SMALL = {
    "num_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "hidden_size": 64,
}


def attention_module(model_type: str, config: Any) -> torch.nn.Module:
    folder = model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    with torch.device("meta"):
        name = ATTENTION_CLASSES.get(model_type, "DeepseekV4Attention")
        return getattr(module, name)(config, 0)


def test_every_preset_has_a_checkpoint_to_be_compared_with():
    assert set(CHECKPOINTS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_the_config_of_its_checkpoint(name):
    model_type, published = CHECKPOINTS[name]
    config = AutoConfig.for_model(model_type, **published)
    assert MLAGeometry.from_config(config) == MLAGeometry.preset(name)


@pytest.mark.parametrize("name", PRESETS)
def test_softmax_scale_is_that_of_the_attention_module(name):
    model_type, published = CHECKPOINTS[name]
    module = attention_module(model_type, AutoConfig.for_model(model_type, **published))
    assert math.isclose(MLAGeometry.preset(name).softmax_scale, module.scaling, rel_tol=1e-12)


@pytest.mark.parametrize("model_type", ATTENTION_CLASSES)
@pytest.mark.parametrize("stretched", [False, True], ids=["plain", "yarn"])
def test_from_config_of_every_family(model_type, stretched):
    if stretched and model_type in ("kimi_linear", "glm5_next_text"):
        published: dict[str, Any] = {}  # its layers have no rope to stretch
    else:
        published = published_yarn(16, 0.8) if stretched else {}
    config = AutoConfig.for_model(model_type, **published)
    geometry = MLAGeometry.from_config(config)
    assert geometry.num_heads == config.num_attention_heads
    for name in (
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "hidden_size",
        "q_lora_rank",
    ):
        assert getattr(geometry, name) == getattr(config, name), name
    sparse = ("deepseek_v32", "glm_moe_dsa", "glm5_next_text", "hy_v4")
    assert geometry.has_indexer is (model_type in sparse)
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        assert getattr(geometry, name) == getattr(config, name, 0), name
    module = attention_module(model_type, config)
    assert math.isclose(geometry.softmax_scale, module.scaling, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("model_type", "flag", "rope"),
    [
        ("axk1", False, "half"),
        ("axk2", False, "interleaved"),
        ("deepseek_v2", None, "interleaved"),
        ("deepseek_v2", False, "interleaved"),
        ("deepseek_v3", None, "interleaved"),
        ("deepseek_v3", False, "half"),
        ("deepseek_v32", None, "interleaved"),
        ("deepseek_v32", False, "interleaved"),
        ("glm4_moe_lite", False, "half"),
        ("glm_moe_dsa", None, "interleaved"),
        ("glm_moe_dsa", False, "interleaved"),
        ("hy_v4", None, "half"),
        ("hy_v4", True, "half"),
        ("longcat_flash", False, "interleaved"),
        ("minicpm3", None, "half"),
        ("minicpm3", True, "half"),
        ("mistral4", None, "interleaved"),
        ("mistral4", False, "half"),
        ("youtu", False, "half"),
    ],
)
def test_from_config_knows_which_columns_are_rotated_together(model_type, flag, rope):
    fields = {} if flag is None else {"rope_interleave": flag}
    assert MLAGeometry.from_config(AutoConfig.for_model(model_type, **fields)).rope == rope
    raw = {**RELEASES["deepseek-v3"], "model_type": model_type, **fields}
    assert MLAGeometry.from_config(raw).rope == rope


def test_the_types_that_read_rope_interleave_are_those_of_transformers():
    folder = Path(transformers.__file__).parent / "models"
    reading = {
        file.parent.name
        for file in folder.glob("*/modeling_*.py")
        if "config.rope_interleave" in file.read_text(encoding="utf-8")
    }
    assert reading == set(geometry._READ_ROPE_INTERLEAVE)


@pytest.mark.parametrize(("stored", "rope"), [(None, "half"), (0, "half"), (1, "interleaved")])
def test_any_false_value_of_rope_interleave_means_halves(stored, rope):
    fields = {**RELEASES["deepseek-v3"], "model_type": "deepseek_v3", "rope_interleave": stored}
    assert MLAGeometry.from_config(fields).rope == rope
    del fields["model_type"]
    assert MLAGeometry.from_config(fields).rope == rope


def test_from_config_takes_the_text_model_of_a_wrapper():
    wrapper = AutoConfig.for_model("kimi_k25")
    assert MLAGeometry.from_config(wrapper) == MLAGeometry.from_config(wrapper.text_config)
    text = RELEASES["kimi-k2.5"]
    wrapped = {"model_type": "kimi_k25", "vision_config": {"hidden_size": 1}, "text_config": text}
    assert MLAGeometry.from_config(wrapped) == PRESETS["kimi-k2.5"]


@pytest.mark.parametrize("name", RELEASES)
def test_from_config_takes_what_a_checkpoint_has(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(RELEASES[name]), encoding="utf-8")
    for config in (
        RELEASES[name],
        tmp_path,
        str(tmp_path),
        tmp_path / "config.json",
        str(tmp_path / "config.json"),
        SimpleNamespace(**RELEASES[name]),
        PRESETS[name],
        name,
    ):
        assert MLAGeometry.from_config(config) == PRESETS[name]


def test_a_folder_comes_before_a_known_model_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deepseek-v3").mkdir()
    assert MLAGeometry.from_config("deepseek-v3") == PRESETS["deepseek-v3"]
    content = json.dumps(RELEASES["kimi-k2"])
    (tmp_path / "deepseek-v3" / "config.json").write_text(content, encoding="utf-8")
    assert MLAGeometry.from_config("deepseek-v3") == PRESETS["kimi-k2"]
    assert MLAGeometry.preset("deepseek-v3") == PRESETS["deepseek-v3"]


def test_from_config_of_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(RELEASES["glm-5"]), encoding="utf-8")
    assert MLAGeometry.from_config("~/config.json") == PRESETS["glm-5"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config must be the name of a known model, .* or a config object, got NoneType"),
        (3, "config must be the name of a known model, .* got int"),
        (["deepseek-v3"], "config must be the name of a known model, .* got list"),
        (b"deepseek-v3", "config must be the name of a known model, .* got bytes"),
        (
            {**RELEASES["deepseek-v3"], "kv_lora_rank": "512"},
            "config dict: kv_lora_rank must be an integer, got '512'",
        ),
        (
            {**RELEASES["deepseek-v3"], "rope_scaling": "yarn"},
            "config dict: rope_scaling must be a dict, got str",
        ),
    ],
    ids=repr,
)
def test_what_is_no_config_is_refused(config, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        MLAGeometry.from_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kv_lora_rank": None},
            "config dict has no kv_lora_rank: not an MLA config",
        ),
        (
            {"hidden_size": None},
            "config dict has no hidden_size: not an MLA config",
        ),
        (
            {"num_attention_heads": None},
            "config dict has no num_attention_heads: not an MLA config",
        ),
        ({"v_head_dim": None}, "config dict has no v_head_dim: not an MLA config"),
        (
            {"text_config": {"hidden_size": 4}},
            "text_config of config dict has no kv_lora_rank: not an MLA config",
        ),
        (
            {"rope_scaling": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}},
            "config dict: rope_scaling must be for one layer type, got "
            "full_attention, sliding_attention",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "mscale_all_dim": 1.0}},
            "rope_parameters: linear must have a factor, got None",
        ),
    ],
    ids=str,
)
def test_a_config_that_lacks_something_is_refused(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        MLAGeometry.from_config({**RELEASES["deepseek-v3"], **change})


def test_a_path_that_leads_to_no_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config: there is no config\.json at .*nowhere"):
        MLAGeometry.from_config(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config: there is no config\.json at "):
        MLAGeometry.from_config(tmp_path)
    with pytest.raises(ValueError, match=r"^config '.*' is not a config\.json, a folder with one"):
        MLAGeometry.from_config(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"is not .* or a known model; choose from deepseek-v2"):
        MLAGeometry.from_config("deepsek-v3")
    with pytest.raises(ValueError, match=r"^config '\{.*' is not a config\.json"):
        MLAGeometry.from_config(json.dumps(RELEASES["deepseek-v3"]) * 100)
    file = tmp_path / "config.json"
    for content, message in (("{", "is not JSON: "), ("[1]", "must be a JSON object, got a list")):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=f"^config .*config\\.json {message}"):
            MLAGeometry.from_config(file)
    file.write_bytes(b"\xff{}")
    with pytest.raises(ValueError, match="is not JSON: "):
        MLAGeometry.from_config(file)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("deepseek-r1", "deepseek-v3"),
        ("deepseek-v3.1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("DEEPSEEK-AI/deepseek-v3.2-exp", "deepseek-v3.2"),
        ("DeepSeek-V3", "deepseek-v3"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2-0905"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2-0905"),
        ("moonshotai/Kimi-K2.5", "kimi-k2.5"),
        ("zai-org/GLM-5", "glm-5"),
    ],
)
def test_presets_have_other_names(alias, name):
    assert MLAGeometry.preset(alias) is PRESETS[name]
    assert MLAGeometry.from_config(alias) is PRESETS[name]


def test_names_and_aliases_are_lower_case_and_lead_to_a_preset():
    assert list(PRESETS) == list(RELEASES)
    assert set(ALIASES.values()) == set(RELEASES)
    assert not set(ALIASES) & set(RELEASES)
    for name in (*ALIASES, *RELEASES):
        assert name == name.lower()
    assert sum("/" in alias for alias in ALIASES) >= len(RELEASES)


def test_the_factors_of_minicpm3_lie_on_the_curve_they_were_made_from():
    scaling = RELEASES["minicpm3"]["rope_scaling"]
    curve = [1 + 16 / (1 + math.exp((7.5 - i) / 1.34)) for i in range(16)]
    assert scaling["short_factor"] == pytest.approx(curve, rel=1e-15)
    assert scaling["long_factor"] == scaling["short_factor"]


def test_rope_parameters_show_what_is_not_a_default():
    assert repr(RopeParameters()) == "RopeParameters(rope_type='default', rope_theta=10000.0)"
    assert repr(RopeParameters("linear", factor=2.0)) == (
        "RopeParameters(rope_type='linear', rope_theta=10000.0, factor=2.0)"
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 40, "mscale_all_dim": 1.0},
        {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0},
    ],
    ids=["rope_type", "type"],
)
@pytest.mark.parametrize("attribute", ["rope_parameters", "rope_scaling"])
def test_from_config_reads_old_and_new_names_of_the_rope(attribute, rope):
    config = SimpleNamespace(**config_fields(), **{attribute: rope})
    assert MLAGeometry.from_config(config).attention_mscale == yarn_mscale(40, 1.0)


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"rope_type": "default"},
        {"rope_type": "default", "factor": 40, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 40},
        {"rope_type": "yarn", "factor": 40, "mscale_all_dim": 0},
        {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
    ],
    ids=str,
)
def test_the_scale_is_plain_without_mscale_all_dim(rope):
    config = SimpleNamespace(**config_fields(), rope_parameters=rope)
    assert MLAGeometry.from_config(config).softmax_scale == 1 / math.sqrt(24)


def config_fields() -> dict[str, int]:
    fields = dict(SMALL)
    fields["num_attention_heads"] = fields.pop("num_heads")
    return fields


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_config_of_another_attention_is_refused(model_type):
    config = AutoConfig.for_model(model_type)
    message = rf"config {type(config).__name__} has no kv_lora_rank: not an MLA config"
    with pytest.raises(ValueError, match=message):
        MLAGeometry.from_config(config)


def test_yarn_mscale():
    assert yarn_mscale(40, 1.0) == pytest.approx(1.3688879454, abs=1e-10)
    assert yarn_mscale(1, 1.0) == 1.0
    assert yarn_mscale(0.5, 1.0) == 1.0


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown model 'gpt-2'; choose from .*deepseek-v3"):
        MLAGeometry.preset("gpt-2")
    with pytest.raises(TypeError, match="the name of a model must be a string, got int"):
        MLAGeometry.preset(3)


def test_derived_sizes():
    geometry = MLAGeometry.preset("deepseek-v3")
    assert geometry.qk_head_dim == 192
    assert geometry.row == RowShape(512, 64)
    assert (geometry.row.width, geometry.row.v_width) == (576, 512)
    assert geometry.expanded_elements_per_token == 128 * (192 + 128)
    assert not geometry.has_indexer
    assert MLAGeometry.preset("deepseek-v3.2").has_indexer


def test_with_heads_changes_nothing_else():
    whole = MLAGeometry.preset("deepseek-v3")
    rank = whole.with_heads(16)
    assert rank.num_heads == 16
    assert rank.with_heads(128) == whole
    assert rank.softmax_scale == whole.softmax_scale


@pytest.mark.parametrize(
    ("row", "width", "v_width"),
    [
        (RowShape(512, 64), 576, 512),
        (RowShape(256, 64), 320, 256),
        (RowShape(256, 32), 288, 256),
        (RowShape(512, 0), 512, 512),
        (RowShape(448, 64, v_width=512), 512, 512),
        (RowShape(1, 0), 1, 1),
    ],
    ids=str,
)
def test_row_widths(row, width, v_width):
    assert (row.width, row.v_width) == (width, v_width)


def test_v_width_reaches_the_row():
    geometry = MLAGeometry(**{**SMALL, "v_width": 40})
    assert geometry.v_width == geometry.row.v_width == geometry.row.width == 40
    assert MLAGeometry(**SMALL).row == RowShape(32, 8)
    assert MLAGeometry(**SMALL).row.v_width == 32
    assert dataclasses.replace(MLAGeometry(**SMALL), kv_lora_rank=64).row.v_width == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank must be at least 1, got 0"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even and not negative, got 7"),
        ({"qk_rope_head_dim": -2}, "qk_rope_head_dim must be even and not negative, got -2"),
        ({"v_width": 41}, "v_width must be between 1 and the row width 40, got 41"),
        ({"v_width": -1}, "v_width must be between 1 and the row width 40, got -1"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim must be at least 1, got 0"),
        ({"v_head_dim": -1}, "v_head_dim must be at least 1, got -1"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"rope": "halves"}, "rope must be one of interleaved, half, got 'halves'"),
    ],
    ids=str,
)
def test_sizes_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        MLAGeometry(**{**SMALL, **change})


def test_geometries_are_frozen_and_hashable():
    geometry = MLAGeometry(**SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.num_heads = 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.row.v_width = 8
    assert len({geometry, MLAGeometry(**SMALL), geometry.with_heads(2)}) == 2
