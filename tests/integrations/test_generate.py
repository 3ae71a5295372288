"""A patched model gives the tokens and logits of eager attention, whatever way it is called."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from mlakit import plan_mla_decode
from mlakit.integrations.transformers import patch, pool, unpatch
from mlakit.integrations.transformers.cache_layers import LatentLayer
from tests.integrations.models import COLUMNS, MODELS, build, left_padding, prompts

TOLERANCE = 2e-4  # of logits, in float32
FEW = ("DeepseekV3", "DeepseekV32")  # dense and sparse, where the model does not matter
# with layers of its own kinds, or another order of them
OTHERS = ("LongcatFlash", "KimiLinear", "Glm5Next")
STATEFUL = ("KimiLinear", "Glm5Next")  # transformers cannot crop their linear attention
HOW = {
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "chunked_prefill": {"prefill_chunk_size": 33},
}


def thorough_but(*names: str) -> list[Any]:
    """All models; those not named repeat the code path of one that is, with other numbers."""
    marks = [pytest.mark.thorough]
    return [pytest.param(each, marks=[] if each in names else marks) for each in MODELS]


def generate(model: Any, ids: Tensor, mask: Tensor, **how: Any) -> Any:
    torch.manual_seed(3)
    given = {"max_new_tokens": 8, "do_sample": False} | how
    return model.generate(ids, attention_mask=mask, **given)


def latent_layers(cache: DynamicCache) -> list[LatentLayer]:
    return [layer for layer in cache.layers if isinstance(layer, LatentLayer)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        *((name, 64) for name in MODELS),
        *(
            pytest.param(name, 7, marks=[] if name in FEW + OTHERS else [pytest.mark.thorough])
            for name in MODELS
        ),
    ],
)
def test_greedy_with_left_padding(name, page_size):
    model, ids, mask = build(name), prompts(), left_padding()
    how = {"return_dict_in_generate": True, "output_logits": True}
    eager = generate(model, ids, mask, **how)
    patch(model, page_size=page_size)
    ours = generate(model, ids, mask, **how)
    assert torch.equal(ours.sequences, eager.sequences)
    assert len(eager.logits) == 8
    error = (torch.stack(ours.logits) - torch.stack(eager.logits)).abs().max()
    assert error < TOLERANCE
    assert torch.stack(eager.logits).std() > 0.5  # far from uniform
    layers = latent_layers(ours.past_key_values)
    assert layers
    # padding is not stored; the last new token is not fed back
    (pool,) = {id(layer.pool): layer.pool for layer in layers}.values()
    assert [sequence.length for sequence in pool.sequences] == (mask.sum(1) + 7).tolist()
    assert pool.allocator.page_size == page_size


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", thorough_but(*FEW, *OTHERS))
def test_other_ways_to_generate(name, how):
    model, ids, mask = build(name), prompts(), left_padding()
    eager = generate(model, ids, mask, **HOW[how])
    patch(model)
    assert torch.equal(generate(model, ids, mask, **HOW[how]), eager)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [each for each in thorough_but(*FEW, *OTHERS) if each.values[0] not in STATEFUL]
)
def test_prompt_lookup_crops_the_cache(name, monkeypatch):
    model = build(name)
    ids = prompts(batch=1)[:, :24].repeat(1, 3)  # something to look up
    mask = torch.ones_like(ids)
    how = {"max_new_tokens": 12, "prompt_lookup_num_tokens": 3}
    eager = generate(model, ids, mask, **how)
    patch(model)
    crops = []
    crop = LatentLayer.crop
    monkeypatch.setattr(
        LatentLayer, "crop", lambda self, n: (crops.append(int(n)), crop(self, n))[1]
    )
    assert torch.equal(generate(model, ids, mask, **how), eager)
    assert any(crops)


@pytest.mark.parametrize("name", MODELS)
def test_forward_without_a_cache(name):
    model, ids, mask = build(name), prompts(), left_padding()
    eager = model(ids, attention_mask=mask, use_cache=False)
    patch(model)
    ours = model(ids, attention_mask=mask, use_cache=False)
    assert ours.past_key_values is None
    assert (ours.logits - eager.logits)[mask.bool()].abs().max() < TOLERANCE


def in_steps(model: Any, ids: Tensor, mask: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Logits of all columns, from forwards that end at these columns."""
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits, first = [], 0
    for end in ends:
        step = model(
            ids[:, first:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, first:end],
            past_key_values=cache,
        )
        assert step.past_key_values is cache
        logits.append(step.logits)
        first = end
    return torch.cat(logits, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in STATEFUL])
def test_padding_may_be_anywhere(name):
    """In the middle, on the right, a step with only padding for a request. Recurrent layers
    take left padding only."""
    model, ids = build(name), prompts()
    mask = torch.ones_like(ids)
    mask[0, 10:21] = 0
    mask[0, 40] = 0
    mask[1, 50:66] = 0
    mask[2, 33:] = 0
    ends = (33, 50, 60, 66, 67, COLUMNS)
    eager = in_steps(model, ids, mask, ends)
    patch(model, page_size=16)
    ours = in_steps(model, ids, mask, ends)
    assert (ours - eager)[mask.bool()].abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FEW)
