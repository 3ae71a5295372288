"""Small random DeepSeek-V4 models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mlakit.model.v4 import CSA, HCA, SLIDING

VOCABULARY = 211
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, CSA, HCA, CSA],
    "compress_rates": {CSA: 4, HCA: 16},
    "sliding_window": 16,
    "num_attention_heads": 8,
    "head_dim": 64,
    "q_lora_rank": 48,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "o_groups": 2,
    "o_lora_rank": 32,
    # few heads give equal scores, all 0, whose order nothing defines
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 6,
    "hc_mult": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "all kinds": {},
    # nothing divides anything, and the window is shorter than a compressed one
    "odd": {
        "layer_types": [CSA, SLIDING, CSA, HCA],
        "sliding_window": 5,
        "index_topk": 5,
        "compress_rates": {CSA: 3, HCA: 7},
        "num_attention_heads": 6,
        "o_groups": 3,
    },
    "rates as released": {
        "layer_types": [HCA, HCA, CSA, SLIDING],
        "sliding_window": 128,
        "index_topk": 24,
        "compress_rates": {CSA: 4, HCA: 128},
        "rope_parameters": YARN,
    },
    "rows of 448 + 64": {"head_dim": 512, "index_head_dim": 128, "num_attention_heads": 4},
}
# longer than two of the windows that HCA pools
LENGTHS = {"rates as released": 290}


def build(name: str = "all kinds", **changes: Any) -> Any:
    """A model in float32 with eager attention, whose biases, sinks and norms are not trivial."""
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-V4")
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**(SIZES | CONFIGS[name] | changes))
    model = transformers.DeepseekV4ForCausalLM(config).eval().requires_grad_(False)
    noise = torch.Generator().manual_seed(1)
    for key, value in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith(("sinks", "position_bias")):
            value.copy_(torch.randn(value.shape, generator=noise))
        elif key.endswith("norm.weight"):
            value.copy_(1 + 0.3 * torch.randn(value.shape, generator=noise))
        elif key.endswith("tid2eid"):
            value.copy_(torch.randint(4, value.shape, generator=noise))
        elif "self_attn" in key and key.endswith(("gate_proj.weight", "weights_proj.weight")):
            value.mul_(3)  # gates and head weights that differ
        elif key.endswith("embed_tokens.weight"):
            # a token with an embedding of 0, as padding has, gives all scores of an indexer as 0
            value[0] = 0.15 * torch.randn(value.shape[1], generator=noise)
    model.set_attn_implementation("eager")
    return model


def prompt(length: int, seed: int = 3) -> Tensor:
    """Random token ids [length], none of them padding."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=noise)


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(ids, mask) of prompts with padding before them, and inside of the last one."""
    longest = max(map(len, rows)) + 1
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        columns = torch.arange(longest - len(row), longest)
        if i == len(rows) - 1:
            columns[0] -= 1
        ids[i, columns], mask[i, columns] = row, 1
    return ids, mask
