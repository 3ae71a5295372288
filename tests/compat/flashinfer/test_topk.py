"""Top-k selections, against a sort in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.compat.flashinfer import (
    top_k,
    top_k_page_table_transform,
    top_k_ragged_transform,
)
from mlakit.compat.flashinfer.topk import TopKTieBreak
from mlakit.dispatch.checks import UnsupportedError
from mlakit.tools.testing import poison

ROWS, COLUMNS, K = 6, 90, 7
STARTS = torch.tensor([0, 3, 90, 11, 40, 8], dtype=torch.int32)
LENGTHS = torch.tensor([90, 5, 0, 40, 7, 1], dtype=torch.int32)
BATCH = torch.tensor([1, 0, 0, 1, 1, 0], dtype=torch.int32)


def scores(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scores with ties in every row."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, COLUMNS, generator=generator).mul(4).round().to(dtype).to(device)


def chosen(given: Tensor, starts: Tensor, lengths: Tensor) -> list[list[int]]:
    """Columns of each row counted from its start: of equal scores the lower, in their order."""
    selected = []
    for row, start, length in zip(given.cpu(), starts.tolist(), lengths.tolist(), strict=True):
        own = row[start : start + length].tolist()
        best = sorted(sorted(range(length), key=lambda i: (-own[i], i))[:K])
        selected.append(best + [-1] * (K - len(best)))
    return selected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_the_largest_elements(dtype, is_sorted, device):
    given = scores(device, dtype)
    values, indices = top_k(given, K, sorted=is_sorted, tie_break=TopKTieBreak.SMALL)
    assert values.dtype == dtype
    assert indices.dtype == torch.int64
    assert torch.equal(values, given.gather(1, indices))
    whole = torch.zeros(ROWS).int(), torch.full((ROWS,), COLUMNS)
    assert indices.sort(1).values.tolist() == chosen(given, *whole)
    if is_sorted:
        assert torch.equal(values, given.topk(K).values)


def test_minus_infinity_is_not_selected(device):
    given = scores(device)
    given[2, 3:] = -torch.inf
    for is_sorted in (False, True):
        values, indices = top_k(given, K, is_sorted)
        assert indices[2].tolist()[3:] == [-1] * 4
        assert torch.isneginf(values[2, 3:]).all()


def page_table(page_size: int) -> Tensor:
    return torch.randperm(2 * 200).view(2, 200)[:, : 180 // page_size + 60].int()


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("has_batch", [False, True])
def test_cache_rows_of_the_largest_scores(page_size, has_starts, has_batch, device):
    given, table = scores(device), page_table(page_size)
    options: dict[str, Any] = {"page_size": page_size}
    starts, batch = torch.zeros(ROWS).int(), BATCH
    table_starts = starts
    if has_starts:
        starts = STARTS
        table_starts = torch.arange(ROWS).int() if page_size > 1 else starts
        options["row_starts"] = starts.to(device)
        if page_size > 1:
            options["page_table_row_starts"] = table_starts.to(device)
    if has_batch:
        options["row_to_batch"] = BATCH.to(device)
    else:
        batch, table = torch.arange(ROWS).int(), table.repeat(3, 1)
    lengths = LENGTHS.minimum(COLUMNS - starts)
    want, raw = [], chosen(given, starts, lengths)
    for row, columns in enumerate(raw):
        pages = table[batch[row], table_starts[row] :].tolist()
        want.append(
            [c if c < 0 else pages[c // page_size] * page_size + c % page_size for c in columns]
        )
    out, out_raw = (poison(torch.empty(ROWS, K, dtype=torch.int32, device=device)) for _ in "ab")
    call = given, table.to(device), lengths.to(device), K
    got = top_k_page_table_transform(*call, **options, out=out, out_raw_indices=out_raw)
    assert got is out
    assert got.tolist() == want
    assert out_raw.tolist() == raw
    again = top_k_page_table_transform(*call, **options)
    assert again.dtype == torch.int32
    assert torch.equal(again, got)


def test_columns_plus_offsets(device):
    given = scores(device)
    offsets = torch.arange(ROWS).int() * 1000
    lengths = LENGTHS.minimum(COLUMNS - STARTS)
    got = top_k_ragged_transform(
        given, offsets.to(device), lengths.to(device), K, row_starts=STARTS.to(device)
    )
    raw = torch.tensor(chosen(given, STARTS, lengths))
    assert got.dtype == torch.int32
    assert got.cpu().tolist() == torch.where(raw < 0, raw, raw + offsets[:, None]).tolist()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"tie_break": TopKTieBreak.LARGE}, UnsupportedError, "tie_break must be NONE or SMALL"),
        ({"input": scores("cpu").double()}, TypeError, "input must be bfloat16 or"),
        ({"lengths": LENGTHS[1:]}, ValueError, r"lengths.shape\[0\] \(rows\) must equal input"),
        ({"lengths": LENGTHS + 90}, ValueError, "must not exceed the columns of logits, 90"),
        ({"page_size": 0}, ValueError, "page_size must be at least 1"),
        ({"row_starts": STARTS * 0, "page_size": 2}, ValueError, "page_table_row_starts must be g"),
        ({"src_page_table": page_table(1)}, ValueError, "must equal the rows of input, 6, got 2"),
        ({"out": torch.zeros(6, 7)}, TypeError, "out must be int32, got float32"),
        ({"out_raw_indices": torch.zeros(6, 6).int()}, ValueError, "out_raw_indices.shape.1."),
        ({"sorted": True}, TypeError, "unexpected keyword argument 'sorted'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(change, kind, message):
    good = {
        "input": scores("cpu"),
        "src_page_table": page_table(1).repeat(3, 1),
        "lengths": LENGTHS,
        "k": K,
    }
    with pytest.raises(kind, match=message):
        top_k_page_table_transform(**{**good, **change})


def test_k_is_at_most_the_columns():
    with pytest.raises(ValueError, match="k must not exceed the 90 columns of input, got 91"):
        top_k(scores("cpu"), 91)
