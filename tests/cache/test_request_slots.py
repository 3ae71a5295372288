"""Which row of a pool the token of a request has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlakit.cache import request_slots, select_requests, token_requests, token_slots
from mlakit.tools.testing import NEVER_A_PAGE, assert_same_bits, shuffled_pages


def slots_by_hand(table: Tensor, page_size: int, request: int, tokens: range) -> list[int]:
    return [int(table[request, t // page_size]) * page_size + t % page_size for t in tokens]


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_request_slots_follow_the_page_table(page_size, dtype, generator):
    lengths = [0, 1, page_size, page_size + 1, 5 * page_size]
    counts = [-(-length // page_size) for length in lengths]
    # entries past a request's last page are NEVER_A_PAGE: read, they would give a slot
    table = shuffled_pages(len(lengths), counts, 2 * sum(counts), generator).to(dtype)
    assert (table == NEVER_A_PAGE).any()
    for request, length in enumerate(lengths):
        slots = request_slots(table, page_size, request, 0, length)
        assert slots.dtype == torch.int64
        assert slots.tolist() == slots_by_hand(table, page_size, request, range(length))


def test_request_slots_of_a_span_do_not_look_at_other_pages():
    table = torch.full((2, 6), NEVER_A_PAGE, dtype=torch.int32)
    table[1, 2:4] = torch.tensor([7, 1], dtype=torch.int32)
    assert request_slots(table, 4, 1, 9, 14).tolist() == [29, 30, 31, 4, 5]
    assert request_slots(table, 4, 0, 0, 0).tolist() == []
    assert request_slots(table[:, :0], 4, 1, 0, 0).tolist() == []


def test_slots_beyond_int32_keep_their_value():
    table = torch.tensor([[40_000_000]], dtype=torch.int32)
    expected = 40_000_000 * 64 + 5  # above 2**31
    assert request_slots(table, 64, 0, 5, 6).tolist() == [expected]
    here = torch.tensor([0])
    assert token_slots(table, 64, here, torch.tensor([5])).tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_flat_table_lists_the_rows_of_all_requests(dtype):
    starts = torch.tensor([0, 3, 3, 5], dtype=dtype)
    garbage = NEVER_A_PAGE
    flat = torch.tensor([9, 4, 6, 2, 8, garbage, garbage], dtype=dtype)
    spans = [(0, 0, 3), (0, 1, 2), (1, 0, 0), (2, 0, 2), (2, 1, 2)]
    found = [request_slots((starts, flat), 1, *span) for span in spans]
    assert [slots.tolist() for slots in found] == [[9, 4, 6], [4], [], [2, 8], [8]]
    assert all(slots.dtype == torch.int64 for slots in found)

    request, position = torch.tensor([2, 0, 0]), torch.tensor([1, 2, 0])
    slots = token_slots((starts, flat), 1, request, position)
    assert (slots.dtype, slots.tolist()) == (torch.int64, [8, 6, 9])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_requests_are_selected_from_a_flat_table(dtype, device):
    starts = torch.tensor([0, 3, 3, 5], dtype=dtype, device=device)
    flat = torch.tensor([9, 4, 6, 2, 8, NEVER_A_PAGE], dtype=dtype, device=device)
    for tokens, rows in ((None, [2, 8, 9, 4, 6]), ([1, 0, 2], [2, 9, 4])):
        new_starts, slots = select_requests((starts, flat), [2, 1, 0], tokens)
        assert (new_starts.dtype, slots.dtype) == (dtype, dtype)
        counts = tokens or [2, 0, 3]
        assert new_starts.diff().tolist() == counts
        assert slots.tolist() == rows
    new_starts, slots = select_requests((starts, flat), [])
    assert (new_starts.tolist(), slots.tolist()) == ([0], [])


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_token_slots_are_the_request_slots_of_single_tokens(page_size, generator):
    cached, new = [0, 2, 130, 7], [4, 0, 3, 1]
    counts = [
        -(-(before + tokens) // page_size) for before, tokens in zip(cached, new, strict=True)
    ]
    table = shuffled_pages(4, counts, 2 * sum(counts), generator)
    request, index = token_requests(torch.tensor([0, 4, 4, 7, 8]), 8)
    slots = token_slots(table, page_size, request, torch.tensor(cached)[request] + index)
    expected = [
        request_slots(table, page_size, b, before, before + tokens)
        for b, (before, tokens) in enumerate(zip(cached, new, strict=True))
    ]
    assert_same_bits("slots", slots, torch.cat(expected))


@pytest.mark.parametrize(
    ("starts", "requests", "indices"),
    [
        ([0, 2, 5], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2]),
        ([0, 0, 0, 2, 2, 3, 3], [2, 2, 4], [0, 1, 0]),  # empty first, in between, last
        ([0, 0, 0], [], []),
        ([0], [], []),
        ([0, 1], [0], [0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_token_requests_pass_over_empty_requests(starts, requests, indices, dtype, device):
    q_starts = torch.tensor(starts, dtype=dtype, device=device)
    request, index = token_requests(q_starts, starts[-1])
    assert (request.tolist(), index.tolist()) == (requests, indices)
    assert request.dtype == index.dtype == torch.int64
