"""`mlakit tiny`: checkpoints like those of releases, small."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import mlakit
from mlakit.integrations.transformers import patch
from mlakit.model.geometry import PRESETS, MLAGeometry
from mlakit.tools import cli, tiny


def invoke(*arguments: object, status: int = 0) -> Any:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, ["tiny", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.MODELS)
def test_a_patched_model_continues_a_text(name, tmp_path):
    folder = tmp_path / "model"
    assert name in invoke(name, folder).output
    ids = AutoTokenizer.from_pretrained(folder)("Paris is", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    how = {"max_new_tokens": 20, "do_sample": False}  # 28 tokens: more than `index_topk`
    eager = model.generate(ids, **how)
    patch(model)
    assert torch.equal(model.generate(ids, **how), eager)
    assert eager.shape == (1, 28)


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "deepseek-v3.2", "deepseek-v2-lite"])
def test_a_checkpoint_has_what_the_release_has(name, tmp_path):
    tiny.write(name, tmp_path)
    found, release = MLAGeometry.from_config(tmp_path), MLAGeometry.from_config(name)
    assert found.num_heads == 4
    assert found.rope_parameters.factor == release.rope_parameters.factor
    assert (found.q_lora_rank is None) == (release.q_lora_rank is None)
    assert found.has_indexer == release.has_indexer
    layer = mlakit.MLAAttention.load_safetensors(tmp_path, layer=tiny.LAYERS - 1)
    is_fp8 = name != "deepseek-v2-lite"
    assert (layer.o_proj.weight.dtype == torch.float8_e4m3fn) == is_fp8
    fields = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization_config" in fields) == is_fp8


def test_the_tokenizer_reads_what_it_writes(tmp_path):
    tiny.write("deepseek-v2-lite", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == tiny.SIZES["vocab_size"]
    text = tokenizer.decode(range(len(tokenizer)))
    assert text.isprintable()
    assert tokenizer(text).input_ids == list(range(len(tokenizer)))
    assert tokenizer.decode(tokenizer("a \n b\u4e2d").input_ids) == "a ? b?"


def test_the_seed_decides_the_weights_and_no_state_changes(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny.write("deepseek-v2-lite", tmp_path / name, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_what_cannot_be_written(tmp_path):
    said = invoke("llama", tmp_path, status=2).output
    assert f"MODEL must be one of {', '.join(tiny.MODELS)}, got 'llama'" in said
    assert set(tiny.MODELS) < set(PRESETS)
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file"):
        said = invoke("deepseek-v3", folder, status=2).output
        assert f"DIR must be a new or empty folder, got {folder}" in said
