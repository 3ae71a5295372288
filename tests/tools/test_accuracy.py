"""`mlakit accuracy`: errors by layer and perplexity, per cache format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from mlakit.tools import cli, tiny
from tests.integrations import v4_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write("deepseek-v2-lite", path)
    return path


def invoke(*arguments: object, status: int = 0) -> Any:
    runner = CliRunner(env={"COLUMNS": "300"})
    result = runner.invoke(cli.app, ["accuracy", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output if status else result.stdout


@pytest.mark.slow
def test_errors_and_perplexity(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The cache has one row per token. " * 8)
    found = json.loads(invoke(folder, "--text", text, "--tokens", 100, "--dtype", "fp32", "--json"))
    by_format = {each["format"]: each for each in found}
    assert list(by_format) == ["eager", "fp32", "fp8", "fp8_token", "fp8_block128", "mxfp4_block32"]
    ids = torch.tensor([[ord(each) - 0x20 for each in text.read_text()[:100]]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    for name, each in by_format.items():
        assert len(each["errors"]) == tiny.LAYERS
        assert each["perplexity"] == pytest.approx(float(loss.exp()), rel=0.2)
        if name == "eager":
            assert each["errors"] == [0.0] * tiny.LAYERS
        elif name == "fp32":
            assert 0 < max(each["errors"]) < 1e-4
        else:
            most = 0.6 if name == "mxfp4_block32" else 0.3
            assert 1e-3 < min(each["errors"]) < max(each["errors"]) < most
    shown = invoke(folder, "--tokens", 20, "--format", "fp8_ds_mla", "--dtype", "fp32")
    assert "fp8_block128" in shown
    assert "random tokens" in shown


def test_deepseek_v4_has_an_error_for_each_format_of_its_rows(tmp_path):
    model = v4_models.build("all kinds")
    model.save_pretrained(tmp_path)
    found = json.loads(invoke(tmp_path, "--tokens", 60, "--dtype", "fp32", "--json"))
    by_format = {each["format"]: each["errors"] for each in found}
    assert list(by_format) == ["eager", "fp32", "fp8_block64", "mxfp4_block32"]
    assert {len(errors) for errors in by_format.values()} == {len(model.model.layers)}
    assert 0 < max(by_format["fp32"]) < 1e-4
    # one layer alone; a selection that differs moves the layers after it
    assert 1e-3 < by_format["fp8_block64"][0] < by_format["mxfp4_block32"][0] < 0.3


def test_wrong_arguments(folder, tmp_path):
    assert "text must be a file" in invoke(folder, "--text", tmp_path, status=2)
    assert "unknown cache format 'fp9'" in invoke(folder, "--format", "fp9", status=2)
    (tmp_path / "short.txt").write_text("a")
    said = invoke(folder, "--text", tmp_path / "short.txt", status=2)
    assert "the text must have at least 2 tokens, got 1" in said
