"""`mlakit generate`: a checkpoint's folder, a prompt, tokens per second."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from mlakit.integrations.transformers.generation import CacheUse, Run, loaded_dtype
from mlakit.tools import cli
from mlakit.tools.generate import comparison
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
    speed = r"first token after \d+\.\d\d s, then \d+\.\d tokens/s; cache (\d+) bytes/token, "
    for name, allocated in (("mlakit", 3 * 2 * 64 * 80 * 4), ("eager ", 3 * 8 * 80 * 4)):
        (found,) = re.findall(rf"^{name}  {speed}([\d,]+) allocated$", output, flags=re.MULTILINE)
        assert found == (str(3 * 80 * 4), f"{allocated:,}")
    assert "6 of 6 tokens equal" in output
    assert "Attention is a small part of a step over 8 tokens" in output


def test_a_comparison_says_what_to_expect():
    def run(*tokens: int, length: int = 4096) -> Run:
        return Run(list(tokens), 0.1, 0.2, CacheUse(length, 1, 1.0))

    assert comparison(run(1, 2), run(1, 2), "bf16") == ["2 of 2 tokens equal"]
    same, why = comparison(run(1, 2), run(1, 3), "bf16")
    assert same == "1 of 2 tokens equal before the first difference"
    assert "--dtype fp32" in why
    for tokens in ((1, 2), (1, 3)):
        assert "FP8 rows keep 4" in comparison(run(1, 2), run(*tokens), "fp8_block128")[1]
    assert "over 9 tokens" in comparison(run(1, length=9), run(1), "fp32")[1]


def test_ids_in_place_of_a_prompt(folder, tmp_path):
    code, output = invoke(folder, "--ids", "7,11,42", "--tokens", 3)
    assert code == 0, output
    assert re.search(r"^w7 w11 w42\s*(w\d+ ?){3}$", output, flags=re.MULTILINE), output
    for file in ("config.json", "model.safetensors"):
        shutil.copy(folder / file, tmp_path)
    code, output = invoke(tmp_path, "--ids", "7,11,42", "--tokens", 3)
    assert code == 0, output
    assert re.search(r"^ ?7 11 42( \d+){3}$", output, flags=re.MULTILINE), output
    assert "has no tokenizer: save one there, or give --ids" in said_by(tmp_path, "--prompt", "a")


def test_one_token_of_a_format(folder):
    code, output = invoke(folder, "--prompt", "w7", "--tokens", 1, "--format", "fp8_token")
    assert code == 0, output
    assert "then one token" in output
    assert "eager" not in output


def said_by(*arguments: object, status: int = 2) -> str:
    code, output = invoke(*arguments)
    assert code == status, output
    return " ".join(re.sub("[│╭╮╰╯─]", " ", output).split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "int4"], "unknown cache format 'int4'"),
        (["--format", "bf16"], "format must be 'fp32' or an FP8 format"),
        (["--dtype", "int8"], "dtype must be one of auto, bf16, fp16, fp32, got 'int8'"),
        (["--device", "tpu"], "device must be one of auto, cpu, cuda, got 'tpu'"),
        (["--ids", "7"], "one of --prompt and --ids must be given"),
    ],
)
def test_wrong_options(folder, arguments, said):
    assert said in said_by(folder, "--prompt", "w7", *arguments)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ("7,x", "ids must be whole numbers such as 11,42,7, got '7,x'"),
        ("7,256", "ids must be token ids in [0, 256), got 256"),
    ],
)
def test_wrong_ids(folder, ids, said):
    assert said in said_by(folder, "--ids", ids)


def test_cuda_without_a_gpu(folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = said_by(folder, "--prompt", "w7", "--device", "cuda")
    assert "device must be cpu on a machine without a GPU" in said


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("float32", "float32")])
def test_names_of_dtypes(name, dtype):
    assert str(loaded_dtype(name)) == f"torch.{dtype}"


@pytest.mark.parametrize("command", [["generate", "x", "--prompt", "a"], ["tiny", "glm-5", "x"]])
def test_without_transformers(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, command)
    assert result.exit_code == 1
    said = f"Error: {command[0]} needs transformers: pip install 'mlakit[transformers]'"
    assert said in result.output


def test_a_folder_without_a_checkpoint(tmp_path, monkeypatch):
    assert "config.json is missing" in said_by(tmp_path, "--prompt", "w7")
    monkeypatch.chdir(tmp_path)
    for name in ("deepseek-ai/DeepSeek-V2-Lite", "deepseek-v2-lite"):
        said = said_by(name, "--prompt", "w7")
        assert "there is no such folder; from the Hugging Face Hub: hf download " in said
        assert "deepseek-ai/DeepSeek-V2-Lite --local-dir DeepSeek-V2-Lite" in said
    assert said_by("nothing", "--prompt", "w7").endswith("there is no such folder")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert f"transformers cannot load {tmp_path}: " in said_by(tmp_path, "--ids", "7")


def test_common_prefix():
    a, b = Run([1, 2, 3], 0.1, 0.2), Run([1, 2, 4], 0.1, 0.2)
    assert (a.common_prefix(b), a.common_prefix(a)) == (2, 3)
    assert a.tokens_per_second == pytest.approx(10)
