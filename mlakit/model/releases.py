"""Fields of the config.json of each known release, by model name.

Only the fields that `MLAGeometry.from_config`, `mlakit memory` and, to count weights, `mlakit
plan` read, with their published names and values. The comment above an entry is the Hub id of
the config. `ALIASES` has other names with the same attention: Hub ids, and releases that differ
only in their weights. `HUB_IDS` has the first Hub id of each.
"""

from __future__ import annotations

import re
from typing import Any


def _yarn(factor: float, **others: float) -> dict[str, Any]:
    """`rope_scaling` of DeepSeek and Moonshot: 4096 original positions times `factor`."""
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    } | others


def _moe(intermediate: int, expert: int, routed: int, shared: int, active: int, dense: int) -> Any:
    """The MLPs of a mixture of experts; the first `dense` layers have none."""
    return {
        "intermediate_size": intermediate,
        "moe_intermediate_size": expert,
        "n_routed_experts": routed,
        "n_shared_experts": shared,
        "num_experts_per_tok": active,
        "first_k_dense_replace": dense,
    }


DEEPSEEK_V4, GLM5_NEXT, HY4 = "deepseek_v4", "glm5_next", "hy_v4"  # model types


def is_longcat_type(model_type: object) -> bool:
    """Whether a model type is LongCat's: `longcat_flash`, or one with sparse attention."""
    return isinstance(model_type, str) and model_type.startswith("longcat")


def is_glm5_next_type(model_type: object) -> bool:
    """Whether a model type is that of GLM-5.3-Flash, or of its language model."""
    return model_type in (GLM5_NEXT, f"{GLM5_NEXT}_text")


_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
_BF16 = {"torch_dtype": "bfloat16", "quantization_config": None}

_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": _yarn(40),
    "vocab_size": 129280,
    **_moe(18432, 2048, 256, 1, 8, 3),
    **_FP8,
}

_KIMI_K2: dict[str, Any] = _DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "vocab_size": 163840,
    **_moe(18432, 2048, 384, 1, 8, 1),
}

_GLM_5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "vocab_size": 154880,
    **_moe(12288, 2048, 256, 1, 8, 3),
    **_BF16,
}

_DEEPSEEK_V4: dict[str, Any] = {
    "model_type": DEEPSEEK_V4,
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    # by layer: 0 has no compressed rows, 4 selects among them, 128 has one per 128 tokens
    "compress_ratios": [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)), 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "vocab_size": 129280,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
}

# `short_factor` and `long_factor` are the same list
_MINICPM3_FACTORS = [
    1.0591234137867171,
    1.1241891283591912,
    1.2596935748670968,
    1.5380380402321725,
    2.093982484148734,
    3.1446935121267696,
    4.937952647693647,
    7.524541999994549,
    10.475458000005451,
    13.062047352306353,
    14.85530648787323,
    15.906017515851266,
    16.461961959767827,
    16.740306425132907,
    16.87581087164081,
    16.940876586213285,
]

