"""The module itself: prepared weights, dtypes, FP8, plans, MTP, errors."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from mlakit import EvenSplit, MLAAttention, PagedLatentCache, plan_decode, plan_step, reference
from mlakit.dispatch.checks import UnsupportedError
from mlakit.layer import LayerConfig
from mlakit.layer.linear import Linear
from mlakit.layer.rotary import RopeTable
from mlakit.steps import decode_branch
from mlakit.tools.testing import assert_matches, assert_same_bits, assert_unchanged, snapshot
from tests.layer.checkpoints import (
    HY4,
    INDEX,
    KIMI_K3,
    SMALL,
    in_blocks,
    quantised,
    tensors,
)
from tests.layer.models import FAMILIES, HIDDEN
from tests.layer.oracle import Oracle
from tests.layer.serving import Server, serve

BF16 = torch.bfloat16
DENSE = SMALL | {"qk_rope_head_dim": 32}
SPARSE = DENSE | INDEX
CHUNKS = ((20, 5), (1, 9), (4, 2), (1, 1))
LENGTHS = [sum(chunk[b] for chunk in CHUNKS) for b in range(2)]


def inputs(dtype: torch.dtype = torch.float32, lengths: list[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 256, generator=generator).to(dtype) for n in lengths]


def layer_of(config: dict[str, Any], *, seed: int = 0, **options: Any) -> MLAAttention:
    layer = MLAAttention(config, **options)
    layer.load_state_dict(tensors(config, seed=seed))
    return layer


def check(found: list[Tensor], layer: MLAAttention, x: list[Tensor]) -> None:
    parameters = dict(layer.named_parameters())
    exact = [Oracle(layer.config, parameters).run(each) for each in x]
    stored = Oracle(layer.config, parameters, stored=found[0].dtype)
    naive = [stored.run(each) for each in x]
    assert_matches("out", torch.cat(found), torch.cat(exact), torch.cat(naive))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        DENSE,
        DENSE | {"q_lora_rank": None},
        DENSE | {"attention_bias": True},
        DENSE | KIMI_K3 | {"num_attention_heads": 96, "v_head_dim": 16},
    ],
)
def test_every_dtype_against_the_oracle(config, dtype):
    layer = layer_of(config).to(dtype)
    x = inputs(dtype)
    format = {torch.float32: "fp32", BF16: "bf16", torch.float16: "fp16"}[dtype]
    check(serve(layer, x, CHUNKS, format=format), layer, x)


@pytest.mark.parametrize("format", ["fp8_token", "fp8_block128", "fp8"])
def test_a_cache_of_fp8_rows(format):
    """The format's own error; its bytes are compared in the tests of the steps."""
    layer = layer_of(DENSE)
    x = inputs()
    exact = torch.cat([Oracle(layer.config, dict(layer.named_parameters())).run(e) for e in x])
    found = torch.cat(serve(layer, x, CHUNKS, format=format)).double()
    error = float((found - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1


def test_linear_of_fp8_blocks():
    linear = Linear(200, 300, is_fp8=True, bias=True)
    codes, scale = in_blocks(torch.randn(300, 200))
    linear.load_state_dict(
        {"weight": codes, "weight_scale_inv": scale, "bias": torch.arange(300.0)}
    )
    x = torch.randn(7, 200)
    values, scales = reference.quantize_fp8(x, 128)
    exact = (
        reference.scaled_mm_fp8(values, scales, codes, scale, n_group=128, k_group=128)
        + linear.bias.double()
    )
    assert_matches("y", linear(x), exact, exact.float())


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_fp8_weights_survive_a_change_of_dtype(dtype):
    stored = quantised(tensors(DENSE))
    layer = MLAAttention(DENSE, is_fp8=True, dtype=BF16)
    layer.load_state_dict(stored)
    layer = layer.to(dtype)
    assert layer.q_b_proj.weight.dtype == torch.float8_e4m3fn
    assert_same_bits("codes", layer.q_b_proj.weight, stored["q_b_proj.weight"])
    assert layer.q_b_proj.weight_scale_inv.dtype == torch.float32
    assert layer.kv_a_layernorm.weight.dtype == dtype
    x = inputs(dtype)
    found = torch.cat(serve(layer, x, CHUNKS, format="bf16" if dtype == BF16 else "fp32"))
    whole = layer_of(DENSE)
    exact = torch.cat(serve(whole, inputs(), CHUNKS))
    assert float((found.float() - exact).norm() / exact.norm()) < 0.12


def test_kimi_k3_has_a_gate_and_no_positions():
    config = LayerConfig.from_config(DENSE | KIMI_K3)
    assert (config.gate, config.geometry.rope_parameters.rope_type) == ("g_proj", "none")
    assert LayerConfig.from_config(DENSE | {"model_type": "kimi_linear"}).gate is None


def test_the_presets_of_layers_with_gates_sinks_and_selected_tokens():
    hy4, k3 = (LayerConfig.from_config(name, 3) for name in ("hy4-preview", "kimi-k3"))
    assert (hy4.gate, hy4.has_sinks, hy4.selection) == ("gate_proj", True, "shared")
    assert (k3.gate, k3.has_sinks, k3.geometry.num_heads) == ("g_proj", False, 96)
    longcat = [LayerConfig.from_config("longcat-2.0", n) for n in (2, 3)]
    assert [each.selection for each in longcat] == ["own", "shared"]
    assert (longcat[0].init_tokens, longcat[0].local_tokens) == (16, 1024)


def test_four_layers_of_hy4_share_a_selection_unless_the_config_says_otherwise():
    config = {name: value for name, value in (DENSE | HY4).items() if name != "indexer_types"}
    own = [n for n in range(12) if LayerConfig.from_config(config, n).selection == "own"]
    full = AutoConfig.for_model("hy_v4", num_hidden_layers=12).indexer_types
    assert own == [n for n, kind in enumerate(full) if kind == "full"]


def test_sinks_keep_float32_and_those_of_16_bits_are_copied():
    layer = layer_of(DENSE | HY4).to(BF16)
    assert layer.sinks.dtype == torch.float32
    assert layer.weights(torch.device("cpu")).sink is layer.sinks
    rounded = layer.sinks.bfloat16()
    layer.sinks = torch.nn.Parameter(rounded, requires_grad=False)
    sink = layer.weights(torch.device("cpu")).sink
    assert_same_bits("sink", sink, rounded.float())
    rounded.mul_(2)
    assert_same_bits("sink", layer.weights(torch.device("cpu")).sink, rounded.float())
    rounded.data.mul_(2)  # torch does not count it
    with pytest.raises(RuntimeError, match="MLAAttention: sinks must equal the copy"):
        layer.weights(torch.device("cpu"))
    layer.refresh_weights()
    assert_same_bits("sink", layer.weights(torch.device("cpu")).sink, rounded.float())


def test_the_indexer_keeps_float32_where_its_model_does():
    layer = layer_of(SPARSE).to(BF16)
    assert layer.indexer.wq_b.weight.dtype == layer.indexer.wk.weight.dtype == BF16
    for kept in (layer.indexer.weights_proj, layer.indexer.k_norm):
        assert kept.weight.dtype == torch.float32


# ---- what is prepared ------------------------------------------------------------------------


def one_step(layer: MLAAttention, x: Tensor) -> Tensor:
    dtype = layer.kv_a_layernorm.weight.dtype
    format = "bf16" if dtype == BF16 else "fp32"
    return serve(layer, [x.to(dtype)], [(len(x),)], format=format)[0]


def test_weights_are_prepared_once():
    layer = layer_of(DENSE)
    first = layer.weights(torch.device("cpu"))
    one_step(layer, inputs()[0])
    assert layer.weights(torch.device("cpu")) is first


@pytest.mark.parametrize("is_fp8", [False, True], ids=["float", "fp8"])
@pytest.mark.parametrize(
    "change", ["copy_", "load_state_dict", "assign", "data", "parameter", "in inference mode"]
)
def test_a_change_of_weights_is_seen(change, is_fp8):
    kind = quantised if is_fp8 else dict
    new = kind(tensors(DENSE, seed=9))
    layer = MLAAttention(DENSE, is_fp8=is_fp8, dtype=BF16)
    layer.load_state_dict(kind(tensors(DENSE)))
    x = inputs()[0]
    before = one_step(layer, x)
    if change == "load_state_dict":
        layer.load_state_dict(new)
    elif change == "assign":
        layer.load_state_dict(new, assign=True)
        layer.to(BF16)
    elif change == "in inference mode":
        with torch.inference_mode():
            one_step(layer, x)
            layer.load_state_dict(new)
            one_step(layer, x)
    else:
        for name, parameter in layer.named_parameters():
            owner = layer.get_submodule(name.rpartition(".")[0])
            values = new[name].to(parameter.dtype)
            if change == "copy_":
                with torch.no_grad():
                    parameter.copy_(values)
            elif change == "data":
                parameter.data = values
            else:
                setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(values, False))
    fresh = MLAAttention(DENSE, is_fp8=is_fp8, dtype=BF16)
    fresh.load_state_dict(new)
    assert_same_bits("out", one_step(layer, x), one_step(fresh, x))
    assert not torch.equal(one_step(layer, x), before)


def test_new_values_of_inference_tensors_are_seen():
    """Torch does not count writes to them."""
    with torch.inference_mode():
        layer = MLAAttention(DENSE, is_fp8=True, dtype=BF16)
        layer.load_state_dict(quantised(tensors(DENSE)))
        assert layer.kv_b_proj.weight.is_inference()
        x = inputs()[0]
        one_step(layer, x)
        layer.load_state_dict(quantised(tensors(DENSE, seed=9)))
        found = one_step(layer, x)
    fresh = MLAAttention(DENSE, is_fp8=True, dtype=BF16)
    fresh.load_state_dict(quantised(tensors(DENSE, seed=9)))
    assert_same_bits("out", found.clone(), one_step(fresh, x.clone()))


def test_a_change_of_dtype_is_seen():
    layer = layer_of(DENSE)
    x = inputs()[0]
    one_step(layer, x)
    one_step(layer.to(BF16), x)
    fresh = layer_of(DENSE).to(BF16)
    assert_same_bits("out", one_step(layer, x), one_step(fresh, x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_its_own_weights(how):
    layer = layer_of(SPARSE)
    x = inputs()[0]
    want = one_step(layer, x)
    if how == "deepcopy":
        other = copy.deepcopy(layer)
    else:
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    layer.load_state_dict(tensors(SPARSE, seed=4))
    assert_same_bits("out", one_step(other, x), want)
    assert other.rope_table is layer.rope_table


def test_layers_share_one_rope_table():
    layers = [layer_of(DENSE), layer_of(SPARSE)]
    assert layers[0].rope_table is layers[1].rope_table
    other = MLAAttention(DENSE, max_positions=17)
    assert other.rope_table is not layers[0].rope_table
    assert other.rope_table.on(torch.device("cpu")).shape == (17, 32)
    layers[0].to(BF16)
    assert layers[0].weights(torch.device("cpu")).freqs.dtype == torch.float32


def test_a_table_without_rotation_has_one_row():
    model = LayerConfig.from_config(DENSE | {"model_type": "kimi_linear"})
    table = RopeTable(model.geometry, 1 << 20).on(torch.device("cpu"))
    assert table.shape == (1 << 20, 32)
    assert table.stride(0) == 0


# ---- plans -----------------------------------------------------------------------------------


def server_with(layer: MLAAttention, x: list[Tensor], chunks: Any, **options: Any) -> Any:
    """A server whose requests have these chunks in the cache, and what is left of x."""
    server = Server(layer, [len(each) for each in x], **options)
    for new in chunks:
        at = server.kv_lens
        part = torch.cat([each[a : a + n] for each, a, n in zip(x, at, new, strict=True)])
        layer(part, server.batch(new), index_cache=server.index_cache)
    return server, torch.cat([each[a:] for each, a in zip(x, server.kv_lens, strict=True)])


def test_every_plan_gives_the_same_result():
    layer = layer_of(DENSE)
    x = inputs(lengths=[22, 16])
    server, rest = server_with(layer, x, [(20, 15)])
    new = [2, 1]
    batch = server.batch(new)
    plans = [
        None,
        plan_step(server.kv_lens, new),
        plan_step(server.kv_lens, new, decode_threshold=1),
        plan_step(server.kv_lens, new, decode_threshold=0, max_context_rows=8),
        plan_decode(server.kv_lens, num_ctas=3),
        EvenSplit(2),
    ]
    first, *others = [layer(rest, batch, plan=plan) for plan in plans]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=2e-5)


def test_a_batch_whose_lengths_are_unknown_needs_a_plan(monkeypatch):
    """As on a GPU; one new token each needs none."""
    layer = layer_of(DENSE)
    server, rest = server_with(layer, inputs(lengths=[7, 9]), [(6, 8)])
    batch = server.batch([1, 1])
    want = layer(rest, batch)
    for module in ("steps.checks", "layer.attention", "ops._checks"):
        monkeypatch.setattr(f"mlakit.{module}.values_visible", lambda tensor: False)
    assert_same_bits("out", layer(rest, batch), want)
    more = torch.cat([rest, rest])
    with pytest.raises(ValueError, match="plan must be given"):
        layer(more, replace(batch, q_starts=torch.tensor([0, 2, 4], dtype=torch.int32)))


@pytest.mark.slow
@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_a_decode_step_compiles_to_one_graph(config):
    layer = layer_of(config)
    x = inputs(lengths=[22, 18])
    server, rest = server_with(layer, x, [(20, 17)])
    x = rest[[0, 2]]
    batch = server.batch([1, 1])
    want = layer(x, batch, index_cache=server.index_cache)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor, kv_lens: Tensor) -> Tensor:
        return layer(x, replace(batch, kv_lens=kv_lens), index_cache=server.index_cache)

    assert_same_bits("out", step(x, batch.kv_lens), want)


# ---- arguments -------------------------------------------------------------------------------


def wrong_calls() -> dict[str, Any]:
    return {
        "hidden size": ({"x": torch.zeros(2, 255)}, ValueError, r"x\.shape\[1\] \(hidden\)"),
        "dtype": ({"x": torch.zeros(2, 256, dtype=BF16)}, TypeError, "x must be float32"),
        "plan": ({"plan": plan_decode([20], num_ctas=2)}, ValueError, "plan must be a StepPlan or"),
        "no index cache": ({"index_cache": None}, TypeError, "index_cache must be a Paged"),
        "pages": (
            {
                "index_cache": PagedLatentCache.allocate(
                    layer_of(SPARSE).indexer.allocate_index_cache(num_pages=1).row,
                    "fp32",
                    num_pages=9,
                    page_size=8,
                )
            },
            ValueError,
            "index_cache must have pages of 16",
        ),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_a_wrong_argument_is_named_and_changes_nothing(name):
    changes, error, match = wrong_calls()[name]
    layer = layer_of(SPARSE)
    server = Server(layer, [20])
    arguments = {"x": torch.zeros(20, 256), "index_cache": server.index_cache, **changes}
    x = arguments.pop("x")
    batch = server.batch([20])
    before = snapshot(latents=server.cache.payload, keys=server.index_cache.payload)
    with pytest.raises(error, match=match):
        layer(x, batch, **arguments)
    assert_unchanged(before)


def test_a_layer_without_an_indexer_takes_no_index_cache():
    layer = layer_of(DENSE)
    server = Server(layer, [3])
    x, batch = inputs(lengths=[3])[0], server.batch([3])
    before = snapshot(latents=server.cache.payload)
    match = "index_cache must be None for a layer without an indexer, got PagedLatentCache"
    with pytest.raises(ValueError, match=match):
        layer(x, batch, index_cache=server.cache)
    assert_unchanged(before)


def test_a_layer_needs_a_batch():
    layer = layer_of(DENSE)
    with pytest.raises(TypeError, match="batch must be CachedBatch, got NoneType"):
        layer(inputs(lengths=[3])[0], None)


def test_there_is_no_backward():
    layer = layer_of(DENSE)
    x = inputs(lengths=[3])[0].requires_grad_()
    server = Server(layer, [3])
    with pytest.raises(UnsupportedError, match="require grad"):
        layer(x, server.batch([3]))


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_autocast_changes_nothing(config):
    layer = layer_of(config)
    x = inputs()
    want = serve(layer, x, CHUNKS)
    with torch.autocast("cpu", dtype=BF16):
        found = serve(layer, x, CHUNKS)
    assert_same_bits("out", torch.cat(found), torch.cat(want))


def test_a_config_without_positions_needs_them():
    config = {name: value for name, value in DENSE.items() if name != "max_position_embeddings"}
    with pytest.raises(ValueError, match="max_positions must be given"):
        MLAAttention(config)
    assert MLAAttention(config, max_positions=8).rope_table.positions == 8


def test_a_preset_is_a_config():
    layer = MLAAttention("deepseek-v3.2", device="meta")
    assert layer.indexer is not None
    assert layer.q_b_proj.weight.shape == (128 * 192, 1536)
    assert layer.config.scale == pytest.approx(0.135234, rel=1e-5)
    assert layer.config.index_hadamard
    assert MLAAttention("zai-org/GLM-5", device="meta").config.index_rope == "interleaved"
    assert MLAAttention("mistral-small-4", device="meta").config.query_scale.original == 8192
    assert MLAAttention("deepseek-v2-lite", device="meta").q_proj.weight.shape == (16 * 192, 2048)


class QuantisedLinear(torch.nn.Module):
    """As transformers has them for block-FP8 checkpoints."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        codes, scale = in_blocks(values)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)


@pytest.mark.slow
def test_quantised_modules_of_transformers():
    model = FAMILIES["deepseek_v3 half"]
    module = model.module()
    exact = MLAAttention.from_hf(module)
    x = torch.randn(30, HIDDEN)
    want = serve(exact, [x], [(30,)])[0]
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        setattr(module, name, QuantisedLinear(getattr(module, name).weight))
    layer = MLAAttention.from_hf(module)
    assert layer.kv_b_proj.weight is module.kv_b_proj.weight
    assert layer.q_b_proj.is_fp8
    found = serve(layer, [x], [(30,)])[0]
    assert float((found - want).norm() / want.norm()) < 0.2


def test_parameters_of_a_module_are_shared():
    module = FAMILIES["deepseek_v32"].module()
    layer = MLAAttention.from_hf(module)
    own = dict(layer.named_parameters())
    theirs = dict(module.named_parameters())
    assert own.keys() == theirs.keys()
    assert all(own[name] is theirs[name] for name in own)


def test_a_module_with_more_or_other_parameters_is_refused():
    module = FAMILIES["deepseek_v3"].module()
    module.gate = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"a parameter that no MLA layer has, gate\.weight"):
        MLAAttention.from_hf(module)
    del module.gate
    module.o_proj.weight = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"o_proj\.weight of .* must have shape"):
        MLAAttention.from_hf(module)
    module.o_proj.weight = torch.nn.Parameter(torch.zeros(64, 48, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"o_proj\.weight of .* got float64"):
        MLAAttention.from_hf(module)
    del module.q_b_proj
    with pytest.raises(ValueError, match=r"has no q_b_proj\.weight"):
        MLAAttention.from_hf(module)


def test_modules_of_other_kinds_are_refused():
    with pytest.raises(TypeError, match="must be an MLA attention of transformers, got Linear"):
        MLAAttention.from_hf(torch.nn.Linear(2, 2))


def test_the_layer_is_its_parts():
    """Projections, `decode_branch`, output projection: nothing else."""
    layer = layer_of(DENSE)
    server, rest = server_with(layer, inputs(lengths=[9, 5]), [(8, 4)])
    batch = server.batch([1, 1])
    got = layer(rest, batch)
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(rest))).unflatten(-1, (4, -1))
    out = decode_branch(q, layer.kv_a_proj_with_mqa(rest), layer.weights(rest.device), batch)
    assert_same_bits("out", got, layer.o_proj(out.flatten(1)))
