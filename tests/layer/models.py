"""Small random attention modules of transformers, one per family, and their results."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

HIDDEN = 64
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "max_position_embeddings": 128,
    "num_hidden_layers": 3,
}
INDEX = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 12}
# yarn whose original context is short, so that the position's factor is seen
MISTRAL = YARN | {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16}
POOLED = INDEX | {
    "index_n_heads": 16,  # few heads have no positive score: sums of 0, which no top-k tells apart
    "index_kpool": 4,
    "qk_rope_head_dim": 0,
    "layer_types": ["deepseek_sparse_attention"] * 3,
    "indexer_types": ["full"] * 3,
    "rms_norm_eps": 0.5,
}


@dataclass(frozen=True)
class Family:
    """An attention class of transformers, and the fields of its config that are not `SIZES`."""

    model_type: str
    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    attention: str = "Attention"
    layer: int = 1
    config_type: str | None = None  # where it is not model_type

    @property
    def modeling(self) -> Any:
        return importlib.import_module(
            f"transformers.models.{self.model_type}.modeling_{self.model_type}"
        )

    def config(self, **changes: Any) -> Any:
        kind = self.config_type or self.model_type
        config = AutoConfig.for_model(kind, **{**SIZES, **self.fields, **changes})
        # eager attends to everything where nothing is selected
        config._attn_implementation = "sdpa" if self.model_type == "glm5_next" else "eager"
        return config

    def module(self, config: Any = None, *, seed: int = 0) -> nn.Module:
        """Random weights large enough that the attention is far from uniform."""
        config = self.config() if config is None else config
        made = getattr(self.modeling, f"{self.name}{self.attention}")(config, self.layer).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in made.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                values = values * 2 / parameter.shape[-1] ** 0.5
                values = values / 8 if name.startswith("o_proj") else values
            elif name.endswith("norm.weight"):
                values = 1 + 0.3 * values
            parameter.data = values
            parameter.requires_grad_(False)
        return made

    def rotary(self, config: Any) -> Any:
        return getattr(self.modeling, f"{self.name}RotaryEmbedding")(config)


FAMILIES = {
    "deepseek_v2": Family("deepseek_v2", "DeepseekV2", {"rope_parameters": YARN}),
    "deepseek_v2 without q LoRA": Family(
        "deepseek_v2", "DeepseekV2", {"rope_parameters": YARN, "q_lora_rank": None}
    ),
    "deepseek_v3": Family(
        "deepseek_v3", "DeepseekV3", {"rope_parameters": YARN, "attention_bias": True}
    ),
    "deepseek_v3 half": Family(
        "deepseek_v3", "DeepseekV3", {"rope_parameters": YARN, "rope_interleave": False}
    ),
    "deepseek_v32": Family("deepseek_v32", "DeepseekV32", {"rope_parameters": YARN, **INDEX}),
    "glm_moe_dsa": Family("glm_moe_dsa", "GlmMoeDsa", INDEX),
    "glm4_moe_lite": Family("glm4_moe_lite", "Glm4MoeLite"),
    "axk1": Family("axk1", "AXK1", {"rope_parameters": YARN}),
    "youtu": Family("youtu", "Youtu", {"rope_parameters": YARN}),
    "mistral4": Family("mistral4", "Mistral4", {"rope_parameters": MISTRAL}),
    "minicpm3": Family("minicpm3", "MiniCPM3"),
    "kimi_linear": Family(
        "kimi_linear",
        "KimiLinear",
        {"q_lora_rank": None, "layer_types": ["linear_attention", *["full_attention"] * 2]},
    ),
    "hy_v4": Family("hy_v4", "HYV4", {**INDEX, "rms_norm_eps": 0.5}),
    "glm5_next": Family("glm5_next", "Glm5NextText", POOLED, config_type="glm5_next_text"),
    "glm5_next without tail": Family(
        "glm5_next",
        "Glm5NextText",
        POOLED | {"index_kpool": 2, "index_kpool_always_select_tail": False},
        config_type="glm5_next_text",
    ),
    "longcat_flash": Family(
        "longcat_flash", "LongcatFlash", {"num_layers": 2, "head_dim": 8}, attention="MLA"
    ),
}


@torch.no_grad()
def results(family: Family, module: Any, x: Tensor, **more: Any) -> tuple[Tensor, ...]:
    """What the module returns for one whole sequence x [tokens, hidden], without batch axis."""
    positions = torch.arange(len(x))[None]
    arguments: dict[str, Any] = {"attention_mask": causal_mask(len(x)), **more}
    if family.model_type == "glm5_next":  # its mask says which tokens are padding
        arguments["attention_mask"] = torch.ones(1, len(x), dtype=torch.bool)
    elif family.model_type != "kimi_linear":
        arguments["position_embeddings"] = family.rotary(module.config)(x[None], positions)
    if family.model_type in ("mistral4", "deepseek_v32", "glm_moe_dsa"):
        arguments["position_ids"] = positions
    return tuple(module(x[None], **arguments))


def causal_mask(tokens: int) -> Tensor:
    """Additive, [1, 1, tokens, tokens]."""
    return torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
