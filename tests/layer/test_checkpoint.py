"""A layer from a checkpoint's folder: every tensor, the slices of a rank, FP8 scales, errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import MLAAttention
from mlakit.tools.testing import assert_same_bits, assert_unchanged, snapshot
from tests.layer.checkpoints import (
    HY4,
    INDEX,
    KIMI_K3,
    LONGCAT,
    SMALL,
    from_blocks,
    quantised,
    tensors,
    write_checkpoint,
)
from tests.layer.oracle import Oracle
from tests.layer.selections import positions_of
from tests.layer.serving import Server, serve

LITE = SMALL | {"model_type": "deepseek_v2", "q_lora_rank": None}
SPARSE = SMALL | INDEX


def inputs(hidden: int = 256, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, hidden, generator=generator).to(dtype) for n in (24, 7)]


CHUNKS = ((20, 3), (3, 3), (1, 1))


def served(layer: MLAAttention, dtype: torch.dtype = torch.float32) -> Tensor:
    hidden = layer.config.geometry.hidden_size
    return torch.cat(serve(layer, inputs(hidden, dtype), CHUNKS, page_size=8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        LITE,
        SPARSE,
        SMALL | {"attention_bias": True},
        SMALL | HY4,
        SMALL | KIMI_K3,
    ],
)
@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_every_tensor_is_read(tmp_path, config, index):
    stored = tensors(config)
    write_checkpoint(tmp_path, config, {0: tensors(config, seed=1), 11: stored}, index=index)
    layer = MLAAttention.load_safetensors(tmp_path, 11)
    found = dict(layer.named_parameters())
    assert set(found) == set(stored)
    for name, values in stored.items():
        assert_same_bits(name, found[name], values)
        assert not found[name].requires_grad
    whole = MLAAttention(config)
    whole.load_state_dict(stored)
    assert_same_bits("out", served(layer), served(whole))


@pytest.mark.parametrize(
    "prefix",
    [
        "model.layers.{}.self_attn.",
        "language_model.model.layers.{}.self_attn.",
        "model.language_model.layers.{}.self_attn.",
    ],
)
def test_names_of_text_models_inside_others(tmp_path, prefix):
    """Kimi K2.5 and the like; their config is nested, too."""
    outer = {"model_type": "kimi_k25", "text_config": SMALL | {"model_type": "kimi_k2"}}
    stored = tensors(SMALL)
    write_checkpoint(tmp_path, outer, {1: stored, 12: tensors(SMALL, seed=1)}, prefix=prefix)
    layer = MLAAttention.load_safetensors(tmp_path, 1)
    assert_same_bits("o_proj", layer.o_proj.weight, stored["o_proj.weight"])


def test_two_attentions_in_a_layer_need_a_prefix(tmp_path):
    """LongCat: layers.N.self_attn.0 and .1."""
    config = SMALL | {"model_type": "longcat_flash"}
    stored = {f"{i}.{name}": values for i in (0, 1) for name, values in tensors(config).items()}
    write_checkpoint(tmp_path, config, {2: stored})
    with pytest.raises(KeyError, match=r"layers\.2\.self_attn\.0\.kv_a"):
        MLAAttention.load_safetensors(tmp_path, 2)
    layer = MLAAttention.load_safetensors(tmp_path, 2, prefix="model.layers.2.self_attn.1.")
    assert layer.config.q_factor == pytest.approx(2**0.5)


def test_the_second_attention_of_a_sparse_longcat_layer_has_no_indexer(tmp_path):
    config = SMALL | LONGCAT
    stored = {f"0.{name}": values for name, values in tensors(config).items()}
    dense = {name: value for name, value in config.items() if not name.startswith("index_")}
    stored |= {f"1.{name}": values for name, values in tensors(dense, seed=1).items()}
    write_checkpoint(tmp_path, config, {3: stored})
    first, second = (
        MLAAttention.load_safetensors(tmp_path, 3, prefix=f"model.layers.3.self_attn.{i}.")
        for i in range(2)
    )
    assert (first.config.selection, second.config.selection) == ("own", "shared")
    assert second.indexer is None
    x, rows = inputs()[0], torch.empty(24, 16, dtype=torch.int32)
    server = Server(first, [24], num_layers=2)
    batch = server.batch([24])
    first(x, batch, index_cache=server.index_cache, rows=rows)
    found = second(x, replace(batch, layer=1), rows=rows)
    exact = Oracle(second.config, dict(second.named_parameters())).run(
        x, positions_of(rows, server, 0)
    )
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize(
    "config", [SMALL, SPARSE, SMALL | HY4], ids=["dense", "sparse", "gate and sinks"]
)
def test_the_ranks_add_up_to_the_layer(tmp_path, config, is_fp8):
    config = config | {"attention_bias": True}
    stored = tensors(config)
    write_checkpoint(tmp_path, config, {0: quantised(stored) if is_fp8 else stored})
    load = {"dtype": torch.float32}
    whole = served(MLAAttention.load_safetensors(tmp_path, 0, **load))
    ranks = [
        MLAAttention.load_safetensors(tmp_path, 0, tp_rank=rank, tp_size=2, **load)
        for rank in range(2)
    ]
    assert {rank.config.geometry.num_heads for rank in ranks} == {2}
    total = torch.stack([served(rank) for rank in ranks]).sum(0)
    # of FP8 the input of o_proj is quantised per 128 columns, which are the same in both
    torch.testing.assert_close(total, whole, rtol=0, atol=2e-5)
    assert float(whole.abs().max()) > 0.5
    assert not ranks[1].o_proj.bias.any()


def test_fp8_weights_have_their_scales(tmp_path):
    stored = quantised(tensors(SPARSE))
    write_checkpoint(tmp_path, SPARSE, {0: stored})
    layer = MLAAttention.load_safetensors(tmp_path, 0)
    found = dict(layer.named_parameters())
    assert set(found) == set(stored)
    for name, values in stored.items():
        kept = values.float() if name.startswith(("indexer.k_norm", "indexer.weights")) else values
        assert_same_bits(name, found[name], kept)
    rank = MLAAttention.load_safetensors(tmp_path, 0, tp_rank=1, tp_size=2)
    codes, scale = stored["o_proj.weight"], stored["o_proj.weight_scale_inv"]
    part = from_blocks(rank.o_proj.weight, rank.o_proj.weight_scale_inv)
    assert_same_bits("o_proj", part, from_blocks(codes, scale)[:, 128:].contiguous())


def test_an_fp8_layer_is_near_the_float_layer_of_its_values(tmp_path):
    stored = quantised(tensors(SMALL))
    write_checkpoint(tmp_path / "fp8", SMALL, {0: stored})
    values = {
        name: from_blocks(each, stored[f"{name}_scale_inv"]) if each.dtype.itemsize == 1 else each
        for name, each in stored.items()
        if not name.endswith("_scale_inv")
    }
    write_checkpoint(tmp_path / "float", SMALL, {0: values})
    fp8, exact = (
        served(MLAAttention.load_safetensors(tmp_path / kind, 0, dtype=torch.float32))
        for kind in ("fp8", "float")
    )
    error = (fp8 - exact).norm() / exact.norm()
    assert 1e-4 < float(error) < 0.1  # activations of FP8 have 3 bits of mantissa


def test_a_cut_inside_a_block_of_fp8_is_refused(tmp_path):
    stored = quantised(tensors(SMALL))
    write_checkpoint(tmp_path, SMALL, {0: stored})
    with pytest.raises(ValueError, match=r"tp_size must cut .*o_proj.weight between its blocks"):
        MLAAttention.load_safetensors(tmp_path, 0, tp_rank=1, tp_size=4)


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        ({}, torch.bfloat16, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float32, torch.float16),
        ({"dtype": "bfloat16"}, torch.float32, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_configs_or_the_weights(tmp_path, config, stored, expected):
    values = {name: each.to(stored) for name, each in tensors(SPARSE).items()}
    write_checkpoint(tmp_path, SPARSE | config, {0: values})
    layer = MLAAttention.load_safetensors(tmp_path, 0)
    assert layer.q_b_proj.weight.dtype == layer.kv_a_layernorm.weight.dtype == expected
    assert layer.indexer.weights_proj.weight.dtype == torch.float32
    given = MLAAttention.load_safetensors(tmp_path, 0, dtype=torch.float32)
    assert given.q_b_proj.weight.dtype == torch.float32


def test_the_names_of_hy4s_release(tmp_path):
    config, stored = SMALL | HY4, tensors(SMALL | HY4)
    renamed = dict(stored)
    renamed["linear_gate.weight"] = renamed.pop("gate_proj.weight")
    renamed["learnable_sink_param"] = renamed.pop("sinks")
    write_checkpoint(tmp_path, config, {0: renamed, 1: tensors(config, seed=1)})
    layer = MLAAttention.load_safetensors(tmp_path, 0)
    for name, values in stored.items():
        assert_same_bits(name, layer.get_parameter(name), values)


@pytest.mark.parametrize("name", tensors(SMALL | HY4))
def test_a_missing_tensor_is_named(tmp_path, name):
    stored = tensors(SMALL | HY4)
    del stored[name]
    write_checkpoint(tmp_path, SMALL | HY4, {0: stored})
    with pytest.raises(KeyError, match=name.replace(".", r"\.")):
        MLAAttention.load_safetensors(tmp_path, 0)


def test_a_missing_scale_is_named(tmp_path):
    stored = quantised(tensors(SMALL))
    del stored["q_b_proj.weight_scale_inv"]
    write_checkpoint(tmp_path, SMALL, {0: stored})
    with pytest.raises(KeyError, match=r"self_attn\.q_b_proj\.weight_scale_inv"):
        MLAAttention.load_safetensors(tmp_path, 0)


def changed(**changes: Tensor) -> dict[str, Tensor]:
    return tensors(SMALL) | {name.replace("__", "."): each for name, each in changes.items()}


@pytest.mark.parametrize(
    ("stored", "arguments", "error", "match"),
    [
        (
            changed(g_proj__weight=torch.ones(1)),
            {},
            ValueError,
            r"no MLA layer has: g_proj\.weight",
        ),
        (changed(kv_b_proj__bias=torch.ones(1)), {}, ValueError, r"kv_b_proj\.bias"),
        (
            changed(q_b_proj__weight=torch.zeros(512, 64)),
            {},
            ValueError,
            r"q_b_proj\.weight must have shape \(512, 128\) .*got \(512, 64\)",
        ),
        (
            changed(q_b_proj__weight=torch.zeros(512, 128, dtype=torch.int8)),
            {},
            TypeError,
            r"q_b_proj\.weight must be .*float32 or float8_e4m3fn, got int8",
        ),
        (
            changed(q_b_proj__weight=torch.zeros(640, 128)),  # the rows of 5 heads
            {},
            ValueError,
            r"q_b_proj\.weight must have shape \(512, 128\) .*got \(640, 128\)",
        ),
        (
            changed(q_b_proj__weight=torch.zeros(640, 128)),
            {"tp_size": 2},
            ValueError,
            r"q_b_proj\.weight must have shape \(512, 128\) .*got \(640, 128\)",
        ),
        (
            changed(kv_a_layernorm__weight=torch.tensor(1.0)),
            {},
            ValueError,
            r"kv_a_layernorm\.weight must have shape \(128,\) .*got \(\)",
        ),
        (
            changed(o_proj__weight=torch.tensor(1.0)),
            {},
            ValueError,
            r"o_proj\.weight must have 1 axes or more, got shape \(\)",
        ),
        (
            changed(q_b_proj__weight_scale_inv=torch.ones(4, 1)),
            {},
            ValueError,
            r"q_b_proj\.weight_scale_inv must be there for float8_e4m3fn weights only, .*float32",
        ),
        (changed(), {"tp_size": 3}, ValueError, "tp_size must divide the 4 heads, got 3"),
        (changed(), {"tp_rank": 1}, ValueError, "tp_rank must be below tp_size, 1, got 1"),
        (changed(), {"layer": 5}, KeyError, r"no tensor layers\.5\.self_attn\.kv_a.*none"),
        (changed(), {"dtype": torch.int8}, TypeError, "dtype must be bfloat16"),
    ],
)
def test_errors_say_what_is_wrong(tmp_path, stored, arguments, error, match):
    write_checkpoint(tmp_path, SMALL, {0: stored})
    with pytest.raises(error, match=match):
        MLAAttention.load_safetensors(tmp_path, **{"layer": 0, **arguments})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float64], ids=str)
def test_scales_must_be_floats(tmp_path, dtype):
    """The byte 127 of an e8m0 scale means 1, and must not become 127."""
    stored = quantised(tensors(SMALL))
    stored["q_b_proj.weight_scale_inv"] = torch.full((4, 1), 127).to(dtype)
    write_checkpoint(tmp_path, SMALL, {0: stored})
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=rf"q_b_proj\.weight_scale_inv must be .*, got {name}"):
        MLAAttention.load_safetensors(tmp_path, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("bias", torch.ones(8)), ("weight_scale_inv", torch.ones(1, 2))],
    ids=["bias", "scale"],
)
def test_the_indexers_weights_have_no_bias_and_no_scales(tmp_path, name, value):
    """`weights_proj` multiplies in float32: it would leave them out."""
    stored = tensors(SPARSE) | {f"indexer.weights_proj.{name}": value}
    if name != "bias":
        weight = stored["indexer.weights_proj.weight"]
        stored["indexer.weights_proj.weight"] = weight.to(torch.float8_e4m3fn)
    write_checkpoint(tmp_path, SPARSE, {0: stored})
    with pytest.raises(ValueError, match=rf"no MLA layer has: indexer\.weights_proj\.{name}$"):
        MLAAttention.load_safetensors(tmp_path, 0)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("is_fp8", "name", "dtype", "must"),
    [
        (True, "kv_b_proj.weight_scale_inv", torch.uint8, "float64"),
        (True, "kv_b_proj.weight_scale_inv", torch.int32, "float64"),
        (True, "q_b_proj.weight", torch.bfloat16, "float8_e4m3fn"),
        (False, "q_b_proj.weight", torch.float8_e4m3fn, "float64"),
        (False, "kv_a_layernorm.weight", torch.int32, "float64"),
    ],
    ids=str,
)
def test_load_state_dict_converts_no_codes(is_fp8, name, dtype, must, assign):
    """Torch would: the byte 127 to 127, and e4m3 codes to their values without scales."""
    layer = MLAAttention(SMALL, is_fp8=is_fp8, dtype=torch.bfloat16)
    before = snapshot(**dict(layer.named_parameters()))
    stored = quantised(tensors(SMALL)) if is_fp8 else tensors(SMALL)
    stored[name] = torch.full(stored[name].shape, 127).to(dtype)
    got = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"^MLAAttention: {name} must be .*{must}, got {got}$"):
        torch.nn.ModuleDict({"attention": layer}).load_state_dict(
            {f"attention.{key}": each for key, each in stored.items()}, assign=assign
        )
    assert_unchanged(before)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("name", "size"),
    [("q_a_proj", 128), ("kv_a_proj_with_mqa", 192), ("o_proj", 256), ("q_b_proj", 512)],
)
def test_a_bias_must_have_one_entry_per_output(tmp_path, name, size, tp_size):
    config = SMALL | {"attention_bias": True}
    for wrong in (torch.ones(1), torch.ones(3), torch.ones(size + 1), torch.ones(size, 1)):
        stored = tensors(config) | {f"{name}.bias": wrong}
        write_checkpoint(tmp_path, config, {0: stored})
        message = (
            rf"{name}\.bias must have shape \({size},\) .*got {re.escape(str(tuple(wrong.shape)))}"
        )
        with pytest.raises(ValueError, match=message):
            MLAAttention.load_safetensors(tmp_path, 0, tp_rank=tp_size - 1, tp_size=tp_size)


def test_a_bias_of_integers_is_refused(tmp_path):
    config = SMALL | {"attention_bias": True}
    stored = tensors(config) | {"q_a_proj.bias": torch.ones(128, dtype=torch.int32)}
    write_checkpoint(tmp_path, config, {0: stored})
    with pytest.raises(TypeError, match=r"q_a_proj\.bias must be .*, got int32"):
        MLAAttention.load_safetensors(tmp_path, 0)


def copied(folder: Path, name: str, seed: int) -> dict[str, Tensor]:
    """Other tensors under the names of a checkpoint, in one more file of its folder."""
    from safetensors.torch import save_file  # the tests on a GPU do without it

    stored = tensors(SMALL, seed=seed)
    save_file(
        {f"model.layers.0.self_attn.{key}": each for key, each in stored.items()}, folder / name
    )
    return stored


def test_a_tensor_in_two_files_is_refused_without_an_index(tmp_path):
    stored = tensors(SMALL)
    write_checkpoint(tmp_path, SMALL, {0: stored}, files=1, index=False)
    copied(tmp_path, "zz_backup.safetensors", seed=4)
    message = r"has model\.layers\.0\..* in model-00001-of-00001\.\w+ and in zz_backup\.safetensors"
    with pytest.raises(ValueError, match=f"^load_safetensors: .* {message}"):
        MLAAttention.load_safetensors(tmp_path, 0)
    write_checkpoint(tmp_path, SMALL, {0: stored}, files=1, index=True)
    layer = MLAAttention.load_safetensors(tmp_path, 0)
    assert_same_bits("o_proj", layer.o_proj.weight, stored["o_proj.weight"])


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_model_safetensors_comes_first_as_in_transformers(tmp_path, index):
    write_checkpoint(tmp_path, SMALL, {0: tensors(SMALL)}, index=index)
    stored = copied(tmp_path, "model.safetensors", seed=4)
    layer = MLAAttention.load_safetensors(tmp_path, 0)
    assert_same_bits("o_proj", layer.o_proj.weight, stored["o_proj.weight"])


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("kind", ["empty", "zeros", "short", "cut", "header"])
def test_a_file_that_is_not_whole_is_named(tmp_path, kind, index):
    write_checkpoint(tmp_path, SMALL, {0: tensors(SMALL)}, index=index)
    file = tmp_path / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    broken = {
        "empty": b"",
        "zeros": bytes(64),
        "short": b"{}",
        "cut": whole[:-100],
        "header": b"\xff" * 8 + whole[8:],
    }
    file.write_bytes(broken[kind])
    message = f"^load_safetensors: {re.escape(str(file))} is not a whole safetensors file: "
    with pytest.raises(ValueError, match=message):
        MLAAttention.load_safetensors(tmp_path, 0)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": ["x.safetensors"]}, r"index\.json names a file outside of it, \['x\.safetensors'\]"),
        ({"a": None}, r"index\.json names a file outside of it, None"),
        ([["a", "b"]], r"weight_map of .*index\.json must be a JSON object, got a list"),
        ("a", r"weight_map of .*index\.json must be a JSON object, got a str"),
    ],
    ids=str,
)
def test_an_index_of_other_types_is_refused(tmp_path, weight_map, message):
    folder = write_checkpoint(tmp_path, SMALL, {0: tensors(SMALL)})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"^load_safetensors: .*{message}$"):
        MLAAttention.load_safetensors(folder, 0)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"q_lora_rank": "a"}, TypeError, "config .*: q_lora_rank must be an integer, got 'a'"),
        ({"index_topk": "x"}, TypeError, "config .*: index_topk must be an integer, got 'x'"),
        ({"rope_theta": "a"}, TypeError, "config .*: rope_theta must be a number, got 'a'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": "4", "mscale_all_dim": 1.0}},
            TypeError,
            "config .*: factor must be a number, got '4'",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4, "short_factor": 2.0}},
            TypeError,
            r"config .*: short_factor must be a list of numbers, got 2\.0",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4, "long_factor": [2.0, "a"]}},
            TypeError,
            r"config .*: long_factor\[1\] must be a number, got 'a'",
        ),
        ({"rope_scaling": {"type": 5}}, TypeError, "config .*: rope_type must be a string, got 5"),
        (
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            ValueError,
            "rope parameters of config .* has no original_max_position_embeddings",
        ),
        ({"rope_theta": -5}, ValueError, "MLAAttention: rope_theta must be above 1, got -5"),
        ({"rope_theta": 1e999}, ValueError, "MLAAttention: rope_theta must be finite, got inf"),
        (
            {"rope_scaling": {"type": "bent", "factor": 2.0}},
            ValueError,
            "MLAAttention: rope_type must be one of default, .*, got 'bent'",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            ValueError,
            "MLAAttention: rope_parameters must have factor for linear",
        ),
    ],
    ids=str,
)
def test_a_config_of_other_types_or_values_is_refused_before_a_call(
    tmp_path, fields, error, message
):
    write_checkpoint(tmp_path, SMALL | fields, {0: tensors(SMALL)})
    with pytest.raises(error, match=f"^{message}"):
        MLAAttention.load_safetensors(tmp_path, 0)


@pytest.mark.parametrize("field", ["index_topk_freq", "index_skip_topk_offset"])
def test_numbers_of_glms_indexer_are_checked(field):
    with pytest.raises(TypeError, match=f"{field} must be an integer, got 'x'"):
        MLAAttention(SPARSE | {"model_type": "glm_moe_dsa", field: "x"})


def test_epsilon_can_be_chosen(tmp_path):
    write_checkpoint(tmp_path, SMALL | {"rms_norm_eps": 1e-5}, {0: tensors(SMALL)})
    assert MLAAttention.load_safetensors(tmp_path, 0).q_a_layernorm.epsilon == 1e-6
    layer = MLAAttention.load_safetensors(tmp_path, 0, epsilon=1e-5)
    assert layer.q_a_layernorm.epsilon == layer.weights(torch.device("cpu")).epsilon == 1e-5


def test_angles_that_old_checkpoints_store_are_skipped(tmp_path):
    stored = tensors(SMALL) | {"rotary_emb.inv_freq": torch.zeros(32)}
    write_checkpoint(tmp_path, SMALL, {0: stored})
    MLAAttention.load_safetensors(tmp_path, 0)


def test_an_index_names_files_of_its_own_folder_only(tmp_path):
    write_checkpoint(tmp_path / "other", SMALL, {0: tensors(SMALL)}, files=1)
    folder = write_checkpoint(tmp_path / "model", SMALL, {0: tensors(SMALL)}, files=1)
    index = folder / "model.safetensors.index.json"
    names: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    outside = dict.fromkeys(names, "../other/model-00001-of-00001.safetensors")
    index.write_text(json.dumps({"weight_map": outside}), encoding="utf-8")
    with pytest.raises(ValueError, match="names a file outside"):
        MLAAttention.load_safetensors(folder, 0)
    index.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="has no weight_map"):
        MLAAttention.load_safetensors(folder, 0)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "gone")}), encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        MLAAttention.load_safetensors(folder, 0)


def test_a_folder_without_tensors(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        MLAAttention.load_safetensors(tmp_path / "nowhere", 0)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        MLAAttention.load_safetensors(tmp_path, 0)


def test_a_file_may_change_after_it_was_read(tmp_path):
    stored = tensors(SMALL)
    write_checkpoint(tmp_path, SMALL, {0: stored}, files=1)
    layer = MLAAttention.load_safetensors(tmp_path, 0)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert_same_bits("o_proj", layer.o_proj.weight, stored["o_proj.weight"])
