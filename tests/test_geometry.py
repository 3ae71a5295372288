"""Sizes and softmax scales against the configs and attention modules of transformers."""

from __future__ import annotations

import dataclasses
import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mlakit.geometry import PRESETS, MLAGeometry, RowShape, yarn_mscale


def published_yarn(factor: float, mscale: float) -> dict[str, Any]:
    """`rope_scaling` as the DeepSeek and Kimi checkpoints write it."""
    return {
        "max_position_embeddings": int(4096 * factor),
        "rope_scaling": {
            "type": "yarn",
            "factor": factor,
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }


V3_YARN = published_yarn(40, 1.0)
V2_LITE = {
    **published_yarn(40, 0.707),
    "num_attention_heads": 16,
    "hidden_size": 2048,
    "q_lora_rank": None,
}
KIMI_K2 = {**published_yarn(32, 1.0), "num_attention_heads": 64}

# preset: (model type of transformers, what the checkpoint's config says beside its defaults)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": ("deepseek_v2", V2_LITE),
    "deepseek-v3": ("deepseek_v3", V3_YARN),
    "deepseek-v3.2": ("deepseek_v32", V3_YARN),
    "kimi-k2": ("deepseek_v3", KIMI_K2),
    "glm-5": ("glm_moe_dsa", {}),
    "mistral-small-4": ("mistral4", {}),
    "minicpm3": ("minicpm3", {}),
}

ATTENTION_CLASSES = {
    "deepseek_v2": "DeepseekV2Attention",
    "deepseek_v3": "DeepseekV3Attention",
    "deepseek_v32": "DeepseekV32Attention",
    "glm_moe_dsa": "GlmMoeDsaAttention",
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
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    with torch.device("meta"):
        return getattr(module, ATTENTION_CLASSES[model_type])(config, 0)


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


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("deepseek-v3", 0.135234),
        ("deepseek-v3.2", 0.135234),
        ("deepseek-v2-lite", 0.114721),
        ("kimi-k2", 0.130861),
        ("glm-5", 0.0625),
        ("minicpm3", 0.102062),
    ],
)
def test_softmax_scale_as_published(name, scale):
    assert round(MLAGeometry.preset(name).softmax_scale, 6) == scale


@pytest.mark.parametrize("model_type", ATTENTION_CLASSES)
@pytest.mark.parametrize("stretched", [False, True], ids=["plain", "yarn"])
def test_from_config_of_every_family(model_type, stretched):
    if stretched and model_type == "kimi_linear":
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
    assert geometry.has_indexer is (model_type in ("deepseek_v32", "glm_moe_dsa"))
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        assert getattr(geometry, name) == getattr(config, name, 0), name
    module = attention_module(model_type, config)
    assert math.isclose(geometry.softmax_scale, module.scaling, rel_tol=1e-12)


def test_from_config_takes_the_text_model_of_a_wrapper():
    wrapper = AutoConfig.for_model("kimi_k25")
    assert MLAGeometry.from_config(wrapper) == MLAGeometry.from_config(wrapper.text_config)


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


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v4"])
def test_a_config_of_another_attention_is_refused(model_type):
    config = AutoConfig.for_model(model_type)
    message = rf"config {type(config).__name__} is not of an MLA model: it has no kv_lora_rank"
    with pytest.raises(ValueError, match=message):
        MLAGeometry.from_config(config)


def test_yarn_mscale():
    assert yarn_mscale(40, 1.0) == pytest.approx(1.3688879454, abs=1e-10)
    assert yarn_mscale(1, 1.0) == 1.0
    assert yarn_mscale(0.5, 1.0) == 1.0


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown model 'gpt-2'; choose from .*deepseek-v3"):
        MLAGeometry.preset("gpt-2")


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
