"""The layer is the attention module of transformers, in float32, chunk by chunk.

Each test of a trap takes it: the result must then be far off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.layer import LayerConfig, MLAAttention
from tests.layer.checkpoints import write_checkpoint
from tests.layer.models import FAMILIES, HIDDEN, Family, results
from tests.layer.serving import CHUNKS, Server, serve

TOLERANCE = 2e-5
FAR_OFF = 50 * TOLERANCE


def inputs(seed: int = 7) -> list[Tensor]:
    """Two requests as long as `CHUNKS` makes them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [sum(chunk[b] for chunk in CHUNKS) for b in range(2)]
    return [torch.randn(n, HIDDEN, generator=generator) for n in lengths]


def exact_results(model: Family, module: Any, x: list[Tensor]) -> list[Tensor]:
    return [results(model, module, each)[0][0] for each in x]


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_is_that_of_transformers(family):
    model = FAMILIES[family]
    module = model.module()
    x = inputs()
    exact = exact_results(model, module, x)
    assert min(float(each.abs().max()) for each in exact) > 0.5
    layer = MLAAttention.from_hf(module)
    assert worst(serve(layer, x), exact) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_the_config_alone_is_the_same(family):
    """Scale, ε, factors and pairs follow from the config: `from_hf` does not only copy them."""
    model = FAMILIES[family]
    module = model.module()
    layer = MLAAttention(module.config, layer=model.layer)
    layer.load_state_dict(module.state_dict())
    copied = MLAAttention.from_hf(module).config
    assert layer.config.scale == pytest.approx(copied.scale, rel=1e-12)
    same = {"softmax_scale": None}
    assert replace(layer.config, **same) == replace(copied, **same)
    x = inputs()
    assert worst(serve(layer, x), exact_results(model, module, x)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("is_interleaved", [True, False], ids=["interleaved", "not interleaved"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rope_interleave_means_what_it_means_to_transformers(family, is_interleaved, tmp_path):
    """Some modules obey it, others rotate the same pairs whatever it says."""
    model = FAMILIES[family]
    module = model.module(model.config(rope_interleave=is_interleaved))
    x = inputs()
    exact = exact_results(model, module, x)
    assert worst(serve(MLAAttention.from_hf(module), x), exact) < TOLERANCE
    write_checkpoint(tmp_path, module.config.to_dict(), {model.layer: module.state_dict()})
    loaded = MLAAttention.load_safetensors(tmp_path, model.layer, dtype=torch.float32)
    assert worst(serve(loaded, x), exact) < TOLERANCE


def test_a_shared_layer_attends_to_the_rows_of_the_layer_before_it():
    model = FAMILIES["glm_moe_dsa"]
    config = model.config(indexer_types=["full", "full", "shared"])
    first = model.module(config)
    second = replace(model, layer=2).module(config, seed=5)
    assert second.indexer is None
    x = inputs()[0]
    out, _, selected = results(model, first, x)
    exact = results(model, second, x, prev_topk_indices=selected)[0][0]
    layers = [MLAAttention.from_hf(each) for each in (first, second)]
    assert [each.config.selection for each in layers] == ["own", "shared"]
    server = Server(layers[0], [len(x)], num_layers=2)
    found = []
    for start, stop in ((0, 40), (40, 41), (41, len(x))):
        batch = server.batch([stop - start])
        rows = torch.empty(stop - start, 12, dtype=torch.int32)
        part = x[start:stop]
        own = layers[0](part, batch, index_cache=server.index_cache, rows=rows)
        assert worst([own], [out[0, start:stop]]) < TOLERANCE
        found.append(layers[1](part, replace(batch, layer=1), rows=rows))
    assert worst([torch.cat(found)], [exact]) < TOLERANCE
    with pytest.raises(ValueError, match="MLAAttention: rows must be given"):
        layers[1](part, replace(batch, layer=1))


def taken(family: str, **wrong: Any) -> float:
    """The error of a layer with a wrong config."""
    model = FAMILIES[family]
    module = model.module()
    x = inputs()
    right = MLAAttention.from_hf(module)
    layer = MLAAttention(replace(right.config, **wrong))
    layer.load_state_dict(right.state_dict())
    return worst(serve(layer, x), exact_results(model, module, x))


def geometry_with(family: str, **changes: Any) -> dict[str, Any]:
    config = LayerConfig.from_config(FAMILIES[family].config(), FAMILIES[family].layer)
    return {"geometry": replace(config.geometry, **changes)}


def test_the_trap_of_epsilon_is_seen():
    """`rms_norm_eps` of the config is for the norms between layers. Small latents show it."""
    model = FAMILIES["glm4_moe_lite"]
    config = model.config(rms_norm_eps=1e-5)
    module = model.module(config)
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        getattr(module, name).weight.data.mul_(1e-3)
    x = inputs()
    exact = exact_results(model, module, x)
    layer = MLAAttention.from_hf(module)
    assert layer.config.epsilon == LayerConfig.from_config(config).epsilon == 1e-6
    assert worst(serve(layer, x), exact) < TOLERANCE
    wrong = MLAAttention(replace(layer.config, epsilon=config.rms_norm_eps))
    wrong.load_state_dict(layer.state_dict())
    assert worst(serve(wrong, x), exact) > FAR_OFF


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("deepseek_v2", "half"),
        ("deepseek_v3", "half"),
        ("deepseek_v3 half", "interleaved"),
        ("minicpm3", "interleaved"),
    ],
)
def test_the_trap_of_rope_pairs_is_seen(family, rope):
    assert taken(family, **geometry_with(family, rope=rope)) > FAR_OFF


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rope"), [("deepseek_v32", "interleaved"), ("glm_moe_dsa", "half")]
)
def test_the_trap_of_the_indexers_rope_pairs_is_seen(family, rope):
    assert taken(family, index_rope=rope) > FAR_OFF


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "mistral4"])
def test_the_trap_of_yarns_scale_is_seen(family):
    """mscale² belongs to the scale of scores: 1/sqrt(D_N + D_R) alone is too small."""
    plain = LayerConfig.from_config(FAMILIES[family].config()).geometry.qk_head_dim ** -0.5
    assert taken(family, softmax_scale=plain) > FAR_OFF


