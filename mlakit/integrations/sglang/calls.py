"""SGLang's tensors into mlakit's ops. Nothing here imports SGLang.

key_buffer    [slots, 1, row]: the rows of one layer; slot = page · page_size + offset
req_to_token  [requests of the pool, context length] int32: the slot of every token
seq_lens      [requests] int32 or int64, this step's tokens included
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import mlakit
from mlakit import PagedLatentCache
from mlakit.cache.page_table import token_positions
from mlakit.integrations.steps import DecodeBatch, starts_of


def paged(key_buffer: Tensor, page_size: int) -> Tensor:
    """The rows of a layer as [pages, page_size, row], in the same memory."""
    slots, _, width = key_buffer.shape
    pages = slots // page_size
    rows = key_buffer.view(torch.uint8) if key_buffer.dtype.itemsize == 1 else key_buffer
    return rows[: pages * page_size].view(pages, page_size, width)


def page_table(req_to_token: Tensor, requests: Tensor, page_size: int, tokens: int) -> Tensor:
    """Return [requests, pages] int32 for the first `tokens` tokens of each request.

    The first slot of a page is a multiple of page_size. Entries past a request's last page are
    anything. No length is read: a CUDA graph can hold the call.
    """
    first_slots = req_to_token[:, :tokens:page_size].index_select(0, requests)
    return first_slots if page_size == 1 else first_slots // page_size


@dataclass
class Step:
    """The metadata that all layers of one step share."""

    batch: DecodeBatch
    page_size: int
    max_kv_len: int  # a bound on all lengths that the host knows
    num_tokens: int  # queries of all requests
    all_rows: Tensor | None = None  # see `visible_rows`

    @property
    def q_starts(self) -> Tensor:
        """The first query token of each request of an extend step, [requests + 1] int32."""
        if self.batch.q_starts is None:
            raise ValueError("Step.q_starts: a decode step has one query per request")
        return self.batch.q_starts

    @property
    def kv_starts(self) -> Tensor:
        """[requests + 1] int32 among the keys of all requests."""
        return starts_of(self.batch.kv_lens)


def decode_step(
    req_to_token: Tensor, requests: Tensor, seq_lens: Tensor, page_size: int, max_kv_len: int
) -> Step:
    """Prepare a step with one query per request."""
    table = page_table(req_to_token, requests, page_size, max_kv_len)
    return Step(DecodeBatch(table, seq_lens.to(torch.int32)), page_size, max_kv_len, len(requests))


def window_step(
    req_to_token: Tensor,
    requests: Tensor,
    seq_lens: Tensor,
    page_size: int,
    max_kv_len: int,
    width: int,
) -> Step:
    """The newest `width` tokens of each request; of those that fill up a graph there may be fewer,
    whose queries then see nothing."""
    table = page_table(req_to_token, requests, page_size, max_kv_len)
    count = len(requests)
    q_starts = torch.arange(count + 1, dtype=torch.int32, device=seq_lens.device) * width
    batch = DecodeBatch(table, seq_lens.to(torch.int32), q_starts)
    return Step(batch, page_size, max_kv_len, count * width)


def extend_step(
    req_to_token: Tensor,
    requests: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    page_size: int,
    max_kv_len: int,
    num_tokens: int,
) -> Step:
    """The newest extend_lens tokens of each request."""
    table = page_table(req_to_token, requests, page_size, max_kv_len)
    batch = DecodeBatch(table, seq_lens.to(torch.int32), starts_of(extend_lens))
    return Step(batch, page_size, max_kv_len, num_tokens)


def visible_lens(step: Step) -> Tensor:
    """Return [tokens] int32: how many tokens each query sees, itself included."""
    if step.batch.q_starts is None:
        return step.batch.kv_lens
    _, position = token_positions(step.batch.kv_lens, step.batch.q_starts, step.num_tokens)
    return (position + 1).to(torch.int32)


def visible_rows(step: Step, k: int) -> Tensor:
    """Return [tokens, k] int32: the rows of all tokens that a query sees, at most k; −1 after them.

    Every layer of a step has the same ones, so that they are made once.
    """
    if step.all_rows is None:
        lens = visible_lens(step)
        position = torch.arange(k, dtype=torch.int32, device=lens.device)
        tokens = torch.where(position < lens[:, None], position, -1)
        step.all_rows = mlakit.physical_rows(
            tokens, step.batch.block_table, step.page_size, step.batch.q_starts
        )
    return step.all_rows


def select_rows(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    step: Step,
    k: int,
    out: Tensor | None = None,
    always_selected: tuple[int, int] = (0, 0),
) -> Tensor:
    """Return [rows of q, k] int32: the cache rows of every query's best keys, −1 after them.

    q           [tokens, index_heads, 128] e4m3; rows after the step's tokens are padding
    weights     [tokens, index_heads, 1] float32 with q's scale in them
    index_keys  [pages, page bytes] uint8: 128 e4m3 of every token, then a float32 scale of each
    always_selected   first and last tokens that are selected whatever their scores
    """
    if out is None:
        out = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    tokens, batch = step.num_tokens, step.batch
    if tokens == 0:
        return out
    mlakit.indexer_select(
        q[:tokens],
        weights.squeeze(-1)[:tokens],
        PagedLatentCache.wrap_index_keys(index_keys.view(len(index_keys), step.page_size, -1)),
        batch.block_table,
        batch.kv_lens,
        k,
        q_starts=batch.q_starts,
        init_tokens=always_selected[0],
        local_tokens=always_selected[1],
        max_kv_len=min(step.max_kv_len, batch.block_table.shape[1] * step.page_size),
        out=out[:tokens],
    )
    return out
