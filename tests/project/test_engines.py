"""The scripts that compare engines' backends: their checkpoints, and what they make of results."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest
import torch

from tests.paths import ROOT

FOLDER = ROOT / "scripts/engines"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"engines_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


models, compare = script("models"), script("compare")


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"experts": 4}, {"has_indexer": True}], ids=str)
def test_transformers_takes_every_weight_of_a_checkpoint(given, tmp_path):
    from transformers import AutoModelForCausalLM

    model = models.Model(2, layers=2, hidden=128, **given)
    models.save(model, tmp_path)
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    logits = loaded(torch.tensor([[5, 9, 2]])).logits
    assert logits.shape == (1, 3, models.VOCABULARY)
    assert bool(logits.isfinite().all())
    assert logits.float().std() > 0.3  # tokens differ in probability


def test_fp8_weights_are_their_bytes_times_the_scale_of_their_block():
    weight = torch.randn(200, 300)
    payload, scales = models._in_blocks(weight)
    assert scales.shape == (2, 3)
    whole = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    error = (payload.float() * whole - weight).abs()
    assert bool((error <= weight.abs() / 16 + scales.max() / 512).all())


def run(tokens: list[list[int]], shift: float = 0.0) -> dict[str, object]:
    """A result whose positions have two tokens each, the likeliest one `shift` less likely."""
    logprobs = [[{str(token): -0.5 - shift, "0": -2.0} for token in request] for request in tokens]
    return {"tokens": tokens, "logprobs": logprobs}


def test_logprobs_count_as_far_as_two_runs_saw_the_same_tokens():
    one, other = run([[5, 6, 7], [8, 9]]), run([[5, 6, 7], [8, 9]], 0.25)
    assert compare.difference(one, other) == compare.Difference(2, 2, 0.25)
    other = run([[5, 3, 7], [8, 9]])
    other["logprobs"][0][2]["0"] = -9.0  # after the first difference
    found = compare.difference(one, other)
    assert (found.equal, found.logprob) == (1, 0.0)


def test_the_best_other_backend_is_the_one_whose_attention_is_fastest():
    def result(step: float, kernels: dict[str, float]) -> dict[str, object]:
        task = {"kind": "speed", "batch": 16, "context": 1024}
        return {"tasks": [{"task": task, "step_ms": step, "kernels_us": kernels}]}

    own = compare.own_kernels()
    assert own.match("mla_decode_kernel")
    by_backend = {
        "FLASHMLA": result(2.0, {"flash_fwd_splitkv_mla_kernel": 500, "gemm": 900}),
        "TRITON_MLA": result(1.9, {"_fwd_grouped_kernel_stage1": 600, "gemm": 900}),
        "MLAKIT": result(1.8, {"mla_decode_kernel": 400, "gemm": 900}),
    }
    (row,) = compare.time_rows(by_backend, own)
    assert (row.best, row.attention, row.our_attention) == ("FLASHMLA", 500, 400)
    assert row.step_ratio == pytest.approx(1.8 / 1.9)
    assert row.attention_ratio == pytest.approx(0.8)


def test_every_scenario_has_a_backend_of_ours_and_models_that_exist():
    for scenario in compare.SCENARIOS.values():
        (ours,) = filter(compare.is_ours, scenario.backends)
        assert ours in json.dumps(scenario.arguments(ours))
        assert (FOLDER / scenario.program).exists()
        assert set(scenario.models) <= set(models.MODELS)
