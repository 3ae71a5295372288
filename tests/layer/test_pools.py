"""Layers whose index keys are those of pools of tokens: GLM-5.3-Flash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlakit import MLAAttention, PagedLatentCache, PooledKeyCache
from mlakit.layer import LayerConfig
from mlakit.steps.pools import state_rows
from mlakit.tools.testing import assert_same_bits
from tests.layer.models import FAMILIES, HIDDEN, Family
from tests.layer.selections import positions_of
from tests.layer.serving import Server, serve

MODEL: Family = FAMILIES["glm5_next"]
POOL, TOPK = 4, 12
LENGTH = 50


def layer_of(**changes: Any) -> MLAAttention:
    return MLAAttention.from_hf(MODEL.module(MODEL.config(**changes)))


def inputs(length: int = LENGTH) -> Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(2))


def test_the_preset_of_glm_5_3_flash():
    config = LayerConfig.from_config("glm-5.3-flash", 3)
    assert (config.index_pool, config.selects_tail, config.selection) == (4, True, "own")
    assert (config.epsilon, config.geometry.qk_rope_head_dim) == (1e-5, 0)
    layer = MLAAttention("glm-5.3-flash", layer=3, device="meta")
    cache = layer.indexer.allocate_index_cache(num_pages=8, device="cpu")
    assert (cache.keys.page_size, cache.states.page_size, cache.row.width) == (16, 8, 128)


def pool_scores(layer: MLAAttention, x: Tensor) -> Tensor:
    """Scores [tokens, complete pools] in float64; −inf for pools that a query does not see."""
    indexer = layer.indexer
    assert indexer is not None
    whole = len(x) // POOL * POOL
    keys, gate = (
        part[:whole].double().unflatten(0, (-1, POOL))
        for part in (
            indexer.k_norm(indexer.wk(x, "cpu")),
            F.linear(x, indexer.index_kpool_compress_gate),
        )
    )
    pooled = (keys * (gate + indexer.index_kpool_compress_ape).softmax(1)).sum(1)
    q = indexer.wq_b(layer.q_a_layernorm(layer.q_a_proj(x, "cpu")), "cpu").double()
    q = q.unflatten(-1, (indexer.heads, indexer.width))
    scores = torch.einsum("thd,pd->thp", q, pooled).relu()
    scores = (scores * indexer.weights_proj(x).double()[..., None]).sum(1)
    last = torch.arange(POOL - 1, whole, POOL)
    return scores.masked_fill(last > torch.arange(len(x))[:, None], -torch.inf)


@pytest.mark.parametrize("index_format", ["fp32", "fp8_token"])
def test_a_query_selects_the_best_pools_and_the_tokens_after_them(index_format):
    layer, x = layer_of(), inputs()
    server = Server(layer, [LENGTH], index_format=index_format)
    chosen = []
    for new in (30, 1, 4, 15):
        first = server.kv_lens[0]
        rows = torch.full((new, TOPK + POOL - 1), -7, dtype=torch.int32)
        part = x[first : first + new]
        layer(part, server.batch([new]), index_cache=server.index_cache, rows=rows)
        chosen += positions_of(rows, server, 0)
    scores = pool_scores(layer, x)
    slack = float(scores[scores.isfinite()].std()) * (1e-5 if index_format == "fp32" else 0.15)
    for query, tokens in enumerate(chosen):
        tail = list(range((query + 1) // POOL * POOL, query + 1))
        pools = sorted({token // POOL for token in tokens} - {(query + 1) // POOL})
        assert sorted(tokens) == [p * POOL + i for p in pools for i in range(POOL)] + tail
        assert len(pools) == min(TOPK, (query + 1) // POOL * POOL) // POOL
        others = sorted(set(range((query + 1) // POOL)) - set(pools))
        if others:
            assert float(scores[query, others].max() - scores[query, pools].min()) <= slack


def test_rejected_drafts_are_taken_back():
    """Steps of one token and four drafts, of which 0 to 4 are rejected and come again."""
    layer, x = layer_of(), inputs()
    want = serve(layer, [x], [(20,), *[(1,)] * (LENGTH - 20)])[0]
    server = Server(layer, [LENGTH])
    layer(x[:20], server.batch([20]), index_cache=server.index_cache)
    length, rejected = 20, 0
    while length < LENGTH:
        last = min(length + 5, LENGTH)
        rejected = min((rejected + 1) % 5, last - length - 1)
        part = x[length:last].clone()
        part[len(part) - rejected :] *= -2
        batch = server.batch([len(part)])
        found = layer(part, batch, index_cache=server.index_cache)[: len(part) - rejected]
        length = last - rejected
        server.kv_lens = [length]
        torch.testing.assert_close(found, want[length - len(found) : length], rtol=0, atol=2e-5)


def test_forks_copy_the_keys_and_the_tokens_that_wait():
    layer, x = layer_of(), inputs(23)
    server = Server(layer, [23])
    layer(x[:18], server.batch([18]), index_cache=server.index_cache)
    table = server.page_table
    spare = next(page for page in range(server.cache.num_pages) if page not in table.tolist()[0])
    copies = [(int(table[0, 1]), spare)]
    for cache in (server.cache, server.index_cache):
        cache.copy_pages(copies)
    other = Server(layer, [23])
    other.cache, other.index_cache, other.kv_lens = server.cache, server.index_cache, [18]
    other.page_table = torch.where(table == table[0, 1], spare, table)
    found = [
        layer(x[18:], each.batch([5]), index_cache=each.index_cache) for each in (server, other)
    ]
    assert_same_bits("out", found[0], found[1])


def test_a_shared_layer_attends_to_the_rows_of_the_layer_before_it():
    config = MODEL.config(indexer_types=["full", "full", "shared"])
    second = MLAAttention.from_hf(replace(MODEL, layer=2).module(config, seed=5))
    first, x = layer_of(), inputs()
    assert second.indexer is None
    server = Server(first, [LENGTH], num_layers=2)
    batch = server.batch([LENGTH])
    rows = torch.empty(LENGTH, TOPK + POOL - 1, dtype=torch.int32)
    first(x, batch, index_cache=server.index_cache, rows=rows)
    found = second(x, replace(batch, layer=1), rows=rows)
    assert found.isfinite().all()
    rows[-1] = rows[-1, :1]  # it attends to these rows, and to no others
    other = second(x, replace(batch, layer=1), rows=rows)
    assert_same_bits("out", other[:-1], found[:-1])
    assert not torch.equal(other[-1], found[-1])


@pytest.mark.parametrize(
    ("page_size", "pool", "rows"), [(64, 4, 8), (16, 4, 8), (64, 16, 32), (48, 3, 6), (4, 4, 4)]
)
def test_the_rows_of_a_page_of_states(page_size, pool, rows):
    assert state_rows(page_size, pool) == rows


def wrong(layer: MLAAttention, **changes: Any) -> None:
    server = Server(layer, [LENGTH])
    options = {"index_cache": server.index_cache} | changes
    cache = options["index_cache"]
    if callable(cache):
        options["index_cache"] = cache(server.index_cache)
    layer(inputs(), server.batch([LENGTH]), **options)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (lambda own: own.keys, "index_cache must be a PooledKeyCache, got PagedLatentCache"),
        (
            lambda own: replace(own, states=own.keys),
            "index.pools.states must have float32 rows of 32 columns, key and gate of a token",
        ),
        (
            lambda own: PooledKeyCache.allocate(16, 8, "fp32", num_pages=9, page_size=16),
            "index_cache must have pages of 16 tokens, like the latent cache, got 8",
        ),
        (
            lambda own: replace(
                own, states=PagedLatentCache.allocate(own.states.row, "fp32", num_pages=4)
            ),
            "index.pools.states must have pages of 8 rows, for pages of 16 tokens, got 64",
        ),
    ],
)
def test_a_wrong_cache_is_refused_before_anything_is_written(cache, message):
    with pytest.raises((TypeError, ValueError), match=message):
        wrong(layer_of(), index_cache=cache)


def test_a_list_of_slots_is_refused():
    layer, x = layer_of(), inputs()
    server = Server(layer, [LENGTH])
    slots = torch.arange(64, dtype=torch.int32)
    starts = torch.tensor([0, 64], dtype=torch.int32)
    batch = replace(server.batch([LENGTH]), page_table=(starts, slots))
    with pytest.raises(ValueError, match="page_table must have pages where index keys are pooled"):
        layer(x, batch, index_cache=server.index_cache)


def test_a_config_without_the_tokens_of_a_pool_has_those_of_transformers():
    config = MODEL.config()
    default = type(config)().index_kpool
    fields = config.to_dict() | {"index_topk": 64}
    del fields["index_kpool"]
    for model_type in ("glm5_next", "glm5_next_text"):
        given = fields | {"model_type": model_type}
        assert LayerConfig.from_config(given).index_pool == default == 16
    assert LayerConfig.from_config(fields | {"model_type": "glm_moe_dsa"}).index_pool == 1
    with pytest.raises(ValueError, match="index_kpool must be at least 1, got 0"):
        LayerConfig.from_config(fields | {"index_kpool": 0})


def test_sizes_that_do_not_divide_are_refused():
    config = MODEL.config().to_dict() | {"index_kpool": 5}
    with pytest.raises(ValueError, match="index_kpool must divide index_topk, 12, got 5"):
        LayerConfig.from_config(config)
    with pytest.raises(ValueError, match="page_size must be a multiple of the 3 tokens of a pool"):
        PooledKeyCache.allocate(16, 3, num_pages=1, page_size=64)


@pytest.mark.gpu
def test_a_gpu_selects_and_computes_the_same():
    layer, x = layer_of(), inputs()
    want = serve(layer, [x], [(30,), (4,), *[(1,)] * 16])[0]
    found = serve(layer.cuda(), [x.cuda()], [(30,), (4,), *[(1,)] * 16])[0]
    torch.testing.assert_close(found.cpu(), want, rtol=0, atol=2e-4)
