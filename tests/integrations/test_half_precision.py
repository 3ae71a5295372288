"""16-bit models: the patched attention is as close to float32 as eager attention is."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.integrations.transformers import patch
from tests.integrations.models import build, left_padding, prompts

FACTOR = 2.0


def attention_outputs(model: Any, hidden: Tensor, layer: int = 1) -> Tensor:
    """What one attention module makes of these hidden states, inside of a whole forward.

    A whole model in 16 bits says little: one routed expert or selected token more or less, and all
    logits are others.
    """
    module = model.model.layers[layer].self_attn
    found: list[Tensor] = []

    def replace(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"hidden_states": hidden.to(kwargs["hidden_states"].dtype)}

    hooks = [
        module.register_forward_pre_hook(replace, with_kwargs=True),
        module.register_forward_hook(lambda _, args, out: found.append(out[0])),
    ]
    device = model.device
    model(prompts().to(device), attention_mask=left_padding().to(device))
    for hook in hooks:
        hook.remove()
    return found[0][left_padding().bool().to(device)].float()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "MiniCPM3"])
def test_16_bit_models(name, dtype):
    exact_model = build(name).to(dtype).float()  # the weights of the 16-bit model
    model = deepcopy(exact_model).to(dtype)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(*prompts().shape, model.config.hidden_size, generator=generator)
    hidden = hidden.to(dtype).float()
    exact = attention_outputs(exact_model, hidden)
    eager = attention_outputs(model, hidden)
    patch(model)
    ours = attention_outputs(model, hidden)
    assert model.model.layers[0].self_attn.kv_b_proj.weight.dtype == dtype
    limit = FACTOR * (eager - exact).abs().max()
    assert (ours - exact).abs().max() < limit
