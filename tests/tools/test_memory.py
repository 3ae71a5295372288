"""`mlakit memory`: the bytes are those of allocated caches, and what fits does fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from mlakit import PooledKeyCache, V4Cache
from mlakit.cache import KVShard, PagedLatentCache
from mlakit.formats import FORMATS, row_codec
from mlakit.model.config import read_config
from mlakit.model.geometry import PRESETS, MLAGeometry, RowShape
from mlakit.model.releases import RELEASES
from mlakit.model.v4 import V4Config
from mlakit.tools import cli
from mlakit.tools.memory.budget import (
    CHECKPOINT_INDEX,
    EXPANDED,
    GIB,
    memory_report,
    parse_contexts,
)
from mlakit.tools.memory.compressed import UNCOMPRESSED, compressed_size
from mlakit.tools.memory.layers import config_fields, layer_counts

SMALL = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "kv_lora_rank": 68,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 2,
    "index_head_dim": 24,
    "index_topk": 8,
    "indexer_types": ["full", "shared", "full"],
}
HYBRID = {"linear_attn_config": {"full_attn_layers": [2, 3], "kda_layers": [1]}}


def written(folder: Path, **changed: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**SMALL, **changed}), encoding="utf-8")
    return str(folder)


def allocated_bytes(*pools: PagedLatentCache) -> int:
    """The memory behind the tensors, each storage once."""
    tensors = [each for pool in pools for each in (pool.payload, pool.beside) if each is not None]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_those_of_allocated_caches(tmp_path, name, page_size):
    config = written(tmp_path)
    geometry = MLAGeometry.from_config(config)
    for batch, context in ((1, 1), (3, 65), (2, 128)):
        found = memory_report(config, [context], formats=[name], page_size=page_size).sizes[0]
        pages = {"num_pages": batch * -(-context // page_size), "page_size": page_size}
        latents = PagedLatentCache.allocate(geometry, name, num_layers=3, **pages)
        keys = PagedLatentCache.allocate(RowShape(24, 0), "fp8_token", num_layers=2, **pages)
        assert found.rank_bytes(context, batch) == allocated_bytes(latents, keys)
        rows = latents.num_pages * page_size
        assert found.token_bytes * rows == latents.nbytes + keys.nbytes


@pytest.mark.parametrize("keys", ["bf16", "fp8_token", "mxfp4_block32"])
@pytest.mark.parametrize("model", [each for each in RELEASES if "index_topk" in RELEASES[each]])
def test_index_keys_are_counted_in_the_format_that_is_asked_for(model, keys):
    if "v4" in model:
        with pytest.raises(ValueError, match="index_format must be left out for DeepSeek-V4"):
            memory_report(model, [1], index_format=keys)
        return
    fields, geometry = config_fields(model), MLAGeometry.from_config(model)
    layers = layer_counts(fields)
    found = memory_report(model, [65], formats=["bf16"], index_format=keys)
    pages = {"num_pages": 2, "page_size": 64}
    latents = PagedLatentCache.allocate(geometry, "bf16", num_layers=layers.mla, **pages)
    pages |= {"num_layers": layers.indexer}
    size = fields.integer("index_kpool", 1)
    pooled = PooledKeyCache.allocate(128, size, keys, **pages)
    caches = (latents, pooled.keys, *([pooled.states] if size > 1 else []))
    assert found.sizes[0].rank_bytes(65) == allocated_bytes(*caches)
    assert found.as_json()["index_format"] == keys


@pytest.mark.parametrize(("size", "page_size"), [(4, 64), (4, 4), (2, 6), (16, 64)])
def test_pooled_keys_and_their_states_are_counted_as_they_are_allocated(tmp_path, size, page_size):
    config = written(tmp_path, index_kpool=size, index_topk=16)
    for batch, context in ((1, 1), (3, 65), (2, 192)):
        found = memory_report(config, [context], formats=["fp8"], page_size=page_size).sizes[0]
        pages = {"num_pages": batch * -(-context // page_size), "page_size": page_size}
        geometry = MLAGeometry.from_config(config)
        latents = PagedLatentCache.allocate(geometry, "fp8", num_layers=3, **pages)
        pooled = PooledKeyCache.allocate(24, size, num_layers=2, **pages)
        caches = (latents, pooled.keys, pooled.states)
        assert found.rank_bytes(context, batch) == allocated_bytes(*caches)
        rows = latents.num_pages * page_size
        assert found.token_bytes == round(sum(each.nbytes for each in caches) / rows)


def test_a_config_without_the_tokens_of_an_index_key_has_those_of_transformers(tmp_path):
    options = {"contexts": [64], "page_size": 64}
    sizes = [
        memory_report(written(tmp_path, model_type="glm5_next_text", **pool), **options).sizes
        for pool in ({}, {"index_kpool": 16}, {"index_kpool": 1})
    ]
    assert sizes[0] == sizes[1] != sizes[2]


@pytest.mark.parametrize("name", FORMATS)
def test_a_page_is_as_large_as_in_a_new_pool(name):
    row = RowShape(448, 64)
    for page_size in (1, 5, 64, 72, 73):
        pool = PagedLatentCache.allocate(row, name, num_pages=3, page_size=page_size, num_layers=2)
        assert 6 * row_codec(name, row).page_bytes(page_size) == allocated_bytes(pool)


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        ("deepseek-v3", "bf16", 61 * 1152),
        ("deepseek-v3", "fp8_block128", 61 * 656),
        ("deepseek-v3.2", "fp8_block128", 61 * (656 + 132)),
        ("glm-5", "fp8", 78 * (576 + 132)),
        ("glm-5.2", "fp8", 78 * 576 + 21 * 132),
        ("deepseek-v2-lite", "fp16", 27 * 1152),
        ("minicpm3", "bf16", 62 * 2 * 288),
        ("glm-5.3-flash", "fp8_block128", 11 * (528 + 132 // 4 + 8 * 1024 // 64)),
        ("kimi-k3", "fp8_block128", 24 * 656),
        ("hy4-preview", "fp8_block128", 78 * 656 + 21 * 132),
        ("longcat-2.0", "fp8_block128", 76 * 656 + 38 * 132),
        ("deepseek-v4-flash", "fp8_block64", round(21 * (584 + 132) / 4 + 20 * 584 / 128)),
        ("deepseek-v4-flash", "mxfp4_block32", round(21 * (368 + 68) / 4 + 20 * 368 / 128)),
    ],
)
def test_bytes_per_token_of_known_models(model, name, expected):
    assert memory_report(model, [1], formats=[name]).sizes[0].token_bytes == expected


@pytest.mark.parametrize("model", PRESETS)
def test_every_known_model_has_a_report(model):
    report = memory_report(model, [4096], gpu_gib=141)
    last = UNCOMPRESSED if model.startswith("deepseek-v4") else EXPANDED
    assert [size.name for size in report.sizes] == [*FORMATS, last]
    assert report.layers.total >= report.layers.mla > 0
    is_hybrid = model in ("glm-5.3-flash", "kimi-k3")
    assert (report.layers.mla < report.layers.total) == is_hybrid


@pytest.mark.parametrize("format", ["bf16", "fp8_block64", "mxfp4_block32"])
@pytest.mark.parametrize("context", [1, 131, 1000])
def test_compressed_rows_are_counted_as_a_cache_allocates_them(format, context):
    """Pages in use after steps of one token, and those of the report: pages of every lane."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "q_lora_rank": 32}
    fields = RELEASES["deepseek-v4-flash"] | sizes | {"num_hidden_layers": 6}
    config = V4Config.from_config(fields)
    size = compressed_size(config, format, 16)
    cache = V4Cache(config, format, page_size=16)
    sequence = cache.reserve()
    cache.append_batch([sequence], [context])
    for _ in range(3):  # a prompt's rows outside of the window are freed by the next step
        cache.append_batch([sequence], [1])
    used = sum(
        pages * each.codec.page_bytes(each.page_size) * each.num_layers
        for name, pages in cache.pages_in_use.items()
        for each in cache.lanes[name].caches.values()
    )
    counted = size.rank_bytes(context + 3)
    assert used <= counted
    if context > 200:
        assert counted < 1.2 * used
    assert size.token_bytes == round(cache.token_bytes)
    assert size.max_tokens(size.constant_bytes) == 0
    assert size.max_tokens(size.constant_bytes + 10**6) > 10**6 // 7000


