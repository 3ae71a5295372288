"""Patched models whose layers lie on several devices: each device has a pool of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import DynamicCache

from mlakit import UnsupportedError
from mlakit.integrations.transformers import checks, patch, register, unregister
from mlakit.integrations.transformers.cache_layers import known_pools
from mlakit.integrations.transformers.generation import cache_bytes
from mlakit.integrations.transformers.static_cache import StaticLatentCache
from tests.integrations.models import NEEDS_GENERATE_BATCH, build, left_padding, prompts
from tests.integrations.test_generate import TOLERANCE, generate, latent_layers
from tests.integrations.test_layer_classes import rebuilt

# Kimi Linear has one layer without latents; LongCat has two attentions per layer
NAMES = ("DeepseekV3", "GlmMoeDsa", "KimiLinear", "LongcatFlash")
OUTPUTS = {"return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers say in turn that they are on one of two devices, which are both the host."""

    def claimed(module: nn.Module) -> torch.device:
        return torch.device("cpu", int(module.layer_idx) % 2)  # type: ignore[arg-type]

    monkeypatch.setattr(checks, "device_of", claimed)


def spread(model: Any, first: str, others: str) -> Any:
    """Place a model as `from_pretrained(device_map=...)` does, with its last layers on `others`."""
    layers = range(len(model.model.layers))
    places = {f"model.layers.{i}": first if i == 0 else others for i in layers}
    rest = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), first)
    return dispatch_model(model, places | rest, main_device="cpu", force_hooks=True)


def compared(model: Any, ids: torch.Tensor, patched: Any, tolerance: float = TOLERANCE) -> Any:
    """Generate with eager attention and with `patched`; the cache of the second."""
    mask = left_padding().to(ids.device)
    eager = generate(model, ids, mask, **OUTPUTS)
    ours = generate(patched, ids, mask, **OUTPUTS)
    assert torch.equal(ours.sequences, eager.sequences)
    error = (torch.stack(ours.logits) - torch.stack(eager.logits)).abs().max()
    assert error < tolerance
    return ours.past_key_values


@pytest.mark.slow
@pytest.mark.usefixtures("_two_devices")
@pytest.mark.parametrize("name", NAMES)
def test_each_device_has_a_pool_with_the_rows_of_its_layers(name):
    model = build(name)
    patched = build(name)
    patch(patched)
    cache = compared(model, prompts(), patched)
    layers = latent_layers(cache)
    pools = list(dict.fromkeys(layer.pool for layer in layers))
    assert len(pools) == 2
    assert [pool.device.index for pool in pools] == list(
        dict.fromkeys(int(each.layer_idx) % 2 for each in checks.mla_modules(patched))
    )
    for pool in pools:
        own = [layer.layer for layer in layers if layer.pool is pool]
        assert own == list(range(pool.num_layers))
        assert pool.cache.num_layers == pool.num_layers
        assert pool.cache.payload.any(-1).any(-1).any(-1).all()  # each layer wrote
        assert [each.length for each in pool.sequences] == (left_padding().sum(1) + 7).tolist()
    keys = sum(
        layer.indexer_keys.nbytes
        for layer in layers
        if getattr(layer, "indexer_keys", None) is not None
    )
    if name != "KimiLinear":  # which has states of its linear layers, too
        assert cache_bytes(cache) == sum(pool.cache.nbytes for pool in pools) + keys


@pytest.mark.slow
@pytest.mark.usefixtures("_two_devices")
def test_batches_are_reordered_cropped_and_reset_in_every_pool():
    model = build("DeepseekV3")
    ids, mask = prompts(), left_padding()
    how = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6, "attention_mask": mask}
    eager = model.generate(ids, **how)
    patch(model)
    assert torch.equal(model.generate(ids, **how), eager)
    cache = DynamicCache(config=model.config)
    before = model(ids, past_key_values=cache).logits
    cache.crop(-20)
    again = model(ids[:, -20:], past_key_values=cache).logits
    assert (again - before[:, -20:]).abs().max() < TOLERANCE
    cache.reset()
    pools = known_pools(cache, range(3))
    assert [(pool.columns, pool.sequences) for pool in pools] == [(0, []), (0, [])]
    assert (model(ids, use_cache=False).logits - before).abs().max() < TOLERANCE


