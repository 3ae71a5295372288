"""The memory that attention takes in a step, and vLLM sees while it measures memory.

There vLLM calls no attention. In its place it allocates the expanded context of a prefill; what
attention takes beyond that would be missing later. Nothing here imports vLLM.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from mlakit import PagedLatentCache, RowShape
from mlakit.formats import Format
from mlakit.integrations import steps
from mlakit.integrations.vllm import calls
from mlakit.kernels.launch import Target
from mlakit.plan.split_heuristic import DETERMINISTIC_SPLIT_KEYS
from mlakit.precompile.allocation import allocated_bytes

MOST_CONTEXT_ROWS = 64 * 1024


class Layer(NamedTuple):
    """What the memory of a layer depends on."""

    row: RowShape
    format: Format
    dtype: torch.dtype  # of its queries
    heads: int  # of all ranks that share the tokens
    page_size: int

    @property
    def cache(self) -> PagedLatentCache:
        """A cache whose values are never read."""
        return PagedLatentCache.allocate(
            self.row, self.format, num_pages=2, page_size=self.page_size, device="cpu"
        )

    def queries(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = tokens, self.heads, self.row.width
        q = torch.empty(shape, dtype=self.dtype, device="cpu")
        return q[..., : self.row.kv_lora_rank], q[..., self.row.kv_lora_rank :]


def context_rows(max_model_len: int, max_num_seqs: int, block_size: int) -> int:
    """Return the tokens whose expanded keys and values vLLM allocates, in all its releases."""
    return min(max(8 * max_model_len, 4 * max_num_seqs * block_size), MOST_CONTEXT_ROWS)


def decode_bytes(
    layer: Layer,
    target: Target,
    *,
    requests: int,
    drafts: int,
    max_model_len: int,
    is_batch_invariant: bool = False,
    num_splits: int | None = None,
) -> int:
    """Return the most memory that decode of one layer takes, in bytes; drafts: of each request."""

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="cpu")

    def decode() -> None:
        batch = calls.decode_batch(
            integers(requests, -(-max_model_len // layer.page_size)),
            integers(requests),
            integers(requests + 1),
            1 + drafts,
            requests * (1 + drafts),
            is_batch_invariant=is_batch_invariant,
            num_splits=num_splits,
        )
        steps.decode(layer.queries(requests * (1 + drafts)), layer.cache, batch, 1.0)

    return allocated_bytes(decode, target)


def sparse_bytes(layer: Layer, target: Target, *, tokens: int, k: int) -> int:
    """Return the most memory that attention to selections takes in a step of up to `tokens`."""

    def attend(count: int) -> None:
        def integers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device="cpu")

        lists, starts = integers(count, k), integers(2)
        calls.sparse(layer.queries(count), layer.cache, lists, integers(1, 1), starts, 1.0)

    # of fewer tokens the lists are split, which takes partial results
    counts = {tokens, *(1 << i for i in range(tokens.bit_length()))}
    return max(allocated_bytes(partial(attend, count), target) for count in counts)


def invariant_splits(
    layer: Layer,
    target: Target,
    *,
    requests: int,
    drafts: int,
    max_model_len: int,
    budget: int,
) -> int | None:
    """Return the parts that batch-invariant decode cuts the keys of each request in.

    None: one for every so many keys, which is more parts the longer a request may be. Their partial
    results would need more than `budget` bytes for many requests of a long context.
    """
    taken = partial(
        decode_bytes,
        layer,
        target,
        requests=requests,
        drafts=drafts,
        max_model_len=max_model_len,
        is_batch_invariant=True,
    )
    if taken() <= budget:
        return None
    most = -(-max_model_len // DETERMINISTIC_SPLIT_KEYS)
    return next((n for n in range(most, 1, -1) if taken(num_splits=n) <= budget), 1)
