"""The oracles of sparse attention and of the indexer that chooses its rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mlakit import reference
from mlakit.model.masks import Mask
from tests.reference.inputs import (
    INF,
    SCALE,
    SINK,
    assert_same,
    by_mask,
    make_batch,
    normal,
    visible_keys,
)


@by_mask
@pytest.mark.parametrize("sink", [None, SINK], ids=["plain", "sink"])
def test_sparse_over_all_visible_rows_equals_decode(mask: Mask, sink: Tensor | None) -> None:
    """Rows lie shuffled in a pool whose other rows are NaN; lists hold invalid entries too."""
    batch = make_batch()
    given = batch.absorbed()
    cached = torch.cat(given["rows"])
    generator = torch.Generator().manual_seed(7)
    where = torch.randperm(2 * len(cached), generator=generator)[: len(cached)]
    pool = torch.full((2 * len(cached), cached.shape[1]), torch.nan, dtype=torch.float64)
    pool[where] = cached
    invalid = torch.tensor([-1, len(pool), -(2**31), 2**31 - 1], dtype=torch.int32)
    lists = visible_keys(batch, mask)
    rows = torch.empty(len(lists), max(map(len, lists)) + 4, dtype=torch.int32)
    for row, keys in zip(rows, lists, strict=True):
        slots = torch.cat([where[keys].int(), invalid.repeat(4)])[: len(row)]
        row.copy_(slots[torch.randperm(len(row), generator=generator)])
    options = {"softmax_scale": SCALE, "sink": sink}
    out, lse, max_logits = reference.sparse_mla(
        given["q"], pool, rows, v_width=given["v_width"], **options
    )
    exact_out, exact_lse = reference.mla_decode(**given, mask=mask, **options)
    assert_same(out, exact_out)
    assert_same(lse, exact_lse)
    for token, keys in enumerate(lists):
        scores = given["q"][token] @ cached[keys].T * SCALE
        want = scores.max(-1).values if keys else torch.full((3,), -INF)
        assert_same(max_logits[token], want)


def sparse_by_hand(q: Tensor, attended: Tensor, sink: Tensor, v_width: int) -> Tensor:
    """One token's output: exponentials over their sum and the sink's."""
    exponentials = (q @ attended.T * SCALE).exp()
    return exponentials @ attended[:, :v_width] / (exponentials.sum(-1) + sink.exp())[:, None]


def test_sparse_edge_cases() -> None:
    pool = normal(12, 6, seed=1)
    read = [2, 3, 7]
    unread = [row for row in range(12) if row not in read]
    pool[unread] = torch.nan
    slots = [
        ([2, 3, 5, 6], 2, [2, 3]),  # valid rows past the length are not read
        ([2, -1, 7, -1], 4, [2, 7]),  # -1 in the middle
        ([-1, 12, 7, 3], 4, [7, 3]),  # one past the last row
        ([3, 3, 2, 3], 4, [3, 3, 2, 3]),  # duplicates count as often as they are listed
        ([7, 2, 3, 0], 3, [3, 7, 2]),  # the order does not matter
        ([2, 3, 7, 0], 0, []),  # nothing listed
        ([-1, -1, -7, 99], 4, []),  # nothing valid
        ([2, 3, 7, 2], 9, [2, 3, 7, 2]),  # a length beyond the list
    ]
    rows = torch.tensor([slot[0] for slot in slots])
    lens = torch.tensor([slot[1] for slot in slots], dtype=torch.int32)
    q = normal(len(slots), 3, 6, seed=2)
    for sink in (torch.full((3,), -INF, dtype=torch.float64), SINK):
        out, lse, max_logits = reference.sparse_mla(
            q, pool, rows, softmax_scale=SCALE, v_width=4, topk_lens=lens, sink=sink
        )
        for token, (_, _, attended) in enumerate(slots):
            if not attended:
                assert torch.equal(out[token], torch.zeros(3, 4).double())
                assert torch.equal(lse[token], torch.full((3,), -INF).double())
                assert torch.equal(max_logits[token], lse[token])
                continue
            scores = q[token] @ pool[attended].T * SCALE
            assert_same(out[token], sparse_by_hand(q[token], pool[attended], sink, 4))
            assert_same(lse[token], scores.exp().sum(-1).log())
            assert_same(max_logits[token], scores.max(-1).values)


def test_sparse_extra_rows_join_the_same_softmax() -> None:
    pool, extra_pool = normal(5, 6, seed=1), normal(3, 6, seed=2)
    extra_pool[1] = torch.nan
    rows, extra_rows = torch.tensor([[4, -1, 0], [9, 9, 9]]), torch.tensor([[2, 1], [0, 2]])
    q = normal(2, 3, 6, seed=3)
    out, lse, max_logits = reference.sparse_mla(
        q,
        pool,
        rows,
        softmax_scale=SCALE,
        v_width=6,
        sink=SINK,
        extra=(extra_pool, extra_rows, [1, 2]),
    )
    attended = [torch.stack([pool[4], pool[0], extra_pool[2]]), extra_pool[[0, 2]]]
    for token, joined in enumerate(attended):
        scores = q[token] @ joined.T * SCALE
        assert_same(out[token], sparse_by_hand(q[token], joined, SINK, 6))
        assert_same(lse[token], scores.exp().sum(-1).log())
        assert_same(max_logits[token], scores.max(-1).values)


def test_indexer_takes_relu_before_the_weight() -> None:
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[2.0, -3.0], [2.0, 1.0], [-1.0, -1.0]])
    logits = reference.indexer_logits(q, torch.tensor([[1.0, -5.0]]), [keys], [1])
    assert logits.tolist() == [[2.0, -3.0, 0.0]]


def test_indexer_logits_of_a_ragged_batch() -> None:
    q_lens, kv_lens = (2, 0, 1, 3), (5, 2, 4, 2)
    q, weights = normal(6, 4, 3, seed=1), normal(6, 4, seed=2)
    keys = [normal(kv_len, 3, seed=kv_len) for kv_len in kv_lens]
    logits = reference.indexer_logits(q, weights, keys, q_lens)
    exact = torch.full((6, 5), -INF, dtype=torch.float64)
    owners = [(0, 3), (0, 4), (2, 3), (3, -1), (3, 0), (3, 1)]
    for token, (request, position) in enumerate(owners):
        for k in range(position + 1):
            dots = [float(q[token, h] @ keys[request][k]) for h in range(4)]
            exact[token, k] = sum(
                float(w) * max(dot, 0.0) for w, dot in zip(weights[token], dots, strict=True)
            )
    assert_same(logits, exact)


def test_topk_orders_ties_nan_and_infinities() -> None:
    nan = math.nan
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, -2.0, 3.0],
            [-INF, 0.0, -INF, -0.0, -INF],
            [INF, nan, 5.0, nan, -INF],
            [-INF, -INF, -INF, -INF, -INF],
        ]
    )
    selected = reference.indexer_topk(logits, 4)
    assert selected.dtype == torch.int32
    assert selected.tolist() == [[0, 1, 2, 4], [1, 3, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]]
    assert reference.indexer_topk(logits, 2).tolist() == [[1, 2], [1, 3], [1, 3], [-1, -1]]
    assert reference.indexer_topk(logits, 7)[0].tolist() == [0, 1, 2, 3, 4, -1, -1]


def test_topk_counts_columns_from_the_start_of_the_row() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 9.0], [9.0, 9.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    starts_, ends = torch.tensor([1, 2, 3]), torch.tensor([3, 4, 3])
    selected = reference.indexer_topk(logits, 2, row_starts=starts_, row_ends=ends)
    assert selected.tolist() == [[0, 1], [0, 1], [-1, -1]]


def test_topk_of_distinct_logits_is_torch_topk() -> None:
    logits = normal(6, 50, seed=1)
    expected = logits.topk(20).indices.sort(dim=1).values
    assert torch.equal(reference.indexer_topk(logits, 20).long(), expected)


def test_physical_rows_of_listed_positions() -> None:
    """Two requests, one of which has no query; the last query is padding."""
    slots = [torch.tensor([90, 91, 92]), torch.tensor([40, -1, 27])]
    tokens = torch.tensor([[0, 1, 2], [2, 3, -1], [0, 0, 0]])
    rows = reference.physical_rows(tokens, slots, (0, 2))
    assert rows.dtype == torch.int32
    assert rows.tolist() == [[40, -1, 27], [27, -1, -1], [-1, -1, -1]]


def test_selected_rows_are_those_of_the_best_tokens() -> None:
    """Two requests, one of which has no query; the second's queries see four and five keys."""
    q, weights = torch.ones(2, 1, 1), torch.tensor([[1.0], [-1.0]])
    keys = [torch.full((3, 1), torch.nan), torch.tensor([[2.0], [7.0], [7.0], [1.0], [9.0]])]
    slots = [torch.tensor([90, 91, 92]), torch.tensor([40, 13, 27, 8, 66])]
    rows = reference.indexer_select(q, weights, keys, slots, (0, 2), 2)
    assert rows.dtype == torch.int32
    assert rows.tolist() == [[13, 27], [40, 8]]
    more = reference.indexer_select(q, weights, keys, slots, (0, 2), 5)
    assert more.tolist() == [[40, 13, 27, 8, -1], [40, 13, 27, 8, 66]]
