"""The suite `transformers` on the CPU: its workloads, and what its check finds."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.bench import command
from mlakit.tools.bench import transformers as suite
from mlakit.tools.bench.report import Report
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.bench.transformers import DecodeStep, cache_bytes
from tests.tools.bench.fakes import pretend_gpu

MODELS = ("v3", "v3.2")


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    pretend_gpu(monkeypatch)


def small(model: str) -> DecodeStep:
    return DecodeStep(model, Batch.of(8, 1, 8192)).small


@pytest.mark.parametrize("model", MODELS)
def test_the_weights_are_those_of_the_model(model):
    workload = small(model)
    found = workload._model()
    products = [each for each in found.modules() if isinstance(each, torch.nn.Linear)]
    assert sum(each.weight.numel() for each in products) == workload._weights
    assert found.config._attn_implementation == "eager"


@pytest.mark.parametrize("model", MODELS)
def test_all_decode_over_the_same_context(model):
    workload = small(model)
    decoders = workload._decoders()
    assert list(decoders) == ["eager", "sdpa", "mlakit", "mlakit, CUDA graph"]
    assert {int(each.cache.get_seq_length()) for each in decoders.values()} == {199}
    parameters = {next(each.model.parameters()).data_ptr() for each in decoders.values()}
    assert len(parameters) == 1
    with torch.no_grad():
        workload._check(decoders)
    tokens = {tuple(each.token.flatten().tolist()) for each in decoders.values()}
    assert len(tokens) == 1


@pytest.mark.parametrize("model", MODELS)
def test_a_wrong_cache_is_found(model):
    workload = small(model)
    decoders = workload._decoders()
    pool = decoders["mlakit"].cache.layers[0].pool
    pool.cache.payload[3] = pool.cache.payload[3].flip(0)
    with pytest.raises(AssertionError, match="mlakit: attention output of layer 3 differs"):
        workload._check(decoders)


def test_a_wrong_layer_is_found():
    workload = small("v3")
    decoders = workload._decoders()
    module = decoders["mlakit"].model.model.layers[1].self_attn
    module.register_forward_hook(lambda module, args, out: (out[0].roll(1, -1), *out[1:]))
    with pytest.raises(AssertionError, match="mlakit: attention output of layer 1 differs"):
        workload._check(decoders)


def test_a_cache_that_is_too_large_is_found(monkeypatch):
    workload = small("v3")
    decoders = workload._decoders()
    object.__setattr__(workload, "is_small", False)
    with pytest.raises(AssertionError, match="more than 1/50"):  # 4 heads
        workload._check(decoders)


def test_bytes_of_caches():
    decoders = small("v3.2")._decoders()
    keys = 4 * 2 * 199 * 128 * 2
    expanded = 4 * 2 * 199 * 4 * 320 * 2
    assert cache_bytes(decoders["eager"].cache) == expanded + keys
    pages = decoders["mlakit"].cache.layers[0].pool.allocator.num_pages
    assert cache_bytes(decoders["mlakit"].cache) == 4 * pages * 64 * 1152 + keys


def test_the_suite_runs(tmp_path, monkeypatch):
    use = suite.MemoryUse(weights=5 * 10**9, cache=10**9, step=10**8)
    monkeypatch.setattr(DecodeStep, "_memory", lambda self, decoders: {"mlakit": use})
    file, figures = tmp_path / "report.json", tmp_path / "figures.csv"
    options = ["transformers", "--quick", "--json", str(file), "--csv", str(figures)]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, ["bench", *options])
    assert result.exit_code == 0, result.output
    assert "mlakit needs 6.1 GB: weights 5, cache 1, step 0.1" in result.output
    stored = json.loads(file.read_text())
    assert stored["mode"] == "wall"
    names = {(row["workload"].split("-")[1], row["implementation"]) for row in stored["rows"]}
    implementations = ("mlakit", "eager", "sdpa", "mlakit, CUDA graph")
    assert names == {(model, name) for model in MODELS for name in implementations}
    assert [each.use for each in Report.from_json(stored).memory] == [use, use]
    with figures.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == len(names)
    assert {each["suite"] for each in rows} == {"transformers"}
    assert all(float(each["p50_us"]) > 0 for each in rows)
    assert {each["min_speedup"] for each in rows} == {""}  # tiny problems have no targets


@pytest.mark.parametrize("shape", ["8q2s8k", "4q1s8k+4q1s4k", "8q1s1"])
def test_shapes_that_are_refused(shape):
    result = CliRunner().invoke(cli.app, ["bench", "transformers", "--shape", shape])
    assert result.exit_code == 2
    assert "one new token per request" in result.output


def test_transformers_must_be_installed(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, ["bench", "transformers"])
    assert result.exit_code == 2
    assert "mlakit[transformers]" in result.output
