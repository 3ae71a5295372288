"""GLM-5.3-Flash: its indexer selects pools of tokens, and its rows have no rope columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import UnsupportedError
from mlakit.integrations.transformers import patch, unpatch
from mlakit.integrations.transformers.static_cache import StaticLatentCache
from tests.integrations.models import NEEDS_GENERATE_BATCH, build, left_padding, prompts
from tests.integrations.test_generate import TOLERANCE, generate, in_steps, latent_layers

POOLS = {
    "released": {"index_kpool": 4},
    "as the config": {"index_kpool": 16, "index_topk": 32},
    "an odd pool": {"index_kpool": 3, "index_topk": 9},
    "one token": {"index_kpool": 1},
    "without the tail": {"index_kpool": 4, "index_kpool_always_select_tail": False},
    "without the tail, all pools": {
        "index_kpool": 4,
        "index_topk": 128,
        "index_kpool_always_select_tail": False,
    },
    "all tokens": {"index_kpool": 4, "index_topk": 128},
}


def logits(model: Any, ids: Tensor, mask: Tensor, chunk: int = 40) -> Tensor:
    """Logits of a prompt in two chunks, and of single tokens."""
    with torch.no_grad():
        columns = ids.shape[1]
        return in_steps(model, ids, mask, (chunk, *range(columns - 5, columns + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_selections_of_pools(pool):
    model, ids, mask = build("Glm5Next", **POOLS[pool]), prompts(), left_padding()
    model.set_attn_implementation("sdpa")  # eager attends to everything where nothing is selected
    expected = logits(model, ids, mask)
    patch(model, page_size=16)
    error = (logits(model, ids, mask) - expected)[mask.bool()].abs().max()
    assert error < TOLERANCE


@pytest.mark.slow
def test_rows_have_no_rope_columns():
    model, ids, mask = build("Glm5Next"), prompts(), left_padding()
    patch(model, format="fp8_block128")
    layers = latent_layers(generate(model, ids, mask, return_dict_in_generate=True).past_key_values)
    row = layers[0].pool.cache.row
    assert (row.kv_lora_rank, row.qk_rope_head_dim) == (64, 0)


def test_the_vision_tower_keeps_its_attention():
    model = build("Glm5Next")
    patch(model)
    assert model.model.visual.config._attn_implementation == "eager"
    assert model.model.language_model.config._attn_implementation == "mlakit"
    unpatch(model)
    attentions = [layer.self_attn for layer in model.model.language_model.layers[1:]]
    assert model.model.language_model.config._attn_implementation == "eager"
    for module in attentions:
        assert "build_attention_mask_from_topk" not in module.__dict__
    assert "get_visible_tokens" not in attentions[0].indexer.__dict__


@pytest.mark.slow
def test_an_unpatched_model_is_as_before():
    model, ids, mask = build("Glm5Next"), prompts(), left_padding()
    expected = generate(model, ids, mask)
    with patch(model):
        generate(model, ids, mask)
    assert torch.equal(generate(model, ids, mask), expected)


@NEEDS_GENERATE_BATCH
def test_generate_batch_is_refused():
    model = build("Glm5Next")
    patch(model)
    with pytest.raises(UnsupportedError, match="indexers pool keys"):
        model.generate_batch([[1, 2, 3]])


def test_what_it_refuses():
    model = build("Glm5Next")
    patch(model)
    with pytest.raises(UnsupportedError, match="has layers without MLA"):
        StaticLatentCache(model, batch_size=1, max_length=64)
    layers = ["deepseek_sparse_attention"] * 3
    sparse = build("Glm5Next", layer_types=layers)
    with pytest.raises(UnsupportedError, match="has indexers that pool keys"):
        StaticLatentCache(sparse, batch_size=1, max_length=64)
