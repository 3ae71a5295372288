"""Models that are made on mlakit, by `attn_implementation="mlakit"`, without `patch`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mlakit import UnsupportedError
from mlakit.integrations.transformers import checks, patch, register, unregister
from mlakit.integrations.transformers.static_cache import StaticLatentCache
from tests.integrations.models import MODELS, build, left_padding, prompts
from tests.integrations.test_generate import TOLERANCE, generate, latent_layers

FEW = ("DeepseekV3", "DeepseekV32", "LongcatFlash", "KimiLinear")


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()
    yield
    unregister()


def rebuilt(model: Any, attention: str = "mlakit") -> Any:
    """The model as `from_pretrained(folder, attn_implementation=attention)` makes it."""
    made = type(model)._from_config(deepcopy(model.config), attn_implementation=attention)
    made.load_state_dict(model.state_dict())
    return made.eval().requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.thorough]) for n in MODELS]
)
def test_it_generates_as_eager_and_stores_as_patch(name):
    model, ids, mask = build(name), prompts(), left_padding()
    how = {"return_dict_in_generate": True, "output_logits": True}
    eager = generate(model, ids, mask, **how)
    made = rebuilt(model)
    ours = generate(made, ids, mask, **how)
    assert torch.equal(ours.sequences, eager.sequences)
    error = (torch.stack(ours.logits) - torch.stack(eager.logits)).abs().max()
    assert error < TOLERANCE
    patch(model)
    patched = generate(model, ids, mask, **how)
    pools = [
        {id(layer.pool): layer.pool for layer in latent_layers(run.past_key_values)}.values()
        for run in (ours, patched)
    ]
    (own,), (theirs,) = pools
    assert own.cache.nbytes == theirs.cache.nbytes > 0
    assert [s.length for s in own.sequences] == (mask.sum(1) + 7).tolist()
    assert own.cache.format == theirs.cache.format == "fp32"


@pytest.mark.slow
def test_without_a_cache_and_with_one_of_the_callers():
    model, ids = build("DeepseekV3"), prompts()
    expected = model(ids).logits
    made = rebuilt(model)
    assert (made(ids, use_cache=False).logits - expected).abs().max() < TOLERANCE
    cache = DynamicCache()
    made(ids[:, :40], past_key_values=cache)
    got = made(ids[:, 40:], past_key_values=cache).logits
    assert (got - expected[:, 40:]).abs().max() < TOLERANCE
    static = StaticLatentCache(made, batch_size=3, max_length=80)
    assert (made(ids, past_key_values=static).logits - expected).abs().max() < TOLERANCE


@pytest.mark.slow
def test_a_forward_that_failed_can_be_repeated():
    model, ids = build("DeepseekV3"), prompts()
    expected = model(ids).logits
    made, cache = rebuilt(model), DynamicCache()
    made(ids[:, :40], past_key_values=cache)
    middle = made.model.layers[1]

    def fail(*_: object) -> None:
        raise RuntimeError("a hook")

    hook = middle.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a hook"):
        made(ids[:, 40:], past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == 40
    got = made(ids[:, 40:], past_key_values=cache).logits
    assert (got - expected[:, 40:]).abs().max() < TOLERANCE


@pytest.mark.slow
def test_other_models_made_after_it_are_as_before():
    model, ids, mask = build("DeepseekV3"), prompts(), left_padding()
    made = rebuilt(model, "eager")
    assert isinstance(checks.mla_modules(made)[0], checks.LatentAttention)
    cache = DynamicCache(config=made.config)
    assert torch.equal(
        made(ids, attention_mask=mask, past_key_values=cache).logits,
        model(ids, attention_mask=mask).logits,
    )
    assert latent_layers(cache) == []
    patch(made)
    assert torch.equal(generate(made, ids, mask), generate(model, ids, mask))


@pytest.mark.slow
def test_it_refuses_what_patch_refuses():
    made, ids = rebuilt(build("DeepseekV3")), prompts()
    with pytest.raises(ValueError, match="it needs no patch"):
        patch(made)
    made.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="there is no backward"):
        made(ids)
    made.requires_grad_(False).train()
    with pytest.raises(UnsupportedError, match=r"call model\.eval\(\)"):
        made(ids)
