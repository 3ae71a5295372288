"""`mlakit vllm-args`: weights, the choice of the parallel degrees, what does not fit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlakit.model.releases import RELEASES
from mlakit.tools import cli
from mlakit.tools.memory.budget import CHECKPOINT_INDEX
from mlakit.tools.memory.gpus import GIB
from mlakit.tools.planner.serve import CACHE_DTYPES, serve_plan
from mlakit.tools.planner.weights import model_weights

# counts by hand: see test_parameters_are_those_of_a_hand_count
SMALL: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "max_position_embeddings": 1 << 20,
    "vocab_size": 100,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "torch_dtype": "bfloat16",
}
SPARSE = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64, "model_type": "deepseek_v32"}


def written(folder: Path, **changed: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**SMALL, **changed}))
    return str(folder)


def test_parameters_are_those_of_a_hand_count(tmp_path):
    attention = 64 * 32 + 32 * 8 * 80 + 64 * 576 + 512 * 8 * 32 + 8 * 16 * 64
    experts = 3 * 16 * 3 * 64 * 32
    mlps = 3 * 64 * 128 + 3 * (3 * 64 * 32 + 16 * 64)
    total = 4 * attention + mlps + experts + 2 * 100 * 64
    found = model_weights(written(tmp_path))
    assert (found.parameters, found.expert_parameters, found.total_bytes) == (
        total,
        experts,
        2 * total,
    )
    assert found.active_parameters() == total - experts * 14 / 16
    indexer = 4 * (32 * 4 * 128 + 64 * (128 + 4))
    assert model_weights(written(tmp_path, **SPARSE)).parameters == total + indexer
    tied = model_weights(written(tmp_path, tie_word_embeddings=True))
    assert tied.parameters == total - 100 * 64
    fp8 = model_weights(written(tmp_path, quantization_config={"quant_method": "fp8"}))
    assert fp8.total_bytes == total + 2 * 100 * 64


# billions, by the model cards
PUBLISHED = {
    "deepseek-v2": (236, 21),
    "deepseek-v2-lite": (15.7, 2.4),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1000, 32),
    "glm-4.7-flash": (30, 3),
    "glm-5": (744, 40),
    "minicpm3": (4, 4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_release_are_the_published_ones(name):
    total, active = PUBLISHED[name]
    found = model_weights(name)
    assert found.parameters / 1e9 == pytest.approx(total, rel=0.03)
    # cards leave embeddings out of the active ones
    spared = RELEASES[name]["vocab_size"] * RELEASES[name]["hidden_size"] * 2
    assert found.active_parameters() - spared < active * 1.1e9 < 1.5 * found.active_parameters()


def test_experts_that_a_batch_reads(tmp_path):
    found = model_weights(written(tmp_path))
    assert found.experts_touched(1) == pytest.approx(2 / 16)
    assert found.experts_touched(2) == pytest.approx(1 - (14 / 16) ** 2)
    rest = found.total_bytes * (1 - found.expert_share)
    assert found.bytes_read(1) == pytest.approx(rest + 2 * found.expert_parameters / 8)
    assert model_weights(written(tmp_path, n_routed_experts=0)).bytes_read(1) > 0


def test_weights_come_from_the_checkpoint_first(tmp_path):
    config = written(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 1000)
    assert (model_weights(config).total_bytes, model_weights(config).source) == (
        1000,
        "the .safetensors files",
    )
    (tmp_path / CHECKPOINT_INDEX).write_text(json.dumps({"metadata": {"total_size": 4002}}))
    assert model_weights(config).total_bytes == 4002
    assert model_weights(config, 2.0).total_bytes == 2 * GIB
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "vocab_size": None}))
    assert model_weights(config).parameters is None


def plan(config: str, **options: Any) -> Any:
    return serve_plan(config, **{"gpus": 8, "context": 1024, **options})


def test_dcp_is_the_lowest_with_which_the_requests_fit(tmp_path):
    config = written(tmp_path)
    token = 4 * 1152  # 4 layers in bf16
    free = int(20 * GIB * 0.9) - 4 * GIB - -(-model_weights(config).total_bytes // 8)
    for requests in (1, 3, 10, 24, 25, 60, 110, 180):
        found = plan(config, gpu_memory="20", context=1 << 17, requests=requests)
        needed = requests * (1 << 17) * token
        fitting = [dcp for dcp in (1, 2, 4, 8) if needed // dcp <= free]
        if fitting:
            assert (found.dcp, found.cache_dtype) == (fitting[0], "auto")
            assert found.needed_bytes == needed // found.dcp
        else:
            assert (found.dcp, found.cache_dtype) == (8, "fp8")
        assert found.cache_bytes == free
    assert found.why_not is None


def test_the_degrees_divide_what_they_have_to(tmp_path):
    config = written(tmp_path)
    degrees = {n: plan(config, gpus=n) for n in (1, 2, 4, 6, 8, 16, 24)}
    assert {n: (each.tp, each.pp, each.nodes) for n, each in degrees.items()} == {
        1: (1, 1, 1),
        2: (2, 1, 1),
        4: (4, 1, 1),
        6: (2, 3, 1),
        8: (8, 1, 1),
        16: (8, 2, 2),
        24: (8, 3, 3),
    }
    assert all(8 % each.tp == 0 == each.tp % each.dcp for each in degrees.values())
    # 4 layers in 3 stages: the first has 2
    whole, third = degrees[8], degrees[24]
    assert third.needed_bytes == whole.needed_bytes // 2


def test_a_sparse_model_has_its_own_backend_and_no_dcp(tmp_path):
    found = plan(written(tmp_path, **SPARSE), gpu_memory="20", context=1 << 17, requests=1000)
    assert (found.dcp, found.cache_dtype) == (1, "fp8_ds_mla")
    assert "MLAKIT_SPARSE" in found.arguments
    assert found.why_not is not None
    fits = plan(written(tmp_path, **SPARSE))
    assert fits.needed_bytes == 1024 * 4 * (656 + 132)


def test_several_nodes_have_a_line_each(tmp_path):
    first, second = (shlex.split(line) for line in plan(written(tmp_path), gpus=16).lines)
    assert second == [*first[:-1], "1", "--headless"]
    assert first[-6:] == ["--nnodes", "2", "--master-addr", "ADDRESS", "--node-rank", "0"]


def run(*arguments: object, status: int = 0) -> Any:
    runner = CliRunner(env={"COLUMNS": "200"})
    result = runner.invoke(cli.app, ["vllm-args", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def test_the_command_prints_the_line_and_says_why(tmp_path):
    config = written(tmp_path)
    options = ("--gpus", 8, "--context", "128k", "--requests", 30, "--gpu-memory", 20)
    result = run(config, *options)
    assert shlex.split(result.stdout) == [
        *("vllm", "serve", config, "--attention-backend", "MLAKIT"),
        *("--tensor-parallel-size", "8", "--decode-context-parallel-size", "2"),
        *("--kv-cache-dtype", "auto", "--max-model-len", "131072", "--max-num-seqs", "30"),
        *("--gpu-memory-utilization", "0.9"),
    ]
    for word in shlex.split(result.stdout):
        assert not word.startswith("--") or word in result.stderr
    assert "30 x 131072 tokens do not fit with 1" in result.stderr
    stored = json.loads(run(config, *options, "--json").stdout)
    assert stored["lines"] == [result.stdout.strip()]
    assert stored["dcp"] == 2


def test_a_known_model_is_served_by_its_hub_id():
    result = run("deepseek-v3", "--gpus", 8, "--context", "32k")
    assert result.stdout.startswith("vllm serve deepseek-ai/DeepSeek-V3 ")


def test_what_does_not_fit_is_said_in_numbers(tmp_path):
    result = run("deepseek-v3", "--gpus", 4, "--context", "4k", status=1)
    assert result.stdout == ""
    said = "the weights do not fit: 156.7 GiB per rank on 4 GPUs, 122.9 GiB usable"
    assert said in result.stderr
    assert "at least 6 GPUs" in result.stderr
    options = ("--gpus", 8, "--context", "128k", "--requests", 1000)
    result = run("deepseek-v3", *options, status=1)
    assert result.stdout == ""
    found = serve_plan("deepseek-v3", gpus=8, context=1 << 17, requests=1000)
    fit = re.search(r"([\d.]+) GiB per rank needed, ([\d.]+) GiB free", result.stderr)
    assert fit is not None
    assert float(fit[1]) == pytest.approx(found.needed_bytes / GIB, abs=0.06)
    assert float(fit[2]) == pytest.approx(found.cache_bytes / GIB, abs=0.06)
    most = found.max_requests
    assert f"{most} requests of 131,072 tokens fit" in result.stderr
    options = {"gpus": 8, "context": 1 << 17, "cache_dtype": "fp8"}
    assert serve_plan("deepseek-v3", requests=most, **options).why_not is None
    assert serve_plan("deepseek-v3", requests=most + 1, **options).why_not is not None
    stored = json.loads(run("deepseek-v3", "--gpus", 4, "--context", 8, "--json", status=1).stdout)
    assert stored["lines"] == []


def test_one_gpu_that_holds_all_is_mentioned(tmp_path):
    assert any("--data-parallel-size 8" in note for note in plan(written(tmp_path)).notes)
    assert not any("data-parallel" in note for note in plan("deepseek-v3").notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 0}, "gpus must be at least 1, got 0"),
        ({"gpus": 12}, "gpus must be at most 8 or a multiple of it (--gpus-per-node), got 12"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"context": 1 << 21}, "max_position_embeddings, 1048576, got 2097152"),
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"gpus_per_node": 0}, "gpus_per_node must be at least 1, got 0"),
        ({"gpu_memory": "V100"}, "unknown GPU 'V100'; choose from A100"),
        (
            {"cache_dtype": "fp9"},
            f"cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got 'fp9'",
        ),
        ({"weights_gib": 0.0}, "weights must be above 0 GiB, got 0.0"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(written(tmp_path), **options)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vocab_size": None}, "has no vocab_size: its weights cannot be counted; give --weights"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method must be fp8"),
        ({"torch_dtype": "int3"}, "dtype must be one of bfloat16, float16, float32, got int3"),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, "320, 512, 576 columns"),
        ({"kv_lora_rank": 256, **SPARSE}, "fp8_ds_mla must have rows of 512 + 64 columns"),
        ({"kv_lora_rank": None}, "has no kv_lora_rank: not an MLA config"),
        ({"model_type": "kimi_linear", "layer_types": ["x"] * 4}, "cannot be counted"),
    ],
)
def test_configs_that_cannot_be_planned_for(tmp_path, changed, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(written(tmp_path, **changed))


def test_a_context_is_one_number():
    said = run("deepseek-v3", "--gpus", 8, "--context", "4k,8k", status=2).output
    assert "context must be one number such as 128k, got '4k,8k'" in said
