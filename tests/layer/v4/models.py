"""Small random layers of DeepSeek-V4: configs, weights by name, modules of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlakit.model.v4 import CSA, HCA, SLIDING, V4Config

HIDDEN = 48
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
SIZES: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, CSA, HCA],
    "compress_rates": {CSA: 4, HCA: 16},
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 40,
    "o_groups": 2,
    "o_lora_rank": 24,
    "sliding_window": 16,
    # few heads give equal scores, all 0, whose order nothing defines
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": YARN,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "small": SIZES,
    # nothing divides anything, and the window is shorter than a compressed one
    "odd": SIZES
    | {
        "compress_rates": {CSA: 3, HCA: 7},
        "sliding_window": 5,
        "index_topk": 5,
        "num_attention_heads": 6,
        "o_groups": 3,
        "rope_scaling": None,
    },
    "rates as released": SIZES | {"compress_rates": {CSA: 4, HCA: 128}, "sliding_window": 128},
    "rows of 448 + 64": SIZES
    | {
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "max_position_embeddings": 256,
    },
}
KINDS = (SLIDING, CSA, HCA)


def weights(fields: dict[str, Any], layer: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 parameters of a layer, by their names in it."""
    c = V4Config.from_config(fields)
    generator = torch.Generator().manual_seed(seed + layer)
    width = c.num_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj.weight": (c.q_lora_rank, c.hidden_size),
        "q_a_norm.weight": (c.q_lora_rank,),
        "q_b_proj.weight": (width, c.q_lora_rank),
        "kv_proj.weight": (c.head_dim, c.hidden_size),
        "kv_norm.weight": (c.head_dim,),
        "o_a_proj.weight": (c.o_groups * c.o_lora_rank, width // c.o_groups),
        "o_b_proj.weight": (c.hidden_size, c.o_groups * c.o_lora_rank),
        "sinks": (c.num_heads,),
    }
    kind = c.kinds[layer]
    pools = {"compressor.": c.head_dim} if kind != SLIDING else {}
    if kind == CSA:
        pools["compressor.indexer."] = c.index_head_dim
        shapes["compressor.indexer.q_b_proj.weight"] = (
            c.index_n_heads * c.index_head_dim,
            c.q_lora_rank,
        )
        shapes["compressor.indexer.scorer.weights_proj.weight"] = (c.index_n_heads, c.hidden_size)
    for prefix, columns in pools.items():
        both = 2 * columns if kind == CSA else columns
        shapes[f"{prefix}kv_proj.weight"] = shapes[f"{prefix}gate_proj.weight"] = (
            both,
            c.hidden_size,
        )
        shapes[f"{prefix}position_bias"] = (c.rate(kind), both)
        shapes[f"{prefix}kv_norm.weight"] = (columns,)
    made = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        elif name.endswith("proj.weight"):
            values = values * 1.5 / shape[-1] ** 0.5
        made[name] = values
    return made


def inputs(*lengths: int, hidden: int = HIDDEN, seed: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, hidden, generator=generator) for n in lengths]


def hf_module(fields: dict[str, Any], layer: int, *, seed: int = 0) -> Any:
    """The module of transformers with the parameters of `weights`."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention

    given = {key: value for key, value in fields.items() if key not in ("model_type",)}
    scaling = given.pop("rope_scaling")
    if scaling is not None:
        given["rope_parameters"] = scaling
    config = DeepseekV4Config(**given)
    config._attn_implementation = "eager"
    module = DeepseekV4Attention(config, layer).eval().requires_grad_(False)
    module.load_state_dict(weights(fields, layer, seed=seed))
    return module


@torch.no_grad()
def hf_result(module: Any, x: Tensor) -> Tensor:
    """What the module returns for one whole sequence [tokens, hidden]."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    rotary = DeepseekV4RotaryEmbedding(module.config)
    position = torch.arange(len(x))
    angles = {
        name: rotary(x[None], position_ids=position[None], layer_type=name)
        for name in ("main", "compress")
    }
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < module.config.sliding_window)
    mask = torch.zeros(1, 1, len(x), len(x)).masked_fill(~seen, -torch.inf)
    result: Tensor = module(x[None], angles, position[None], mask)[0][0]
    return result
