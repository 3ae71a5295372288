"""The physical rows of the k best keys of each query, in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mlakit.cache import token_requests, token_slots
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
    indexer_topk(TopkArguments(a.logits, k, None, None, "cpu"), out)
    request, _ = token_requests(a.q_starts, a.first_token + tokens)
    found = out >= 0
    request = request[a.first_token :, None].expand(tokens, k)[found]
    out[found] = token_slots(a.page_table, a.page_size, request, out[found].long()).int()