def test_the_last_row_is_the_cache_without_mla():
    last = memory_report("deepseek-v3", [64], tp=8, dcp=4).sizes[-1]
    assert last.name == EXPANDED
    assert last.token_bytes == 61 * 128 * (192 + 128) * 2
    assert last.rank_token_bytes == last.token_bytes / 8
    assert last.rank_bytes(64) == 64 * last.token_bytes / 8


def test_tp_does_not_divide_the_latent_cache(tmp_path):
    config = written(tmp_path)
    one, four = (memory_report(config, [100], tp=tp).sizes for tp in (1, 4))
    assert one[:-1] == four[:-1]
    assert one[-1].page_bytes == 4 * four[-1].page_bytes


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_dcp_divides_the_tokens(tmp_path, dcp):
    config = written(tmp_path)
    for context in (1, 5, 64, 65, 257, 1000):
        report = memory_report(config, [context], tp=4, dcp=dcp, page_size=16)
        shards = [KVShard(rank, dcp).local_count(context) for rank in range(dcp)]
        pages = 3 * -(-max(shards) // 16)
        for size in report.sizes[:-1]:
            assert size.rank_bytes(context, 3) == pages * size.page_bytes
            assert size.rank_token_bytes == size.token_bytes / dcp


@pytest.mark.parametrize("dcp", [1, 2])
def test_what_fits_is_the_most_that_fits(tmp_path, dcp):
    options = {"tp": 2, "dcp": dcp, "page_size": 16}
    report = memory_report(written(tmp_path), [40], gpu_gib=0.001, weights_gib=0.0003, **options)
    free = report.cache_bytes
    assert free == int(0.001 * GIB) - int(0.0003 * GIB)
    for size in report.sizes:
        most = size.max_tokens(free)
        assert size.rank_bytes(most) <= free < size.rank_bytes(most + 1)
        assert size.max_tokens(-1) == 0


def counted(**config: Any) -> tuple[int, int, int]:
    return layer_counts(read_config({**SMALL, **config}))


def test_layers_of_a_config():
    assert counted() == (3, 3, 2)
    assert counted(indexer_types=None) == (3, 3, 3)
    assert counted(indexer_types=None, index_topk_pattern="FSS") == (3, 3, 1)
    assert counted(indexer_types=["full", "shared", "full", "full"]) == (3, 3, 2)  # one is for MTP
    assert counted(index_topk=0) == (3, 3, 0)
    assert counted(**HYBRID, index_topk=None) == (3, 2, 0)
    assert counted(layer_types=["linear_attention", "full_attention", "full_attention"]) == (
        3,
        2,
        1,
    )
    assert counted(model_type="longcat_flash", num_layers=5, index_topk=0) == (10, 10, 0)


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_shared_indexers_are_those_of_transformers(every, offset):
    fields = {"num_hidden_layers": 23, "index_topk_freq": every, "index_skip_topk_offset": offset}
    config = AutoConfig.for_model("glm_moe_dsa", **fields)
    full = config.indexer_types.count("full")
    assert layer_counts(read_config(config)) == (23, 23, full)
    assert counted(**fields, indexer_types=None) == (23, 23, full)


@pytest.mark.parametrize("name", RELEASES)
def test_the_layers_of_a_release_are_those_of_transformers(name):
    published = dict(RELEASES[name])
    model_type = published.pop("model_type").replace("kimi_k2", "deepseek_v3")
    model_type = model_type.replace("longcat_flash_pro", "longcat_flash")
    config = AutoConfig.for_model(model_type, **published)
    assert layer_counts(config_fields(name)) == layer_counts(read_config(config))
    if name not in (
        "deepseek-v2",
        "deepseek-v2-lite",
        "deepseek-v4-pro",
        "hy4-preview",
        "kimi-k3",
        "longcat-2.0",
    ):  # whose defaults are of another model
        default = AutoConfig.for_model(model_type)
        assert default.num_hidden_layers == config.num_hidden_layers


def test_hybrid_models_of_transformers():
    linear = {"full_attn_layers": [4, 8, 12], "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11]}
    config = AutoConfig.for_model("kimi_linear", num_hidden_layers=12, linear_attn_config=linear)
    assert layer_counts(read_config(config)) == (12, 3, 0)
    assert layer_counts(read_config(AutoConfig.for_model("longcat_flash"))) == (56, 56, 0)
    hy = AutoConfig.for_model("hy_v4")
    assert layer_counts(read_config(hy)).indexer == hy.indexer_types.count("full")
    raw = {"num_hidden_layers": 34, "index_topk": 8, "model_type": "hy_v4"}
    assert layer_counts(read_config(raw)).indexer == hy.indexer_types.count("full")


def test_the_weights_of_a_checkpoint_are_divided_by_tp(tmp_path):
    config = written(tmp_path)
    index = tmp_path / CHECKPOINT_INDEX

    def weights(**options: Any) -> int | None:
        report = memory_report(config, [8], gpu_gib=10, tp=4, **options)
        assert report.cache_bytes == 10 * GIB - (report.weight_bytes or 0)
        return report.weight_bytes

    assert weights() is None
    index.write_text(json.dumps({"metadata": {"total_size": 4002}, "weight_map": {}}))
    assert weights() == 1001
    assert weights(weights_gib=1.5) == 3 * GIB // 2
    assert weights(weights_gib=0) == 0
    for content in ('{"metadata": {}}', "{}", "[]", "{", '{"metadata": {"total_size": "x"}}'):
        index.write_text(content)
        assert weights() is None


def test_contexts_are_numbers_with_units():
    assert parse_contexts("4096") == (4096,)
    assert parse_contexts("1k, 32K,1m,1024") == (1024, 32768, 1 << 20)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dcp": ({"tp": 4, "dcp": 3}, "dcp must divide tp, 4, got 3"),
    "more dcp": ({"dcp": 2}, "dcp must divide tp, 1, got 2"),
    "tp": ({"tp": 3}, "tp must divide the 4 heads, got 3"),
    "page_size": (
        {"config": "glm-5.3-flash", "page_size": 66},
        "page_size must be a multiple of the 4 tokens of an index key, got 66",
    ),
    "index_format": ({"index_format": "fp9"}, "unknown cache format 'fp9'; choose from bf16"),
    "index_format without an indexer": (
        {"config": "deepseek-v3", "index_format": "bf16"},
        "index_format must be left out for a model without an indexer, got 'bf16'",
    ),
    "format": ({"formats": ["fp9"]}, "unknown cache format 'fp9'; choose from bf16, fp16"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_named(tmp_path, wrong):
    options, said = WRONG[wrong]
    options = {"config": written(tmp_path), "contexts": [8], **options}
    with pytest.raises(ValueError, match=re.escape(said)):
        memory_report(**options)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers: its cache cannot be computed"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be an integer, got '3'"),
        ({"indexer_types": ["full"]}, "indexer_types must have 3 entries, got 1"),
        ({"model_type": "kimi_linear"}, "its MLA layers are unknown"),
        ({"linear_attn_config": {}}, "its MLA layers are unknown"),
        ({"index_kpool": 0}, "index_kpool must be at least 1, got 0"),
        ({"kv_lora_rank": None}, "has no kv_lora_rank: not an MLA config"),
    ],
)
def test_configs_that_do_not_say_what_is_cached(tmp_path, changed, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        memory_report(written(tmp_path, **changed), [8])


def test_formats_that_do_not_support_the_rows_are_left_out_unless_they_are_asked_for(tmp_path):
    config = written(tmp_path, kv_lora_rank=1024)
    report = memory_report(config, [8])
    assert "fp8_block64" not in {size.name for size in report.sizes}
    assert "fp8_block64: kv_lora_rank must not exceed 512" in report.unsupported[0]
    with pytest.raises(ValueError, match="fp8_block64: kv_lora_rank must not exceed 512"):
        memory_report(config, [8], formats=["fp8_block64"])


def run(*arguments: object, columns: int = 150, status: int = 0) -> str:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    result = runner.invoke(cli.app, ["memory", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def test_the_command_prints_a_table():
    options = ("--context", "128k,1k", "--batch", 16, "--gpu-memory", 141, "--tp", 8, "--dcp", 2)
    output = run("deepseek-v3.2", *options, "--weights", 80)
    assert output.startswith("deepseek-v3.2: 61 MLA layers, 61 with index keys; batch 16")
    row = ["bf16", "78,324", "39,162", "76.49", "0.60", "1,672,448"]
    assert row in [line.split() for line in output.splitlines()]
    assert "Weights take 80.0 GiB per rank; activations are not counted." in output


def test_the_command_counts_index_keys_in_another_format():
    output = " ".join(run("deepseek-v3.2", "--index-format", "mxfp4_block32").split())
    assert "61 with index keys in mxfp4_block32; batch 1" in output
    assert "44,164" in output  # 61 · (656 + 68)


def test_the_command_says_what_is_not_counted(tmp_path):
    config = written(tmp_path, kv_lora_rank=1024, **HYBRID)
    output = " ".join(run(config, "--gpu-memory", 24, "--context", 8).split())
    assert "2 MLA layers of 3, 1 with index keys" in output
    assert "Weights are not counted" in output
    assert "state of linear attention is not counted" in output
    assert "Left out: fp8_block64" in output


def test_json_has_what_the_table_has():
    options = ("--format", "fp8", "--gpu-memory", 80, "--context", "1k", "--batch", 2, "--json")
    stored = json.loads(run("glm-5.2", *options))
    assert stored["layers"] == {"total": 78, "mla": 78, "indexer": 21}
    assert stored["cache_bytes"] == 80 * GIB
    fp8, expanded = stored["sizes"]
    assert (fp8["name"], expanded["name"]) == ("fp8", EXPANDED)
    token = 78 * 576 + 21 * 132
    assert (fp8["token_bytes"], fp8["rank_bytes"]) == (token, {"1024": 2 * 1024 * token})
    assert fp8["max_tokens"] == 80 * GIB // (64 * token) * 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "4x"], "context must be numbers such as 4096,32k, got '4x'"),
        (["--context", ""], "context must be numbers such as 4096,32k, got ''"),
        (["--context", "8,0"], "context must be numbers such as 4096,32k, got '8,0'"),
        (["--tp", "2", "--dcp", "4"], "dcp must divide tp, 2, got 4"),
        (["--batch", "0"], "--batch"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(arguments, said):
    assert said in run("deepseek-v3", *arguments, columns=300, status=2)


def test_an_unknown_model_lists_the_known_ones():
    output = run("no-such-model", columns=400, status=2)
    assert "'no-such-model' is not a config.json, a folder with one or a known model" in output
    assert ", ".join(PRESETS) in output


def test_no_device_is_touched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA is initialised"))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("a cache is allocated"))
    assert memory_report("deepseek-v3", [1 << 20], batch=1024, gpu_gib=141).sizes
