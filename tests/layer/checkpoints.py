"""Checkpoint folders like those of releases: config.json, safetensors files, an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlakit.steps.weights import BLOCK
from mlakit.tools.tiny import in_blocks

SMALL: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
KIMI_K3 = {"model_type": "kimi_linear", "mla_use_nope": True, "mla_use_output_gate": True}
LONGCAT = {
    "model_type": "longcat2",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    "index_k_norm_type": "rms",
    "index_init_tokens": 3,
    "index_local_tokens": 6,
    "cli_factor": 2,
}
HY4 = {
    "model_type": "hy_v4",
    "indexer_types": ["full"] * 12,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
}
INDEX = {
    "model_type": "deepseek_v32",
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
}


def tensors(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 tensors of one layer's attention, by their names in the layer."""
    c = config
    heads, hidden, latent = c["num_attention_heads"], c["hidden_size"], c["kv_lora_rank"]
    q_width = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent + c["qk_rope_head_dim"], hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent),
        "o_proj.weight": (hidden, heads * c["v_head_dim"]),
    }
    if c["q_lora_rank"] is None:
        shapes["q_proj.weight"] = (q_width, hidden)
    else:
        shapes["q_a_proj.weight"] = (c["q_lora_rank"], hidden)
        shapes["q_a_layernorm.weight"] = (c["q_lora_rank"],)
        shapes["q_b_proj.weight"] = (q_width, c["q_lora_rank"])
    if c.get("attention_bias"):
        shapes["q_a_proj.bias"] = (c["q_lora_rank"],)
        shapes["kv_a_proj_with_mqa.bias"] = (latent + c["qk_rope_head_dim"],)
        shapes["o_proj.bias"] = (hidden,)
    gate = {"hy_v4": "gate_proj", "kimi_linear": "g_proj"}.get(c["model_type"])
    if gate is not None:
        shapes[f"{gate}.weight"] = (heads * c["v_head_dim"], hidden)
    if c["model_type"] == "hy_v4":
        shapes["sinks"] = (heads,)
    if "index_topk" in c:
        width = c["index_head_dim"]
        shapes["indexer.wq_b.weight"] = (c["index_n_heads"] * width, c["q_lora_rank"])
        shapes["indexer.wk.weight"] = (width, hidden)
        shapes["indexer.k_norm.weight"] = (width,)
        if c.get("index_k_norm_type") != "rms":
            shapes["indexer.k_norm.bias"] = (width,)
        shapes["indexer.weights_proj.weight"] = (c["index_n_heads"], hidden)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        made[name] = values * 1.5 / shape[-1] ** 0.5 if len(shape) == 2 else 1 + 0.2 * values
    return made


def from_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """The values of an e4m3 matrix, float32."""
    rows, columns = codes.shape
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * spread[:rows, :columns]


def quantised(layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer as in DeepSeek's releases: matrices in FP8 blocks, the rest bf16."""
    made = {}
    for name, values in layer.items():
        if values.ndim == 2 and "weights_proj" not in name:
            codes, scale = in_blocks(values)
            made[name], made[f"{name}_scale_inv"] = codes, scale
        else:
            made[name] = values.bfloat16()
    return made


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    layers: Mapping[int, Mapping[str, Tensor]],
    *,
    prefix: str = "model.layers.{}.self_attn.",
    files: int = 2,
    index: bool = True,
) -> Path:
    """A folder with the layers' tensors dealt to `files` files."""
    from safetensors.torch import save_file  # the tests on a GPU do without it

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    named = {
        prefix.format(number) + name: values
        for number, layer in layers.items()
        for name, values in layer.items()
    }
    named["model.embed_tokens.weight"] = torch.zeros(2, 2)
    parts: list[dict[str, Tensor]] = [{} for _ in range(files)]
    weight_map = {}
    for number, (name, values) in enumerate(named.items()):
        part = number % files
        parts[part][name] = values.contiguous()
        weight_map[name] = f"model-{part + 1:05}-of-{files:05}.safetensors"
    for part, content in enumerate(parts):
        save_file(content, folder / f"model-{part + 1:05}-of-{files:05}.safetensors")
    if index:
        content = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    return folder
