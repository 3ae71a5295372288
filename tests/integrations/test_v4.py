"""DeepSeek-V4 on mlakit: logits and tokens of eager attention without a cache, each row alone.

Eager attention with a cache is no reference: it compresses padding, and beams lose their windows.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from mlakit import UnsupportedError
from mlakit.integrations.transformers import patch, refresh_weights, unpatch
from mlakit.integrations.transformers.generation import cache_use
from mlakit.integrations.transformers.static_cache import StaticLatentCache
from mlakit.model.v4 import CSA, HCA
from tests.integrations.v4_models import CONFIGS, LENGTHS, build, padded, prompt

TOLERANCE = 2e-4
NEW = 12


def exact_logits(model: Any, *rows: Tensor) -> list[Tensor]:
    return [model(row[None], use_cache=False).logits[0] for row in rows]


def difference(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().max())


def in_steps(model: Any, ids: Tensor, cuts: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of a batch in steps that end at these columns."""
    cache, found = DynamicCache(config=model.config), []
    for first, last in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        seen = None if mask is None else mask[:, :last]
        step = model(ids[:, first:last], attention_mask=seen, past_key_values=cache)
        found.append(step.logits)
    return torch.cat(found, 1)


def steps_of(length: int) -> list[int]:
    """Chunks that end inside of windows, then steps of 1 to 4 tokens."""
    cuts = [length // 3 + 1]
    for size in (17, 1, 2, 3, 4, 1, 1, 6):
        cuts.append(cuts[-1] + size)
    return cuts


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_eager(name):
    model, length = build(name), LENGTHS.get(name, 83)
    ids = prompt(length)
    (exact,) = exact_logits(model, ids)
    assert exact.std() > 0.5
    with torch.no_grad(), patch(model, page_size=8):
        assert difference(model(ids[None], use_cache=False).logits[0], exact) < TOLERANCE
        assert difference(model(ids[None]).logits[0], exact) < TOLERANCE
        assert difference(in_steps(model, ids[None], steps_of(length))[0], exact) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all kinds", "odd"])
def test_rows_of_a_padded_batch_are_what_each_gives_alone(name):
    model = build(name)
    rows = [prompt(44, 1), prompt(82, 2), prompt(9, 3)]
    exact = exact_logits(model, *rows)
    alone = [
        model.generate(row[None], max_new_tokens=NEW, do_sample=False, use_cache=False)[0, -NEW:]
        for row in rows
    ]
    ids, mask = padded(rows)
    patch(model)
    with torch.no_grad():
        for found in (
            model(ids, attention_mask=mask).logits,
            model(ids, attention_mask=mask, use_cache=False).logits,
            in_steps(model, ids, [41, 50, 80], mask),
        ):
            assert found[mask == 0].isfinite().all()
            for own, shown, right in zip(found, mask, exact, strict=True):
                assert difference(own[shown == 1], right) < TOLERANCE
    made = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(made[:, -NEW:], torch.stack(alone))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all kinds", "odd"])
def test_beams(name):
    model, ids = build(name), prompt(44)[None]
    how = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    exact = model.generate(ids, **how, use_cache=False)
    patch(model, page_size=8)
    assert torch.equal(model.generate(ids, **how), exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all kinds", "odd"])
def test_rejected_drafts_are_taken_back(name):
    model, ids = build(name), prompt(83)
    (exact,) = exact_logits(model, ids)
    patch(model, page_size=8)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        found = [model(ids[None, :50], past_key_values=cache).logits[0]]
        for at in range(50, 83):
            wrong = prompt(1 + at % 7, at)
            step = torch.cat([ids[at : at + 1], wrong])[None]
            found.append(model(step, past_key_values=cache).logits[0, :1])
            cache.crop(-len(wrong))
    assert difference(torch.cat(found), exact) < TOLERANCE
    with pytest.raises(ValueError, match="crop must take back at most 2 tokens of row 0"):
        cache.crop(-9)
    assert cache.get_seq_length() == 83
    cache.crop(-83)
    with torch.no_grad():
        assert difference(model(ids[None], past_key_values=cache).logits[0], exact) < TOLERANCE


@pytest.mark.slow
def test_a_forward_that_fails_leaves_the_cache_as_it_was():
    model, ids = build(), prompt(60)
    (exact,) = exact_logits(model, ids)
    patch(model, page_size=8)
    cache = DynamicCache(config=model.config)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    with torch.no_grad():
        found = [model(ids[None, :40], past_key_values=cache).logits[0]]
        hook = model.model.layers[2].register_forward_pre_hook(fail)
        for wrong in (prompt(17, 8), prompt(1, 9)):
            with pytest.raises(RuntimeError, match="broken"):
                model(wrong[None], past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 40
        found.append(model(ids[None, 40:], past_key_values=cache).logits[0])
    assert difference(torch.cat(found), exact) < TOLERANCE


@pytest.mark.slow
def test_one_cache_after_another_and_selections_of_rows():
    model, rows = build(), [prompt(30, 1), prompt(30, 2)]
    more = prompt(9, 3)
    exact = exact_logits(model, *(torch.cat([row, more]) for row in rows))
    patch(model, page_size=8)
    with torch.no_grad():
        for _ in range(2):
            cache = DynamicCache(config=model.config)
            model(torch.stack(rows), past_key_values=cache)
            cache.batch_select_indices(torch.tensor([1, 0]))
            cache.batch_repeat_interleave(2)
            found = model(more.expand(4, -1), past_key_values=cache).logits
            for own, right in zip(found, [exact[1], exact[1], exact[0], exact[0]], strict=True):
                assert difference(own, right[30:]) < TOLERANCE
            cache.reset()
            found = model(rows[0][None], past_key_values=cache).logits[0]
            assert difference(found, exact[0][:30]) < TOLERANCE


@pytest.mark.slow
def test_rows_in_fp8_have_584_bytes():
    model, ids = build("rows of 448 + 64"), prompt(83)
    (exact,) = exact_logits(model, ids)
    patch(model, format="fp8_block64")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        found = model(ids[None], past_key_values=cache).logits[0]
    pool = cache.layers[0].pool
    assert pool.cache.cache("window").codec.bytes_per_token == 584
    assert pool.cache.cache("csa", "index").format == "fp8_token"
    error = (found - exact).square().mean().sqrt() / exact.std()
    assert 0 < error < 0.2


@pytest.mark.slow
def test_window_rows_are_freed():
    model = build()
    patch(model, page_size=8)
    out = model.generate(
        prompt(90)[None], max_new_tokens=30, do_sample=False, return_dict_in_generate=True
    )
    pool = out.past_key_values.layers[0].pool
    # 16 tokens of the window and 8 that could be taken back; one row per 4 and per 16 tokens
    assert pool.cache.pages_in_use["window"] <= 5
    assert (pool.cache.pages_in_use["csa"], pool.cache.pages_in_use["hca"]) == (4, 1)
    assert pool.cache.pages_in_use["csa_state"] <= 4
    used = cache_use(out.past_key_values)
    assert (used.tokens, used.allocated_bytes) == (119, pool.cache.nbytes)
    # float32: two layers with a row of 64 and a key of 32 columns per 4 tokens, a row per 16
    assert used.bytes_per_token == 4 * (2 * (64 + 32) / 4 + 64 / 16)


@pytest.mark.slow
def test_an_unpatched_model_is_as_before_and_copies_stay_patched():
    model, ids = build(), prompt(40)
    (exact,) = exact_logits(model, ids)
    patch(model)
    refresh_weights(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.model.layers[1].self_attn.compressor.position_bias.neg_()
            changed = other(ids[None]).logits[0]
            assert difference(changed, exact) > 100 * TOLERANCE
            assert difference(model(ids[None]).logits[0], exact) < TOLERANCE
            assert changed.isfinite().all()
    unpatch(model)
    assert difference(exact_logits(model, ids)[0], exact) == 0
    for layer in model.model.layers:
        assert "forward" not in getattr(layer.self_attn.compressor, "__dict__", {})


def refused(call: Any, error: type[Exception], match: str) -> None:
    with torch.no_grad(), pytest.raises(error, match=match):
        call()


def test_refusals():
    model, ids = build(), prompt(20)[None]
    layer = model.model.layers[1].self_attn
    handle = layer.compressor.kv_norm.register_forward_hook(lambda *_: None)
    refused(
        lambda: patch(model), UnsupportedError, r"compressor\.kv_norm must have no forward hooks"
    )
    handle.remove()
    other = build(layer_types=[CSA, CSA, HCA, HCA])
    weight = other.model.layers[0].self_attn.compressor.indexer.q_b_proj
    weight.out_features //= 2
    refused(lambda: patch(other), UnsupportedError, "indexer of DeepSeek-V4 must have all heads")
    refused(lambda: patch(model, format="bf16"), UnsupportedError, "format must be 'fp32'")
    patch(model)
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    refused(
        lambda: model(ids, position_ids=positions),
        UnsupportedError,
        "position_ids must count the tokens of each sequence",
    )
    refused(lambda: model.generate_batch([[1, 2]]), UnsupportedError, "generate_batch does not run")
    refused(
        lambda: StaticLatentCache(model, batch_size=1, max_length=64),
        UnsupportedError,
        "StaticLatentCache: DeepseekV4ForCausalLM has compressed rows",
    )
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 3, 64), torch.zeros(1, 1, 3, 64), 0)
    refused(lambda: model(ids, past_key_values=cache), ValueError, "must be empty or begun by")
    shared = build()
    shared.set_attn_implementation("mlakit")
    refused(lambda: shared(ids), UnsupportedError, "DeepSeek-V4 must be patched")
    module = model.model.layers[0].self_attn
    hidden = torch.zeros(1, 4, 64)
    angles = dict.fromkeys(("main", "compress"), (torch.ones(1, 4, 4), torch.zeros(1, 4, 4)))
    refused(
        lambda: module(hidden, angles, torch.arange(4)[None], None),
        UnsupportedError,
        "the decoder of the patched model must be called",
    )
    model.train()
    refused(lambda: model(ids), UnsupportedError, "must not be in training mode")
