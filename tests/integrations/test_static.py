"""A latent cache of fixed size: the same tokens, and one graph for all decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from mlakit import UnsupportedError
from mlakit.integrations.transformers import patch, refresh_weights, static_cache
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE)
def test_static_cache_with_less_memory_than_a_selection(name):
    model, ids = build_without_ties(name, index_topk=64), prompts(21, batch=2)
    eager = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=40, page_size=8)
    assert torch.equal(decode(model, ids, cache, model), eager)


@pytest.mark.slow
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


def new_weights(model: Any) -> dict[str, Tensor]:
    """A state dict with other up-projections."""
    changed = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in changed.items():
        if "kv_b_proj" in name:
            value.copy_(value.flip(0) * 1.5)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("assign", torch.float32),
        ("parameter", torch.float32),
        ("in place", torch.float32),
        ("data", torch.bfloat16),
    ],
    ids=str,
)
def test_a_graph_sees_new_weights(how, dtype):
    """Prompt and steps are compiled, so nothing but the graph looks at the weights."""
    model, ids = build("DeepseekV3", num_hidden_layers=1).to(dtype), prompts(21, batch=2)
    patch(model)
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager", dynamic=False)
    cache = StaticLatentCache(model, batch_size=2, max_length=64, page_size=16)

    def logits(forward: Callable[..., Any]) -> Tensor:
        cache.reset()
        with torch.no_grad():
            prompt = forward(input_ids=ids, past_key_values=cache).logits
            token = forward(input_ids=ids[:, :1], past_key_values=cache).logits
        return torch.cat([prompt, token], 1)

    before = logits(step)
    changed = new_weights(model)
    if how == "assign":
        model.load_state_dict(changed, assign=True)
        model.requires_grad_(False)
    else:
        for name, parameter in model.named_parameters():
            if how == "in place":
                parameter.copy_(changed[name])
            elif how == "data":
                parameter.data.copy_(changed[name])
            else:
                parameter.data = changed[name]
    found = logits(step)
    refresh_weights(model)
    expected = logits(model)
    assert (expected - before).abs().max() > 0.5
    tolerance = 2e-4 if dtype == torch.float32 else 0.05 * float(expected.abs().max())
    assert (found - expected).abs().max() < tolerance
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepseekV3", "DeepseekV32"])
def test_more_tokens_than_there_is_memory_for(name):
    model, ids = build_without_ties(name), prompts(32, batch=2)
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=20, page_size=8)
    assert cache.get_max_length() == 24  # whole pages
    with pytest.raises(ValueError, match=r"at least the 0 cached and 32 new tokens, got 24"):
        model(ids, past_key_values=cache)
    model(ids[:, :23], past_key_values=cache)
    with pytest.raises(ValueError, match=r"at least the 23 cached and 2 new tokens, got 24"):
        model(ids[:, 23:25], past_key_values=cache)
    mask = torch.ones(2, 25, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must have at most 24 columns.*got 25"):
        model(ids[:, 23:25], past_key_values=cache, attention_mask=mask)
    cache.crop(20)  # refused steps change nothing
    eager = model(ids[:, :24]).logits[:, 20:]
    ours = model(ids[:, 20:24], past_key_values=cache).logits
    assert (ours - eager).abs().max() < 2e-4
    cache.reset()
    # newer versions of transformers pass no mask where every token is visible
    refusal = (
        r"must have at most 24 columns.*got 25|at least the 24 cached and 1 new tokens, got 24"
    )
    with pytest.raises(ValueError, match=refusal):
        model.generate(ids[:, :20], past_key_values=cache, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("name", ["DeepseekV3", "DeepseekV32"])
def test_where_the_host_knows_no_lengths_lost_tokens_give_nan(name, device, monkeypatch):
    """In a graph and on a GPU. Nothing is written outside of the memory, or over what is stored."""
    monkeypatch.setattr(static_cache, "values_visible", lambda tensor: False)
    model = build_without_ties(name).to(device)
    ids = prompts(32, batch=2).to(device)
    eager = model(ids[:, :24]).logits
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=24, page_size=8)
    model(ids[:, :23], past_key_values=cache)
    assert bool(model(ids[:, 23:28], past_key_values=cache).logits.isnan().all())
    assert bool(model(ids[:, 28:29], past_key_values=cache).logits.isnan().all())
    assert int(cache.get_seq_length()) == 29
    cache.crop(-7)
    ours = model(ids[:, 22:24], past_key_values=cache).logits
    assert (ours - eager[:, 22:]).abs().max() < 1e-3


@pytest.mark.parametrize("length", [-4, 17], ids=["tokens", "length"])
@pytest.mark.parametrize("name", ["DeepseekV3", "DeepseekV32"])
def test_a_cropped_cache(name, length):
    model, ids = build_without_ties(name), prompts(30, batch=2)
    eager = model(ids).logits[:, 17:]
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=40, page_size=8)
    model(torch.cat([ids[:, :17], ids[:, :4]], 1), past_key_values=cache)
    cache.crop(length)
    assert int(cache.get_seq_length()) == 17
    assert (model(ids[:, 17:], past_key_values=cache).logits - eager).abs().max() < 2e-4


def test_prompt_lookup_crops_the_cache():
    model = build("DeepseekV3")
    ids = prompts(24, batch=1).repeat(1, 3)
    how = {"max_new_tokens": 12, "prompt_lookup_num_tokens": 3, "do_sample": False}
    eager = model.generate(ids, **how)
    patch(model)
    cache = StaticLatentCache(model, batch_size=1, max_length=100)
    assert torch.equal(model.generate(ids, past_key_values=cache, **how), eager)


def test_another_batch_and_beams():
    model, ids = build("DeepseekV3"), prompts(21, batch=2)
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=40)
    for given in (prompts(21, batch=1), prompts(21, batch=3)):
        with pytest.raises(ValueError, match=f"batch_size, 2 requests, got {len(given)}"):
            model(given, past_key_values=cache)
    with pytest.raises(ValueError, match="batch_size, 2 requests, got 6"):
        model.generate(ids, past_key_values=cache, num_beams=3, max_new_tokens=4)
    model(ids, past_key_values=cache)
    rows = torch.tensor([1, 0])
    for change in (
        lambda: cache.reorder_cache(rows),
        lambda: cache.batch_select_indices(rows),
        lambda: cache.batch_repeat_interleave(2),
    ):
        with pytest.raises(UnsupportedError, match="use a DynamicCache, where beams share pages"):
            change()


def test_another_dtype_than_the_rows():
    model, ids = build("DeepseekV3").bfloat16(), prompts(21, batch=2)
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=40)
    model.float()
    with pytest.raises(UnsupportedError, match="past_key_values must have rows of 'fp32' or"):
        model(ids, past_key_values=cache)


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
