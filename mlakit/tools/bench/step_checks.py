"""Compares whole steps with the oracles of `mlakit.reference.steps`: rows, selections, outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import request_slots
from mlakit.formats import RowCodec
from mlakit.ops import indexer_logits, physical_rows
from mlakit.reference.steps import (
    LayerOracle,
    StepOracle,
    StepQuery,
    StepWeights,
    naive_prefill_output,
)
from mlakit.steps import CachedBatch, IndexInputs, LayerWeights
from mlakit.tools.bench import correctness, gpu
from mlakit.tools.bench.indexer import scored_queries
from mlakit.tools.bench.pool import clear_new_rows
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.bench.step_stages import LayerInputs
from mlakit.tools.testing import (
    MERGED_ROUNDINGS,
    STORED_ROUNDINGS,
    assert_matches,
    assert_same_bits,
)

MAX_CHECKED = 2  # queries per request


def oracle_weights(weights: LayerWeights) -> StepWeights:
    return StepWeights(
        w_uk=weights.up.w_uk_t.weight.mT,
        w_uv=weights.up.w_uv.weight,
        gamma=weights.gamma,
        freqs=weights.freqs,
        softmax_scale=weights.softmax_scale,
        epsilon=weights.epsilon,
        rope=weights.rope,
    )


def assert_output_correct(
    out: Tensor, token: int, query: StepQuery, weights: LayerWeights, *, is_decode: bool
) -> None:
    """Assert that row `token` of a step's output matches the oracle of its branch."""
    own = oracle_weights(weights)
    exact = StepOracle(own, is_exact=True).output(query)
    if is_decode:
        naive = StepOracle(own, is_exact=False).output(query)
    else:
        naive = naive_prefill_output(query, own)
    is_merged = not is_decode and query.cached > 0  # of the context and of the new tokens
    roundings = MERGED_ROUNDINGS if is_merged else STORED_ROUNDINGS
    own_out = out[token : token + 1]
    assert_matches(f"out of token {token}", own_out, exact, naive, roundings=roundings)


def assert_row_appended(query: StepQuery, weights: LayerWeights, codec: RowCodec) -> None:
    """Assert that the token's own row, the last visible one, is its latent normed and rotated."""
    given = query.q[None], query.kv[None], [query.position]
    exact, naive = (
        StepOracle(oracle_weights(weights), is_exact=is_exact).absorb(*given)[1]
        for is_exact in (True, False)
    )
    stored = codec.decode(*codec.encode(naive))
    assert_matches(f"row {query.position}", query.rows[-1:].float(), exact, stored)


def step_queries(
    lengths: Batch, q: Tensor, kv: Tensor, batch: CachedBatch
) -> Iterator[tuple[int, int, StepQuery]]:
    """Some new tokens of a step: (request, token, its query for the oracle)."""
    layer, page_size = batch.cache.layer(0), batch.cache.page_size
    for request in lengths.checked_requests:
        q_len = lengths.q_lens[request]
        before = lengths.kv_lens[request] - q_len
        for place in correctness.evenly_spaced(q_len, MAX_CHECKED):
            token, seen = lengths.starts[request] + place, before + place + 1
            slots = request_slots(batch.page_table, page_size, request, 0, seen)
            rows = layer.read(slots, torch.float64)
            query = StepQuery(q[token], kv[token], before + place, rows, before)
            yield request, token, query


