"""Layers from safetensors files, by the names of transformers and of the releases."""

from __future__ import annotations

import json
import re

import pytest
import torch

from mlakit import V4Attention
from mlakit.layer.v4.checkpoint import released_name, spread
from mlakit.tools.tiny import in_blocks
from tests.layer.checkpoints import write_checkpoint
from tests.layer.v4.models import KINDS, SIZES, weights

# two blocks and a half of rows, so that the last block is not whole
WIDE = SIZES | {"hidden_size": 320, "q_lora_rank": 160, "o_lora_rank": 96}
FP8 = re.compile(r"(q_a_proj|q_b_proj|^kv_proj|o_a_proj|o_b_proj)\.weight")


def files_of(fields, folder, layer, *, released, is_fp8=False):
    stored = {}
    for name, values in weights(fields, layer).items():
        own = released_name(name) if released else name
        if is_fp8 and FP8.search(name):
            stored[own], scale = in_blocks(values)
            scale = torch.exp2(torch.log2(scale).ceil())  # powers of two, as released
            stored[own] = (values / spread(scale, tuple(values.shape))).to(torch.float8_e4m3fn)
            if released:
                stored[own.removesuffix("weight") + "scale"] = scale.to(torch.float8_e8m0fnu)
            else:
                stored[f"{own}_scale_inv"] = scale
        else:
            stored[own] = values
    prefix = "layers.{}.attn." if released else "model.layers.{}.self_attn."
    return write_checkpoint(folder, fields, {layer: stored}, prefix=prefix)


@pytest.mark.parametrize("released", [False, True], ids=["transformers", "released"])
@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_a_layer_has_the_tensors_of_its_files(layer, released, tmp_path):
    folder = files_of(SIZES, tmp_path / "checkpoint", layer, released=released)
    made = V4Attention.load_safetensors(folder, layer, dtype=torch.float32)
    expected = weights(SIZES, layer)
    found = dict(made.named_parameters())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    made = V4Attention.load_safetensors(folder, layer, dtype=torch.bfloat16)
    kept = {name for name, each in made.named_parameters() if each.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in kept} <= {"sinks", "position_bias"}


@pytest.mark.parametrize("released", [False, True], ids=["transformers", "released"])
def test_fp8_matrices_keep_their_blocks(released, tmp_path):
    folder = files_of(WIDE, tmp_path / "checkpoint", 1, released=released, is_fp8=True)
    made = V4Attention.load_safetensors(folder, 1, dtype=torch.bfloat16)
    expected = weights(WIDE, 1)
    for name in ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", "compressor.indexer.q_b_proj"):
        part = made.get_submodule(name)
        assert part.is_fp8
        shape = tuple(part.weight.shape)
        values = part.weight.float() * spread(part.weight_scale_inv, shape)
        assert (values - expected[f"{name}.weight"]).abs().max() < 0.07 * values.abs().max()
    assert made.o_a_proj.weight.dtype == torch.bfloat16
    assert not made.compressor.kv_proj.is_fp8


def test_wrong_folders_name_the_tensor(tmp_path):
    folder = files_of(SIZES, tmp_path / "checkpoint", 1, released=True)
    with pytest.raises(KeyError, match=r"has no tensor layers\.0\.self_attn\.q_a_proj"):
        V4Attention.load_safetensors(folder, 0)
    (folder / "config.json").write_text(json.dumps(SIZES | {"q_lora_rank": 8}), encoding="utf-8")
    must = r"layers\.1\.attn\.wq_a\.weight must have shape \(8, 48\)"
    with pytest.raises(ValueError, match=must):
        V4Attention.load_safetensors(folder, 1)
    with pytest.raises(TypeError, match="dtype must be bfloat16, float16 or float32"):
        V4Attention.load_safetensors(folder, 1, dtype=torch.int8)
    more = weights(SIZES, 0) | {"gate.weight": torch.zeros(2)}
    other = write_checkpoint(tmp_path / "other", SIZES, {0: more})
    with pytest.raises(ValueError, match=r"must have only tensors of V4Attention, got also gate"):
        V4Attention.load_safetensors(other, 0)