@pytest.mark.usefixtures("_two_devices")
def test_a_forward_that_fails_leaves_every_pool_as_it_was():
    model = build("DeepseekV3")
    patch(model)
    ids, cache = prompts(), DynamicCache(config=model.config)
    expected = model(ids).logits[:, -1:]
    model(ids[:, :-1], past_key_values=cache)

    def fail(*_: object) -> None:
        raise RuntimeError("stop")

    hook = model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        model(ids[:, -1:], past_key_values=cache)
    hook.remove()
    assert [pool.columns for pool in known_pools(cache, range(3))] == [ids.shape[1] - 1] * 2
    found = model(ids[:, -1:], past_key_values=cache).logits
    assert (found - expected).abs().max() < TOLERANCE


def test_a_cache_of_other_devices_is_refused(monkeypatch):
    model = build("DeepseekV3")
    patch(model)
    cache = model(prompts()).past_key_values
    monkeypatch.setattr(checks, "device_of", lambda module: torch.device("cpu", module.layer_idx))
    refused = r"must have the rows of layer 0 on cpu:0, where its weights are, got cpu; begin"
    with pytest.raises(ValueError, match=refused):
        model(prompts(1), past_key_values=cache)


@pytest.mark.usefixtures("_two_devices")
def test_caches_in_one_piece_need_one_device():
    model = build("DeepseekV3")
    patch(model)
    with pytest.raises(UnsupportedError, match=r"StaticLatentCache: .* one device, got cpu:0, cp"):
        StaticLatentCache(model, batch_size=1, max_length=8)


@NEEDS_GENERATE_BATCH
@pytest.mark.usefixtures("_two_devices")
def test_generate_batch_needs_one_device():
    model = build("DeepseekV3")
    patch(model)
    with pytest.raises(UnsupportedError, match="generate_batch needs all layers on one device"):
        model.generate_batch([[1, 2]])


@pytest.mark.usefixtures("_two_devices")
@pytest.mark.parametrize("use_cache", [False, True])
def test_models_without_patch_need_one_device(use_cache):
    register()
    try:
        model = rebuilt(build("DeepseekV3"))
        with pytest.raises(UnsupportedError, match="got cpu:0 and cpu:1; `patch` takes several"):
            model(prompts(), use_cache=use_cache)
    finally:
        unregister()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_accelerate_has_placed(name):
    """Its modules have a forward that moves their inputs, also `kv_b_proj`."""
    placed = spread(build(name), "cpu", "cpu")
    assert "forward" in checks.mla_modules(placed)[0].kv_b_proj.__dict__
    patch(placed)
    compared(build(name), prompts(), placed)


@pytest.mark.slow
def test_offloaded_weights_are_refused(tmp_path):
    """Weights that accelerate loads for a call of `kv_b_proj` are not there without the call."""
    model = build("DeepseekV3")
    names = [name for name, _ in model.named_children() if name != "model"]
    names += [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    places = {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    dispatch_model(model, places | dict.fromkeys(names, "cpu"), offload_dir=tmp_path)
    assert checks.device_of(checks.mla_modules(model)[1]).type == "meta"
    with pytest.raises(UnsupportedError, match="no layer may be offloaded, got 1 of 3; load"):
        patch(model)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_layers_on_the_host_and_on_a_gpu(name):
    model = spread(build(name), "cpu", "cuda:0")
    devices = {checks.device_of(module) for module in checks.mla_modules(model)}
    assert devices == {torch.device("cpu"), torch.device("cuda", 0)} or name == "KimiLinear"
    patch(model)
    cache = compared(build(name), prompts(), model, tolerance=1e-3)
    for layer in latent_layers(cache):
        assert layer.pool.cache.payload.device == layer.pool.device
    assert {layer.pool.device for layer in latent_layers(cache)} == devices
