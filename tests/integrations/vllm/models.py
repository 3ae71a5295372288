"""A small DeepSeek-V3 with random weights, and what transformers makes of prompts."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.integrations.vllm.engine import NEW_TOKENS

LENGTHS = (5, 17, 90, 72, 40, 33)


def save_model(folder: Path) -> Path:
    """Two layers whose cache rows have the widths of the real model: vLLM takes no others."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        kv_lora_rank=512,
        q_lora_rank=96,
        qk_rope_head_dim=64,
        v_head_dim=64,
        qk_nope_head_dim=64,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        max_position_embeddings=2048,
        num_mtp_layers=0,
        initializer_range=0.08,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 128,
        },
    )
    DeepseekV3ForCausalLM(config).eval().save_pretrained(folder)
    return folder


def prompts() -> list[list[int]]:
    """Ragged; one begins as another does, one repeats itself, so that drafts are accepted."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(2, 512, (n,), generator=generator).tolist() for n in LENGTHS]
    made[3] = [*made[2][:70], 3, 4]
    made[1] = [7, 8, 9] * 5 + [7, 8]
    return made


def transformers_tokens(model: Path, given: list[list[int]]) -> list[list[int]]:
    """Greedy, one prompt at a time, with eager attention in float32."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    made = []
    for prompt in given:
        ids = torch.tensor([prompt])
        out = loaded.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        made.append(out[0, len(prompt) :].tolist())
    return made
