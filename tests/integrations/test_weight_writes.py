"""Weights of a patched model that are written through `.data`: refreshed, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.integrations.transformers import patch, refresh_weights, unpatch
from mlakit.steps import weights
from tests.integrations.models import build, prompts
from tests.integrations.test_generate import FEW, generate


@pytest.fixture(autouse=True)
def float32_copies(monkeypatch):
    """Also on a CPU that multiplies bf16 matrices."""
    monkeypatch.setattr(weights, "multiplies_bf16", lambda dtype: False)


def kv_b_proj(model: Any) -> Tensor:
    weight: Tensor = model.model.layers[1].self_attn.kv_b_proj.weight
    return weight


def logits(model: Any) -> Tensor:
    """A prompt and two decode steps."""
    ids = prompts(22)
    first = model(ids[:, :20])
    cache = first.past_key_values
    steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in (20, 21)]
    return torch.cat([first.logits, *steps], 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("written", ["one element", "all"])
def test_refreshed_weights(written, dtype):
    """The results are those of a model that had the new weights from the start."""
    models = [build("DeepseekV3").to(dtype) for _ in range(2)]
    patch(models[0])
    before = logits(models[0])
    for model in models:
        weight = kv_b_proj(model)
        if written == "all":
            weight.data.mul_(-1.5)
        else:
            weight.data[3, 40] = 50.0
    refresh_weights(models[0])
    patch(models[1])
    found = logits(models[0])
    assert torch.equal(found, logits(models[1]))
    assert not torch.equal(found, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_write_without_refresh_weights_is_refused(name, dtype):
    model, ids = build(name).to(dtype), prompts()
    patch(model)
    generate(model, ids, torch.ones_like(ids))
    kv_b_proj(model).data.mul_(-1.5)
    with pytest.raises(RuntimeError, match=r"kv_b_proj must equal the copy.*refresh_weights\(\)"):
        generate(model, ids, torch.ones_like(ids))
    refresh_weights(model)
    generate(model, ids, torch.ones_like(ids))


def test_float32_weights_are_read_where_they_are():
    models = [build("DeepseekV3") for _ in range(2)]
    patch(models[0])
    logits(models[0])
    for model in models:
        kv_b_proj(model).data.mul_(-1.5)
    patch(models[1])
    assert torch.equal(logits(models[0]), logits(models[1]))


def test_a_write_in_inference_mode_and_a_use_outside_of_it():
    models = [build("DeepseekV3").bfloat16() for _ in range(2)]
    patch(models[0])
    with torch.inference_mode():
        logits(models[0])
    for model in models:
        kv_b_proj(model).data.mul_(-1.5)
    refresh_weights(models[0])
    patch(models[1])
    assert torch.equal(logits(models[0]), logits(models[1]))


def test_refresh_weights_is_for_patched_models():
    model = build("DeepseekV3")
    with pytest.raises(ValueError, match="refresh_weights: the model is not patched"):
        refresh_weights(model)
    patch(model)
    refresh_weights(model)  # before its first forward
    unpatch(model)
