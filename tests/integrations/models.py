"""Small random models of transformers, one per MLA model type and variant, and one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mlakit.integrations.transformers import continuous

NEEDS_GENERATE_BATCH = pytest.mark.skipif(
    not transformers.__version__.startswith(continuous.RELEASE),
    reason=f"generate_batch needs transformers {continuous.RELEASE}x",
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MOE = {
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
DENSE_LAYERS = {"first_k_dense_replace": 3}
DENSE_TYPES = {"mlp_layer_types": ["dense"] * 3}
INDEX = {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 2}
SHARED_INDEXER = {"indexer_types": ["full", "shared", "full"]}
LONGCAT = {
    "num_layers": 3,
    "num_hidden_layers": 6,  # two attentions a layer
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 64,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "head_dim": 16,
}
KIMI_LINEAR = {
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_local_experts": 8,
    "topk_group": 1,
    "n_group": 1,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_head_dim": 32,
    "linear_num_heads": 4,
    "q_lora_rank": None,
}
GLM5_NEXT = {
    "layer_types": ["linear_attention", *["deepseek_sparse_attention"] * 2],
    "indexer_types": ["full", "full", "shared"],
    "qk_rope_head_dim": 0,
    "index_n_heads": 16,  # few heads have no positive score: sums of 0, which no top-k tells apart
    "index_kpool": 4,
    "linear_head_dim": 32,
    "linear_num_heads": 4,
    "hc_mult": 2,
}
# of models of text and images: the fields of their config beside those of the text
VISION: dict[str, dict[str, Any]] = {
    "Glm5Next": {
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 128,
            "projection_intermediate_size": 32,
        },
    },
    "Kimi_K25": {
        "vision_config": {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
        },
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    },
}
DEEPSEEK = MOE | DENSE_LAYERS | {"rope_parameters": YARN}

# class name before a "-", and the fields of its config that are not `SIZES`
MODELS: dict[str, dict[str, Any]] = {
    "DeepseekV2": DEEPSEEK,
    "DeepseekV2-no_q_latent": DEEPSEEK | {"q_lora_rank": None},
    "DeepseekV3": DEEPSEEK | {"num_mtp_layers": 0},
    "DeepseekV3-half_pairs": DEEPSEEK | {"num_mtp_layers": 0, "rope_interleave": False},
    "Kimi_K25": DEEPSEEK | {"num_mtp_layers": 0},
    "Glm4MoeLite": MOE | DENSE_TYPES,
    "LongcatFlash": LONGCAT,
    "Mistral4": MOE | DENSE_LAYERS,
    "MiniCPM3": {"dim_model_base": None, "scale_depth": None, "scale_emb": 1},
    "Youtu": {},
    "AXK1": MOE | DENSE_LAYERS,
    "KimiLinear": KIMI_LINEAR | DENSE_TYPES,
    "DeepseekV32": MOE | DENSE_TYPES | INDEX | {"rope_parameters": YARN},
    "GlmMoeDsa": MOE | DENSE_TYPES | INDEX | SHARED_INDEXER,
    "AXK2": MOE | DENSE_TYPES | INDEX,
    "HYV4": MOE | DENSE_TYPES | INDEX | SHARED_INDEXER,
    "Glm5Next": MOE | DENSE_TYPES | INDEX | GLM5_NEXT,
}
SPARSE = ("DeepseekV32", "GlmMoeDsa", "AXK2", "HYV4")
ABSENT = {"5.15": ("KimiLinear", "HYV4", "Glm5Next")}  # by release of transformers
COLUMNS = 70  # longer than a page of 64


def build(name: str, **changes: Any) -> Any:
    """The model in float32 with eager attention; the weights make attention far from uniform."""
    cls = name.split("-")[0]
    if cls in ABSENT.get(transformers.__version__.rpartition(".")[0], ()):
        pytest.skip(f"transformers {transformers.__version__} has no {cls}")
    fields = SIZES | MODELS[name] | changes
    if cls == "LongcatFlash":
        del fields["intermediate_size"]
    torch.manual_seed(0)
    kind = "CausalLM"
    if cls in VISION:
        fields, kind = {"text_config": fields, **VISION[cls]}, "ConditionalGeneration"
    config = getattr(transformers, f"{cls}Config")(**fields)
    model = getattr(transformers, f"{cls}For{kind}")(config).eval()
    model.set_attn_implementation("eager")
    return model.requires_grad_(False)


def prompts(columns: int = COLUMNS, batch: int = 3) -> Tensor:
    """Random token ids [batch, columns], none of them padding."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, SIZES["vocab_size"], (batch, columns), generator=generator)


def left_padding(columns: int = COLUMNS) -> Tensor:
    """The mask of three prompts: a short padding, none, a long one."""
    mask = torch.ones(3, columns, dtype=torch.int64)
    mask[0, :5] = 0
    mask[2, : columns // 2 - 4] = 0
    return mask