def test_the_trap_of_the_absorbed_width_is_seen():
    row = LayerConfig.from_config(FAMILIES["minicpm3"].config()).geometry.row.width
    assert taken("minicpm3", softmax_scale=row**-0.5) > FAR_OFF


def test_the_trap_of_rotating_a_model_without_positions_is_seen():
    right = geometry_with("kimi_linear")["geometry"].rope_parameters
    assert right.rope_type == "none"
    rotated = replace(right, rope_type="default")
    assert taken("kimi_linear", **geometry_with("kimi_linear", rope_parameters=rotated)) > FAR_OFF


def test_the_trap_of_longcats_factors_is_seen():
    assert taken("longcat_flash", q_factor=1.0) > FAR_OFF
    assert taken("longcat_flash", latent_factor=1.0) > FAR_OFF


def test_the_trap_of_mistrals_query_scale_is_seen():
    assert taken("mistral4", query_scale=None) > FAR_OFF


def test_the_traps_of_hy4s_indexer_are_seen():
    assert taken("hy_v4", index_rope_last=False) > FAR_OFF
    assert taken("hy_v4", index_epsilon=1e-6) > FAR_OFF


@pytest.mark.parametrize("left_out", ["gate_proj.weight", "sinks"])
def test_hy4s_gate_and_sinks_count(left_out):
    model = FAMILIES["hy_v4"]
    module = model.module()
    layer = MLAAttention.from_hf(module)
    x = inputs()
    exact = exact_results(model, module, x)
    # a gate of 0 halves the output, a sink of -inf is none
    layer.get_parameter(left_out).copy_(torch.tensor(0.0 if "gate" in left_out else -torch.inf))
    assert worst(serve(layer, x), exact) > FAR_OFF


def test_a_wrong_top_k_is_seen():
    assert taken("deepseek_v32", **geometry_with("deepseek_v32", index_topk=11)) > FAR_OFF
