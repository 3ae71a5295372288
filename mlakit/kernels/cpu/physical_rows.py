"""Physical rows of the positions that an indexer listed, in host memory.

Maths      rows[t, i] = table[request of t, tokens[t, i] // page] · page + tokens[t, i] % page
Memory     an entry that names no row becomes -1; table entries of others are not read
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import token_requests, token_slots
from mlakit.kernels.arguments import PhysicalRowsArguments


def physical_rows(a: PhysicalRowsArguments, out: Tensor) -> None:
    tokens, table = a.tokens.long(), a.page_table
    num_queries, topk = tokens.shape
    live = num_queries if a.q_starts is None else int(a.q_starts[-1])
    request = torch.arange(live, device="cpu")
    if a.q_starts is not None:
        request = token_requests(a.q_starts, live)[0]
    out.fill_(-1)
    listed, request = tokens[:live], request[:, None].expand(live, topk)
    if isinstance(table, tuple):
        lengths = table[0].long().diff()
        is_inside = (listed >= 0) & (listed < lengths[request])
    else:
        is_inside = (listed >= 0) & (listed < table.shape[1] * a.page_size)
    row = token_slots(table, a.page_size, request[is_inside], listed[is_inside])
    # an empty entry of the table; what int32 cannot hold is no row
    row = torch.where((row < 0) | (row > torch.iinfo(torch.int32).max), -1, row)
    out[:live].masked_scatter_(is_inside, row.int())
