"""The suite `transformers-v4` on the CPU: its caches, and what its check finds."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.bench.transformers_v4 import COMPILED, V4DecodeStep
from tests.tools.bench.fakes import pretend_gpu


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function: function)


def small(format: str = "fp8_block64") -> V4DecodeStep:
    workload = V4DecodeStep(Batch.of(2, 1, 8192), format=format).small
    assert isinstance(workload, V4DecodeStep)
    return workload


def test_the_weights_are_those_of_the_model():
    workload = small()
    fields = workload.fields
    found = workload._model()
    products = [each for each in found.modules() if isinstance(each, torch.nn.Linear)]
    weights = sum(each.weight.numel() for each in products)
    experts = min(fields["num_experts_per_tok"], fields["n_routed_experts"])
    inner = 3 * fields["hidden_size"] * fields["moe_intermediate_size"] * experts
    router = fields["hidden_size"] * fields["n_routed_experts"]
    assert weights + 4 * (inner + router) == workload._weights(1)


@torch.no_grad()
def test_all_decode_over_the_same_context():
    workload = small("bf16")
    decoders = workload._decoders()
    assert list(decoders) == ["mlakit", "eager", COMPILED]
    assert {int(each.cache.get_seq_length()) for each in decoders.values()} == {workload.context}
    workload._check(decoders)
    for decoder in decoders.values():
        first = decoder.step().clone()
        decoder.take_back()
        decoder.synchronised_step()
        assert int(decoder.cache.get_seq_length()) == workload.context
        assert first.isfinite().all()


@torch.no_grad()
def test_rows_in_fp8_pass_the_check_and_a_wrong_cache_does_not():
    workload = small()
    decoders = workload._decoders()
    workload._check(decoders)
    pool = decoders["mlakit"].cache.layers[0].pool
    rows = pool.cache.cache("csa").payload
    rows[1] = rows[1].flip(0, 1)
    window = pool.cache.cache("window").payload
    window[2] = window[2].flip(0, 1)
    with pytest.raises(AssertionError, match="mlakit: attention output of layer 2 differs"):
        workload._check(decoders)


@pytest.mark.parametrize("shape", ["8q2s8k", "4q1s8k+4q1s4k", "8q1s100"])
def test_shapes_that_are_refused(shape):
    result = CliRunner().invoke(cli.app, ["bench", "transformers-v4", "--shape", shape])
    assert result.exit_code == 2
    assert "one new token per request" in result.output
