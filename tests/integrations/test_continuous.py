"""`generate_batch` of a patched model: continuous batching over latent rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache as paged_cache

from mlakit import UnsupportedError
from mlakit.integrations.transformers import continuous, patch, unpatch
from tests.integrations.models import NEEDS_GENERATE_BATCH, build, prompts

LENGTHS = (5, 37, 9, 70, 3)
NAMES = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Youtu", "AXK1", "Mistral4")


@pytest.fixture(autouse=True)
def _some_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sizes its pages by the memory of the device, on a CPU as psutil says."""
    memory = (torch.device("cpu"), 1 << 30, 0, 0)
    monkeypatch.setattr(paged_cache, "get_device_and_memory_breakdown", lambda: memory)


def requests() -> list[list[int]]:
    return [prompts(length, batch=1)[0].tolist() for length in LENGTHS]


def generate_batch(model: Any, **changes: Any) -> list[list[int]]:
    """Prompts of several chunks: a step has at most 32 tokens."""
    sizes = {"num_blocks": 64, "block_size": 16, "max_batch_tokens": 32} | changes
    results = model.generate_batch(
        inputs=requests(),
        generation_config=GenerationConfig(
            max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**sizes),
        progress_bar=False,
    )
    by_request = sorted(results, key=lambda name: int(name.split("_")[-1]))
    return [list(results[name].generated_tokens) for name in by_request]


@pytest.mark.slow
@NEEDS_GENERATE_BATCH
@pytest.mark.parametrize(
    "name",
    [
        # with and without low-rank queries, and with frequencies of its own
        pytest.param(each, marks=[] if each in NAMES[:2] + NAMES[-1:] else [pytest.mark.thorough])
        for each in NAMES
    ],
)
def test_generate_batch(name):
    model = build(name)
    eager = [
        model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0, len(ids) :]
        for ids in requests()
    ]
    sizes = (model.config.num_key_value_heads, model.config.head_dim)
    patch(model)
    assert generate_batch(model) == [tokens.tolist() for tokens in eager]
    assert (model.config.num_key_value_heads, model.config.head_dim) == sizes
    assert model.config._attn_implementation == "mlakit"
    # generate goes on as before
    ids = torch.tensor([requests()[1]])
    ours = model.generate(ids, max_new_tokens=10, do_sample=False)
    assert ours[0, ids.shape[1] :].tolist() == eager[1].tolist()
    unpatch(model)
    assert "generate_batch" not in model.__dict__


@pytest.mark.parametrize("version", ["5.16.1", "5.18.0"])
def test_other_releases_are_refused(version, monkeypatch):
    model = build("DeepseekV3")
    patch(model)
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(UnsupportedError, match=rf"needs transformers 5\.17\.x, got {version}"):
        generate_batch(model)


def test_rows_of_other_widths_are_refused():
    """Continuous batching that is not begun by generate_batch has rows of the config's sizes."""
    model = build("DeepseekV3")
    patch(model)
    module = model.model.layers[1].self_attn
    cache = SimpleNamespace(
        layer_index_to_group_indices={1: (0, 0)}, key_cache=[torch.zeros(8, 4, 16)]
    )
    q = torch.zeros(1, 4, 2, 48)
    with pytest.raises(UnsupportedError, match="generate_batch of the patched model only"):
        continuous.attention(module, q, q, q, None, cache=cache)