def check_sparse_step(
    lengths: Batch,
    out: Tensor,
    chosen: Tensor,
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    index: IndexInputs,
) -> None:
    """Compare some queries of `sparse_step`: appended rows and keys, selection, output.

    chosen  [tokens, topk] the rows that the step selected
    """
    table, page_size = batch.page_table, batch.cache.page_size
    assert isinstance(table, Tensor)
    scored = (index.q, index.weights, index.cache, table)
    columns, topk = max(lengths.kv_lens), chosen.shape[1]
    scores = indexer_logits(*scored, batch.kv_lens, q_starts=batch.q_starts, max_kv_len=columns)
    latents, keys = batch.cache.layer(0), index.cache.layer(0)
    for each in scored_queries(lengths, *scored):
        own, request, seen = slice(each.token, each.token + 1), each.request, len(each.keys)
        each.assert_correct(scores)
        best = reference.indexer_topk(scores[own], topk).to(table.device)
        want = physical_rows(best, table[request : request + 1], page_size)
        assert_same_bits(f"rows of {each.label}", chosen[own], want)
        slots = request_slots(table, page_size, request, seen - 1, seen)
        place = (q[each.token], kv[each.token], seen - 1)
        appended = StepQuery(*place, latents.read(slots, torch.float64), seen - 1)
        assert_row_appended(appended, weights, latents.codec)
        power = index.power_of_two_scales
        stored = keys.codec.decode(*keys.codec.encode(index.keys[own], power_of_two=power))
        assert_same_bits(f"index key of {each.label}", keys.read(slots), stored)
        selected = latents.read(want[want >= 0].long(), torch.float64)
        attended = StepQuery(*place, selected, seen - 1)
        assert_output_correct(out, each.token, attended, weights, is_decode=True)


def check_layer(inputs: LayerInputs, lengths: Batch) -> None:
    """Compare the last token of some requests: its row, its key, its selection, its output."""
    batch, layer = inputs.batch, inputs.layer
    caches = [batch.cache] if inputs.index_cache is None else [batch.cache, inputs.index_cache]
    clear_new_rows(batch, len(inputs.x), *caches)
    chosen = None
    if layer.indexer is not None:
        chosen = gpu.int32([[-1] * layer.indexer.topk] * len(inputs.x))
    out = inputs.run(rows=chosen)
    requests = lengths.checked_requests
    tokens = [lengths.starts[request + 1] - 1 for request in requests]
    positions = [lengths.kv_lens[request] - 1 for request in requests]
    runs = [LayerOracle(layer, is_exact=is_exact) for is_exact in (True, False)]
    exact, naive = (each.project(inputs.x[tokens], positions) for each in runs)
    latents = batch.cache.layer(0)
    for i, (request, token) in enumerate(zip(requests, tokens, strict=True)):
        label, own = f"token {token}", slice(i, i + 1)
        slots = request_slots(batch.page_table, batch.cache.page_size, request, 0, positions[i] + 1)
        stored = latents.codec.decode(*latents.codec.encode(naive.rows[own]))
        row = latents.read(slots[-1:], torch.float32)
        assert_matches(f"row of {label}", row, exact.rows[own], stored)
        if chosen is not None:
            assert exact.index is not None
            assert naive.index is not None
            assert inputs.index_cache is not None
            index = inputs.index_cache.layer(0)
            codes = index.codec.encode(naive.index.keys[own], power_of_two=True)
            key, want = index.read(slots[-1:]), exact.index.keys[own]
            assert_matches(f"index key of {label}", key, want, index.codec.decode(*codes))
            keys = index.read(slots, torch.float64)
            scores = [each.scores(i, keys) for each in (exact.index, naive.index)]
            selected = chosen[token]
            check_selection(label, selected, slots, scores[0], scores[1].double())
            slots = selected[selected >= 0].long()
        rows = latents.read(slots, torch.float64)
        wanted, plain = (
            oracle.result(each.q[i], rows)
            for oracle, each in zip(runs, (exact, naive), strict=True)
        )
        assert_matches(f"out of {label}", out[token : token + 1], wanted, plain)


def check_selection(
    label: str, selected: Tensor, slots: Tensor, exact: Tensor, naive: Tensor
) -> None:
    """Assert that no token that is left out is better than a selected one.

    Scores may be wrong by twice the largest error of the naive scores: FP8 queries and roundings
    swap tokens with nearly equal scores.
    """
    own = selected[selected >= 0].long()
    want = min(len(selected), len(slots))
    assert len(own) == want, f"{label} selects {len(own)} rows, want {want}"
    is_selected = torch.isin(slots, own)
    assert int(is_selected.sum()) == want, f"{label} selects rows twice or of other requests"
    if want < len(slots):
        error = float((naive - exact).abs().max())
        excess = float(exact[~is_selected].max() - exact[is_selected].min())
        must = f"want at most {2 * error:.2e}"
        assert excess <= 2 * error, f"{label} leaves out a score better by {excess:.2e}, {must}"