RELEASES: dict[str, dict[str, Any]] = {
    # deepseek-ai/DeepSeek-V2
    "deepseek-v2": _DEEPSEEK_V3
    | {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 60,
        "hidden_size": 5120,
        "rope_scaling": _yarn(40, mscale=0.707, mscale_all_dim=0.707),
        "vocab_size": 102400,
        **_moe(12288, 1536, 160, 2, 6, 1),
        **_BF16,
    },
    # deepseek-ai/DeepSeek-V2-Lite
    "deepseek-v2-lite": _DEEPSEEK_V3
    | {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": _yarn(40, mscale=0.707, mscale_all_dim=0.707),
        "vocab_size": 102400,
        **_moe(10944, 1408, 64, 2, 6, 1),
        **_BF16,
    },
    # deepseek-ai/DeepSeek-V3; R1 and V3.1 have the same architecture (their model cards)
    "deepseek-v3": _DEEPSEEK_V3,
    # deepseek-ai/DeepSeek-V3.2-Exp
    "deepseek-v3.2": _DEEPSEEK_V3
    | {
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    # deepseek-ai/DeepSeek-V4-Flash
    "deepseek-v4-flash": _DEEPSEEK_V4,
    # deepseek-ai/DeepSeek-V4-Pro
    "deepseek-v4-pro": _DEEPSEEK_V4
    | {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "compress_ratios": [128, 128, *(4 if i % 2 == 0 else 128 for i in range(2, 61)), 0],
        "index_topk": 1024,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 384,
    },
    # moonshotai/Kimi-K2-Instruct
    "kimi-k2": _KIMI_K2
    | {"max_position_embeddings": 131072, "rope_scaling": _yarn(32.0, beta_fast=1.0)},
    # moonshotai/Kimi-K2-Instruct-0905; moonshotai/Kimi-K2-Thinking has the same attention
    "kimi-k2-0905": _KIMI_K2 | {"rope_scaling": _yarn(64.0, beta_fast=1.0)},
    # moonshotai/Kimi-K2.5, its text_config; K2.6 has the same attention. Only experts are packed.
    "kimi-k2.5": _KIMI_K2
    | {
        "rope_scaling": _yarn(64.0),
        "quantization_config": {"quant_method": "compressed-tensors"},
    },
    # zai-org/GLM-4.7-Flash
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "num_hidden_layers": 47,
        "hidden_size": 2048,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "partial_rotary_factor": 1.0,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "vocab_size": 154880,
        **_moe(10240, 1536, 64, 1, 4, 1),
        **_BF16,
    },
    # zai-org/GLM-5; GLM-5.1 has the same attention
    "glm-5": _GLM_5,
    # zai-org/GLM-5.2; `indexer_types` is a list there: layers 0, 1 and 2, then every fourth
    "glm-5.2": _GLM_5
    | {
        "indexer_types": ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(78)],
        "max_position_embeddings": 1048576,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
    },
    # zai-org/GLM-5.3-Flash, its text_config; every fourth layer has MLA, without rope columns
    "glm-5.3-flash": {
        "model_type": "glm5_next_text",
        "num_hidden_layers": 45,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "layer_types": [
            "deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)
        ],
        "indexer_types": ["full"] * 45,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
        "max_position_embeddings": 1048576,
        "vocab_size": 154880,
        **_moe(12288, 2048, 288, 1, 8, 3),
        **_BF16,
    },
    # moonshotai/Kimi-K3, its text_config; layers are counted from 1
    "kimi-k3": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 93,
        "hidden_size": 7168,
        "num_attention_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [i for i in range(1, 93) if i % 4],
        },
        "max_position_embeddings": 1048576,
        "vocab_size": 163840,
        "quantization_config": {"quant_method": "compressed-tensors"},
    },
    # tencent/Hy4-preview
    "hy4-preview": {
        "model_type": HY4,
        "num_hidden_layers": 78,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "indexer_types": ["full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(78)],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "vocab_size": 120832,
        **_moe(18432, 2048, 256, 1, 8, 1),
        **_BF16,
    },
    # meituan-longcat/LongCat-2.0; a layer has two attentions, which share a selection
    "longcat-2.0": {
        "model_type": "longcat_flash_pro",
        "num_layers": 38,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_init_tokens": 16,
        "index_local_tokens": 1024,
        "index_k_norm_type": "rms",
        "cli_factor": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_theta": 1000000.0,
        "vocab_size": 163840,
    },
    # mistralai/Mistral-Small-4-119B-2603, its text_config. The model also multiplies its queries by
    # a factor that grows with the position (llama_4_scaling_beta), which is not part of RoPE.
    "mistral-small-4": {
        "model_type": "mistral4",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 1048576,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "partial_rotary_factor": 0.5,
            "llama_4_scaling_beta": 0.1,
        },
    },
    # openbmb/MiniCPM3-4B; v_head_dim is hidden_size / num_attention_heads
    "minicpm3": {
        "model_type": "minicpm3",
        "num_hidden_layers": 62,
        "hidden_size": 2560,
        "num_attention_heads": 40,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 32768,
            "short_factor": _MINICPM3_FACTORS,
            "long_factor": _MINICPM3_FACTORS,
        },
        "vocab_size": 73448,
        "intermediate_size": 6400,
        "tie_word_embeddings": True,
        **_BF16,
    },
}

