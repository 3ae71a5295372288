"""A latent cache of fixed size: the same tokens, and one graph for all decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from mlakit import UnsupportedError
from mlakit.integrations.transformers import patch
from mlakit.integrations.transformers.static_cache import StaticLatentCache
from tests.integrations.models import SPARSE, build, prompts

NEW_TOKENS = 12


def decode(model: Any, ids: Tensor, cache: Any, step: Callable[..., Any]) -> Tensor:
    """Greedy tokens: the prompt by the model, the others by `step`."""
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits
        tokens = [ids, logits[:, -1].argmax(-1, keepdim=True)]
        for _ in range(NEW_TOKENS - 1):
            logits = step(input_ids=tokens[-1], past_key_values=cache).logits
            tokens.append(logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(tokens, 1)


DENSE = ("DeepseekV2", "DeepseekV3", "LongcatFlash", "Mistral4")


def build_without_ties(name: str, **changes: Any) -> Any:
    """With few index heads two tokens may have a score of 0, and one of them is selected: which
    one depends on the number of columns, which a static cache fixes."""
    return build(name, **(changes | {"index_n_heads": 16} if name in SPARSE else changes))


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_static_cache(name):
    """By hand, after a reset, and by generate."""
    model, ids = build_without_ties(name), prompts(21, batch=2)
    eager = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=40, page_size=16)
    assert torch.equal(decode(model, ids, cache, model), eager)
    cache.reset()
    ours = model.generate(ids, past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(ours, eager)
    assert int(cache.get_seq_length()) == ids.shape[1] + NEW_TOKENS - 1
    assert cache.get_max_length() == 48  # whole pages


@pytest.mark.parametrize("name", SPARSE)
def test_static_cache_with_less_memory_than_a_selection(name):
    model, ids = build_without_ties(name, index_topk=64), prompts(21, batch=2)
    eager = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=40, page_size=8)
    assert torch.equal(decode(model, ids, cache, model), eager)


@pytest.mark.parametrize("name", ["DeepseekV3", "DeepseekV32"])
def test_decode_steps_are_one_graph(name):
    model, ids = build_without_ties(name), prompts(21, batch=2)
    eager = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=64, page_size=16)
    torch._dynamo.reset()
    counters.clear()
    options = {"fullgraph": True, "backend": "aot_eager", "dynamic": False}
    step = torch.compile(model.forward, **options)
    assert torch.equal(decode(model, ids, cache, step), eager)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_padding_is_refused():
    model, ids = build("DeepseekV3"), prompts(21, batch=2)
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=40)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask must be None with a StaticLatentCache"):
        model(ids, attention_mask=mask, past_key_values=cache)


def test_models_that_it_is_not_for():
    model = build("KimiLinear")
    patch(model)
    with pytest.raises(UnsupportedError, match="KimiLinearForCausalLM has layers without MLA"):
        StaticLatentCache(model, batch_size=2, max_length=40)


def test_it_is_for_patched_models():
    model, ids = build("DeepseekV3"), prompts(21, batch=2)
    cache = StaticLatentCache(model, batch_size=2, max_length=40)
    with pytest.raises((AttributeError, TypeError)):
        model(ids, past_key_values=cache)
