"""What modules do beside their parameters: the layer does not call all of them, and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlakit import MLAAttention, UnsupportedError
from mlakit.layer.linear import HARMLESS, does_more_when_called
from tests.layer.models import FAMILIES, HIDDEN
from tests.layer.serving import serve

PARTS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj")


def layer_of(part: str, family: str = "deepseek_v3") -> tuple[MLAAttention, Any]:
    """A layer, and a part of it."""
    layer = MLAAttention.from_hf(FAMILIES[family].module())
    return layer, layer.get_submodule(part)


def run(layer: MLAAttention) -> Tensor:
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(3))
    return serve(layer, [x], ((20,),))[0]


def hook(module: Any, *given: Any) -> None:
    """Of any kind: it changes nothing, and still nobody would call it."""


def replace_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) * 2


CHANGES = {
    "hook": lambda module: module.register_forward_hook(hook),
    "pre-hook": lambda module: module.register_forward_pre_hook(hook),
    "forward": replace_forward,
}


@pytest.mark.parametrize("part", ["", "indexer.wk", *PARTS])
@pytest.mark.parametrize("change", CHANGES)
def test_from_hf_refuses_modules_that_do_more_when_called(part, change):
    module = FAMILIES["deepseek_v32"].module()
    CHANGES[change](module.get_submodule(part))
    message = f"^from_hf: {part or 'module'} must have no forward hooks and no forward of its own"
    with pytest.raises(UnsupportedError, match=message):
        MLAAttention.from_hf(module)


class Doubled(nn.Linear):
    """An adapter that keeps the names of the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * 2


def test_from_hf_refuses_other_linear_classes():
    module = FAMILIES["deepseek_v3"].module()
    module.o_proj.__class__ = Doubled
    with pytest.raises(UnsupportedError, match=r"^from_hf: o_proj must be nn.Linear, got Doubled"):
        MLAAttention.from_hf(module)


@pytest.mark.parametrize("part", ["kv_a_layernorm", "kv_b_proj"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_refuses_what_it_would_skip(part, change):
    """Also after its weights were prepared."""
    layer, module = layer_of(part)
    run(layer)
    CHANGES[change](module)
    with pytest.raises(UnsupportedError, match=f"^MLAAttention: {part} must have no forward hooks"):
        run(layer)


@pytest.mark.parametrize(
    "part", [part for part in PARTS if part not in ("kv_a_layernorm", "kv_b_proj")]
)
def test_hooks_of_other_parts_are_called(part):
    layer, module = layer_of(part)
    before = run(layer)
    module.register_forward_hook(lambda module, given, out: out.flip(-1))
    assert (run(layer) - before).abs().max() > 0.01 * before.abs().max()


def test_a_bias_of_the_up_projection_is_refused():
    module = FAMILIES["deepseek_v3"].module()
    rows = module.kv_b_proj.weight.shape[0]
    module.kv_b_proj.bias = nn.Parameter(torch.ones(rows), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"^MLAAttention: kv_b_proj must have no bias"):
        run(MLAAttention.from_hf(module))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("bias", torch.ones(8), ValueError, "a parameter that no MLA layer has, indexer"),
        ("weight_scale_inv", torch.ones(1, 1), ValueError, "a parameter that no MLA layer has"),
        (
            "weight",
            torch.ones(8, HIDDEN).to(torch.float8_e4m3fn),
            TypeError,
            r"indexer.weights_proj.weight of \w+ must be .* or float32, got float8_e4m3fn",
        ),
    ],
)
def test_the_indexers_weights_are_a_plain_matrix(name, value, error, message):
    """It is multiplied in float32, without a bias or scales."""
    module = FAMILIES["deepseek_v32"].module()
    module.indexer.weights_proj.register_parameter(name, nn.Parameter(value, requires_grad=False))
    with pytest.raises(error, match=message):
        MLAAttention.from_hf(module)


def test_hooks_of_transformers_that_change_nothing_are_known():
    """Of tensor parallelism, and those that note attentions: the names are still its modules."""
    from transformers.utils import output_capturing

    assert output_capturing.__name__ in HARMLESS
    module = nn.Linear(2, 2)
    output_capturing.install_output_capuring_hook(module, "attentions", 0)
    assert not does_more_when_called(module)
    module.register_forward_hook(hook)
    assert does_more_when_called(module)
