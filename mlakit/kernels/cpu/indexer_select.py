"""The physical rows of the k best keys of each query, in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlakit.cache import token_positions, token_slots
from mlakit.kernels.arguments import SelectBlockArguments, TopkArguments
from mlakit.kernels.cpu.indexer import indexer_topk
from mlakit.model.masks import Mask


def plan_query_blocks(
    q_starts: Tensor, kv_lens: Tensor, mask: Mask, blocks: Sequence[range]
) -> list[tuple[Tensor, Tensor]]:
    """Return (q_starts, kv_lens) of each block of query tokens, as if no other queries existed."""
    bounds = []
    for block in blocks:
        starts = (q_starts - block.start).clamp(0, len(block))
        after = (q_starts[1:] - block.stop).clamp_min(0).minimum(q_starts.diff())
        # under a causal mask the keys of later queries are invisible
        lens = (kv_lens - after).clamp_min(0) if mask.is_causal else kv_lens
        bounds.append((starts, lens))
    return bounds


def indexer_select(a: SelectBlockArguments, out: Tensor) -> None:
    tokens, k = out.shape
    request, position = token_positions(a.kv_lens, a.q_starts, a.first_token + tokens)
    if a.init_tokens or a.local_tokens:
        _put_first(a, position[a.first_token :], a.kv_lens[request[a.first_token :]])
    indexer_topk(TopkArguments(a.logits, k, None, None, "cpu"), out)
    found = out >= 0
    request = request[a.first_token :, None].expand(tokens, k)[found]
    out[found] = token_slots(a.page_table, a.page_size, request, out[found].long()).int()


def _put_first(a: SelectBlockArguments, position: Tensor, kv_len: Tensor) -> None:
    """Give the keys that are always selected a score above all others."""
    for scores, *query in zip(a.logits, position.tolist(), kv_len.tolist(), strict=True):
        first, last = a.mask.interval(*query)
        scores[first : min(first + a.init_tokens, last)] = torch.inf
        scores[max(last - a.local_tokens, first) : last] = torch.inf
