"""A patched model that is pickled: it works where it is loaded, also in another process."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.integrations.transformers import patch, unpatch
from tests.integrations.models import build, left_padding, prompts
from tests.integrations.test_generate import FEW, TOLERANCE
from tests.paths import ROOT

LOAD = """
import sys, torch
model, ids, mask, how = torch.load(sys.argv[1], weights_only=False)
torch.save(model.generate(ids, attention_mask=mask, **how), sys.argv[2])
"""


def saved(model: Any, how: str) -> Any:
    """The model, written and read again."""
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", FEW)
def test_a_patched_model(name, how):
    """It has its own weights and hooks, and can be unpatched."""
    model, ids, mask = build(name), prompts(), left_padding()

    def logits(model: Any) -> Tensor:
        return model(ids, attention_mask=mask).logits[mask.bool()]

    eager = logits(model)
    patch(model, page_size=16)
    logits(model)
    other = saved(model, how)
    model.model.layers[1].self_attn.kv_b_proj.weight.zero_()
    assert (logits(other) - eager).abs().max() < TOLERANCE
    cache = other(ids, attention_mask=mask).past_key_values
    assert cache.layers[0].pool.allocator.page_size == 16
    unpatch(other)
    assert torch.equal(logits(other), eager)


def test_a_saved_model_is_not_larger():
    """What is derived of the weights is made again, not saved."""
    model = build("DeepseekV3").bfloat16()
    patch(model)
    sizes = []
    for _ in range(2):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        sizes.append(buffer.tell())
        model(prompts())
    assert sizes[1] - sizes[0] < 10_000


@pytest.mark.slow
def test_another_process(tmp_path: Path):
    model, ids, mask = build("DeepseekV3"), prompts(), left_padding()
    how = {"max_new_tokens": 4, "do_sample": False}
    eager = model.generate(ids, attention_mask=mask, **how)
    patch(model)
    stored, found = tmp_path / "model.pt", tmp_path / "tokens.pt"
    torch.save((model, ids, mask, how), stored)
    command = [sys.executable, "-c", LOAD, str(stored), str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(found), eager)
