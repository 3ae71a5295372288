"""Every weight of a layer: its derivative is that of autograd, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.func import functional_call, jvp, vmap

from mlakit import CachedBatch, MLAAttention, UnsupportedError, weights
from tests.layer.checkpoints import INDEX, SMALL, tensors

LONGCAT = SMALL | {"model_type": "longcat_flash", "mla_scale_kv_lora": True}
CONFIGS = {"dense": SMALL, "sparse": SMALL | INDEX, "latent factor": LONGCAT}
AFTER = ("o_proj.weight",)  # its product is torch's own, with derivatives
CASES = [
    *(("dense", weight) for weight in tensors(SMALL)),
    *(("sparse", weight) for weight in tensors(SMALL | INDEX) if weight not in tensors(SMALL)),
    ("sparse", "o_proj.weight"),
    ("latent factor", "kv_a_layernorm.weight"),
]


@pytest.fixture(autouse=True)
def float32_copies(monkeypatch):
    """Also on a CPU that multiplies bf16 matrices."""
    monkeypatch.setattr(weights, "multiplies_bf16", lambda dtype: False)


def function_of(config: dict[str, Any], name: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A step as a function of one weight, which has been called, and the weight."""
    layer = MLAAttention(config, dtype=torch.bfloat16)
    layer.load_state_dict(tensors(config))
    one = torch.tensor([3], dtype=torch.int32)
    cache = layer.allocate_cache(num_pages=1)
    batch = CachedBatch(cache, one[None] - 3, one, torch.tensor([0, 3], dtype=torch.int32))
    options: dict[str, Any] = {}
    if layer.indexer is not None:
        options["index_cache"] = layer.indexer.allocate_index_cache(num_pages=1)
        options["rows"] = torch.empty(3, layer.indexer.topk, dtype=torch.int32)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()

    def run(weight: Tensor) -> Tensor:
        return functional_call(layer, {name: weight}, (x, batch), options)

    given = layer.get_parameter(name).detach()
    run(given)
    return run, given


def with_dual(run: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor | None:
    """The tangent of the result; the memory of the weight is that of the layer's own."""
    with fwAD.dual_level():
        dual = fwAD.make_dual(weight, torch.ones_like(weight))
        return fwAD.unpack_dual(run(dual)).tangent


@pytest.mark.parametrize(("config", "name"), CASES)
def test_forward_mode(config, name):
    run, weight = function_of(CONFIGS[config], name)
    if name in AFTER:
        tangent = jvp(run, (weight,), (torch.ones_like(weight),))[1]
        assert float(tangent.abs().max()) > 1
        assert torch.equal(with_dual(run, weight), tangent)
        return
    with pytest.raises(UnsupportedError, match="must not have a tangent"):
        jvp(run, (weight,), (torch.ones_like(weight),))
    with pytest.raises(UnsupportedError, match="must not have a tangent"):
        with_dual(run, weight)


@pytest.mark.parametrize(("config", "name"), CASES)
def test_backward(config, name):
    run, weight = function_of(CONFIGS[config], name)
    if name in AFTER:
        assert run(weight.clone().requires_grad_()).requires_grad
        return
    with pytest.raises(UnsupportedError, match="must not require grad"):
        run(weight.clone().requires_grad_())
    with torch.no_grad():
        run(weight.clone().requires_grad_())


@pytest.mark.parametrize(("config", "name"), CASES)
def test_vmap(config, name):
    run, weight = function_of(CONFIGS[config], name)
    if name in AFTER:
        assert torch.equal(vmap(run)(weight[None])[0], run(weight))
        return
    with pytest.raises(UnsupportedError, match=r"must not be a batch of torch\.vmap"):
        vmap(run)(weight[None])
