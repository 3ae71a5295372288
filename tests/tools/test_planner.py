"""`mlakit plan`: weights, measured times, attention by hand, the choice, the serve line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import scaling_page
from typer.testing import CliRunner

from mlakit.model.geometry import PRESETS
from mlakit.tools import cli
from mlakit.tools.memory.budget import CHECKPOINT_INDEX, GIB
from mlakit.tools.memory.layers import read_model
from mlakit.tools.planner import times
from mlakit.tools.planner.command import folded
from mlakit.tools.planner.plan import CACHE_DTYPES, MOST_REQUESTS, make_plan
from mlakit.tools.planner.times import KernelTimes, attention_us, interpolated, measured_times
from mlakit.tools.planner.weights import count_parameters, model_weights

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
    assert model_weights(written(tmp_path)).total_bytes == 2 * total
    indexer = 4 * (32 * 4 * 128 + 64 * (128 + 4))
    assert model_weights(written(tmp_path, **SPARSE)).total_bytes == 2 * (total + indexer)
    tied = model_weights(written(tmp_path, tie_word_embeddings=True))
    assert tied.total_bytes == 2 * (total - 100 * 64)
    fp8 = model_weights(written(tmp_path, quantization_config={"quant_method": "fp8"}))
    assert fp8.total_bytes == total + 2 * 100 * 64


# billions, by the model cards
PUBLISHED = {
    "deepseek-v2": 236,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "kimi-k2": 1000,
    "glm-4.7-flash": 30,
    "glm-5": 744,
    "minicpm3": 4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_release_are_the_published_ones(name):
    fields, geometry, _ = read_model(name)
    total = sum(count_parameters(fields, geometry))
    assert total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.03)


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
    assert model_weights(config).total_bytes == 4002


def test_the_times_are_those_of_the_documented_reports():
    stored = json.loads(times.FILE.read_text(encoding="utf-8"))
    # if it differs: python scripts/docs/scaling_page.py
    assert stored == json.loads(json.dumps(scaling_page.measured()))


def test_interpolation():
    points = [(10.0, 2.0), (1000.0, 8.0)]
    assert [interpolated(points, x) for x in (1, 10, 1000, 2000)] == [2, 2, 8, 16]
    assert interpolated(points, 100) == pytest.approx(4)


def test_a_measured_shape_has_its_time():
    found = measured_times()
    rows = scaling_page.rows("h200-grid.json")
    assert len(rows) == 120
    for _, b, h, n, us in rows:
        assert found.dense_us(h, b * n) == pytest.approx(us, rel=0.21)
    # shapes of other runs
    assert found.dense_us(128, 128 * 4096) == pytest.approx(228.5, rel=0.02)
    assert found.dense_us(16, 128 * 8192, "fp8") == pytest.approx(165.6, rel=0.06)
    assert found.dense_us(128, 128 * 4096, "fp8_block128") == pytest.approx(356.4, rel=0.02)
    assert found.sparse_us(128, 64, 32768) == pytest.approx(76.2 + 31.6 + 98.5, rel=0.01)


# a measured machine of round numbers: attention takes heads · tokens / 1000 us
TIMES = KernelTimes(
    dense={"1": [(1, 0.001), (1e9, 1e6)], "1024": [(1, 1.024), (1e9, 1.024e9)]},
    factors={"fp8": [(1, 0.5)]},
    logits={"1": [(1, 1.0), (1000, 1000.0)]},
    topk={"1": [(1, 2.0), (1000, 2000.0)]},
    attend={"8": [(1, 3.0), (1000, 3000.0)]},
)


def attention(
    config: str, format: str = "bf16", tp: int = 1, dcp: int = 1, **work: int
) -> float | None:
    _, geometry, layers = read_model(config)
    heads, context = geometry.num_heads * dcp // tp, -(-work["context"] // dcp)
    sizes = {"heads": heads, "requests": work["requests"], "context": context}
    return attention_us(geometry, layers, format=format, times=TIMES, **sizes)


def test_attention_by_hand(tmp_path):
    config = written(tmp_path)
    # 4 layers, 8 heads, 3000 tokens
    assert attention(config, requests=3, context=1000) == pytest.approx(4 * 8 * 3000 / 1000)
    found = attention(config, "fp8", tp=4, dcp=2, requests=3, context=1001)
    assert found == pytest.approx(4 * 0.5 * (8 * 2 / 4) * (3 * 501) / 1000)


def test_sparse_attention_by_hand_and_rows_that_were_not_measured(tmp_path):
    sparse = written(tmp_path, **{**SPARSE, "index_topk": 2048})
    work = {"requests": 10, "context": 1}
    assert attention(sparse, "fp8_block128", **work) == pytest.approx(4 * (10 + 20 + 30))
    assert attention(sparse, "bf16", **work) is None
    assert attention(written(tmp_path, **SPARSE), "fp8_block128", **work) is None
    assert attention(written(tmp_path, kv_lora_rank=256), **work) is None


def plan(config: str, **options: Any) -> Any:
    return make_plan(config, **{"gpus": 8, "context": 1024, **options})


def test_every_command_lists_the_models_there_are():
    for command in (["memory"], ["plan", "--context", "4k"], ["warmup", "--arch", "sm_90"]):
        runner = CliRunner(env={"COLUMNS": "300"})
        said = runner.invoke(cli.app, [*command, "llama-3"]).output
        assert "'llama-3' is not a config.json" in said
        assert ", ".join(PRESETS) in re.sub(r"[│\s]+", " ", said)


def test_dcp_is_the_lowest_with_which_the_requests_fit(tmp_path):
    config = written(tmp_path)
    token = 4 * 1152  # 4 layers in bf16
    free = int(20 * GIB * 0.9) - 4 * GIB - -(-model_weights(config).total_bytes // 8)
    for requests in (1, 3, 10, 24, 25, 60, 110, 180):
        found = plan(config, gpu_gib=20, context=1 << 17, requests=requests).chosen
        needed = requests * (1 << 17) * token
        fitting = [dcp for dcp in (1, 2, 4, 8) if needed // dcp <= free]
        if fitting:
            assert (found.dcp, found.cache_dtype) == (fitting[0], "auto")
            assert found.needed_bytes == needed // found.dcp
        else:
            assert (found.dcp, found.cache_dtype) == (8, "fp8")
        assert found.free_bytes == free


def test_the_degrees_divide_what_they_have_to(tmp_path):
    config = written(tmp_path)
    plans = {n: plan(config, gpus=n) for n in (1, 2, 4, 6, 8, 16, 24)}
    assert {n: (each.chosen.tp, each.chosen.pp, each.nodes) for n, each in plans.items()} == {
        1: (1, 1, 1),
        2: (2, 1, 1),
        4: (4, 1, 1),
        6: (2, 3, 1),
        8: (8, 1, 1),
        16: (8, 2, 2),
        24: (8, 3, 3),
    }
    tried = plans[8].candidates
    assert [(each.cache_dtype, each.dcp) for each in tried] == [
        (dtype, dcp) for dtype in ("auto", "fp8") for dcp in (1, 2, 4, 8)
    ]
    # 4 layers in 3 stages: the first has 2
    assert plans[24].chosen.needed_bytes == plans[8].chosen.needed_bytes // 2


def test_the_number_of_gpus_is_the_smallest_that_fits(tmp_path):
    config = written(tmp_path)
    # 49 requests fit on a GPU, in FP8
    for requests, gpus in ((1, 1), (60, 2), (180, 4), (250, 8), (400, 16)):
        options = {"gpu_gib": 20, "context": 1 << 17, "requests": requests}
        found = plan(config, gpus=None, **options)
        assert found.chosen.gpus == gpus
        tried = dict.fromkeys(each.gpus for each in found.candidates)
        assert list(tried) == [n for n in (1, 2, 4, 8, 16) if n <= gpus]
        if gpus > 1:
            assert plan(config, **{**options, "gpus": gpus // 2}).chosen is None
    assert plan("deepseek-v3", gpus=None).chosen.gpus == 8  # the weights take 627 GiB


def test_what_fits_has_the_time_of_its_attention():
    found = plan("deepseek-v3", context=1 << 15, requests=16)
    _, geometry, layers = read_model("deepseek-v3")
    for each in found.candidates:
        format, sizes = CACHE_DTYPES[each.cache_dtype], {"heads": 16 * each.dcp, "requests": 16}
        us = attention_us(geometry, layers, format=format, **sizes, context=(1 << 15) // each.dcp)
        assert each.attention_ms == pytest.approx(us / 1e3)


def test_a_sparse_model_has_its_own_backend_and_no_dcp(tmp_path):
    found = plan(written(tmp_path, **SPARSE), gpu_gib=20, context=1 << 17, requests=1000)
    assert [(each.dcp, each.cache_dtype) for each in found.candidates] == [(1, "fp8_ds_mla")]
    assert (found.chosen, found.lines) == (None, [])
    assert found.why_not is not None
    assert found.requests == 1000
    fits = plan(written(tmp_path, **SPARSE), requests=1)
    assert "MLAKIT_SPARSE" in shlex.split(fits.lines[0])
    assert fits.chosen.needed_bytes == 1024 * 4 * (656 + 132)


def test_several_nodes_have_a_line_each(tmp_path):
    first, second = (shlex.split(line) for line in plan(written(tmp_path), gpus=16).lines)
    assert second == [*first[:-1], "1", "--headless"]
    assert first[-6:] == ["--nnodes", "2", "--master-addr", "ADDRESS", "--node-rank", "0"]


def words(shown: str) -> list[str]:
    """The words of a command as a shell reads them."""
    return shlex.split(shown.replace("\\\n", ""))


def run(*arguments: object, status: int = 0) -> Any:
    runner = CliRunner(env={"COLUMNS": "200"})
    result = runner.invoke(cli.app, ["plan", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def test_the_command_prints_the_line_and_says_why(tmp_path):
    config = written(tmp_path)
    options = ("--gpus", 8, "--context", "128k", "--requests", 30, "--gpu-memory", 20)
    result = run(config, *options)
    assert words(result.stdout) == [
        *("vllm", "serve", config, "--attention-backend", "MLAKIT"),
        *("--tensor-parallel-size", "8", "--decode-context-parallel-size", "2"),
        *("--kv-cache-dtype", "auto", "--max-model-len", "131072", "--max-num-seqs", "30"),
        *("--gpu-memory-utilization", "0.9"),
    ]
    for word in words(result.stdout):
        assert not word.startswith("--") or word in result.stderr
    rows = [line.split() for line in result.stderr.splitlines()]
    chosen = plan(config, gpu_gib=20, context=1 << 17, requests=30).chosen
    (row,) = [row for row in rows if row[:1] == ["*8"]]
    assert row[1:5] == ["8", "1", "2", "auto"]
    assert row[7:9] == [f"{chosen.max_requests:,}", f"{chosen.attention_ms:.1f}"]
    stored = json.loads(run(config, *options, "--json").stdout)
    assert [shlex.split(line) for line in stored["lines"]] == [words(result.stdout)]
    assert stored["chosen"]["dcp"] == 2


def test_a_known_model_is_served_by_its_hub_id():
    result = run("deepseek-v3", "--gpus", 8, "--context", "32k")
    assert result.stdout.startswith("vllm serve deepseek-ai/DeepSeek-V3 ")


@pytest.mark.parametrize("gpus", [8, None])
def test_as_many_requests_as_fit_if_none_are_asked_for(gpus):
    found = plan("deepseek-v3", gpus=gpus, context=1 << 17)
    assert found.requests == found.chosen.max_requests > 1
    assert f"--max-num-seqs {found.requests} " in found.lines[0]
    asked = plan("deepseek-v3", gpus=gpus, context=1 << 17, requests=found.requests)
    assert (found.chosen, found.candidates) == (asked.chosen, asked.candidates)
    more = plan("deepseek-v3", gpus=gpus, context=1 << 17, requests=found.requests + 1)
    assert more.chosen.dcp > found.chosen.dcp


def test_not_more_requests_than_an_engine_takes_well(tmp_path):
    found = plan(written(tmp_path), context=64)
    assert found.requests == MOST_REQUESTS < found.chosen.max_requests


def test_a_line_is_folded_between_options():
    line = "vllm serve 'a folder --x' --one 1 --two 'b c' --three"
    assert folded(line, 300) == line
    shown = folded(line, 40)
    assert shown == "vllm serve 'a folder --x' --one 1 \\\n    --two 'b c' --three"
    printed = subprocess.run(
        ["sh", "-c", shown.replace("vllm serve", "printf '%s\n'")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.splitlines() == shlex.split(line)[2:]


def test_what_would_fit_comes_first(tmp_path):
    result = run("deepseek-v3", "--gpus", 4, "--context", "4k", status=1)
    assert result.stderr.startswith("Does not fit: needs 8 GPUs. Why: the weights do not fit: ")
    config = written(tmp_path)
    options = {"gpu_gib": 5, "context": 1 << 20, "requests": 10_000}
    assert (plan(config, gpus=128, **options).enough_gpus) is None
    result = run(config, "--context", 1 << 20, "--requests", 10_000, "--gpu-memory", 5, status=1)
    assert result.stderr.startswith("Does not fit: needs more than 64 GPUs. Why: ")


def test_what_does_not_fit_is_said_in_numbers():
    result = run("deepseek-v3", "--gpus", 4, "--context", "4k", status=1)
    assert result.stdout == ""
    said = "the weights do not fit: 156.7 GiB per rank on 4 GPUs, 122.9 GiB usable"
    assert said in result.stderr
    result = run("deepseek-v3", "--gpus", 8, "--context", "128k", "--requests", 1000, status=1)
    most = plan("deepseek-v3", context=1 << 17, requests=1000).candidates[-1].max_requests
    assert re.search(r"[\d.]+ GiB per rank needed, 44\.6 GiB free", result.stderr)
    assert f"{most} requests of 131,072 tokens fit" in result.stderr
    options = {"context": 1 << 17, "cache_dtype": "fp8"}
    assert plan("deepseek-v3", requests=most, **options).why_not is None
    assert plan("deepseek-v3", requests=most + 1, **options).why_not is not None
    stored = json.loads(run("deepseek-v3", "--gpus", 4, "--context", 8, "--json", status=1).stdout)
    assert stored["lines"] == []


def test_one_gpu_that_holds_all_is_mentioned(tmp_path):
    assert any("--data-parallel-size 8" in note for note in plan(written(tmp_path)).notes)
    assert not any("data-parallel" in note for note in plan("deepseek-v3").notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 12}, "gpus must be at most 8 or a multiple of it (--gpus-per-node), got 12"),
        ({"context": 1 << 21}, "max_position_embeddings, 1048576, got 2097152"),
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
        ({"index_kpool": 4, **SPARSE}, "one index key for every token with mlakit's backends"),
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


SHOWN = scaling_page.SHOWN.findall(scaling_page.PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_page_on_scaling_has_what_its_commands_print(command, shown):
    # if it differs: python scripts/docs/scaling_page.py
    assert shown == scaling_page.printed(command)
    assert "vllm serve" in shown
