"""Appending rows to a paged cache of two tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.compat.flashinfer import (
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from mlakit.tools.testing import assert_same_bits, poison
from tests.compat.flash_mla.inputs import padded
from tests.compat.flashinfer.inputs import E4M3, starts_of

KV_LENS, NEW, PAGE = (21, 0, 8, 3), (5, 0, 8, 1), 8
COUNTS = [3, 0, 1, 1]
PAGES = torch.tensor([6, 1, 4, 2, 5], dtype=torch.int32)
LAST = torch.tensor([5, 0, 8, 3], dtype=torch.int32)


def call(device: torch.device | str, dtype: torch.dtype, kpe: int = 16) -> dict[str, Any]:
    """13 of 14 rows of a step, the last of which is padding that is not stored."""
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(sum(NEW) + 2, width, generator=generator).to(dtype) for width in (64, kpe)]
    for rows in new:
        poison(rows[sum(NEW) :])
    caches = [poison(torch.empty(7, PAGE, width, dtype=dtype)) for width in (64, kpe)]
    indptr = starts_of(COUNTS)
    lens = get_seq_lens(indptr, LAST, PAGE)
    assert lens.tolist() == list(KV_LENS)
    batch_indices, positions = get_batch_indices_positions(starts_of(NEW), lens, sum(NEW) + 2)
    arguments = (*new, batch_indices, positions, *caches, PAGES, indptr, LAST)
    names = (
        *("append_ckv", "append_kpe", "batch_indices", "positions", "ckv_cache", "kpe_cache"),
        *("kv_indices", "kv_indptr", "kv_last_page_len"),
    )
    return {name: each.to(device) for name, each in zip(names, arguments, strict=True)}


def test_requests_and_positions_of_the_newest_tokens(device):
    lengths = starts_of(NEW).to(device), torch.tensor(KV_LENS).to(device)
    for spare in (0, 3):
        names = ("batch_indices", "positions")
        given = {n: torch.full((14 + spare,), 9, dtype=torch.int32, device=device) for n in names}
        got = get_batch_indices_positions(*lengths, 14 + spare, **given)
        assert got[0] is given["batch_indices"]
        assert got[1] is given["positions"]
        assert got[0].tolist() == [0] * 5 + [2] * 8 + [3] + [-1] * spare
        assert got[1].tolist() == [*range(16, 21), *range(8), 2] + [0] * spare
        for mine, other in zip(get_batch_indices_positions(*lengths, 14 + spare), got, strict=True):
            assert_same_bits("indices", mine, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, E4M3])
@pytest.mark.parametrize("kpe", [16, 0])
@pytest.mark.parametrize("is_padded", [False, True])
def test_rows_go_to_their_places_and_nothing_else_is_written(dtype, kpe, is_padded, device):
    arguments = call(device, dtype, kpe)
    if is_padded:
        for name in ("ckv_cache", "kpe_cache", "append_ckv", "append_kpe"):
            arguments[name] = padded(arguments[name])
    want = {name: arguments[name].clone() for name in ("ckv_cache", "kpe_cache")}
    token = 0
    for request, (length, new) in enumerate(zip(KV_LENS, NEW, strict=True)):
        for position in range(length - new, length):
            page = PAGES[starts_of(COUNTS)[request] + position // PAGE]
            for name, rows in (("ckv_cache", "append_ckv"), ("kpe_cache", "append_kpe")):
                as_bytes(want[name])[page, position % PAGE] = as_bytes(arguments[rows])[token]
            token += 1
    append_paged_mla_kv_cache(**arguments)
    for name, tensor in want.items():
        assert_same_bits(name, as_bytes(arguments[name]), as_bytes(tensor))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"ckv_cache": None}, TypeError, "ckv_cache must be a tensor, got NoneType"),
        ({"append_ckv": torch.zeros(16, 64)}, TypeError, "append_ckv must be bfloat16, got float3"),
        ({"append_kpe": torch.zeros(16, 8).bfloat16()}, ValueError, r"append_kpe.shape\[1\]"),
        ({"positions": torch.zeros(3).int()}, ValueError, r"positions.shape\[0\] \(tokens\)"),
        ({"kv_indptr": starts_of([1])}, ValueError, r"kv_indptr.shape\[0\] \(batch \+ 1\) must eq"),
        ({"kv_indices": PAGES[:0]}, ValueError, "kv_indices must not be empty"),
        ({"positions": torch.full((16,), 40)}, ValueError, r"positions\[0\] must lie in the pages"),
        (
            {"batch_indices": torch.full((16,), 4)},
            ValueError,
            "pages of its request, got 16 of",
        ),
        ({"kv_layout": "NHD"}, TypeError, "unexpected keyword argument 'kv_layout'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_written(change, kind, message):
    arguments = call("cpu", torch.bfloat16)
    before = arguments["ckv_cache"].clone()
    with pytest.raises(kind, match=message):
        append_paged_mla_kv_cache(**{**arguments, **change})
    assert_same_bits("ckv_cache", arguments["ckv_cache"], before)
