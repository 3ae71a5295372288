"""The oracles together are the attention layer of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_inputs import Batch, assert_same, normal
from torch import Tensor

from mlakit import reference

LAYERS: dict[str, dict[str, Any]] = {
    "interleaved": {"rope_interleave": True, "q_lora_rank": 24},
    "half": {"rope_interleave": False, "q_lora_rank": 24},
    "no q latent": {"rope_interleave": True, "q_lora_rank": None},
    "yarn": {
        "rope_interleave": True,
        "q_lora_rank": 24,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
}


def run_transformers_layer(layer: dict[str, Any], x: Tensor) -> tuple[Any, Tensor, Tensor]:
    """A random DeepseekV3Attention, its rope table [tokens, D_R] and its result on x."""
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3

    config = configuration_deepseek_v3.DeepseekV3Config(
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
    module = modeling_deepseek_v3.DeepseekV3Attention(config, layer_idx=0).double().eval()
    for seed, parameter in enumerate(module.parameters()):
        fan_in = parameter.shape[-1] if parameter.ndim == 2 else 1
        parameter.data = normal(*parameter.shape, seed=seed) * 1.5 / fan_in**0.5
    rotary = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
    cos, sin = rotary(x, torch.arange(len(x))[None])
    with torch.no_grad():
        out, _ = module(x[None], (cos, sin), attention_mask=None)
    pairs = cos.shape[-1] // 2  # both halves hold the same angles
    return module, torch.stack([cos[0, :, :pairs], sin[0, :, :pairs]], -1).flatten(1), out[0]


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
        rope="interleaved" if config.rope_interleave else "half",
    )
    return q_nope, q_rope, rows


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("layer", LAYERS)
@torch.no_grad()
def test_parity_with_transformers(layer: str, form: str) -> None:
    """The norms of the module compute in float32, hence 1e-5."""
    x = normal(11, 32, seed=100)
    module, freqs, exact = run_transformers_layer(LAYERS[layer], x)
    q_nope, q_rope, rows = layer_inputs(module, x, freqs)
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

    assert_same(attend(module.scaling), exact, 1e-5)
    uniform_average = attend(0.0)
    assert (uniform_average - exact).abs().amax(-1)[1:].min() > 0.1  # token 0 has one key
