"""The oracles together are the attention layer of transformers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from mlakit import MLAGeometry, reference, rope_table
from tests.reference.inputs import Batch, assert_same, normal

pytestmark = pytest.mark.slow

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LAYERS: dict[str, dict[str, Any]] = {
    "interleaved": {"rope_interleave": True, "q_lora_rank": 24},
    "half": {"rope_interleave": False, "q_lora_rank": 24},
    "no q latent": {"rope_interleave": True, "q_lora_rank": None},
    "yarn": {
        "rope_interleave": True,
        "q_lora_rank": 24,
        "attention_bias": True,
        "rope_parameters": YARN,
    },
}


# the families whose attention takes no more than states, angles and a mask
FAMILIES = {
    "axk1": "AXK1",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "minicpm3": "MiniCPM3",
    "youtu": "Youtu",
}


def run_transformers_layer(family: str, layer: dict[str, Any], x: Tensor) -> tuple[Any, Tensor]:
    """A random attention module of a family, and its result on x."""
    config = AutoConfig.for_model(
        family,
        hidden_size=x.shape[1],
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        max_position_embeddings=64,
        **layer,
    )
    config._attn_implementation = "sdpa"  # eager rounds the softmax to float32
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = FAMILIES[family]
    module = getattr(modeling, f"{name}Attention")(config, layer_idx=0).double().eval()
    for seed, parameter in enumerate(module.parameters()):
        fan_in = parameter.shape[-1] if parameter.ndim == 2 else 1
        parameter.data = normal(*parameter.shape, seed=seed) * 1.5 / fan_in**0.5
    rotary = getattr(modeling, f"{name}RotaryEmbedding")(config)
    angles = rotary(x, torch.arange(len(x))[None])
    with torch.no_grad():
        out, _ = module(x[None], position_embeddings=angles, attention_mask=None)
    return module, out[0]


def layer_inputs(module: Any, x: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q_nope and rotated q_rope of every head, and the cache rows, from the layer's own weights."""
    config = module.config
    if config.q_lora_rank is None:
        q = module.q_proj(x)
    else:
        norm = module.q_a_layernorm
        q_latent = reference.rms_norm(module.q_a_proj(x), norm.weight, norm.variance_epsilon)
        q = module.q_b_proj(q_latent)
    q_nope, q_rope = q.view(len(x), config.num_attention_heads, -1).split(
        [config.qk_nope_head_dim, config.qk_rope_head_dim], -1
    )
    q_rope, rows = reference.norm_rope_quant(
        q_rope,
        module.kv_a_proj_with_mqa(x),
        freqs,
        module.kv_a_layernorm.weight,
        range(len(x)),
        epsilon=module.kv_a_layernorm.variance_epsilon,
        rope=MLAGeometry.from_config(config).rope,
    )
    return q_nope, q_rope, rows


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("layer", LAYERS)
def test_parity_with_transformers(layer: str, form: str) -> None:
    check_parity("deepseek_v3", LAYERS[layer], form)


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_every_family(family: str) -> None:
    """The geometry of a config has the scale, the angles and the pairs of columns of its model."""
    check_parity(family, {"q_lora_rank": 24, "rope_parameters": YARN}, "absorbed")


@torch.no_grad()
def check_parity(family: str, layer: dict[str, Any], form: str) -> None:
    """The norms of the module compute in float32, hence 1e-5."""
    x = normal(11, 32, seed=100)
    module, exact = run_transformers_layer(family, layer, x)
    geometry = MLAGeometry.from_config(module.config)
    q_nope, q_rope, rows = layer_inputs(module, x, rope_table(module.config, len(x)))
    latent, k_rope = rows.split([16, 8], -1)
    w_uk, w_uv = module.kv_b_proj.weight.view(4, -1, 16).split([12, 10], 1)
    batch = Batch(q_nope, q_rope, latent, k_rope, w_uk, w_uv, (11,), (11,))

    def attend(softmax_scale: float) -> Tensor:
        if form == "expanded":
            heads, _ = reference.mla_prefill(**batch.expanded(), softmax_scale=softmax_scale)
        else:
            latent_out, _ = reference.mla_decode(**batch.absorbed(), softmax_scale=softmax_scale)
            heads = batch.values(latent_out)
        return module.o_proj(heads.flatten(1))

    assert_same(attend(geometry.softmax_scale), exact, 1e-5)
    uniform_average = attend(0.0)
    assert (uniform_average - exact).abs().amax(-1)[1:].min() > 0.1  # token 0 has one key