def test_no_mask_is_no_padding(name):
    model, ids = build(name), prompts()
    eager = model(ids).logits
    patch(model)
    assert (model(ids).logits - eager).abs().max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_cache_goes_on_after_generate_and_reset(name):
    """A conversation: the cache of one generate() is given to the next."""
    model, ids = build(name), prompts(batch=2)
    more = prompts(12, batch=2)

    def talk() -> tuple[Tensor, Tensor]:
        cache = DynamicCache(config=model.config)
        first = generate(model, ids, torch.ones_like(ids), past_key_values=cache)
        longer = torch.cat([first, more], 1)
        return cache, generate(model, longer, torch.ones_like(longer), past_key_values=cache)

    _, eager = talk()
    patch(model, page_size=16)
    cache, ours = talk()
    assert torch.equal(ours, eager)
    pool = latent_layers(cache)[0].pool
    cache.reset()
    assert pool.allocator.num_free_pages == pool.allocator.num_pages
    again = generate(model, ids, torch.ones_like(ids), past_key_values=cache)
    assert torch.equal(again, eager[:, : again.shape[1]])


@pytest.mark.parametrize("name", FEW)
def test_batch_methods_of_the_cache(name):
    """Select and repeat, as contrastive and best-of-n decoding do, then one more step."""
    model, ids = build(name), prompts()
    mask = left_padding()
    rows = [2, 2, 1, 1]

    def run() -> Tensor:
        cache = DynamicCache(config=model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 1]))
        cache.batch_repeat_interleave(2)
        longer = torch.cat([mask[rows], torch.ones(4, 2, dtype=mask.dtype)], 1)
        new = prompts(2, batch=4)
        positions = (longer.cumsum(1) - 1)[:, -2:]
        step = model(new, attention_mask=longer, position_ids=positions, past_key_values=cache)
        return step.logits

    eager = run()
    patch(model, page_size=16)
    assert (run() - eager).abs().max() < TOLERANCE


def test_a_decoder_may_be_called_by_position():
    model, ids, mask = build("DeepseekV3"), prompts(), left_padding()
    eager = model.model(ids, mask).last_hidden_state
    patch(model)
    ours = model.model(ids, mask).last_hidden_state
    assert (ours - eager)[mask.bool()].abs().max() < TOLERANCE


def test_embeddings_in_the_place_of_tokens():
    model, ids = build("DeepseekV3"), prompts()
    embeddings = model.get_input_embeddings()(ids)
    eager = model(ids).logits
    patch(model)
    assert (model(inputs_embeds=embeddings).logits - eager).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FEW)
def test_unpatch_restores_the_model(name):
    model, ids, mask = build(name), prompts(), left_padding()
    before = model(ids, attention_mask=mask)
    patch(model)
    model(ids, attention_mask=mask)
    unpatch(model)
    after = model(ids, attention_mask=mask)
    assert torch.equal(after.logits, before.logits)
    assert not latent_layers(after.past_key_values)
    assert model.config._attn_implementation == "eager"
    assert not [key for module in model.modules() for key in module.__dict__ if "mlakit" in key]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_new_weights_are_seen(name):
    """In place, as load_state_dict writes, and as another parameter."""
    model, ids = build(name), prompts()
    patch(model)
    model(ids)
    module = model.model.layers[1].self_attn.kv_b_proj
    for change in ("in place", "another"):
        with torch.no_grad():
            if change == "in place":
                module.weight.mul_(-1.5)
            else:
                module.weight = torch.nn.Parameter(module.weight.flip(0), requires_grad=False)
        ours = model(ids).logits
        unpatch(model)
        eager = model(ids).logits
        patch(model)
        assert (ours - eager).abs().max() < TOLERANCE, change


@pytest.mark.parametrize(
    ("format", "stored"),
    [("fp32", "fp32"), ("float32", "fp32"), ("fp8_e4m3", "fp8"), ("fp8_token", "fp8_token")],
)
def test_formats(format, stored):
    """The cache has the format; FP8 rows change the logits a little, and only with a cache."""
    model, ids = build("DeepseekV3"), prompts()
    eager = model(ids).logits
    patch(model, format=format)
    ours = model(ids)
    assert latent_layers(ours.past_key_values)[0].pool.cache.format == stored
    error = (ours.logits - eager).std() / eager.std()
    assert error < 0.2
    assert (error > 1e-3) == (stored != "fp32")
    assert (model(ids, use_cache=False).logits - eager).abs().max() < TOLERANCE


def test_a_copy_of_a_patched_model():
    """It has weights, hooks and a cache of its own, and can be unpatched."""
    model, ids = build("DeepseekV3"), prompts()
    eager = model(ids).logits
    patch(model)
    model(ids)
    copied = deepcopy(model)
    with torch.no_grad():
        copied.model.layers[1].self_attn.kv_b_proj.weight.mul_(2)
    changed = copied(ids).logits
    assert (model(ids).logits - eager).abs().max() < TOLERANCE
    unpatch(copied)
    assert (copied(ids).logits - changed).abs().max() < TOLERANCE
    assert (changed - eager).abs().max() > 0.1
    assert (model(ids).logits - eager).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", FEW)
def test_one_plan_for_all_layers_of_a_step(name, monkeypatch):
    """None for a prompt; the plan of an earlier step is not used again."""
    model, ids = build(name, **({"index_topk": 100} if name == "DeepseekV32" else {})), prompts()
    patch(model)
    planned = []

    def plan(cache: Any, page_table: Tensor, kv_lens: Tensor, **how: Any) -> Any:
        planned.append(kv_lens.tolist())
        return plan_mla_decode(cache, page_table, kv_lens, **how)

    monkeypatch.setattr(pool, "plan_mla_decode", plan)
    generate(model, ids, torch.ones_like(ids), max_new_tokens=4)
    assert planned == [[COLUMNS + step] * 3 for step in (1, 2, 3)]
