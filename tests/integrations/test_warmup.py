"""Kernels that engines have compiled when they start: when, with which arguments, and errors."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mlakit
from mlakit import MLAGeometry
from mlakit.dispatch import knobs
from mlakit.integrations import warmup
from mlakit.integrations.vllm import calls
from mlakit.precompile import Warmup, WarmupError

GPU = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of all calls of `mlakit.warmup`, which compiles nothing."""
    calls: list[dict[str, Any]] = []

    def record(**given: Any) -> Warmup:
        calls.append(given)
        return Warmup("sm_90", 3, 2, 1.0, "folder")

    monkeypatch.setattr(mlakit, "warmup", record, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(warmup, "_DONE", set())
    return calls


def describe() -> dict[str, Any]:
    return {"model": "deepseek-v3", "heads": 16, "format": "fp8_block128"}


def test_a_deployment_is_compiled_once(asked, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            warmup.compile_kernels("vllm", GPU, describe)
    geometry = MLAGeometry.preset("deepseek-v3")
    assert asked == [{**describe(), "model": geometry, "user": "vllm"}]
    assert caplog.messages == ["mlakit: 2 of 3 kernels for sm_90 compiled in 1 s, into folder."]
    warmup.compile_kernels("sglang", GPU, describe)
    assert len(asked) == 2


def test_nothing_is_compiled_for_a_cpu_or_where_a_setting_says_so(asked):
    def fail() -> dict[str, Any]:
        raise AssertionError

    warmup.compile_kernels("vllm", "cpu", fail)
    with knobs.override(warmup=False):
        warmup.compile_kernels("vllm", GPU, fail)
    assert asked == []


@pytest.mark.parametrize(
    "error", [WarmupError("no space"), AttributeError("no space"), OSError("no space")]
)
def test_an_engine_starts_although_nothing_can_be_compiled(error, asked, monkeypatch):
    def fail(**given: Any) -> Warmup:
        raise error

    monkeypatch.setattr(mlakit, "warmup", fail, raising=False)
    with pytest.warns(UserWarning, match="compiles kernels when they are launched: no space$"):
        warmup.compile_kernels("vllm", GPU, describe)


def test_vllms_names_of_caches_are_formats():
    names = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
    formats = [calls.format_of(name, torch.bfloat16) for name in names]
    assert formats == ["bf16", "bf16", "fp8", "fp8", "fp8_block128"]
    assert calls.format_of("auto", torch.float16) == "fp16"


def test_the_deployment_of_vllm_is_found_in_its_config(asked):
    pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
    from mlakit.integrations.vllm.dense import warm_up

    impl = SimpleNamespace(num_heads=16, kv_cache_dtype="fp8_ds_mla")
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config="deepseek-v3", dtype=torch.bfloat16, max_model_len=4096
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(impl=impl)}
        ),
    )
    warm_up(SimpleNamespace(block_size=64), "layer", config, GPU)
    (given,) = asked
    assert given.pop("model") == MLAGeometry.preset("deepseek-v3")
    assert given == {
        "user": "vllm",
        "heads": 32,
        "format": "fp8_block128",
        "page_size": 64,
        "dtype": "bf16",
        "max_context": 4096,
        "max_tokens": 2048,
        "is_batch_invariant": False,
    }