_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "deepseek-v2": (
        "deepseek-ai/DeepSeek-V2",
        "deepseek-ai/DeepSeek-V2-Chat",
    ),
    "deepseek-v2-lite": (
        "deepseek-ai/DeepSeek-V2-Lite",
        "deepseek-ai/DeepSeek-V2-Lite-Chat",
    ),
    "deepseek-v3": (
        "deepseek-r1",
        "deepseek-v3.1",
        "deepseek-ai/DeepSeek-V3",
        "deepseek-ai/DeepSeek-V3-Base",
        "deepseek-ai/DeepSeek-V3-0324",
        "deepseek-ai/DeepSeek-V3.1",
        "deepseek-ai/DeepSeek-V3.1-Base",
        "deepseek-ai/DeepSeek-V3.1-Terminus",
        "deepseek-ai/DeepSeek-R1",
        "deepseek-ai/DeepSeek-R1-0528",
        "deepseek-ai/DeepSeek-R1-Zero",
    ),
    "deepseek-v3.2": (
        "deepseek-v3.2-exp",
        "deepseek-ai/DeepSeek-V3.2",
        "deepseek-ai/DeepSeek-V3.2-Exp",
    ),
    "deepseek-v4-flash": ("deepseek-ai/DeepSeek-V4-Flash",),
    "deepseek-v4-pro": ("deepseek-ai/DeepSeek-V4-Pro",),
    "kimi-k2": (
        "kimi-k2-instruct",
        "moonshotai/Kimi-K2-Base",
        "moonshotai/Kimi-K2-Instruct",
    ),
    "kimi-k2-0905": (
        "kimi-k2-instruct-0905",
        "kimi-k2-thinking",
        "moonshotai/Kimi-K2-Instruct-0905",
        "moonshotai/Kimi-K2-Thinking",
    ),
    "kimi-k2.5": ("kimi-k2.6", "moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6"),
    "glm-4.7-flash": ("zai-org/GLM-4.7-Flash",),
    "glm-5": ("glm-5.1", "zai-org/GLM-5", "zai-org/GLM-5.1"),
    "glm-5.2": ("zai-org/GLM-5.2",),
    "glm-5.3-flash": ("zai-org/GLM-5.3-Flash",),
    "kimi-k3": ("moonshotai/Kimi-K3",),
    "hy4-preview": ("tencent/Hy4-preview",),
    "longcat-2.0": ("meituan-longcat/LongCat-2.0",),
    "mistral-small-4": ("mistralai/Mistral-Small-4-119B-2603",),
    "minicpm3": ("minicpm3-4b", "openbmb/MiniCPM3-4B"),
}

HUB_IDS: dict[str, str] = {
    name: next(other for other in others if "/" in other) for name, others in _OTHER_NAMES.items()
}
ALIASES: dict[str, str] = {
    other.lower(): name for name, others in _OTHER_NAMES.items() for other in others
}


def download_hint(name: str) -> str:
    """Return how to get the checkpoint of a name that is no folder, for the end of an error.

    It is "" for a name that is neither a release nor of the form of a Hub id.
    """
    hub_id = HUB_IDS.get(ALIASES.get(name.lower(), name.lower()), name)
    if "/" in name:
        hub_id = name
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", hub_id):
        return ""
    folder = hub_id.partition("/")[2]
    return f"; from the Hugging Face Hub: hf download {hub_id} --local-dir {folder}"
