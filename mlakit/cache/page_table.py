"""Page tables: the slots of tokens, and the requests of ragged batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

PageTable: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""int32 [batch, max_pages] page ids; or (kv_starts [batch + 1], slots), one flat list of slots."""


def from_host(values: Sequence[int] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host values as a tensor on `device`; the copy to a GPU does not block the host."""
    host = torch.as_tensor(values, dtype=dtype, device="cpu")  # ignores torch's default device
    if device.type != "cuda" or not len(host):
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def capacity_of(page_table: PageTable, page_size: int) -> int:
    """Return the most tokens that a request of this page table can have."""
    if isinstance(page_table, tuple):
        return page_table[1].shape[0]
    return page_table.shape[1] * page_size


def request_slots(
    page_table: PageTable, page_size: int, request: int, first: int, last: int
) -> Tensor:
    """Return int64 slots of tokens [first, last) of one request."""
    if isinstance(page_table, tuple):
        starts, flat = page_table
        start = int(starts[request])
        return flat[start + first : start + last].long()
    token = torch.arange(first, last, device=page_table.device)
    # reads only the pages of these tokens: later entries may be garbage
    return page_table[request, token // page_size].long() * page_size + token % page_size


def token_slots(page_table: PageTable, page_size: int, request: Tensor, position: Tensor) -> Tensor:
    """Return int64 slots of tokens given by their request and position, both int64 [tokens]."""
    if isinstance(page_table, tuple):
        starts, flat = page_table
        return flat[starts.long()[request] + position].long()
    page = page_table[request, position // page_size].long()
    return page * page_size + position % page_size


def token_requests(q_starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The request of each token of a ragged batch, and its index within the request (int64)."""
    starts = q_starts.long()
    token = torch.arange(num_tokens, device=starts.device)
    # the last start ≤ token: this skips empty requests
    request = torch.searchsorted(starts, token, right=True) - 1
    return request, token - starts[request]


def token_positions(kv_lens: Tensor, q_starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The request of each new token of a ragged batch, and its position in the request (int64).

    kv_lens  [batch] tokens of each request, including the new ones, which are its newest
    """
    request, index = token_requests(q_starts, num_tokens)
    first = kv_lens.long() - q_starts.long().diff()
    return request, first[request] + index


def select_requests(
    page_table: PageTable, requests: Sequence[int], tokens: Sequence[int] | None = None
) -> PageTable:
    """The page table of some requests of a batch, in the given order.

    tokens  of each selected request; a flat table keeps only these. None keeps all, and
            synchronises with a GPU to read the bounds
    """
    if not isinstance(page_table, tuple):
        index = from_host(list(requests), torch.int64, page_table.device)
        return page_table.index_select(0, index)
    starts, slots = page_table
    selected = from_host(list(requests), torch.int64, starts.device)
    if tokens is None:
        tokens = starts.diff()[selected].tolist()
    new_starts = from_host([0, *accumulate(tokens)], starts.dtype, starts.device)
    request, index = token_requests(new_starts, sum(tokens))
    return new_starts, slots[starts.long()[selected[request]] + index]


def range_slots(
    page_table: PageTable,
    page_size: int,
    first: Sequence[int],
    last: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """(int64 slots of tokens [first, last) of every request, kv_starts int32 [batch + 1])."""
    counts = [high - low for low, high in zip(first, last, strict=True)]
    kv_starts = from_host([0, *accumulate(counts)], torch.int32, device)
    request, index = token_requests(kv_starts, sum(counts))
    position = from_host(list(first), torch.int64, device)[request] + index
    return token_slots(page_table, page_size, request, position), kv_starts
