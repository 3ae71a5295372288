"""The suite `sparse-prefill`: absorbed attention of a prompt's tokens over top-k rows, on a GPU.

Rows    2048 rows of the token's own request: uniform, distinct, unsorted
Bytes   every cached row once, q, the indices and out
Peers   FlashAttention-3 reads the rows as pages of one token; FlashMLA on zero-padded heads for 16
        and 32, padded before the clock starts
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.formats import row_codec
from mlakit.tools.bench.pool import ROW, SCALE, filled_cache, page_counts
from mlakit.tools.bench.problems import SparsePrefill
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.sparse import Lists, SparseWorkload, random_tokens, sparse_of_shape
from mlakit.tools.bench.suite import Workload

PAGE_SIZE = 64


@dataclass(frozen=True)
class Sparse(SparseWorkload):
    suite = "sparse-prefill"

    @property
    def bytes(self) -> int:
        cached = sum(self.batch.kv_lens) * row_codec(self.format, ROW).bytes_per_token
        return cached + self.batch.tokens * self.query_bytes

    def lists(self, generator: torch.Generator) -> Lists:
        counts = page_counts(self.batch.kv_lens, PAGE_SIZE)
        cache = filled_cache(sum(counts), PAGE_SIZE, self.format, generator)
        # requests are consecutive, each starts on a page boundary
        last_page = accumulate(counts)
        requests = zip(self.batch.q_lens, self.batch.kv_lens, counts, last_page, strict=True)
        lists = [
            random_tokens(q_len, kv_len, self.topk, generator) + PAGE_SIZE * (last - count)
            for q_len, kv_len, count, last in requests
        ]
        return Lists(cache, torch.cat(lists).int())

    def problem(self, q: Tensor, cache: PagedLatentCache, rows: Tensor) -> SparsePrefill | None:
        if self.format != "bf16":
            return None
        return SparsePrefill(q, cache.payload[0].flatten(0, 1), rows, SCALE)


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    return (sparse_of_shape(Sparse, shape),)


MIN_SPEEDUPS = {  # over FlashMLA, by (heads, cached tokens)
    (128, 8192): 1.157,
    (128, 32768): 1.157,
    (128, 131072): 1.143,
    (64, 8192): 1.163,
    (64, 32768): 1.15,
    (64, 131072): 1.163,
    # shards of tensor parallelism: FlashMLA computes 64 heads
    (32, 32768): 1.0,
    (16, 32768): 1.0,
}
WORKLOADS: tuple[Workload, ...] = tuple(
    Sparse(Batch.of(1, 4096, tokens), heads, min_speedup=target)
    for (heads, tokens), target in MIN_SPEEDUPS.items()
)
