"""`mlakit generate`: a checkpoint's folder, a prompt, tokens per second."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from mlakit.integrations.transformers.generation import Run
from mlakit.tools import cli
from tests.integrations.models import SIZES, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    build("DeepseekV3").save_pretrained(path)
    words = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, ["generate", *map(str, arguments)])
    return result.exit_code, result.output


def test_generate_and_compare(folder):
    code, output = invoke(folder, "--prompt", "w7 w11 w42", "--tokens", 6, "--compare")
    assert code == 0, output
    assert re.search(r"^w7 w11 w42\s*(w\d+ ?){6}$", output, flags=re.MULTILINE), output
    speed = r"first token after \d+\.\d\d s, then \d+\.\d tokens/s$"
    for name in ("mlakit", "eager "):
        assert re.search(rf"^{name}  {speed}", output, flags=re.MULTILINE), output
    assert "6 of 6 tokens equal" in output


def test_one_token_of_a_format(folder):
    code, output = invoke(folder, "--prompt", "w7", "--tokens", 1, "--format", "fp8_token")
    assert code == 0, output
    assert "then one token" in output
    assert "eager" not in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "int4"], "unknown cache format 'int4'"),
        (["--format", "bf16"], "format must be 'fp32' or an FP8 format"),
    ],
)
def test_wrong_options(folder, arguments, said):
    code, output = invoke(folder, "--prompt", "w7", *arguments)
    assert code == 2
    assert said in output


def test_a_folder_without_a_checkpoint(tmp_path):
    code, output = invoke(tmp_path, "--prompt", "w7")
    assert code == 2
    assert "config.json is missing" in " ".join(re.sub("[│╭╮╰╯─]", " ", output).split())


def test_common_prefix():
    a, b = Run([1, 2, 3], 0.1, 0.2), Run([1, 2, 4], 0.1, 0.2)
    assert (a.common_prefix(b), a.common_prefix(a)) == (2, 3)
    assert a.tokens_per_second == pytest.approx(10)
