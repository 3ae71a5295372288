"""No decode step expands the context: no tensor as large as K or V of all heads is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mlakit.integrations.transformers import attention, patch
from tests.integrations.models import build, prompts
from tests.ops.inside_ops import modes_see_inside_ops
from tests.ops.test_memory import Scratch

CONTEXT = 400
HEADS = 16
BATCH = 2
MODELS = ("DeepseekV2", "DeepseekV3", "LongcatFlash", "KimiLinear", "DeepseekV32", "HYV4")


def largest_of_a_decode_step(model: Any, steps: int = 3) -> int:
    """Bytes of the largest tensor that the decode steps after a prompt make, whoever makes it."""
    ids = prompts(CONTEXT + steps, batch=BATCH)
    cache = DynamicCache(config=model.config)
    model(ids[:, :CONTEXT], past_key_values=cache)
    with modes_see_inside_ops(), Scratch() as scratch:
        for i in range(CONTEXT, CONTEXT + steps):
            model(ids[:, i : i + 1], past_key_values=cache)
    return scratch.largest


def expanded_bytes(model: Any) -> int:
    """K or V of all heads over the context of one request, in float32, whichever is smaller."""
    config = model.config
    return HEADS * CONTEXT * min(config.qk_nope_head_dim, config.v_head_dim) * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_does_not_expand_the_context(name):
    model = build(name, num_attention_heads=HEADS, num_key_value_heads=HEADS)
    limit = expanded_bytes(model)
    assert largest_of_a_decode_step(model) >= limit  # eager attention expands
    patch(model)
    assert largest_of_a_decode_step(model) < limit


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepseekV3", "HYV4"])
def test_an_expansion_by_the_attention_function_is_seen(name, monkeypatch):
    monkeypatch.setattr(attention, "DECODE_THRESHOLD", 0)
    changes = {"index_topk": 2 * CONTEXT} if name == "HYV4" else {}  # dense attention
    model = build(name, num_attention_heads=HEADS, num_key_value_heads=HEADS, **changes)
    patch(model)
    assert largest_of_a_decode_step(model) >= expanded_bytes(model)


@pytest.mark.slow
def test_an_expansion_by_a_module_is_seen():
    """A patch that leaves `expand_kv` of one layer to the model must not pass."""
    model = build("DeepseekV3", num_attention_heads=HEADS, num_key_value_heads=HEADS)
    patch(model)
    module = model.model.layers[1].self_attn

    def expand(latent: Any, k_rope: torch.Tensor) -> Any:
        pool, layer = latent
        rows = pool.cache.layer(layer).read(torch.arange(CONTEXT))
        module.kv_b_proj(rows[:, : module.kv_lora_rank])
        return latent, k_rope

    module.__dict__["expand_kv"] = expand
    assert largest_of_a_decode_step(model) >= expanded_bytes(model)
