"""The layer against the module of transformers and a float64 oracle, in float32, chunk by chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import MLAAttention, MLAGeometry, UnsupportedError, V4Attention
from mlakit.model.releases import RELEASES
from mlakit.model.v4 import CSA, HCA, SLIDING, V4Config
from tests.layer.v4.models import CONFIGS, KINDS, SIZES, hf_module, hf_result, inputs, weights
from tests.layer.v4.oracle import V4Oracle
from tests.layer.v4.serving import Server, serve

TOLERANCE = 2e-5
FAR_OFF = 50 * TOLERANCE
LENGTHS = {"rates as released": (300, 40)}


def layer_of(fields: Any, layer: int, **options: Any) -> V4Attention:
    made = V4Attention(fields, layer, **options)
    made.load_state_dict(weights(fields, layer))
    return made


def oracle_of(layer: V4Attention) -> V4Oracle:
    return V4Oracle(layer.config, layer.layer, dict(layer.named_parameters()))


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_layer_is_that_of_transformers(name, layer):
    fields = CONFIGS[name]
    x = inputs(*LENGTHS.get(name, (90, 37)))
    module = hf_module(fields, layer)
    exact = [hf_result(module, each) for each in x]
    assert min(float(each.abs().max()) for each in exact) > 0.5
    taken = V4Attention.from_hf(module)
    assert taken.kv_proj.weight is module.kv_proj.weight
    assert worst(serve(taken, x), exact) < TOLERANCE
    assert worst(serve(layer_of(fields, layer), x, keep=3), exact) < TOLERANCE


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
@pytest.mark.parametrize("name", ["small", "odd"])
def test_the_layer_is_the_oracle(name, layer):
    made = layer_of(CONFIGS[name], layer)
    x = inputs(90, 37)
    exact = [oracle_of(made).run(each) for each in x]
    assert worst(serve(made, x), exact) < TOLERANCE
    # the same result at once, and token by token
    assert worst(serve(made, x, ()), exact) < TOLERANCE
    assert worst(serve(made, x, [(1, 1)] * 36), exact) < TOLERANCE


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [
        (0, {"sliding_window": 15}),
        (0, {"main": "compress"}),
        (1, {"csa_rate": 8}),
        (1, {"index_topk": 5}),
        (1, {"compress": "main"}),
        (2, {"hca_rate": 8}),
        (2, {"epsilon": 1e-2}),
    ],
)
def test_another_config_gives_another_result(layer, wrong):
    right = V4Config.from_config(SIZES)
    angles = {"main": right.main, "compress": right.compress}
    config = replace(right, **{key: angles.get(value, value) for key, value in wrong.items()})
    made, other = layer_of(SIZES, layer), V4Attention(config, layer)
    for name, parameter in made.named_parameters():
        if not name.endswith("position_bias"):
            other.get_parameter(name).data = parameter.data
    x = inputs(90, 37)
    assert worst(serve(other, x), serve(made, x)) > FAR_OFF


@pytest.mark.parametrize("layer", [1, 2], ids=[CSA, HCA])
def test_position_biases_and_sinks_count(layer):
    x = inputs(90, 37)
    right = serve(layer_of(SIZES, layer), x)
    for name in ("sinks", "compressor.position_bias"):
        made = layer_of(SIZES, layer)
        made.get_parameter(name).data.neg_()
        assert worst(serve(made, x), right) > FAR_OFF


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_lists_of_rows_are_made_in_parts(layer, monkeypatch):
    made = layer_of(SIZES, layer)
    x = inputs(90, 37)
    right = serve(made, x)
    monkeypatch.setattr("mlakit.layer.v4.batch.MAX_LISTED", 300)
    assert worst(serve(made, x), right) < 1e-6


@pytest.mark.parametrize(
    ("format", "row_bytes", "limit"),
    [("bf16", 1024, 0.03), ("fp8_block64", 584, 0.12), ("mxfp4_block32", 368, 0.25)],
)
@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_bf16_layers_over_rows_of_every_size(layer, format, row_bytes, limit):
    fields = CONFIGS["rows of 448 + 64"]
    made = layer_of(fields, layer).bfloat16()
    x = [each.bfloat16() for each in inputs(90, 37)]
    exact = torch.cat([oracle_of(made).run(each) for each in x])
    server = Server(made, format=format, page_size=64)
    assert server.cache.cache("window").codec.bytes_per_token == row_bytes
    found = torch.cat(serve(made, x, format=format, page_size=64)).double()
    error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    # a selection that differs by rounding counts as well
    assert float(error) < limit


def test_norms_and_biases_may_be_float32_in_a_bf16_model():
    made = layer_of(SIZES, 1).bfloat16()
    x = [each.bfloat16() for each in inputs(40, 9)]
    right = serve(made, x, format="bf16")
    for name, parameter in made.named_parameters():
        if name.endswith(("norm.weight", "sinks", "position_bias")):
            parameter.data = parameter.data.float()
    assert worst(serve(made, x, format="bf16"), right) < 0.05


def test_autocast_does_not_change_the_layer():
    made, x = layer_of(SIZES, 1), inputs(40, 9)
    right = serve(made, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert worst(serve(made, x), right) == 0


def test_wrong_calls_name_the_argument():
    made = layer_of(SIZES, 1)
    server = Server(made)
    sequence = server.new()
    batch = server.begin([sequence], [4])
    x = inputs(4)[0]
    with pytest.raises(
        ValueError, match=r"V4Attention: x\.shape\[0\] .* must equal the new tokens .*, 4, got 3"
    ):
        made(x[:3], batch)
    with pytest.raises(TypeError, match="V4Attention: x must be float32, got float16"):
        made(x.half(), batch)
    other = layer_of(SIZES, 0)
    with pytest.raises(ValueError, match="batch must be of a cache that has layer 0, sliding"):
        other(x, batch)
    with pytest.raises(TypeError, match="batch must be"):
        made(x, object())
    with pytest.raises(ValueError, match="layer must be the number of one of the model's 3 layers"):
        V4Attention(SIZES, 3)
    with pytest.raises(TypeError, match="from_hf: module must be a DeepseekV4Attention"):
        V4Attention.from_hf(torch.nn.Linear(2, 2))


def test_a_module_with_hooks_is_refused():
    module = hf_module(SIZES, 1)
    module.compressor.kv_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(
        NotImplementedError, match=r"compressor\.kv_proj must have no forward hooks"
    ):
        V4Attention.from_hf(module)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type must be deepseek_v4, got 'deepseek_v3'"),
        ({"layer_types": [SLIDING, CSA]}, "layer_types must name one of .* for each of 3 layers"),
        ({"layer_types": [SLIDING, CSA, "full"]}, "got 3 and full"),
        ({"o_groups": 3}, "o_groups must divide the 4 heads, got 3"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"index_head_dim": 4}, "index_head_dim must be at least qk_rope_head_dim, 8, got 4"),
        (
            {"layer_types": None, "compress_ratios": [0, 4, 2]},
            r"compress_ratios must be of .*\[2\]",
        ),
    ],
)
def test_wrong_configs_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        V4Config.from_config(SIZES | change)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_known_models_are_those_of_transformers(name):
    from transformers import DeepseekV4Config

    fields = dict(RELEASES[name])
    del fields["model_type"]
    config = V4Config.from_config(name)
    assert V4Config.from_config(DeepseekV4Config(**fields)) == config
    assert MLAGeometry.preset(name) == MLAGeometry.from_config(RELEASES[name]) == config.geometry()
    assert config.row.width == config.row.v_width == 512
    with pytest.raises(UnsupportedError, match="whose layers are V4Attention"):
        MLAAttention(name)


def test_configs_of_releases_and_of_transformers_are_the_same():
    released = SIZES | {"compress_ratios": [0, 4, 128, 4], "layer_types": None}
    config = V4Config.from_config(released | {"compress_rates": None})
    assert config.kinds == (SLIDING, CSA, HCA)
    assert (config.csa_rate, config.hca_rate) == (4, 128)
    ours, theirs = V4Config.from_config(SIZES), V4Config.from_config(hf_module(SIZES, 0).config)
    assert ours == theirs
    assert ours.compress.attention_factor == 1.0
