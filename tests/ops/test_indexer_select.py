"""`indexer_select` is `indexer_topk` of `indexer_logits`, looked up: bit for bit, in any blocks."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, RowShape, ops
from mlakit.cache import request_slots
from mlakit.model import masks
from mlakit.ops import physical_rows
from mlakit.tools.testing import assert_same_bits
from tests.ops.cases import KV_LENS, TOKENS, Call, select_call
from tests.ops.random_cases import problems_of

ROW_BYTES = 4 * 12  # of the scores of 9 columns, padded to 12


def in_steps(call: Call, backend: str) -> torch.Tensor:
    arguments = dict(call.arguments)
    k = arguments.pop("k")
    del arguments["max_score_bytes"]
    logits = ops.indexer_logits(**arguments, backend=backend)
    chosen = ops.indexer_topk(logits, k, backend=backend)
    table, starts = arguments["page_table"], arguments["q_starts"]
    return physical_rows(chosen, table, arguments["cache"].page_size, starts)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("queries", "mask"),
    [
        *((queries, masks.CAUSAL) for queries in (1, 2, 3, TOKENS - 1, TOKENS)),
        (3, masks.NULL),
        (2, masks.sliding_window_causal(3)),
    ],
    ids=str,
)
def test_blocks_change_no_bit(queries, mask, place):
    call = select_call(mask=mask, max_kv_len=9, max_score_bytes=queries * ROW_BYTES)
    call = call.on(place.device)
    (rows,) = call.run(backend=place.backend)
    assert_same_bits("rows", rows, in_steps(call, place.backend))


@pytest.mark.interpreted
def test_a_decode_step_selects_the_same_whatever_its_table_can_hold(place):
    call = select_call(max_kv_len=max(KV_LENS)).on(place.device)
    table = call.arguments["page_table"]
    wide = torch.full((len(table), 300), 2**30, dtype=torch.int32, device=place.device)
    wide[:, : table.shape[1]] = table
    (rows,) = call.run(backend=place.backend)
    others = {"page_table": wide, "max_kv_len": None, "max_score_bytes": 2**20}
    (of_capacity,) = call.run(backend=place.backend, **others)
    assert_same_bits("rows", of_capacity, rows)


@pytest.mark.interpreted
def test_the_first_and_the_last_keys_are_selected_whatever_their_scores(place):
    """A prompt of 9 tokens in blocks of 2 queries; with equal scores the earlier keys would win."""
    cache = PagedLatentCache.allocate(RowShape(4, 0), "fp32", num_pages=3, page_size=4)
    cache.payload.fill_(torch.nan)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    slots = request_slots(table, 4, 0, 0, 9)
    cache.layer(0).write(slots, torch.ones(9, 4))
    call = Call(
        ops.indexer_select,
        {
            "q": torch.ones(9, 1, 4),
            "weights": torch.ones(9, 1),
            "cache": cache,
            "page_table": table,
            "kv_lens": torch.tensor([9], dtype=torch.int32),
            "k": 4,
            "q_starts": torch.tensor([0, 9], dtype=torch.int32),
            "init_tokens": 1,
            "local_tokens": 2,
            "max_score_bytes": 2 * 12 * 4,
        },
    )
    (rows,) = call.on(place.device).run(backend=place.backend)
    chosen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    chosen += [sorted({0, 1, p - 1, p}) for p in range(4, 9)]  # key 1 is the best of the others
    wanted = torch.full((9, 4), -1, dtype=torch.int32)
    for row, keys in zip(wanted, chosen, strict=True):
        row[: len(keys)] = slots[torch.tensor(keys)].int()
    assert_same_bits("rows", rows.cpu(), wanted)


@pytest.mark.interpreted
def test_more_than_all_keys_are_all_keys(place):
    """−1 only at the end of a list, and as many rows as keys are visible."""
    (rows,) = select_call(k=40).on(place.device).run(backend=place.backend)
    found = (rows >= 0).cpu()
    assert found.sum(1).tolist() == [4, 5, 7, 8, 9, 1, 4]
    assert torch.equal(found, found.sort(dim=1, descending=True, stable=True).values)
    for row in rows.cpu():
        used = row[row >= 0]
        assert len(used.unique()) == len(used)


@pytest.mark.slow
@problems_of("indexer_select")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))
