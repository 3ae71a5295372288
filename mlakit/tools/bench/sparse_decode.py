"""The suite `sparse-decode`: absorbed attention over top-k rows of a 656-byte FP8 cache, on a GPU.

Rows    2048 rows of the query's own request: uniform, distinct, unsorted, in shuffled pages
Bytes   the rows of each query, q, the indices and out
Peers   FlashMLA on zero-padded heads for 16 and 32, padded before the clock starts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.formats import Format, row_codec
from mlakit.tools.bench import gpu
from mlakit.tools.bench.pool import ROW, SCALE, filled_pages
from mlakit.tools.bench.problems import SparseDecode
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.sparse import Lists, SparseWorkload, random_tokens, sparse_of_shape
from mlakit.tools.bench.suite import Baseline, Workload


@dataclass(frozen=True)
class Sparse(SparseWorkload):
    format: Format = "fp8_block128"
    page_size: int = 64

    suite = "sparse-decode"

    @property
    def name(self) -> str:
        return super().name + (f"-page{self.page_size}" if self.page_size != 64 else "")

    @property
    def bytes(self) -> int:
        listed = self.topk * row_codec(self.format, ROW).bytes_per_token
        return self.batch.tokens * (listed + self.query_bytes)

    @property
    def hardware_baselines(self) -> Sequence[Baseline]:
        return (gpu.read_baseline(self.bytes),)

    def lists(self, generator: torch.Generator) -> Lists:
        kv_lens, page = self.batch.kv_lens, self.page_size
        cache, page_table = filled_pages(kv_lens, page, self.format, generator)
        tokens, rows = [], []
        for request, (q_len, kv_len) in enumerate(zip(self.batch.q_lens, kv_lens, strict=True)):
            own = random_tokens(q_len, kv_len, self.topk, generator)
            tokens.append(own)
            rows.append(page_table[request][own // page] * page + own % page)
        return Lists(cache, torch.cat(rows).int(), torch.cat(tokens).int(), page_table)

    def problem(self, q: Tensor, cache: PagedLatentCache, rows: Tensor) -> SparseDecode | None:
        if self.format != "fp8_block128" or not self.batch.is_even:
            return None
        by_request = (self.batch.size, -1)
        return SparseDecode(
            q.unflatten(0, by_request),
            cache.payload[0].view(torch.uint8),
            rows.unflatten(0, by_request),
            SCALE,
        )


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    return (sparse_of_shape(Sparse, shape, "page_size"),)


WORKLOADS: tuple[Workload, ...] = (
    Sparse(Batch.of(128, 1, 32768), 128, min_speedup=1.22),
    Sparse(Batch.of(128, 2, 32768), 128, min_speedup=1.22),
    Sparse(Batch.of(64, 1, 32768), 64, min_speedup=1.177),
    Sparse(Batch.of(8, 1, 32768), 128, min_speedup=1.25),
    # shards of tensor parallelism: FlashMLA computes 64 heads
    Sparse(Batch.of(128, 1, 32768), 32, min_speedup=1.0),
    Sparse(Batch.of(128, 1, 32768), 16, min_speedup=1.0),
    Sparse(Batch.of(8, 1, 32768), 16, min_speedup=1.0),
)
