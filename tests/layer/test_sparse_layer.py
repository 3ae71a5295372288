"""Layers with an indexer: selections, always selected tokens, index keys, blocks of scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlakit import MLAAttention
from mlakit.layer import LayerConfig
from mlakit.layer.indexer import hadamard_matrix
from mlakit.tools.testing import assert_matches, assert_same_bits
from tests.layer.checkpoints import LONGCAT, tensors
from tests.layer.models import FAMILIES
from tests.layer.oracle import Oracle
from tests.layer.selections import check_selection, selected_by
from tests.layer.serving import Server, serve
from tests.layer.test_layer import DENSE, SPARSE, inputs, layer_of


@pytest.mark.parametrize("index_format", ["fp32", "fp8_token"])
@pytest.mark.parametrize("hadamard", [True, False])
def test_a_sparse_layer_against_the_oracle(index_format, hadamard):
    """Selection and attention apart: of FP8 near scores may change places."""
    config = replace(LayerConfig.from_config(SPARSE), index_hadamard=hadamard)
    layer = MLAAttention(config)
    layer.load_state_dict(tensors(SPARSE))
    (x,) = inputs(lengths=[50])
    found, chosen = selected_by(layer, x, [30, 1, 4, 15], index_format=index_format)
    parameters = dict(layer.named_parameters())
    oracle = Oracle(layer.config, parameters)
    scores = oracle.index_scores(x)
    spread = float(scores[scores.isfinite()].std())
    check_selection(scores, chosen, 16, spread * (1e-5 if index_format == "fp32" else 0.15))
    naive = Oracle(layer.config, parameters, stored=torch.float32)
    assert_matches("out", found, oracle.run(x, chosen), naive.run(x, chosen))


def test_longcats_indexer_selects_the_first_and_the_last_tokens_always():
    config = DENSE | LONGCAT
    layer = layer_of(config)
    c = layer.config
    assert (c.init_tokens, c.local_tokens, c.index_rms_norm, c.selection) == (3, 6, True, "own")
    assert c.q_factor == c.latent_factor == 2**0.5
    (x,) = inputs(lengths=[50])
    found, chosen = selected_by(layer, x, [30, 1, 4, 15], index_format="fp32")
    oracle = Oracle(c, dict(layer.named_parameters()))
    scores = oracle.index_scores(x)
    spread = float(scores[scores.isfinite()].std())
    check_selection(scores, chosen, 16, spread * 1e-5)
    assert all({0, 1, 2, *range(p - 5, p + 1)} <= set(chosen[p]) for p in range(9, 50))
    naive = Oracle(c, dict(layer.named_parameters()), stored=torch.float32)
    assert_matches("out", found, oracle.run(x, chosen), naive.run(x, chosen))
    others = replace(c, init_tokens=0, local_tokens=0)
    assert not torch.equal(Oracle(others, dict(layer.named_parameters())).index_scores(x), scores)


def test_the_queries_of_the_indexer_are_fp8_where_its_cache_is():
    layer = layer_of(SPARSE)
    (x,) = inputs(lengths=[5])
    positions = torch.arange(5)
    residual = layer.q_a_layernorm(layer.q_a_proj(x))
    caches = [layer.indexer.allocate_index_cache(f, num_pages=1) for f in ("fp32", "fp8_token")]
    plain, fp8 = (layer.indexer(x, residual, positions, cache) for cache in caches)
    assert plain.q.dtype == torch.float32
    assert fp8.q.dtype == torch.float8_e4m3fn
    scaled = fp8.q.float() * fp8.weights[..., None]
    want = plain.q * plain.weights[..., None]
    assert float((scaled - want).norm() / want.norm()) < 0.05


def test_hadamard_is_orthonormal_and_changes_no_score():
    matrix = hadamard_matrix(16)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16), rtol=0, atol=1e-6)
    assert_same_bits("matrix", matrix, matrix.T.contiguous())
    assert sorted(set(matrix.flatten().tolist())) == [-0.25, 0.25]
    with pytest.raises(ValueError, match="index_head_dim must be a power of two"):
        MLAAttention(SPARSE | {"index_head_dim": 96})


def test_a_short_context_is_attended_whole_and_its_keys_are_cached():
    """Below top-k the layer is the dense one; beyond it finds the keys of the first steps."""
    layer = layer_of(SPARSE)
    dense = layer_of(DENSE)
    x = inputs(lengths=[16, 12])
    chunks = [(9, 10), (6, 1), (1, 1)]
    found = serve(layer, x, chunks)
    for a, b in zip(found, serve(dense, x, chunks), strict=True):
        assert_same_bits("out", a, b)
    (x,) = inputs(lengths=[40])
    split = serve(layer, [x], [(10,), (6,), (24,)])[0]
    whole = serve(layer, [x], [(40,)])[0]
    torch.testing.assert_close(split, whole, rtol=0, atol=2e-5)


def test_padding_where_the_host_does_not_know_the_lengths(monkeypatch):
    """Fewer keys than top-k, and no plan: the rest of a list is -1."""
    layer = layer_of(SPARSE)
    (x,) = inputs(lengths=[7])
    want = serve(layer, [x], [(7,)])[0]
    server = Server(layer, [7])
    batch = server.batch([7])
    monkeypatch.setattr("mlakit.layer.attention.values_visible", lambda tensor: False)
    rows = torch.empty(7, 16, dtype=torch.int32)
    found = layer(x, batch, index_cache=server.index_cache, rows=rows)
    assert (rows >= 0).sum(-1).tolist() == [1, 2, 3, 4, 5, 6, 7]
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)


def test_scores_in_blocks_select_the_same(monkeypatch):
    (x,) = inputs(lengths=[60])
    layer = layer_of(SPARSE)
    want, rows = selected_by(layer, x, [60])
    step = "mlakit.layer.attention.sparse_step"
    original = __import__("mlakit").sparse_step
    blocks = lambda *a, **k: original(*a, **k, max_score_bytes=4 * 64 * 7)  # noqa: E731
    monkeypatch.setattr(step, blocks)
    found, others = selected_by(layer, x, [60])
    assert others == rows
    assert_same_bits("out", found, want)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 4},
        {"index_topk_pattern": "FSSFSFSS"},
        {"indexer_types": ["full", "shared"] * 4},
    ],
)
def test_which_layers_have_an_indexer(fields):
    """As in transformers, whose config is also read as the dict of a config.json."""
    model = FAMILIES["glm_moe_dsa"]
    config = model.config(num_hidden_layers=8, **fields)
    want = ["own" if kind == "full" else "shared" for kind in config.indexer_types]
    plain = {**SPARSE, "model_type": "glm_moe_dsa", **fields}
    for source in (config, plain):
        assert [LayerConfig.from_config(source, n).selection for n in range(8)] == want
    assert LayerConfig.from_config(plain, 8).selection in ("own", "shared")
