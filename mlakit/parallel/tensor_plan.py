"""Tensor-parallel plans of transformers' models, with the attention that some of them leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = "layers.*.self_attn."
ENTRIES = {
    "kv_a_proj_with_mqa": "mla_kv_a_proj",  # replicated: all heads share the latents
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}


def tensor_parallel_plan(config: Any, *, prefix: str = "model.") -> dict[str, str]:
    """The tensor-parallel plan of a model, its attention included.

    The plans of deepseek_v3, axk1, mistral4, youtu and kimi_linear in transformers leave attention
    out: with `tp_plan="auto"` every rank computes all heads. This is the model's own plan and the
    missing entries, which shard the heads.

    config  of the model, or of its text model; the ranks must divide its num_attention_heads
    prefix  of the text model's parameters: "model." in a `ForCausalLM`

    Returns the plan for `DistributedConfig(tp_plan=...)`. A plan that has entries for attention is
    not changed. Entries of the head, such as `lm_head`, are those of the model's class: add
    `model_class._tp_plan` to have them.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "kv_lora_rank", None) is None:
        kind = type(config).__name__
        raise ValueError(f"tensor_parallel_plan: config must have a kv_lora_rank, got {kind}")
    own: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = dict(own)
    if not any(".self_attn." in name for name in own):
        query = "q_proj" if getattr(config, "q_lora_rank", None) is None else "q_b_proj"
        plan |= {LAYERS + name: style for name, style in {query: "colwise", **ENTRIES}.items()}
    return {prefix + name: style for name, style in plan.items()}
