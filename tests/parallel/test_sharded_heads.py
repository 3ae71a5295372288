"""Tensor parallelism: layers with the heads of a rank, and plans for transformers."""

from __future__ import annotations

import pytest

from mlakit import MLAAttention
from mlakit.parallel import tensor_parallel_plan
from tests.layer.checkpoints import SMALL, quantised, tensors, write_checkpoint
from tests.layer.models import FAMILIES
from tests.parallel import heads, steps
from tests.parallel.ranks import WORLDS

worlds = pytest.mark.parametrize("world", WORLDS)
DENSE = {"first_k_dense_replace": 2}
# without entries for attention in their own plans
LEFT_OUT = ("deepseek_v3", "axk1", "mistral4", "youtu", "kimi_linear")


@pytest.mark.slow
@worlds
def test_the_sum_over_ranks(ranks, world):
    ranks.run(world, steps.check_sum)


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True], ids=["float32", "fp8"])
def test_a_layer_sums_its_ranks(ranks, tmp_path, is_fp8):
    config = SMALL | {"attention_bias": True}
    stored = tensors(config)
    write_checkpoint(tmp_path, config, {0: quantised(stored) if is_fp8 else stored})
    for world in WORLDS[:1] if is_fp8 else WORLDS:  # a cut of o_proj must be between blocks
        ranks.run(world, heads.check_layer, str(tmp_path))


def test_a_group_stands_for_rank_and_size(tmp_path):
    with pytest.raises(TypeError, match="takes tp_group, or tp_rank and tp_size"):
        MLAAttention.load_safetensors(tmp_path, 0, tp_size=2, tp_group=object())


@pytest.mark.slow
@worlds
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("deepseek_v3", DENSE),
        ("deepseek_v3", DENSE | {"q_lora_rank": None}),
        ("youtu", {}),
    ],
    ids=["deepseek_v3", "deepseek_v3 without q LoRA", "youtu"],
)
def test_transformers_shards_the_heads_by_the_plan(ranks, world, model_type, fields):
    ranks.run(world, heads.check_model, model_type, fields)


@pytest.mark.slow
def test_transformers_loads_the_heads_of_a_rank_by_the_plan(ranks, tmp_path):
    heads.small_model("deepseek_v3", **DENSE).save_pretrained(tmp_path)
    ranks.run(max(WORLDS), heads.check_loaded_model, str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_has_the_attention(family):
    config = FAMILIES[family].config()
    plan = tensor_parallel_plan(config)
    own = {f"model.{name}": style for name, style in config.base_model_tp_plan.items()}
    assert own.items() <= plan.items()
    is_left_out = config.model_type in LEFT_OUT
    assert (plan == own) is not is_left_out
    ends = [name.rsplit(".", 1)[-1] for name in plan if ".self_attn." in name]
    query = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    assert {query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= set(ends)


def test_the_prefix_of_a_plan():
    plan = tensor_parallel_plan(FAMILIES["deepseek_v3"].config(), prefix="model.language_model.")
    assert plan["model.language_model.layers.*.self_attn.o_proj"] == "rowwise"


def test_a_config_without_latents():
    with pytest.raises(ValueError, match="config must have a kv_lora_rank, got object"):
        tensor_parallel_plan(object())
