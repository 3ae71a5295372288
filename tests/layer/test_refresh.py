"""Weights written through `.data`, which torch does not count: refreshed, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import MLAAttention
from mlakit.steps import weights
from mlakit.steps.weight_copies import GPU_INTERVAL
from mlakit.tools.testing import assert_same_bits
from tests.layer.checkpoints import SMALL, quantised, tensors
from tests.layer.serving import serve

BF16, F16 = torch.bfloat16, torch.float16
DENSE = SMALL | {"qk_rope_head_dim": 32}
LONGCAT = DENSE | {"model_type": "longcat_flash", "mla_scale_kv_lora": True}
CHUNKS = ((20,), (1,), (1,))  # a prompt and two decode steps
FORMATS = {BF16: "bf16", F16: "fp16", torch.float32: "fp32"}


@pytest.fixture(autouse=True)
def float32_copies(monkeypatch):
    """Also on a CPU that multiplies bf16 matrices."""
    monkeypatch.setattr(weights, "multiplies_bf16", lambda dtype: False)


def layer_of(config: dict[str, Any], kind: object, device: torch.device, seed: int) -> MLAAttention:
    """kind  a dtype, or "fp8" """
    stored = tensors(config, seed=seed)
    dtype = kind if isinstance(kind, torch.dtype) else BF16
    layer = MLAAttention(config, is_fp8=kind == "fp8", dtype=dtype, device=device)
    layer.load_state_dict(quantised(stored) if kind == "fp8" else stored)
    return layer


def run(layer: MLAAttention) -> Tensor:
    weight = layer.kv_a_layernorm.weight
    x = torch.randn(22, 256, generator=torch.Generator().manual_seed(3))
    x = x.to(weight.dtype).to(weight.device)
    return serve(layer, [x], CHUNKS, format=FORMATS[weight.dtype])[0]


def write(layer: MLAAttention, other: MLAAttention) -> None:
    """All weights of `other`, as a weight synchronisation writes them."""
    for own, new in zip(layer.parameters(), other.parameters(), strict=True):
        own.data.copy_(new)


KINDS = [BF16, F16, torch.float32, "fp8"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_refreshed_weights_give_the_results_of_a_new_layer(kind, device):
    layer, other = (layer_of(DENSE, kind, device, seed) for seed in (0, 9))
    before = run(layer)
    write(layer, other)
    layer.refresh_weights()
    found = run(layer)
    assert_same_bits("out", found.cpu(), run(other).cpu())
    assert not torch.equal(found, before)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_element_after_refresh_weights(kind, device):
    layer, other = (layer_of(DENSE, kind, device, 0) for _ in range(2))
    before = run(layer)
    for each in (layer, other):
        each.kv_b_proj.weight.data[5, 17] = 100.0
    layer.refresh_weights()
    found = run(layer)
    assert_same_bits("out", found.cpu(), run(other).cpu())
    assert not torch.equal(found, before)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (BF16, "kv_b_proj.weight"),
        (F16, "kv_b_proj.weight"),
        ("fp8", "kv_b_proj.weight"),
        ("fp8", "kv_b_proj.weight_scale_inv"),
    ],
    ids=str,
)
def test_a_write_without_refresh_weights_is_refused(kind, written):
    layer, other = (layer_of(DENSE, kind, torch.device("cpu"), seed) for seed in (0, 9))
    run(layer)
    layer.get_parameter(written).data.copy_(other.get_parameter(written))
    name = "scale" if "scale" in written else "kv_b_proj"
    with pytest.raises(RuntimeError, match=rf"{name} must equal the copy.*refresh_weights\(\)"):
        run(layer)
    layer.refresh_weights()
    run(layer)


def test_float32_weights_are_read_where_they_are():
    """There is no copy that could be stale."""
    layer, other = (layer_of(DENSE, torch.float32, torch.device("cpu"), seed) for seed in (0, 9))
    run(layer)
    write(layer, other)
    assert_same_bits("out", run(layer), run(other))


def test_the_norm_of_a_model_with_a_latent_factor():
    cpu = torch.device("cpu")
    layer, other = (layer_of(LONGCAT, torch.float32, cpu, seed) for seed in (0, 9))
    assert layer.config.latent_factor != 1.0
    run(layer)
    write(layer, other)
    with pytest.raises(RuntimeError, match=r"MLAAttention: kv_a_layernorm.weight must equal"):
        run(layer)
    layer.refresh_weights()
    assert_same_bits("out", run(layer), run(other))


def test_refresh_weights_before_the_first_call():
    layer = layer_of(DENSE, BF16, torch.device("cpu"), 0)
    layer.refresh_weights()
    run(layer)


@pytest.mark.gpu
def test_a_write_on_a_gpu_is_refused_after_some_calls():
    gpu = torch.device("cuda")
    layer, other = (layer_of(DENSE, "fp8", gpu, seed) for seed in (0, 9))
    run(layer)
    write(layer, other)

    def many() -> None:
        for _ in range(GPU_INTERVAL + 1):  # each has two decode steps
            run(layer)
            torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match=r"must equal the copy.*refresh_weights\(\)"):
        many()
    layer.refresh_weights()
    assert_same_bits("out", run(layer).cpu(), run(other).cpu())
