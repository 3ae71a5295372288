"""Models whose kv_b_proj is FP8 in blocks, as DeepSeek-V3's release has it on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Linear

from mlakit import UnsupportedError
from mlakit.integrations.transformers import patch, refresh_weights, unpatch
from mlakit.integrations.transformers.static_cache import StaticLatentCache
from mlakit.tools.tiny import in_blocks
from tests.integrations.models import build, left_padding, prompts
from tests.layer.checkpoints import from_blocks

WIDTHS = {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64}
NAMES = ["DeepseekV3", "DeepseekV32"]


def fp8_linear(linear: nn.Linear) -> Any:
    """The layer with the same weight in FP8."""
    made = FP8Linear(linear.in_features, linear.out_features, block_size=(128, 128))
    codes, scale = in_blocks(linear.weight.detach().float())
    made.weight = nn.Parameter(codes, requires_grad=False)
    made.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    return made


def both(name: str) -> tuple[Any, Any]:
    """A model with FP8 kv_b_proj, and one whose matrices have the same values in float32."""
    quantised, plain = build(name, **WIDTHS), build(name, **WIDTHS)
    for layer, other in zip(quantised.model.layers, plain.model.layers, strict=True):
        made = fp8_linear(layer.self_attn.kv_b_proj)
        layer.self_attn.kv_b_proj = made
        values = from_blocks(made.weight, made.weight_scale_inv)
        other.self_attn.kv_b_proj.weight.copy_(values)
    return quantised.requires_grad_(False), plain


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).std() / b.std())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_tokens(name):
    """The first layer differs only by activations that are rounded to e4m3 for an FP8 product."""
    model, plain = both(name)
    outputs: dict[Any, torch.Tensor] = {}
    for each in (model, plain):
        attention = each.model.layers[0].self_attn
        attention.register_forward_hook(lambda module, _, out: outputs.update({module: out[0]}))
    ids, mask = prompts(), left_padding()
    patch(model)
    caches = [each(ids, attention_mask=mask).past_key_values for each in (model, plain)]
    assert caches[0].layers[0].pool.cache.format == "fp32"
    shown = mask.bool()
    ours, exact = outputs.values()
    assert 1e-4 < difference(ours[shown], exact[shown]) < 0.05
    token, more = torch.tensor([[3], [5], [8]]), torch.cat([mask, torch.ones_like(ids[:, :1])], 1)
    for each, cache in zip((model, plain), caches, strict=True):
        each(token, past_key_values=cache, attention_mask=more)
    ours, exact = outputs.values()
    assert ours.shape[1] == 1
    assert 1e-4 < difference(ours, exact) < 0.05


def test_another_weight_is_seen():
    model, ids = both("DeepseekV3")[0], prompts()
    patch(model)
    before = model(ids).logits
    scale = model.model.layers[0].self_attn.kv_b_proj.weight_scale_inv
    scale.mul_(2)
    changed = model(ids).logits
    assert difference(changed, before) > 0.01
    scale.data.mul_(0.5)
    refresh_weights(model)
    assert torch.equal(model(ids).logits, before)
    unpatch(model)


def test_rows_have_the_dtype_of_the_latents():
    model = both("DeepseekV3")[0]
    with pytest.raises(UnsupportedError, match="format must be 'fp32' or an FP8 format for"):
        patch(model, format="bf16")
    patch(model, format="fp8_ds_mla")
    assert model(prompts()).past_key_values.layers[0].pool.cache.format == "fp8_block128"
    assert StaticLatentCache(model, batch_size=1, max_length=64).format == "fp32"


def float_scales(linear: Any) -> None:
    linear.weight_scale_inv = nn.Parameter(linear.weight_scale_inv.bfloat16(), requires_grad=False)


def per_tensor(linear: Any) -> None:
    linear.block_size = None


@pytest.mark.parametrize("change", [float_scales, per_tensor])
def test_other_scales_are_refused(change: Callable[[Any], None]):
    model = both("DeepseekV3")[0]
    change(model.model.layers[1].self_attn.kv_b_proj)
    with pytest.raises(UnsupportedError, match="kv_b_proj in FP8 must have a float32 scale per"):
        patch(model)


def test_an_fp8_layer_with_a_float_weight_is_a_linear_layer():
    model, plain = build("DeepseekV3", **WIDTHS), build("DeepseekV3", **WIDTHS)
    for layer in model.model.layers:
        linear = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = fp8_linear(linear)
        layer.self_attn.kv_b_proj.weight = linear.weight
    patch(model)
    assert difference(model(prompts()).logits, plain(prompts()).logits) < 1e-5
